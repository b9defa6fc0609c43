//! Servers that stay when their model leaves the GPU: what the drivers share that put one to sleep and wake it.
//!
//! Each is either started by a command of ours, and then ended by us too, or runs by the word of somebody else, who alone
//! may end it.

use std::path::PathBuf;
use std::sync::Arc;

use url::Url;

use super::http::Client;
use super::launch::{Children, Launch};
use super::process::served_by;
use super::sequence::Sequence;
use super::served::{Served, port_of};
use super::{Call, DriverError};
use crate::multiplexer::Model;
use crate::multiplexer::estimate::LoadKind;

/// One server. `S`: what its driver remembers of it.
#[derive(Debug)]
pub struct Server<S> {
    /// How it shows that it is ready.
    pub served: Served,
    /// Talks to it.
    pub client: Client,
    /// What starts it; without one somebody else does.
    pub launch: Option<Launch>,
    /// What must not be left half done.
    pub orders: Sequence,
    /// What its driver remembers of it.
    pub state: S,
}

/// The servers of a slot.
#[derive(Debug)]
pub struct Servers<S> {
    all: Vec<Arc<Server<S>>>,
    children: Children,
}

impl<S> Server<S> {
    /// A server at `url` of which nothing is known yet.
    pub fn new(served: Served, url: Url, launch: Option<Launch>, state: S) -> Self {
        Self { client: served.client(url), served, launch, orders: Sequence::default(), state }
    }
}

impl<S> Servers<S> {
    /// None of them was started yet. `supervisor`: this very program.
    pub fn new(servers: impl IntoIterator<Item = Server<S>>, supervisor: PathBuf) -> Self {
        Self { all: servers.into_iter().map(Arc::new).collect(), children: Children::new(supervisor) }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Server<S>> {
        self.all.iter().map(|server| &**server)
    }

    /// The one of this model.
    pub fn find(&self, model: &Model) -> Result<&Arc<Server<S>>, DriverError> {
        let found = self.all.iter().find(|server| server.served.id == *model);
        found.ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    /// Their models.
    pub fn models(&self) -> Vec<Model> {
        self.iter().map(|server| Model::clone(&server.served.id)).collect()
    }

    /// Where the model's server is.
    pub fn url(&self, model: &Model) -> Option<Url> {
        self.find(model).ok().map(|server| server.client.base().clone())
    }

    /// Whether the model's server is our child.
    pub fn owns(&self, model: &Model) -> bool {
        self.find(model).is_ok_and(|server| server.launch.is_some())
    }

    /// Whether any of them is.
    pub fn owns_any(&self) -> bool {
        self.iter().any(|server| server.launch.is_some())
    }

    /// A server of ours that has ended, or was not started, is nobody to talk to.
    pub fn is_absent(&self, server: &Server<S>) -> bool {
        server.launch.is_some() && self.children.alive(&server.served.id).is_none()
    }

    /// One that we do not start has to be there, and each where it may be told.
    pub async fn check(&self, model: &Model) -> Result<(), DriverError> {
        let server = self.find(model)?;
        if server.launch.is_none() {
            server.served.reach(&server.client).await?;
        }
        server.client.may_be_told().await
    }

    /// Ends when the model's server does, if it is our child.
    pub async fn ended(&self, model: &Model) {
        self.children.ended(model).await;
    }

    /// Starts a server of ours that is not there and sees to it that `begun` holds, or has another one woken by `wake`.
    ///
    /// One that is there is not killed when the call is dropped: a wake that takes too long is followed by a forced
    /// eviction.
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
                // Whatever is left of a former attempt.
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

    /// Ends a server of ours for good, asleep or awake, and lets it finish what it has to.
    pub async fn stop(&self, server: &Server<S>) -> Result<(), DriverError> {
        self.children.stop(&server.served.id).await
    }

    /// Ends a server of ours; `false` if it is none.
    pub async fn kill(&self, server: &Server<S>) -> Result<bool, DriverError> {
        if server.launch.is_none() {
            return Ok(false);
        }
        self.children.kill(&server.served.id).await?;
        // Nothing that was meant for the dead must reach its successor.
        server.orders.settled().await;
        Ok(true)
    }
}

/// A child that was asleep when it was last seen and is gone: starting it takes longer than a wake may, and is another order.
fn ended_asleep() -> DriverError {
    DriverError::Ended { last_words: "in its sleep, and nobody saw how".to_owned() }
}
