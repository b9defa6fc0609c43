//! One relay process: its parts, its start, its settings, and its end.

mod drain;
pub mod program;
mod router;
pub mod server;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use modelrelay_platform::readiness;
use modelrelay_protocol::message::{RelayToWorker, Relays};
use modelrelay_traces::{GatherFuture, MetricExport, MetricsTarget, Service, Target, Traces};
use tokio_util::task::TaskTracker;
use tracing::{error, info};

use crate::dashboard::{self, Addresses, Dashboard};
use crate::keys::{FileKeyStore, KeyStore, KeyStoreError, SecretKeyStore, flush_regularly};
use crate::kubernetes::identity::{Identities, TokenHolder};
use crate::net::lockout::Lockout;
use crate::net::tls::Tls;
use crate::net::{self, TcpListener};
use crate::provider::Provider;
use crate::provider::routing::Providers;
use crate::provider::shared::Shared;
use crate::settings::admin_token::AdminToken;
use crate::settings::cli::Args;
use crate::settings::config::{Config, KeyStorage, WorkerTokens};
use crate::settings::error::ConfigError;
use crate::settings::watch::ConfigWatch;
use crate::state::{ClientTokens, Relay};
use crate::system::shutdown::ShutdownSignal;
use crate::system::{blocking, ids};
use crate::telemetry::audit::AuditLog;
use crate::telemetry::journal::Journal;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::request_journal::RequestJournal;
use crate::telemetry::usage::UsageLedger;
use crate::workers::recheck;
use router::ListenerRoutes;
use server::Serving;

/// Why a relay did not start, in one line.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address cannot be listened on.
    #[error("{setting}: cannot listen on {address}: {source}; choose a free address of this machine as IP:PORT")]
    Listen {
        /// The variable.
        setting: &'static str,
        /// Its value.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// A file that a setting names cannot be used.
    #[error(transparent)]
    Setting(#[from] ConfigError),
    /// The keys cannot be read.
    #[error("API_KEYS_FILE: {0}")]
    Keys(#[from] KeyStoreError),
}

/// Runs until a signal ends it. Returns an error if it could not start. `journal`: the past and future entries of the
/// log.
pub async fn run(args: Args, config: Config, mut signal: ShutdownSignal, journal: Journal) -> Result<(), StartError> {
    let keys = open_keys(&config)?;
    let admin_token = AdminToken::start(&config.admin_token)?;
    let metrics = Arc::new(Metrics::new());
    let tls = config.tls.as_ref().map(|files| Tls::start(files, Arc::clone(&metrics))).transpose()?;
    let audit = AuditLog::open(config.audit_log_file.as_deref(), Arc::clone(&metrics))?;
    let requests = RequestJournal::open(config.request_journal.as_ref(), &metrics)?;
    let usage = UsageLedger::open(&config.usage, &metrics)?;
    let (identities, client_tokens) = identities(&config);
    let listeners = Listeners::bind(&config).await?;
    let relay_id = ids::random_hex::<16>();
    let traces = config.traces.as_ref().map(|target| start_traces(target, &relay_id, &metrics)).transpose()?;
    let shared = Shared::new(config.clone(), Arc::clone(&metrics), traces.clone(), (requests, usage), relay_id);
    let limit = config.max_connections;
    let relay = Arc::new(Relay {
        config_watch: ConfigWatch::start(args, config, metrics),
        shared,
        providers: Providers::default(),
        admin_token,
        tls,
        audit,
        keys,
        lockout: Lockout::new(),
        identities,
        client_tokens,
    });
    let metric_export = relay.start_metric_export()?;
    let pages = Dashboard::new(Arc::clone(&relay), journal, listeners.addresses());
    relay.apply(&relay.config_watch.current());
    tokio::spawn(flush_regularly(Arc::downgrade(&relay.keys)));
    tokio::spawn(recheck::run(Arc::downgrade(&relay)));
    let connections = TaskTracker::new();
    let base_path: Arc<str> = relay.shared.config.load().base_path().into();
    for (listener, parts) in listeners.0 {
        let router = router::router(Arc::clone(&relay), &pages, parts);
        let (base_path, shared) = (Arc::clone(&base_path), Arc::clone(&relay.shared));
        let serving = Serving { router, base_path, shared, tls: relay.tls.clone() };
        tokio::spawn(server::serve(listener, serving, limit, connections.clone()));
    }
    tokio::spawn(Arc::clone(&relay).follow_settings());
    tokio::spawn(dashboard::record(Arc::downgrade(&pages)));
    // `systemctl start` returns here, once the relay accepts connections.
    readiness::report();
    let stop = signal.recv().await;
    relay.drain(stop, connections).await;
    relay.audit.close();
    relay.shared.request_journal.close();
    relay.shared.usage.close();
    let last_metrics = async {
        if let Some(export) = metric_export {
            export.shutdown().await;
        }
    };
    let last_traces = async {
        if let Some(traces) = traces {
            traces.shutdown().await;
        }
    };
    tokio::join!(last_metrics, last_traces);
    Ok(())
}

fn start_traces(target: &Target, relay_id: &str, metrics: &Arc<Metrics>) -> Result<Traces, ConfigError> {
    let service = service(relay_id);
    let metrics = Arc::clone(metrics);
    let on_loss = move |loss, spans| metrics.spans_dropped(loss, spans);
    Ok(Traces::start(target, &service, Arc::new(on_loss))?)
}

fn service(relay_id: &str) -> Service<'_> {
    Service { name: "modelrelay-relay", version: env!("CARGO_PKG_VERSION"), instance: relay_id }
}

/// The identities of workers, and the clients that present tokens.
fn identities(config: &Config) -> (Arc<Identities>, ClientTokens) {
    let WorkerTokens { api, audience, recheck } = &config.worker_tokens;
    let of = |holder, audience: &str| Identities::new(api.clone(), holder, audience, *recheck);
    let client_tokens = ClientTokens {
        identities: of(TokenHolder::Client, &config.client_token_audience),
        tenants: ArcSwap::default(),
        failures: Lockout::new(),
    };
    (of(TokenHolder::Worker, audience), client_tokens)
}

fn open_keys(config: &Config) -> Result<Arc<dyn KeyStore>, KeyStoreError> {
    let kept = config.revoked_keys_kept;
    Ok(match &config.api_keys {
        KeyStorage::File(path) => Arc::new(FileKeyStore::open(path, kept)?),
        KeyStorage::Secret { mount, access } => Arc::new(SecretKeyStore::open(mount, access.clone(), kept)?),
    })
}

impl Relay {
    /// Starts to push metrics, if this is configured. Gathering takes as long as a scrape, so it has a thread of its
    /// own.
    fn start_metric_export(self: &Arc<Self>) -> Result<Option<MetricExport>, ConfigError> {
        let start = |target: &MetricsTarget| {
            let relay = Arc::clone(self);
            let gather = Box::new(move || {
                let relay = Arc::clone(&relay);
                let gathering = blocking::run(move || relay.shared.metrics.gather(&*relay));
                Box::pin(async move { gathering.await.unwrap_or_default() }) as GatherFuture
            });
            MetricExport::start(target, &service(&self.shared.relay_id), gather)
        };
        let config = self.shared.config.load();
        Ok(config.metric_export.as_ref().map(start).transpose()?)
    }

    /// Applies `config`: settings of the whole relay at once, those of a provider to requests that arrive from now on.
    fn apply(&self, config: &Arc<Config>) {
        let before = self.shared.config.swap(Arc::clone(config));
        let tenants = self.client_tokens.tenants.load().renewed(&config.tenants, SystemTime::now());
        self.client_tokens.tenants.store(Arc::new(tenants));
        let old = self.providers.all();
        let current =
            config.providers.iter().map(|wanted| match old.iter().find(|provider| *provider.name == *wanted.name) {
                Some(provider) => {
                    provider.reconfigure(wanted);
                    Arc::clone(provider)
                }
                None => Provider::start(wanted.clone(), Arc::clone(&self.shared)),
            });
        let current: Vec<_> = current.collect();
        // Routing first: new requests do not reach a provider that is about to be deleted.
        for provider in self.providers.replace(&current) {
            info!(provider = %provider.name, "provider removed");
            provider.delete();
            self.shared.metrics.remove_provider(&provider.name);
        }
        self.providers.forget_finished();
        self.drop_refused_workers();
        if before.relay_count != config.relay_count {
            self.send_relay_count(config.relay_count);
        }
    }

    /// Drains every worker whose secret or token is no longer valid.
    fn drop_refused_workers(&self) {
        for provider in self.providers.all() {
            for link in provider.links() {
                provider.send_away_if_refused(&link);
            }
        }
    }

    fn send_relay_count(&self, relay_count: u32) {
        for provider in self.providers.all() {
            for link in provider.links().iter().filter(|link| link.info.core1) {
                link.push(&RelayToWorker::Relays(Relays { relay_count }));
            }
        }
    }

    async fn follow_settings(self: Arc<Self>) {
        let mut watch = self.config_watch.clone();
        loop {
            let next_expiry = self.next_secret_expiry();
            let expired = async {
                match next_expiry {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                config = watch.next() => {
                    self.apply(&config);
                    info!(hash = config.hash, providers = config.providers.len(), "configuration applied");
                }
                () = expired => self.drop_refused_workers(),
            }
        }
    }

    fn next_secret_expiry(&self) -> Option<Instant> {
        let now = SystemTime::now();
        let config = self.shared.config.load();
        let ends = config.providers.iter().flat_map(|provider| &provider.worker_secrets).filter_map(|s| s.not_after);
        let left = ends.filter_map(|end| end.duration_since(now).ok()).filter(|left| !left.is_zero()).min()?;
        Some(Instant::now() + left)
    }
}

struct Listeners(Vec<(TcpListener, ListenerRoutes)>);

impl Listeners {
    async fn bind(config: &Config) -> Result<Self, StartError> {
        let mut listeners = Vec::new();
        let clients = ListenerRoutes {
            clients: true,
            workers: config.workers_on_client_port || config.worker_listen_addr.is_none(),
            admin: config.admin_listen_addr.is_none(),
        };
        let scheme = if config.tls.is_some() { "https" } else { "http" };
        listeners.push((bind("LISTEN_ADDR", config.listen_addr, "", scheme).await?, clients));
        if let Some(address) = config.worker_listen_addr {
            let parts = ListenerRoutes { workers: true, ..ListenerRoutes::default() };
            listeners.push((bind("WORKER_LISTEN_ADDR", address, "worker ", scheme).await?, parts));
        }
        if let Some(address) = config.admin_listen_addr {
            let parts = ListenerRoutes { admin: true, ..ListenerRoutes::default() };
            listeners.push((bind("ADMIN_LISTEN_ADDR", address, "admin ", scheme).await?, parts));
        }
        Ok(Self(listeners))
    }

    fn addresses(&self) -> Addresses {
        let address = |(listener, _): &(TcpListener, ListenerRoutes)| listener.local_addr().ok();
        Addresses {
            clients: self.0.iter().find(|(_, parts)| parts.clients).and_then(address),
            // The clients' listener is the first.
            workers: self.0.iter().rfind(|(_, parts)| parts.workers).and_then(address),
        }
    }
}

async fn bind(setting: &'static str, address: SocketAddr, name: &str, scheme: &str) -> Result<TcpListener, StartError> {
    let listener = net::listen(address).await.map_err(|source| StartError::Listen { setting, address, source })?;
    match listener.local_addr() {
        Ok(local) => info!("{name}listening on {scheme}://{local}"),
        Err(problem) => error!(%problem, "cannot determine the address of a listener"),
    }
    Ok(listener)
}
