//! Servers that keep running when their model leaves the GPU: the common part of the drivers that put a server to sleep
//! and wake it.
//!
//! A server is either started by the worker's own command, and then also ended by the worker, or started by another
//! program, which alone may end it.

use std::path::PathBuf;
use std::sync::Arc;

use url::Url;

use super::http::Client;
use super::launch::{Children, Launch};
use super::process::served_by;
use super::sequence::Sequence;
use super::served::{Served, port_of};
use super::{Call, DriverError};
use crate::Model;
use crate::estimate::LoadKind;

/// One server. `S`: the driver's own state for it.
#[derive(Debug)]
pub struct Server<S> {
    /// How its readiness is checked.
    pub served: Served,
    /// Sends requests to it.
    pub client: Client,
    /// The command that starts it; `None` if another program does.
    pub launch: Option<Launch>,
    /// Runs actions that must not be left half done.
    pub orders: Sequence,
    /// The driver's own state for it.
    pub state: S,
}

/// The servers of a slot.
#[derive(Debug)]
pub struct Servers<S> {
    all: Vec<Arc<Server<S>>>,
    children: Children,
}

impl<S> Server<S> {
    /// Creates a server at `url` of which nothing is known yet.
    pub fn new(served: Served, url: Url, launch: Option<Launch>, state: S) -> Self {
        Self { client: served.client(url), served, launch, orders: Sequence::default(), state }
    }
}

impl<S> Servers<S> {
    /// Creates the set; no server is started yet. `supervisor`: the path of this program.
    pub fn new(servers: impl IntoIterator<Item = Server<S>>, supervisor: PathBuf) -> Self {
        Self { all: servers.into_iter().map(Arc::new).collect(), children: Children::new(supervisor) }
    }

    /// Returns all servers.
    pub fn iter(&self) -> impl Iterator<Item = &Server<S>> {
        self.all.iter().map(|server| &**server)
    }

    /// Returns the model's server.
    pub fn find(&self, model: &Model) -> Result<&Arc<Server<S>>, DriverError> {
        let found = self.all.iter().find(|server| server.served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    /// Returns the servers' models.
    pub fn models(&self) -> Vec<Model> {
        self.iter().map(|server| Model::clone(&server.served.id)).collect()
    }

    /// Returns the URL of the model's server.
    pub fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok().map(|server| server.client.base().clone())
    }

    /// True if the model's server is a child process of the worker.
    pub fn owns(&self, model: &Model) -> bool {
        self.find(model).is_ok_and(|server| server.launch.is_some())
    }

    /// True if any server is a child process of the worker.
    pub fn owns_any(&self) -> bool {
        self.iter().any(|server| server.launch.is_some())
    }

    /// True if the server is one that the worker starts, and it has ended or was not started.
    pub fn is_absent(&self, server: &Server<S>) -> bool {
        server.launch.is_some() && self.children.alive(&server.served.id).is_none()
    }

    /// Checks that a server which the worker does not start can be reached, and that any server's addresses are
    /// private.
    pub async fn check(&self, model: &Model) -> Result<(), DriverError> {
        let server = self.find(model)?;
        if server.launch.is_none() {
            server.served.reach(&server.client).await?;
        }
        server.client.ensure_private_address().await
    }

    /// Completes when the model's server ends, if it is a child process of the worker.
    pub async fn ended(&self, model: &Model) {
        self.children.ended(model).await;
    }

    /// Starts the worker's own server if it does not run, and then awaits `begun`; wakes any other one with `wake`.
    ///
    /// A server that already runs is not killed when the call is dropped: a wake that takes too long is followed by a
    /// forced eviction.
    pub async fn make_ready(
        &self,
        server: &Server<S>,
        kind: LoadKind,
        begun: Call<'_, Result<(), DriverError>>,
        wake: Call<'_, Result<(), DriverError>>,
    ) -> Result<(), DriverError> {
        let Server { served, client, launch, .. } = server;
        match (launch, self.children.alive(&served.id)) {
            (Some(_), None) if kind == LoadKind::Wake => Err(ended_asleep()),
            (Some(launch), None) => {
                // Remains of an earlier attempt.
                self.children.kill(&served.id).await?;
                let running = self.children.start(&served.id, launch, port_of(Some(client.base())))?;
                let guard = running.kill_on_drop();
                served_by(&running, served, client).await?;
                begun.await?;
                guard.keep();
                Ok(())
            }
            (Some(_), Some(running)) => tokio::select! {
                biased;
                failure = running.failed() => Err(failure),
                awake = wake => awake,
            },
            (None, _) => wake.await,
        }
    }

    /// Ends the worker's own server for good, asleep or awake, with a grace period.
    pub async fn stop(&self, server: &Server<S>) -> Result<(), DriverError> {
        self.children.stop(&server.served.id).await
    }

    /// Kills the worker's own server; returns `false` if another program started it.
    pub async fn kill(&self, server: &Server<S>) -> Result<bool, DriverError> {
        if server.launch.is_none() {
            return Ok(false);
        }
        self.children.kill(&server.served.id).await?;
        // No action that was meant for the killed server may reach its successor.
        server.orders.settled().await;
        Ok(true)
    }
}

/// The error for a child that was asleep at the last probe and is gone: starting it takes longer than a wake may, and
/// needs another call.
fn ended_asleep() -> DriverError {
    DriverError::Ended { last_words: "while asleep, for an unknown reason".to_owned() }
}
