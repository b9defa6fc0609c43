//! Runs the operator: every replica serves probes and the webhook, and the leader runs the controllers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future;
use modelrelay_platform::sockets;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cluster::{api, cache};
use crate::context::{Context, OperatorLocation, Span};
use crate::controllers::{provider, worker_pool};
use crate::relay_client;
use crate::settings::cli::RunArgs;
use crate::settings::defaults::{Defaults, DefaultsError};
use webhook::WebhookServer;

pub mod commands;
pub mod lead;
pub mod probe;
mod webhook;

/// The reason that the operator cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The defaults are invalid.
    #[error(transparent)]
    Defaults(#[from] DefaultsError),
    /// No API server is known.
    #[error("failed to connect to a cluster: {0}")]
    NoCluster(#[from] kube::Error),
    /// An address cannot be bound.
    #[error("{setting}: {addr}: {source}")]
    Listen {
        /// The setting.
        setting: &'static str,
        /// Its value.
        addr: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// Signal handlers cannot be installed.
    #[error("failed to install signal handlers: {0}")]
    Signals(#[from] io::Error),
}

/// Runs until SIGTERM or SIGINT.
pub async fn run(args: RunArgs) -> Result<(), RunError> {
    let defaults = Defaults::read(&args.defaults)?;
    let client = api::client().await?;
    let instance = args.instance();
    let place = OperatorLocation { namespace: args.namespace.clone(), host_network: args.host_network };
    let context = Context::new(client.clone(), defaults, place, instance.clone());
    let probes = listen("--listen-addr", args.listen_addr)?;
    let mut stop = Stop::listen()?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), instance, "starting");

    let webhook = WebhookServer::start(&args, &context).await?;
    let probes = tokio::spawn(probe::serve(probes, context.clone(), webhook.readiness()));
    let election = lead::stand(&client, candidacy(&args, instance));
    let leading = election.leading.clone();
    let certificates = tokio::spawn(webhook.manage(&args, &client, leading.clone()));
    let (context, spans) = (context.clone(), spans(&args));
    let work = lead::while_leading(leading, move || control(context.clone(), spans.clone()));
    let controllers = tokio::spawn(work);
    stop.recv().await;
    for task in [controllers, certificates] {
        task.abort();
        let _ = task.await;
    }
    election.resign().await;
    webhook.finish().await;
    probes.abort();
    Ok(())
}

fn listen(setting: &'static str, addr: SocketAddr) -> Result<TcpListener, RunError> {
    let listener =
        sockets::listen(addr, sockets::BACKLOG).map_err(|source| RunError::Listen { setting, addr, source })?;
    let address = listener.local_addr().unwrap_or(addr);
    tracing::info!(setting, %address, "listening");
    Ok(listener)
}

fn candidacy(args: &RunArgs, instance: String) -> lead::Candidacy {
    lead::Candidacy {
        namespace: args.namespace.clone(),
        lease: args.lease_name.clone(),
        instance,
        owner: args.webhook_configuration.clone(),
    }
}

fn spans(args: &RunArgs) -> Vec<Span> {
    let named: Vec<Span> = args.namespaces().into_iter().map(Span::Namespace).collect();
    if named.is_empty() { vec![Span::Cluster] } else { named }
}

/// Runs everything that only the leader does. Dropping it stops it.
async fn control(context: Arc<Context>, spans: Vec<Span>) {
    context.metrics.leader.set(1);
    // Reports from before this replica lost the lease are outdated.
    context.relays.clear();
    let _resigned = Resigned(context.clone());
    let parts = spans.into_iter().map(|span| {
        let context = context.clone();
        async move {
            let (caches, requests, watches) = cache::start(&context.client, &span);
            // The first to end stops all: without a watch, the others would work on outdated state.
            tokio::select! {
                () = watches => {}
                () = provider::run(context.clone(), caches.clone(), requests.providers) => {}
                () = worker_pool::run(context.clone(), caches.clone(), requests.pools) => {}
                () = relay_client::run(context.clone(), caches.clone()) => {}
            }
        }
    });
    future::select_all(parts.map(Box::pin)).await;
}

struct Resigned(Arc<Context>);

impl Drop for Resigned {
    fn drop(&mut self) {
        self.0.metrics.leader.set(0);
    }
}

/// Listens for SIGTERM and SIGINT. The first one starts the shutdown, which the kubelet's grace period limits.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn listen() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn recv(&mut self) {
        let name = tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        };
        tracing::info!(signal = name, "stopping");
    }
}
