//! One llama-server in router mode: it starts its own process for each model, on command.
//!
//! Start it with `--models-max 0 --no-models-autoload`, so that it never loads or unloads by its own choice.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use url::Url;

use super::http::Client;
use super::key::Key;
use super::sequence::Sequence;
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// The list of models is small, and its server is nearby.
const POLL: Duration = Duration::from_millis(250);

/// The `llama-server` driver.
#[derive(Debug)]
pub struct LlamaRouter {
    models: Vec<Model>,
    client: Arc<Client>,
    orders: Sequence,
}

/// A model's status, as reported by the router.
#[derive(Debug, PartialEq, Eq)]
enum ModelStatus {
    Loaded,
    /// Not ready yet.
    Loading,
    /// It has freed its memory, and loads again on a request.
    Sleeping,
    /// `exit_code`: that of the process that was to serve it, if that failed.
    Unloaded {
        exit_code: Option<i64>,
    },
}

impl LlamaRouter {
    /// Creates a driver for the router at `url` and those of its models that belong to the slot, by the router's names.
    pub fn new(url: Url, models: Vec<Model>) -> Self {
        Self { models, client: Arc::new(Client::new(url)), orders: Sequence::default() }
    }

    /// Sends this key with every request.
    #[must_use]
    pub fn with_key(self, key: Key) -> Self {
        Self { client: Arc::new(Client::new(self.client.base().clone()).with_key(key)), ..self }
    }

    fn find(&self, model: &Model) -> Result<(), DriverError> {
        let known = self.models.contains(model);
        known.then_some(()).ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    async fn status(&self, model: &Model) -> Result<ModelStatus, DriverError> {
        self.status_in(&self.client.get_json_retrying("/models").await?, model)
    }

    fn status_in(&self, list: &Value, model: &Model) -> Result<ModelStatus, DriverError> {
        if ids(list).any(|(id, status)| *id == **model && status.is_null()) {
            let url = self.client.base().to_string();
            let why = format!("{model} has no status: the server is not a router; start it with --models-preset");
            return Err(DriverError::Unexpected { url, why });
        }
        status_in(list, model).ok_or_else(|| DriverError::WrongModel {
            expected: model.to_string(),
            found: ids(list).map(|(id, _)| id.to_owned()).collect(),
        })
    }

    async fn make_ready(&self, model: &Model) -> Result<(), DriverError> {
        self.find(model)?;
        // Only a request would wake it, and no request is sent to a model that is not ready.
        if self.status(model).await? == ModelStatus::Sleeping {
            self.unload(model).await?;
        }
        match self.status(model).await? {
            ModelStatus::Loaded => return Ok(()),
            ModelStatus::Loading | ModelStatus::Sleeping => {}
            ModelStatus::Unloaded { .. } => {
                self.send_command("/models/load", model).await?;
            }
        }
        loop {
            match self.status(model).await? {
                ModelStatus::Loaded => return Ok(()),
                ModelStatus::Loading => tokio::time::sleep(POLL).await,
                ModelStatus::Sleeping => return Err(self.fell_asleep(model)),
                ModelStatus::Unloaded { exit_code } => return Err(ended(exit_code)),
            }
        }
    }

    fn fell_asleep(&self, model: &Model) -> DriverError {
        let url = self.client.base().to_string();
        let why = format!("{model} went to sleep at once: remove sleep-idle-seconds from the router's preset");
        DriverError::Unexpected { url, why }
    }

    async fn send_command(&self, path: &'static str, model: &Model) -> Result<(), DriverError> {
        let (client, body) = (Arc::clone(&self.client), json!({"model": &**model}));
        let reply = self.orders.run(async move { client.post_retrying(path, Some(&body)).await }).await?;
        // 400: another client has loaded it first, or it was unloaded in the meantime.
        if reply.status.as_u16() != 400 {
            reply.accepted()?;
        }
        Ok(())
    }

    async fn unload(&self, model: &Model) -> Result<(), DriverError> {
        self.find(model)?;
        self.orders.settled().await;
        while !matches!(self.status(model).await?, ModelStatus::Unloaded { .. }) {
            self.send_command("/models/unload", model).await?;
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

fn ended(exit_code: Option<i64>) -> DriverError {
    let code = exit_code.map_or_else(|| "no exit code".to_owned(), |code| format!("exit code {code}"));
    DriverError::Ended { last_words: format!("{code}; see the router's log") }
}

fn ids(list: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let models = list["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    models.iter().filter_map(|model| Some((model["id"].as_str()?, &model["status"])))
}

fn status_in(list: &Value, model: &str) -> Option<ModelStatus> {
    let (_, status) = ids(list).find(|(id, _)| *id == model)?;
    Some(match status["value"].as_str()? {
        "loaded" => ModelStatus::Loaded,
        "unloaded" => ModelStatus::Unloaded { exit_code: status["exit_code"].as_i64() },
        "sleeping" => ModelStatus::Sleeping,
        _ => ModelStatus::Loading,
    })
}

impl Driver for LlamaRouter {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: false, returns: Returns::ALL }
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
            let list = self.client.get("/models").await?.accepted()?.json()?;
            self.client.ensure_private_address().await?;
            self.status_in(&list, model).map(drop)
        })
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            self.find(model)?;
            let list = self.client.get("/models").await?.accepted()?.json()?;
            let loaded = ids(&list).filter(|(_, status)| status["value"] == "loaded");
            let model_ids: Vec<_> = loaded.map(|(id, _)| id.to_owned()).collect();
            let ready = model_ids.iter().any(|id| **id == **model);
            // A model that is being loaded is neither, and a model that the router does not know is not loaded.
            let is_gone = |status: &Value| matches!(status["value"].as_str(), Some("unloaded" | "sleeping" | "failed"));
            let gone = ids(&list).find(|(id, _)| **id == **model).is_none_or(|(_, status)| is_gone(status));
            Ok(Probed { ready, gone, model_ids })
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async { Ok(self.make_ready(model).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async { self.unload(model).await.map(|()| Left::Nothing) })
    }

    /// The router kills a model that is still loading at once, and one that does not end after its `stop-timeout`.
    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            match self.unload(model).await {
                // Without a router it has no children, and none for a model that it does not know.
                Err(DriverError::Unreachable { .. } | DriverError::WrongModel { .. }) => Ok(()),
                ended => ended,
            }
        })
    }
}

#[cfg(test)]
mod tests;
