//! vLLM that is put to sleep instead of ended: waking takes seconds where starting takes minutes.
//!
//! It needs vLLM 0.17 or newer with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`. What shapes this file:
//! - A sleeping server answers `/health` with 200 and crashes or hangs on a request: only `/is_sleeping` tells.
//! - `/sleep` under a running request may kill the engine and answer 200 all the same: `/metrics` is read first, and
//!   `/is_sleeping` is the only proof afterwards.
//! - All parameters are in the query; `mode` is `abort` unless it is said.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use url::Url;

use super::http::Client;
use super::launch::Launch;
use super::served::{self, Served, flag};
use super::standing::{Server, Servers};
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::multiplexer::Model;
use crate::multiplexer::error::LoadFailure;
use crate::multiplexer::estimate::LoadKind;
use crate::multiplexer::event::Left;

/// A sleeping vLLM keeps its CUDA context and its graphs: 1.3 to 1.4 GiB were measured, and a little is for the next GPU.
const RETURNS: Returns = Returns { residual: 3 << 29, percent: 90 };

/// Requests that have just been cut off are still counted for a moment.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(250);

const COUNTED: [&str; 2] = ["vllm:num_requests_running", "vllm:num_requests_waiting"];

/// What goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The weights are kept in the host's memory.
    One,
    /// Nothing is kept: they are read again from disk.
    Two,
}

/// A model and its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SleeperModel {
    /// How it shows that it is ready.
    pub served: Served,
    /// Where it is.
    pub url: Url,
    /// What starts it; without one somebody else does.
    pub launch: Option<Launch>,
}

/// The `vllm-sleep` driver.
#[derive(Debug)]
pub struct VllmSleep {
    servers: Servers<()>,
    level: Level,
}

impl VllmSleep {
    /// `supervisor`: this very program.
    pub fn new(models: impl IntoIterator<Item = SleeperModel>, level: Level, supervisor: PathBuf) -> Self {
        let server = |SleeperModel { served, url, launch }| Server::new(served, url, launch, ());
        Self { servers: Servers::new(models.into_iter().map(server), supervisor), level }
    }

    /// What is left of a model that sleeps.
    fn leaves(&self) -> Left {
        match self.level {
            Level::One => Left::Asleep,
            Level::Two => Left::Emptied,
        }
    }

    async fn make_ready(&self, model: &Model, kind: LoadKind) -> Result<(), DriverError> {
        let server = self.servers.find(model)?;
        let (begun, wake) = (Box::pin(confirm_awake(&server.client)), Box::pin(self.wake_and_wait(server)));
        self.servers.make_ready(server, kind, begun, wake).await
    }

    async fn wake_and_wait(&self, server: &Arc<Server<()>>) -> Result<(), DriverError> {
        server.orders.settled().await;
        if is_asleep(&server.client).await.unwrap_or(false) {
            let (level, woken) = (self.level, Arc::clone(server));
            server.orders.run(async move { wake(&woken.client, level).await }).await?;
            confirm_awake(&server.client).await?;
        }
        server.served.become_ready(&server.client).await?;
        confirm_awake(&server.client).await
    }

    async fn put_to_sleep(&self, model: &Model) -> Result<Left, DriverError> {
        let server = self.servers.find(model)?;
        if self.servers.is_absent(server) {
            return Ok(Left::Nothing);
        }
        let client = &server.client;
        server.orders.settled().await;
        if is_asleep(client).await? {
            return Ok(self.leaves());
        }
        wait_until_idle(client).await?;
        let (path, put_to_sleep) = (self.sleep_path("wait"), Arc::clone(server));
        server.orders.run(async move { put_to_sleep.client.tell(&path, None).await?.accepted().map(|_| ()) }).await?;
        if is_asleep(client).await? {
            return Ok(self.leaves());
        }
        Err(DriverError::Unexpected {
            url: client.base().to_string(),
            why: "it does not sleep, after having been put to sleep".to_owned(),
        })
    }

    fn sleep_path(&self, mode: &str) -> String {
        let level = match self.level {
            Level::One => 1,
            Level::Two => 2,
        };
        format!("/sleep?level={level}&mode={mode}")
    }

    async fn end(&self, model: &Model) -> Result<(), DriverError> {
        let server = self.servers.find(model)?;
        if self.servers.kill(server).await? {
            return Ok(());
        }
        // Not ours to kill. Cutting its requests off and putting it to sleep is what is left.
        server.orders.settled().await;
        match is_asleep(&server.client).await {
            Ok(true) | Err(DriverError::Unreachable { .. }) => return Ok(()),
            Ok(false) | Err(_) => {}
        }
        drop(server.client.tell_once(&self.sleep_path("abort"), None).await);
        match is_asleep(&server.client).await {
            Ok(true) | Err(DriverError::Unreachable { .. }) => Ok(()),
            Ok(false) | Err(_) => Err(DriverError::NotOurs(format!(
                "{} does not go to sleep, and no command of ours started it: restart it, or give the model a command",
                server.client.base()
            ))),
        }
    }
}

async fn wake(client: &Client, level: Level) -> Result<(), DriverError> {
    match level {
        Level::One => obeyed(client, "/wake_up").await,
        // Memory for the weights, the weights, and only then memory for the cache: both at once may not fit while the
        // weights are read.
        Level::Two => {
            obeyed(client, "/wake_up?tags=weights").await?;
            let reload = json!({"method": "reload_weights"});
            client.tell("/collective_rpc", Some(&reload)).await?.accepted()?;
            obeyed(client, "/wake_up?tags=kv_cache").await?;
            obeyed(client, "/reset_prefix_cache").await
        }
    }
}

async fn obeyed(client: &Client, path: &str) -> Result<(), DriverError> {
    client.tell(path, None).await?.accepted().map(|_| ())
}

async fn is_asleep(client: &Client) -> Result<bool, DriverError> {
    let reply = client.look("/is_sleeping").await?;
    if reply.status.as_u16() == 404 {
        let why = "404: start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1".to_owned();
        return Err(DriverError::Unexpected { url: client.base().to_string(), why });
    }
    let reply = reply.accepted()?;
    flag(&reply.json()?, "is_sleeping").ok_or_else(|| reply.unexpected("no is_sleeping"))
}

/// Also finds a server that could never be put to sleep, while that is still a failed load and not a stuck slot.
async fn confirm_awake(client: &Client) -> Result<(), DriverError> {
    if is_asleep(client).await? {
        let why = "it sleeps still, after having been woken".to_owned();
        return Err(DriverError::Unexpected { url: client.base().to_string(), why });
    }
    Ok(())
}

async fn wait_until_idle(client: &Client) -> Result<(), DriverError> {
    let mut requests = 0;
    let idle = async {
        loop {
            requests = busy(client).await?;
            if requests == 0 {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    };
    let idle = tokio::time::timeout(IDLE_TIMEOUT, idle).await;
    idle.unwrap_or(Err(DriverError::Busy { requests }))
}

async fn busy(client: &Client) -> Result<u32, DriverError> {
    let reply = client.look("/metrics").await?.accepted()?;
    // Whole numbers, written as floats.
    served::gauges(&reply.text(), &COUNTED)
        .map(|requests| requests as u32)
        .ok_or_else(|| reply.unexpected("no count of running and waiting requests"))
}

impl Driver for VllmSleep {
    fn capabilities(&self) -> Capabilities {
        let (leaves, owns_backends) = (self.leaves(), self.servers.owns_any());
        Capabilities { leaves, can_coexist: false, owns_backends, returns: RETURNS }
    }

    fn models(&self) -> Vec<Model> {
        self.servers.models()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.servers.url(model)
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            self.servers.check(model).await?;
            if self.servers.owns(model) {
                return Ok(());
            }
            match is_asleep(&self.servers.find(model)?.client).await {
                // It could never make room again.
                Err(error @ DriverError::Unexpected { .. }) => Err(error),
                // The engine itself answers, and has other things to do while it wakes or is busy.
                Ok(_) | Err(_) => Ok(()),
            }
        })
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let server = self.servers.find(model)?;
            if self.servers.is_absent(server) || is_asleep(&server.client).await? {
                return Ok(Probed::gone());
            }
            server.served.look(&server.client).await
        })
    }

    fn load<'a>(&'a self, model: &'a Model, kind: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async move { Ok(self.make_ready(model, kind).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(self.put_to_sleep(model))
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.end(model))
    }

    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async { self.servers.stop(self.servers.find(model)?).await })
    }

    fn owns(&self, model: &Model) -> bool {
        self.servers.owns(model)
    }

    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        Box::pin(self.servers.ended(model))
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;
    use axum::routing::get;
    use axum::{Json, Router};

    use super::*;
    use crate::multiplexer::driver::tests::serve;

    async fn checked(answer: StatusCode, body: serde_json::Value) -> Result<(), DriverError> {
        let is_sleeping = get(move || std::future::ready((answer, Json(body.clone()))));
        let router = Router::new().route("/health", get(async || "ok")).route("/is_sleeping", is_sleeping);
        let model = SleeperModel { served: Served::new("m"), url: serve(router).await, launch: None };
        VllmSleep::new([model], Level::One, "worker".into()).check(&"m".into()).await
    }

    #[tokio::test]
    async fn an_engine_that_is_busy_or_ill_is_not_one_that_cannot_sleep() {
        for is_sleeping in [false, true] {
            assert_eq!(checked(StatusCode::OK, json!({"is_sleeping": is_sleeping})).await, Ok(()));
        }
        assert_eq!(checked(StatusCode::INTERNAL_SERVER_ERROR, json!({})).await, Ok(()));
        let error = checked(StatusCode::NOT_FOUND, json!({"detail": "Not Found"})).await.unwrap_err().to_string();
        assert!(error.contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    }
}
