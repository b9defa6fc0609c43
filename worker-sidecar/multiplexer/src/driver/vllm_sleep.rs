//! Puts vLLM to sleep instead of ending it: waking takes seconds, starting takes minutes.
//!
//! It needs vLLM 0.17 or newer with `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`. These facts determine the
//! design:
//! - A sleeping server responds to `/health` with 200 and queues requests until it wakes.
//! - `/is_sleeping` is true from the start of `/sleep`, while a running request still holds all memory: alone it proves
//!   nothing. The proof is the gauge `vllm:engine_sleep_state`; in a server without that gauge, that no request is
//!   running.
//! - `/sleep` with `mode=wait` returns once memory is released. A second call waits together with the first, and
//!   releases memory that an interrupted wake had reclaimed. Its response is proof too, whatever the metrics show.
//! - A wake at level 2 takes several calls. Between them the server holds its weights, while `/is_sleeping` and the
//!   gauge still report a sleeping server.
//! - `mode=abort` ends running requests with status 200, `finish_reason: "abort"` and `[DONE]`, which looks complete.
//!   It is the default, and is used only on a server that cannot be killed. All parameters are in the query.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use url::Url;

use super::http::{Client, Reply};
use super::launch::Launch;
use super::persistent::{Server, Servers};
use super::served::{self, Served, flag};
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// A sleeping vLLM keeps its CUDA context and its graphs: 1.3 to 1.4 GiB were measured, rounded up for other GPUs.
const RETURNS: Returns = Returns { residual: 3 << 29, percent: 90 };

/// Requests that were just aborted are still included in the metrics for a moment.
const IDLE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(250);

const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";

/// One gauge for each sleep state, 1 for the current one. Unlike `/is_sleeping`, it changes when memory is released.
const SLEEP_STATE: &str = "vllm:engine_sleep_state{";
const AWAKE: &str = "sleep_state=\"awake\"";
const RELEASED: [&str; 2] = ["sleep_state=\"weights_offloaded\"", "sleep_state=\"discard_all\""];

/// The depth of the sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The weights are kept in the host's memory.
    One,
    /// Nothing is kept: the weights are read again from disk.
    Two,
}

/// The state of a server's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rest {
    /// It serves requests.
    Awake,
    /// It serves none, and may hold its memory: a sleep waits for running requests, or a wake is in progress.
    Paused,
    /// It has released its memory.
    Asleep,
}

/// A model and its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SleeperModel {
    /// How its readiness is checked.
    pub served: Served,
    /// Its URL.
    pub url: Url,
    /// The command that starts it; `None` if another program does.
    pub launch: Option<Launch>,
}

/// The `vllm-sleep` driver.
#[derive(Debug)]
pub struct VllmSleep {
    servers: Servers<Sleeper>,
    level: Level,
}

/// A server's state as far as its responses do not show it.
#[derive(Debug, Default)]
struct Sleeper {
    /// True if it has completed an order to sleep, and no wake has begun since.
    has_slept: AtomicBool,
}

impl VllmSleep {
    /// `supervisor`: the path of this program.
    pub fn new(models: impl IntoIterator<Item = SleeperModel>, level: Level, supervisor: PathBuf) -> Self {
        let server = |SleeperModel { served, url, launch }| Server::new(served, url, launch, Sleeper::default());
        Self { servers: Servers::new(models.into_iter().map(server), supervisor), level }
    }

    /// The remains of a sleeping model.
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

    async fn wake_and_wait(&self, server: &Arc<Server<Sleeper>>) -> Result<(), DriverError> {
        server.orders.settled().await;
        let rest = rest(&server.client).await.unwrap_or(Rest::Awake);
        if rest == Rest::Paused {
            // The sleep in progress would overtake a wake.
            self.send_sleep(server).await?;
        }
        if rest != Rest::Awake {
            server.state.has_slept.store(false, Ordering::Relaxed);
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
        if rest(client).await? != Rest::Asleep {
            wait_until_idle(client).await?;
        }
        // A sleeping server is included: an interrupted wake may have reclaimed some of its memory.
        self.send_sleep(server).await?;
        Ok(self.leaves())
    }

    /// Returns when the server has responded, which it does once its memory is released. This is not in the server's
    /// [`Sequence`](super::sequence::Sequence): it may wait for a request that only [`end`](Self::end) ends, and the
    /// next call joins it instead of waiting for it.
    async fn send_sleep(&self, server: &Server<Sleeper>) -> Result<(), DriverError> {
        server.client.post_retrying(&self.sleep_path("wait"), None).await?.accepted()?;
        server.confirm_asleep().await
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
        // The worker cannot kill this server. It can only abort its requests and put it to sleep.
        server.orders.settled().await;
        let slept = match server.client.post_once(&self.sleep_path("abort"), None).await.and_then(Reply::accepted) {
            Ok(_) => server.confirm_asleep().await,
            Err(error) => Err(error),
        };
        match slept {
            Ok(()) | Err(DriverError::Unreachable { .. }) => Ok(()),
            Err(error) => Err(DriverError::NotOurs(format!(
                "it does not go to sleep ({error}), and the worker did not start it: restart it, or set a `command` for the model"
            ))),
        }
    }
}

impl Server<Sleeper> {
    /// Checks the result of an accepted order to sleep: some servers accept it and stay awake.
    async fn confirm_asleep(&self) -> Result<(), DriverError> {
        if is_paused(&self.client).await? {
            self.state.has_slept.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let why = "it is still awake after a request to sleep".to_owned();
        Err(DriverError::Unexpected { url: self.client.base().to_string(), why })
    }
}

async fn wake(client: &Client, level: Level) -> Result<(), DriverError> {
    match level {
        Level::One => obeyed(client, "/wake_up").await,
        // First memory for the weights, then the weights, and only then memory for the cache: both may not fit while
        // the weights are being read.
        Level::Two => {
            obeyed(client, "/wake_up?tags=weights").await?;
            let reload = json!({"method": "reload_weights"});
            client.post_retrying("/collective_rpc", Some(&reload)).await?.accepted()?;
            obeyed(client, "/wake_up?tags=kv_cache").await?;
            obeyed(client, "/reset_prefix_cache").await
        }
    }
}

async fn obeyed(client: &Client, path: &str) -> Result<(), DriverError> {
    client.post_retrying(path, None).await?.accepted().map(|_| ())
}

async fn rest(client: &Client) -> Result<Rest, DriverError> {
    if !is_paused(client).await? {
        return Ok(Rest::Awake);
    }
    let page = client.get("/metrics").await?.text();
    Ok(if has_released_memory(&page) { Rest::Asleep } else { Rest::Paused })
}

/// True if a server that serves no requests has released its memory, in all of its engines.
fn has_released_memory(page: &str) -> bool {
    let states: Vec<_> = page.lines().filter(|line| line.starts_with(SLEEP_STATE)).collect();
    if states.is_empty() {
        return served::gauges(page, &[RUNNING]).is_some_and(|running| running == 0.0);
    }
    let is_one = |state: &str| states.iter().any(|line| line.contains(state) && !line.ends_with(" 0.0"));
    RELEASED.into_iter().any(is_one) && !is_one(AWAKE)
}

async fn is_paused(client: &Client) -> Result<bool, DriverError> {
    let reply = client.get("/is_sleeping").await?;
    if reply.status.as_u16() == 404 {
        let why = "404: start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1".to_owned();
        return Err(DriverError::Unexpected { url: client.base().to_string(), why });
    }
    let reply = reply.accepted()?;
    flag(&reply.json()?, "is_sleeping").ok_or_else(|| reply.unexpected("no is_sleeping"))
}

/// Also detects a server that could never be put to sleep, while that is still a failed load and not a stuck slot.
async fn confirm_awake(client: &Client) -> Result<(), DriverError> {
    if is_paused(client).await? {
        let why = "it is still asleep after a request to wake".to_owned();
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
    let reply = client.get("/metrics").await?.accepted()?;
    // Integers, written as floats.
    served::gauges(&reply.text(), &[RUNNING, WAITING])
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
            match is_paused(&self.servers.find(model)?.client).await {
                // It could never release its memory.
                Err(error @ DriverError::Unexpected { .. }) => Err(error),
                // The engine itself responds to this, and may be busy or waking.
                Ok(_) | Err(_) => Ok(()),
            }
        })
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let server = self.servers.find(model)?;
            if self.servers.is_absent(server) {
                return Ok(Probed::gone());
            }
            let has_slept = server.state.has_slept.load(Ordering::Relaxed);
            match rest(&server.client).await? {
                // At level 2, the weights may be loaded again.
                Rest::Asleep if self.level == Level::Two && !has_slept => Ok(Probed::default()),
                Rest::Asleep => Ok(Probed::gone()),
                Rest::Paused => Ok(Probed::default()),
                Rest::Awake => server.served.probe(&server.client).await,
            }
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
    use crate::driver::tests::serve;

    async fn checked(answer: StatusCode, body: serde_json::Value) -> Result<(), DriverError> {
        let is_sleeping = get(move || std::future::ready((answer, Json(body.clone()))));
        let router = Router::new().route("/health", get(async || "ok")).route("/is_sleeping", is_sleeping);
        let model = SleeperModel { served: Served::new("m"), url: serve(router).await, launch: None };
        VllmSleep::new([model], Level::One, "worker".into()).check(&"m".into()).await
    }

    #[tokio::test]
    async fn busy_or_failing_engine_can_still_sleep() {
        for is_sleeping in [false, true] {
            assert_eq!(checked(StatusCode::OK, json!({"is_sleeping": is_sleeping})).await, Ok(()));
        }
        assert_eq!(checked(StatusCode::INTERNAL_SERVER_ERROR, json!({})).await, Ok(()));
        let error = checked(StatusCode::NOT_FOUND, json!({"detail": "Not Found"})).await.unwrap_err().to_string();
        assert!(error.contains("VLLM_SERVER_DEV_MODE=1"), "{error}");
    }

    /// A metrics page: running requests, and the gauges `awake`, `weights_offloaded` and `discard_all` if given.
    fn metrics(running: u32, states: Option<[u32; 3]>) -> String {
        let names = ["awake", "weights_offloaded", "discard_all"];
        let state =
            |(name, value)| format!("vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"{name}\"}} {value}.0\n");
        let states: String = names.into_iter().zip(states.into_iter().flatten()).map(state).collect();
        format!("vllm:num_requests_running{{engine=\"0\"}} {running}.0\n{states}")
    }

    async fn paused_with(metrics: String) -> Probed {
        let router = Router::new()
            .route("/health", get(async || "ok"))
            .route("/is_sleeping", get(async || Json(json!({"is_sleeping": true}))))
            .route("/metrics", get(move || std::future::ready(metrics)));
        let model = SleeperModel { served: Served::new("m"), url: serve(router).await, launch: None };
        VllmSleep::new([model], Level::One, "worker".into()).probe(&"m".into()).await.unwrap()
    }

    #[tokio::test]
    async fn paused_server_that_holds_memory_is_not_gone() {
        let pages = [
            metrics(1, Some([1, 0, 0])),
            metrics(1, None),
            // Paused, and idle by now.
            metrics(0, Some([1, 0, 0])),
            // Asleep at level 0.
            metrics(0, Some([0, 0, 0])),
            String::new(),
        ];
        for page in pages {
            assert_eq!(paused_with(page.clone()).await, Probed::default(), "{page}");
        }
    }

    #[tokio::test]
    async fn sleeping_server_with_proof_is_gone() {
        for page in [metrics(0, Some([0, 1, 0])), metrics(0, Some([0, 0, 1])), metrics(0, None)] {
            assert_eq!(paused_with(page.clone()).await, Probed::gone(), "{page}");
        }
    }
}
