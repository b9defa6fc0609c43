//! Makes SGLang release its GPU memory and reclaim it, instead of ending it.
//!
//! It needs `--enable-memory-saver`, and `--enable-weights-cpu-backup` unless the weights are read from disk at each
//! wake: without either, resumed weights are garbage. These facts determine the design:
//! - `/release_memory_occupation` asserts that no request is running, and a failed assertion ends the scheduler:
//!   generation is paused first.
//! - Resuming memory that was not released is just as fatal, and cannot be queried, so this driver records what it
//!   released. A server that another program started may have released its memory before this worker started, and looks
//!   healthy all the same: generating one token proves that it serves. If its memory was released, that request crashes
//!   it; it could not have been used again anyway.
//! - A paused server generates nothing until `/continue_generation`.
//! - `/health` generates a token: it takes a second at least, and a paused server does not respond to it for 20 s.
//!   `/ready` costs nothing and is requested first; older versions do not have that path.
//! - A server whose health check failed, as that of any paused one does, is not ready until another one succeeds: if
//!   `/ready` fails, `/health` is requested too.
//! - A memory request without tags applies to all of them: the cache, the weights, and in newer versions the CUDA
//!   graphs.
//! - With `--admin-api-key` the endpoints for memory and pausing accept only that key, and not the one of `--api-key`.

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
use super::persistent::{Server, Servers};
use super::served::{HEALTH_PATH, Served};
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// Like a sleeping vLLM, it keeps its CUDA context and its graphs.
const RETURNS: Returns = Returns { residual: 3 << 29, percent: 90 };

/// The timeout for the first token of a server that another program started: for a load, and for a probe.
const PROOF_TIMEOUT: Duration = Duration::from_secs(60);
const GLANCE: Duration = Duration::from_secs(4);

/// A model and its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SaverModel {
    /// How its readiness is checked.
    pub served: Served,
    /// Its URL.
    pub url: Url,
    /// The command that starts it; `None` if another program does.
    pub launch: Option<Launch>,
    /// The path from which the weights are read at each wake, for a server without `--enable-weights-cpu-backup`.
    pub reload_from: Option<String>,
}

/// The `sglang` driver.
#[derive(Debug)]
pub struct Sglang {
    servers: Servers<Memory>,
}

/// The state of a server's memory.
#[derive(Debug)]
struct Memory {
    /// Sends the admin key, if the command contains one.
    admin: Client,
    reload_from: Option<String>,
    is_released: AtomicBool,
    /// True if the server's state is known: it has generated a token, or this driver released its memory.
    is_proven: AtomicBool,
}

impl Sglang {
    /// `supervisor`: the path of this program.
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
        // Only a response shows that weights restored from host memory are intact.
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
                "{error}; the worker did not start it: restart it, or set a `command` for the model"
            ))),
        }
    }
}

impl Server<Memory> {
    /// Proves that a server which another program started generates. Once is enough.
    async fn prove(&self, within: Duration) -> Result<(), DriverError> {
        if self.launch.is_some() || self.state.is_proven.load(Ordering::Relaxed) {
            return Ok(());
        }
        let proof = self.served.warm_once(&self.client);
        match tokio::time::timeout(within, proof).await {
            Ok(Ok(())) => self.state.is_proven.store(true, Ordering::Relaxed),
            Ok(Err(error)) => return Err(self.unproven(&error.to_string())),
            Err(_) => return Err(self.unproven(&format!("no response within {} s", within.as_secs()))),
        }
        Ok(())
    }

    /// Fails for a paused server that another program started, because it would never become ready. A server that is
    /// starting is not ready either, but responds to its health check at once.
    async fn refuse_paused(&self) -> Result<(), DriverError> {
        if self.launch.is_some() || self.state.is_proven.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.served.probe(&self.client).await {
            Err(error @ DriverError::Silent { .. }) => Err(self.unproven(&error.to_string())),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn unproven(&self, why: &str) -> DriverError {
        let url = self.client.base();
        DriverError::NotOurs(format!(
            "{url} generates nothing ({why}): it may have released its memory before this worker started; restart it, \
            or set a `command` for the model"
        ))
    }

    /// The remains of the server once its memory is released.
    fn leaves(&self) -> Left {
        if self.state.reload_from.is_some() { Left::Emptied } else { Left::Asleep }
    }

    async fn resume(&self) -> Result<(), DriverError> {
        // Only once: a second attempt would resume resumed memory. So it is marked as resumed now.
        if !self.state.is_released.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        obeyed(self.state.admin.post_once("/resume_memory_occupation", Some(&everything())).await?)?;
        if let Some(path) = &self.state.reload_from {
            let from = json!({"model_path": path});
            obeyed(self.state.admin.post_retrying("/update_weights_from_disk", Some(&from)).await?)?;
        }
        obeyed(self.state.admin.post_retrying("/continue_generation", Some(&json!({}))).await?)
    }

    async fn release(&self) -> Result<(), DriverError> {
        if self.state.is_released.load(Ordering::Relaxed) {
            // It may have been ended while it slept.
            return self.client.get("/v1/models").await.map(|_| ());
        }
        obeyed(self.state.admin.post_retrying("/pause_generation", Some(&json!({}))).await?)?;
        obeyed(self.state.admin.post_once("/release_memory_occupation", Some(&everything())).await?)?;
        self.state.is_released.store(true, Ordering::Relaxed);
        self.state.is_proven.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// No tags: all that the server's version supports.
fn everything() -> Value {
    json!({})
}

fn admin_key(launch: &Launch) -> Option<Key> {
    const ARGUMENT: &str = "--admin-api-key";
    let joined = launch.command.iter().find_map(|word| word.strip_prefix(ARGUMENT)?.strip_prefix('='));
    let next = || launch.command.iter().skip_while(|word| *word != ARGUMENT).nth(1).map(String::as_str);
    joined.or_else(next).map(|key| Key::new(Some(Secret::new(key))))
}

fn obeyed(reply: Reply) -> Result<(), DriverError> {
    if reply.status.as_u16() == 401 {
        return Err(reply.unexpected("401: with --admin-api-key, SGLang accepts only that key here, not the slot's"));
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
            let probed = server.served.probe(&server.client).await;
            // It may have been released in the meantime.
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
