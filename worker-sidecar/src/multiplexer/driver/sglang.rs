//! SGLang that gives its GPU memory back and takes it again, instead of being ended.
//!
//! It needs `--enable-memory-saver`, and `--enable-weights-cpu-backup` unless the weights are read from disk at each wake:
//! without either, resumed weights are garbage. What shapes this file:
//! - `/release_memory_occupation` asserts that nothing runs, and a failed assertion is the end of the scheduler:
//!   generation is paused first.
//! - Resuming what was not released fails as hard, and there is no way to ask: what was released is remembered here. A
//!   server that others started may have been released before this worker began, and looks well all the same: one token
//!   proves that it serves. Where it was released, that is its end; it could not have been used again anyway.
//! - A paused server generates nothing until `/continue_generation`.
//! - `/health` generates a token: it takes a second at least, and a paused server does not answer it for 20 s. `/ready` costs
//!   nothing and is asked first; older versions have no such path.
//! - A server whose health check failed, as that of any paused one does, is not ready until another one succeeds: where
//!   `/ready` fails, `/health` is asked too.
//! - A request for memory without tags means all of them: the cache, the weights, and in newer versions the CUDA graphs.
//! - With `--admin-api-key` the endpoints of memory and pauses accept that key only, and not the one of `--api-key`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use modelrelay_protocol::secret::Secret;
use serde_json::{Value, json};
use url::Url;

use super::http::{Client, Reply};
use super::key::Key;
use super::launch::Launch;
use super::served::{HEALTH_PATH, Served};
use super::standing::{Server, Servers};
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::multiplexer::Model;
use crate::multiplexer::error::LoadFailure;
use crate::multiplexer::estimate::LoadKind;
use crate::multiplexer::event::Left;

/// As a sleeping vLLM, it keeps its CUDA context and its graphs.
const RETURNS: Returns = Returns { residual: 3 << 29, percent: 90 };

/// For the first token of a server that others started, when it is wanted; and when it is only looked at.
const PROOF_TIMEOUT: Duration = Duration::from_secs(60);
const GLANCE: Duration = Duration::from_secs(4);

/// A model and its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaverModel {
    /// How it shows that it is ready.
    pub served: Served,
    /// Where it is.
    pub url: Url,
    /// What starts it; without one somebody else does.
    pub launch: Option<Launch>,
    /// Where the weights are read from at each wake, for a server without `--enable-weights-cpu-backup`.
    pub reload_from: Option<String>,
}

/// The `sglang` driver.
#[derive(Debug)]
pub struct Sglang {
    servers: Servers<Memory>,
}

/// What is known of a server's memory.
#[derive(Debug)]
struct Memory {
    /// Shows the admin key, where the command names one.
    admin: Client,
    reload_from: Option<String>,
    is_released: AtomicBool,
    /// Whether it is known from here on what it is: it has generated something, or was released by us.
    is_proven: AtomicBool,
}

impl Sglang {
    /// `supervisor`: this very program.
    pub fn new(models: impl IntoIterator<Item = SaverModel>, supervisor: PathBuf) -> Self {
        let server = |SaverModel { mut served, url, launch, reload_from }| {
            if served.health_path == HEALTH_PATH {
                served.ready_path = Some("/ready");
            }
            let key = launch.as_ref().and_then(admin_key).unwrap_or_else(|| served.key.clone());
            let admin = Client::new(url.clone()).with_key(key);
            let (is_released, is_proven) = (AtomicBool::new(false), AtomicBool::new(false));
            Server::new(served, url, launch, Memory { admin, reload_from, is_released, is_proven })
        };
        Self { servers: Servers::new(models.into_iter().map(server), supervisor) }
    }

    async fn make_ready(&self, model: &Model, kind: LoadKind) -> Result<(), DriverError> {
        let server = self.servers.find(model)?;
        let begun = Box::pin(async {
            server.state.is_released.store(false, Ordering::Relaxed);
            Ok(())
        });
        self.servers.make_ready(server, kind, begun, Box::pin(self.resume_and_wait(server))).await
    }

    async fn resume_and_wait(&self, server: &Arc<Server<Memory>>) -> Result<(), DriverError> {
        let resumed = Arc::clone(server);
        server.orders.run(async move { resumed.resume().await }).await?;
        server.refuse_paused().await?;
        let Server { served, client, .. } = &**server;
        served.become_ready(client).await?;
        server.prove(PROOF_TIMEOUT).await?;
        // What comes back from host memory shows only in an answer whether it is whole.
        served.warm(client).await
    }

    async fn release(&self, model: &Model) -> Result<Left, DriverError> {
        let server = self.servers.find(model)?;
        if self.servers.is_absent(server) {
            return Ok(Left::Nothing);
        }
        let released = Arc::clone(server);
        server.orders.run(async move { released.release().await }).await?;
        Ok(server.leaves())
    }

    async fn end(&self, model: &Model) -> Result<(), DriverError> {
        let server = self.servers.find(model)?;
        if self.servers.kill(server).await? {
            server.state.is_released.store(false, Ordering::Relaxed);
            return Ok(());
        }
        match self.release(model).await {
            Ok(_) => Ok(()),
            Err(DriverError::Unreachable { .. }) => {
                server.state.is_released.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(DriverError::NotOurs(format!(
                "{error}; no command of ours started it: restart it, or give the model a command"
            ))),
        }
    }
}

impl Server<Memory> {
    /// That a server which others started generates. Once is enough.
    async fn prove(&self, within: Duration) -> Result<(), DriverError> {
        if self.launch.is_some() || self.state.is_proven.load(Ordering::Relaxed) {
            return Ok(());
        }
        let proof = self.served.warm_once(&self.client);
        match tokio::time::timeout(within, proof).await {
            Ok(Ok(())) => self.state.is_proven.store(true, Ordering::Relaxed),
            Ok(Err(error)) => return Err(self.unproven(&error.to_string())),
            Err(_) => return Err(self.unproven(&format!("no answer within {} s", within.as_secs()))),
        }
        Ok(())
    }

    /// Fails for a server that others started and that is paused, which would be waited for in vain. One that starts is not
    /// ready either, but answers its health check at once.
    async fn refuse_paused(&self) -> Result<(), DriverError> {
        if self.launch.is_some() || self.state.is_proven.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.served.look(&self.client).await {
            Err(error @ DriverError::Silent { .. }) => Err(self.unproven(&error.to_string())),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn unproven(&self, why: &str) -> DriverError {
        let url = self.client.base();
        DriverError::NotOurs(format!(
            "{url} generates nothing ({why}): it may have released its memory before this worker began; restart it, or \
             give the model a command"
        ))
    }

    /// What is left of it once its memory is released.
    fn leaves(&self) -> Left {
        if self.state.reload_from.is_some() { Left::Emptied } else { Left::Asleep }
    }

    async fn resume(&self) -> Result<(), DriverError> {
        // Once: a second time would resume what is resumed. So it counts as resumed from here on.
        if !self.state.is_released.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        obeyed(self.state.admin.tell_once("/resume_memory_occupation", Some(&everything())).await?)?;
        if let Some(path) = &self.state.reload_from {
            let from = json!({"model_path": path});
            obeyed(self.state.admin.tell("/update_weights_from_disk", Some(&from)).await?)?;
        }
        obeyed(self.state.admin.tell("/continue_generation", Some(&json!({}))).await?)
    }

    async fn release(&self) -> Result<(), DriverError> {
        if self.state.is_released.load(Ordering::Relaxed) {
            // Somebody may have ended it in its sleep.
            return self.client.look("/v1/models").await.map(|_| ());
        }
        obeyed(self.state.admin.tell("/pause_generation", Some(&json!({}))).await?)?;
        obeyed(self.state.admin.tell_once("/release_memory_occupation", Some(&everything())).await?)?;
        self.state.is_released.store(true, Ordering::Relaxed);
        self.state.is_proven.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// No tags: all that the server's version knows.
fn everything() -> Value {
    json!({})
}

/// The key of `--admin-api-key`.
fn admin_key(launch: &Launch) -> Option<Key> {
    const ARGUMENT: &str = "--admin-api-key";
    let joined = launch.command.iter().find_map(|word| word.strip_prefix(ARGUMENT)?.strip_prefix('='));
    let next = || launch.command.iter().skip_while(|word| *word != ARGUMENT).nth(1).map(String::as_str);
    joined.or_else(next).map(|key| Key::new(Some(Secret::new(key))))
}

fn obeyed(reply: Reply) -> Result<(), DriverError> {
    if reply.status.as_u16() == 401 {
        return Err(reply.unexpected("401: with --admin-api-key SGLang accepts only that key here, not the slot's"));
    }
    reply.accepted().map(|_| ())
}

impl Driver for Sglang {
    fn capabilities(&self) -> Capabilities {
        let emptied = self.servers.iter().map(Server::leaves).find(|left| *left == Left::Emptied);
        let (leaves, owns_backends) = (emptied.unwrap_or(Left::Asleep), self.servers.owns_any());
        Capabilities { leaves, can_coexist: false, owns_backends, returns: RETURNS }
    }

    fn models(&self) -> Vec<Model> {
        self.servers.models()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.servers.url(model)
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.servers.check(model))
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let server = self.servers.find(model)?;
            if self.servers.is_absent(server) {
                return Ok(Probed::gone());
            }
            if server.state.is_released.load(Ordering::Relaxed) {
                return Ok(Probed::gone());
            }
            let probed = server.served.look(&server.client).await;
            // It may have been released meanwhile.
            if server.state.is_released.load(Ordering::Relaxed) {
                return Ok(Probed::gone());
            }
            if probed.as_ref().is_ok_and(|probed| probed.ready) {
                server.prove(GLANCE).await?;
            }
            probed
        })
    }

    fn load<'a>(&'a self, model: &'a Model, kind: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async move { Ok(self.make_ready(model, kind).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(self.release(model))
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
    use super::*;

    #[test]
    fn admin_key_is_read_from_both_spellings() {
        let key = |words: &[&str]| {
            let command = words.iter().map(ToString::to_string).collect();
            admin_key(&Launch { command, ..Launch::default() })
        };
        let shown = Some(Key::new(Some(Secret::new("a"))));
        assert_eq!(key(&["sglang", "--admin-api-key", "a", "--port", "1"]), shown);
        assert_eq!(key(&["sglang", "--admin-api-key=a"]), shown);
        assert_eq!(key(&["sglang", "--api-key", "k"]), None);
        assert_eq!(key(&["sglang", "--admin-api-key"]), None);
    }
}
