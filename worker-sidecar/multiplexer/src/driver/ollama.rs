//! Ollama, loaded and unloaded on command: `OLLAMA_MAX_LOADED_MODELS=1 OLLAMA_KEEP_ALIVE=-1` keep it from unloading
//! models by its own choice.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use modelrelay_protocol::names::ollama_key;
use serde_json::{Value, json};
use url::Url;

use super::http::Client;
use super::key::Key;
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// The list of loaded models is small, and its server is nearby.
const POLL: Duration = Duration::from_millis(250);

/// Ollama cancels a load whose client is gone, but only once it has examined the GPU and the file; until then `/api/ps`
/// does not list it.
const ABANDONED_FOR: Duration = Duration::from_secs(3);

/// Ollama itself accepts three quarters, after having waited five seconds for them.
const RETURNS: Returns = Returns { residual: 0, percent: 75 };

/// The `ollama` driver.
#[derive(Debug)]
pub struct Ollama {
    models: Vec<Model>,
    client: Client,
    /// Models whose load was abandoned, and that were not unloaded since. Never held over an await.
    abandoned: Mutex<HashSet<Model>>,
}

/// Records a load as abandoned when it is dropped.
struct NoteAbandoned<'a> {
    ollama: &'a Ollama,
    model: &'a Model,
}

impl Drop for NoteAbandoned<'_> {
    fn drop(&mut self) {
        self.ollama.abandoned().insert(Model::clone(self.model));
    }
}

impl Ollama {
    /// Creates a driver for the server at `url` and those of its models that belong to the slot, by Ollama's names.
    pub fn new(url: Url, models: Vec<Model>) -> Self {
        Self { models, client: Client::new(url), abandoned: Mutex::default() }
    }

    /// Sends this key with every request.
    #[must_use]
    pub fn with_key(self, key: Key) -> Self {
        Self { client: self.client.with_key(key), ..self }
    }

    fn find(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.models.contains(model);
        known.then_some(()).ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    async fn loaded(&self) -> Result<Vec<String>, DriverError> {
        Ok(names(&self.client.get_json_retrying("/api/ps").await?))
    }

    async fn is_loaded(&self, model: &Model) -> Result<bool, DriverError> {
        Ok(self.loaded().await?.iter().any(|name| is_same(name, model)))
    }

    async fn make_ready(&self, model: &Model) -> Result<(), DriverError> {
        self.find(model)?;
        let note = NoteAbandoned { ollama: self, model };
        let loaded = self.keep_loaded(model).await;
        // The load was not abandoned.
        std::mem::forget(note);
        loaded
    }

    async fn keep_loaded(&self, model: &Model) -> Result<(), DriverError> {
        let keep = json!({"model": &**model, "keep_alive": -1, "stream": false});
        let reply = self.client.post_retrying("/api/generate", Some(&keep)).await?;
        let reply = match reply.status.as_u16() {
            // An embedding model cannot generate; it loads when it embeds.
            400 if reply.text().contains("does not support generate") => {
                let embed = json!({"model": &**model, "keep_alive": -1, "input": ""});
                self.client.post_retrying("/api/embed", Some(&embed)).await?
            }
            _ => reply,
        };
        reply.accepted()?;
        let loaded = self.loaded().await?;
        if loaded.iter().any(|name| is_same(name, model)) {
            return Ok(());
        }
        Err(DriverError::WrongModel { expected: model.to_string(), found: loaded })
    }

    /// Unloads the model. If a load of it was abandoned, unloads it again in case that load leaves Ollama's queue only
    /// now.
    async fn unload(&self, model: &Model) -> Result<(), DriverError> {
        self.find(model)?;
        self.unload_what_is_there(model).await?;
        if self.abandoned().contains(model) {
            let quiet_since = Instant::now();
            while quiet_since.elapsed() < ABANDONED_FOR {
                tokio::time::sleep(POLL).await;
                self.unload_what_is_there(model).await?;
            }
            self.abandoned().remove(model);
        }
        Ok(())
    }

    async fn unload_what_is_there(&self, model: &Model) -> Result<(), DriverError> {
        while self.is_loaded(model).await? {
            let drop = json!({"model": &**model, "keep_alive": 0, "stream": false});
            let reply = self.client.post_retrying("/api/generate", Some(&drop)).await?;
            // Ollama returns "done_reason":"unload" at once, and unloads when its running requests have ended.
            let done: Value = reply.accepted()?.json()?;
            tracing::trace!(model = &**model, reason = %done["done_reason"], "sent an unload request to Ollama");
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    fn abandoned(&self) -> MutexGuard<'_, HashSet<Model>> {
        self.abandoned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn names(list: &Value) -> Vec<String> {
    let models = list["models"].as_array().map(Vec::as_slice).unwrap_or_default();
    models.iter().filter_map(|model| model["name"].as_str().map(str::to_owned)).collect()
}

fn is_same(name: &str, model: &str) -> bool {
    ollama_key(name) == ollama_key(model)
}

impl Driver for Ollama {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: false, returns: RETURNS }
    }

    fn models(&self) -> Vec<Model> {
        self.models.clone()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok().map(|()| self.client.base().clone())
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            self.find(model)?;
            // Ollama accepts more names for its models than it lists.
            self.client.post_query("/api/show", &json!({"model": &**model})).await?.accepted().map(drop)
        })
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            self.find(model)?;
            let model_ids = names(&self.client.get("/api/ps").await?.accepted()?.json()?);
            let ready = model_ids.iter().any(|name| is_same(name, model));
            Ok(Probed { ready, gone: !ready, model_ids })
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async { Ok(self.make_ready(model).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async { self.unload(model).await.map(|()| Left::Nothing) })
    }

    /// Ollama has no stronger way: a model is unloaded when the connections of its requests are closed, which they are
    /// by now.
    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            match self.unload(model).await {
                // Without Ollama, no model of it is loaded.
                Err(DriverError::Unreachable { .. }) => Ok(()),
                ended => ended,
            }
        })
    }
}

#[cfg(test)]
mod tests;
