//! The running operator: every replica serves probes and the webhook, the leader runs the controllers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future;
use kube::Client;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::cache;
use crate::cli::RunArgs;
use crate::context::{Context, Span};
use crate::defaults::{Defaults, DefaultsError};
use crate::{lead, probe};

/// Why the operator cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The defaults are not usable.
    #[error(transparent)]
    Defaults(#[from] DefaultsError),
    /// No API server is known.
    #[error("no cluster: {0}")]
    NoCluster(#[from] kube::Error),
    /// An address is taken.
    #[error("{setting}: {addr}: {source}")]
    Listen {
        /// The setting.
        setting: &'static str,
        /// Its value.
        addr: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// Signals cannot be listened to.
    #[error("signals: {0}")]
    Signals(#[from] io::Error),
}

/// Runs until SIGTERM or SIGINT.
pub async fn run(args: RunArgs) -> Result<(), RunError> {
    let defaults = Defaults::read(&args.defaults)?;
    let client = Client::try_default().await?;
    let instance = args.instance();
    let context = Context::new(client.clone(), defaults, args.namespace.clone(), instance.clone());
    let listener = listen("--listen-addr", args.listen_addr).await?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    tracing::info!(version = env!("CARGO_PKG_VERSION"), instance, "starting");

    let probes = tokio::spawn(probe::serve(listener, context.clone(), Arc::new(|| Ok(()))));
    let election = lead::stand(&client, &args.namespace, &args.lease_name, &instance).await;
    let spans = spans(&args);
    let controllers = {
        let context = context.clone();
        tokio::spawn(lead::while_leading(election.leading.clone(), move || control(context.clone(), spans.clone())))
    };
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM"),
        _ = interrupt.recv() => tracing::info!("SIGINT"),
    }
    controllers.abort();
    let _ = controllers.await;
    election.resign().await;
    probes.abort();
    Ok(())
}

async fn listen(setting: &'static str, addr: SocketAddr) -> Result<TcpListener, RunError> {
    TcpListener::bind(addr).await.map_err(|source| RunError::Listen { setting, addr, source })
}

fn spans(args: &RunArgs) -> Vec<Span> {
    let named: Vec<Span> = args.namespaces().into_iter().map(Span::Namespace).collect();
    if named.is_empty() { vec![Span::Cluster] } else { named }
}

/// Everything that only the leader does. Dropping it stops it.
async fn control(context: Arc<Context>, spans: Vec<Span>) {
    context.metrics.leader.set(1);
    let _resigned = Resigned(context.clone());
    let parts = spans.into_iter().map(|span| {
        let context = context.clone();
        async move {
            let (_caches, _requests, watches) = cache::start(&context.client, &span);
            watches.await;
        }
    });
    future::join_all(parts).await;
}

struct Resigned(Arc<Context>);

impl Drop for Resigned {
    fn drop(&mut self) {
        self.0.metrics.leader.set(0);
    }
}
