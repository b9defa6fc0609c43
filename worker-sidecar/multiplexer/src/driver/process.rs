//! A backend that the worker starts and stops itself: one process per model, all on the same GPU, one at a time.

use std::path::PathBuf;

use url::Url;

use super::http::Client;
use super::launch::{Children, Launch, Running};
use super::served::{Served, port_of};
use super::{Call, Capabilities, Driver, DriverError, Probed, Returns};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;

/// A model and the command that serves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessModel {
    /// How its readiness is checked.
    pub served: Served,
    /// The command.
    pub launch: Launch,
    /// The URL that it listens on, if configured; otherwise a free port of loopback, passed as `${PORT}`.
    pub url: Option<Url>,
}

/// The `process` driver.
#[derive(Debug)]
pub struct Process {
    models: Vec<ProcessModel>,
    children: Children,
}

impl Process {
    /// `supervisor`: the path of this program.
    pub fn new(models: Vec<ProcessModel>, supervisor: PathBuf) -> Self {
        Self { models, children: Children::new(supervisor) }
    }

    fn find(&self, model: &Model) -> Result<&ProcessModel, DriverError> {
        let found = self.models.iter().find(|known| known.served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    async fn start(&self, model: &Model) -> Result<(), DriverError> {
        let ProcessModel { served, launch, url } = self.find(model)?;
        if let Some(running) = self.children.alive(model)
            && served.probe(&client(served, url.as_ref(), &running)).await.is_ok_and(|probed| probed.ready)
        {
            return Ok(());
        }
        // Remains of an earlier attempt.
        self.children.kill(model).await?;
        let running = self.children.start(model, launch, port_of(url.as_ref()))?;
        let guard = running.kill_on_drop();
        served_by(&running, served, &client(served, url.as_ref(), &running)).await?;
        guard.keep();
        Ok(())
    }
}

/// Waits until a process serves its model; fails if it ends before.
pub async fn served_by(running: &Running, served: &Served, client: &Client) -> Result<(), DriverError> {
    tokio::select! {
        biased;
        failure = running.failed() => Err(failure),
        ready = served.become_ready(client) => ready,
    }
}

fn client(served: &Served, url: Option<&Url>, running: &Running) -> Client {
    served.client(url.cloned().unwrap_or_else(|| on_loopback(running.port())))
}

fn on_loopback(port: u16) -> Url {
    let mut url = Url::parse("http://127.0.0.1").unwrap_or_else(|_| unreachable!("the text is a URL"));
    let _ = url.set_port(Some(port));
    url
}

impl Driver for Process {
    fn capabilities(&self) -> Capabilities {
        Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: true, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        self.models.iter().map(|known| Model::clone(&known.served.id)).collect()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        let known = self.find(model).ok()?;
        let running = self.children.alive(model)?;
        Some(known.url.clone().unwrap_or_else(|| on_loopback(running.port())))
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async {
            let ProcessModel { served, url, .. } = self.find(model)?;
            match self.children.alive(model) {
                Some(running) => served.probe(&client(served, url.as_ref(), &running)).await,
                None => Ok(Probed::gone()),
            }
        })
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async { Ok(self.start(model).await?) })
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async {
            self.find(model)?;
            self.children.stop(model).await.map(|()| Left::Nothing)
        })
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            self.find(model)?;
            self.children.kill(model).await
        })
    }

    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(self.children.stop(model))
    }

    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        Box::pin(self.children.ended(model))
    }
}
