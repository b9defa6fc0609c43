//! SGLang that gives its GPU memory back and takes it again, instead of being ended.
//!
//! It needs `--enable-memory-saver`, and `--enable-weights-cpu-backup` unless the weights are read from disk at each wake:
//! without either, resumed weights are garbage. What shapes this file:
//! - `/release_memory_occupation` asserts that nothing runs, and a failed assertion is the end of the scheduler:
//!   generation is paused first.
//! - Resuming what was not released fails as hard, and there is no way to ask: what was released is remembered here. A
//!   server that was released by somebody else is not known as such.
//! - A paused server generates nothing until `/continue_generation`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use url::Url;

use super::http::Client;
use super::launch::{Children, Launch};
use super::process::served_by;
use super::sequence::Sequence;
use super::served::{Served, port_of};
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::multiplexer::Model;
use crate::multiplexer::error::LoadFailure;
use crate::multiplexer::estimate::LoadKind;
use crate::multiplexer::event::Left;

/// As a sleeping vLLM, it keeps its CUDA context and its graphs.
const RETURNS: Returns = Returns { residual: 3 << 29, percent: 90 };

/// A model and its server.
#[derive(Debug)]
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
    models: Vec<Arc<Known>>,
    children: Children,
}

#[derive(Debug)]
struct Known {
    served: Served,
    client: Client,
    launch: Option<Launch>,
    reload_from: Option<String>,
    orders: Sequence,
    is_released: AtomicBool,
}

impl Sglang {
    /// `supervisor`: this very program.
    pub fn new(models: impl IntoIterator<Item = SaverModel>, supervisor: PathBuf) -> Self {
        let known = |SaverModel { served, url, launch, reload_from }| {
            let (client, orders) = (Client::new(url), Sequence::default());
            Arc::new(Known { served, client, launch, reload_from, orders, is_released: AtomicBool::new(false) })
        };
        Self { models: models.into_iter().map(known).collect(), children: Children::new(supervisor) }
    }

    fn find(&self, model: &Model) -> Result<&Arc<Known>, DriverError> {
        let found = self.models.iter().find(|known| known.served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    fn is_absent(&self, known: &Known) -> bool {
        known.launch.is_some() && self.children.alive(&known.served.id).is_none()
    }

    async fn make_ready(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        let Known { served, client, launch, .. } = &**known;
        match (launch, self.children.alive(model)) {
            (Some(launch), None) => {
                self.children.kill(model).await?;
                known.is_released.store(false, Ordering::Relaxed);
                let running = self.children.start(model, launch, port_of(Some(client.base())))?;
                let guard = running.kill_on_drop();
                served_by(&running, served, client).await?;
                guard.keep();
                Ok(())
            }
            (Some(_), Some(running)) => tokio::select! {
                biased;
                failure = running.failed() => Err(failure),
                awake = self.resume_and_wait(known) => awake,
            },
            (None, _) => self.resume_and_wait(known).await,
        }
    }

    async fn resume_and_wait(&self, known: &Arc<Known>) -> Result<(), DriverError> {
        let resumed = Arc::clone(known);
        known.orders.run(async move { resumed.resume().await }).await?;
        let Known { served, client, .. } = &**known;
        served.become_ready(client).await?;
        // What comes back from host memory shows only in an answer whether it is whole.
        if served.warm_up { Ok(()) } else { served.warm(client).await }
    }

    async fn release(&self, model: &Model) -> Result<Left, DriverError> {
        let known = self.find(model)?;
        if self.is_absent(known) {
            return Ok(Left::Nothing);
        }
        let released = Arc::clone(known);
        known.orders.run(async move { released.release().await }).await?;
        Ok(Left::Asleep)
    }

    async fn end(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.find(model)?;
        if known.launch.is_some() {
            self.children.kill(model).await?;
            // Nothing that was meant for the dead must reach its successor.
            known.orders.settled().await;
            known.is_released.store(false, Ordering::Relaxed);
            return Ok(());
        }
        match self.release(model).await {
            Ok(_) => Ok(()),
            Err(DriverError::Unreachable { .. }) => {
                known.is_released.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(error) => Err(DriverError::NotOurs(format!(
                "{error}; no command of ours started it: restart it, or give the model a command"
            ))),
        }
    }
}

impl Known {
    async fn resume(&self) -> Result<(), DriverError> {
        // Once: a second time would resume what is resumed. So it counts as resumed from here on.
        if !self.is_released.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        self.client.tell_once("/resume_memory_occupation", Some(&both())).await?.accepted()?;
        if let Some(path) = &self.reload_from {
            let from = json!({"model_path": path});
            self.client.tell("/update_weights_from_disk", Some(&from)).await?.accepted()?;
        }
        self.client.tell("/continue_generation", Some(&json!({}))).await?.accepted().map(|_| ())
    }

    async fn release(&self) -> Result<(), DriverError> {
        if self.is_released.load(Ordering::Relaxed) {
            // Somebody may have ended it in its sleep.
            return self.client.look("/v1/models").await.map(|_| ());
        }
        self.client.tell("/pause_generation", Some(&json!({}))).await?.accepted()?;
        self.client.tell_once("/release_memory_occupation", Some(&both())).await?.accepted()?;
        self.is_released.store(true, Ordering::Relaxed);
        Ok(())
    }
}

fn both() -> serde_json::Value {
    json!({"tags": ["kv_cache", "weights"]})
}

impl Driver for Sglang {
    fn capabilities(&self) -> Capabilities {
        let owns_backends = self.models.iter().any(|known| known.launch.is_some());
        Capabilities { leaves: Left::Asleep, can_coexist: false, owns_backends, returns: RETURNS }
    }

    fn models(&self) -> Vec<Model> {
        self.models.iter().map(|known| Model::clone(&known.served.id)).collect()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok().map(|known| known.client.base().clone())
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let known = self.find(model)?;
            if self.is_absent(known) {
                return Ok(Probed::default());
            }
            let probed = known.served.look(&known.client).await;
            if known.is_released.load(Ordering::Relaxed) {
                return Ok(Probed::default());
            }
            probed
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async { Ok(self.make_ready(model).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(self.release(model))
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.end(model))
    }

    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        Box::pin(self.children.ended(model))
    }
}
