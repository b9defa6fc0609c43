//! The state that all parts of a worker share.

mod reports;
mod undo;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use modelrelay_multiplexer::net::Trust;
use modelrelay_traces::{GatherFuture, Loss, MetricExport, MetricsTarget, Service, Target, Traces};
use tokio::sync::{Notify, watch};

use crate::backend::SpareMemory;
use crate::link::{Advertised, Conversations, Link, Links};
use crate::metrics::Metrics;
use crate::serving::{Failing, Serving, ServingContext};
use crate::settings::{self, Credential, Live, SettingError, Settings};
use crate::shutdown::{Cause, Drain, DrainOrder};

/// The interval between attempts to read a secret or token that is missing or invalid.
const CREDENTIAL_INTERVAL: Duration = Duration::from_secs(1);

/// The state that all parts share.
#[derive(Debug)]
pub struct Worker {
    /// The settings at the start.
    pub settings: Settings,
    /// The settings that a reload changes.
    pub live: Arc<ArcSwap<Live>>,
    /// Memory for large request bodies.
    pub spare_memory: Arc<SpareMemory>,
    /// The certificates that are trusted for relays.
    pub trust: ArcSwap<Trust>,
    /// 128 random bits that identify this process to relays.
    pub instance_id: String,
    /// Live links.
    pub links: Arc<Links>,
    /// The conversations that relays have sent.
    pub conversations: Arc<Conversations>,
    /// The part that serves requests.
    pub serving: Serving,
    /// The drain state: whether the worker accepts requests.
    pub drain: Arc<Drain>,
    /// True while no link exists and none is being dialled.
    pub unlinked: watch::Sender<bool>,
    /// The number of relays, as relays report it.
    pub relay_count: watch::Sender<u32>,
    /// The models whose requests the backend fails.
    failing: Arc<Failing>,
    /// Creates spans, if traces are exported.
    pub traces: Option<Traces>,
    /// The worker's metrics.
    pub metrics: Arc<Metrics>,
    /// The start time of the process.
    pub started: Instant,
    /// The newest secret or token that could be read.
    newest_credential: watch::Sender<Option<Credential>>,
    /// Notified when `worker.yaml` was applied.
    reloaded: Notify,
    secret_error: Mutex<Option<String>>,
    config_error: Mutex<Option<String>>,
}

impl Worker {
    /// Creates a worker without links; the slots of a multiplexer start at once. Must be called within a runtime.
    pub fn new(settings: Settings) -> Result<Self, SettingError> {
        let trust = ArcSwap::from_pointee(trust(settings.live.relay_ca_file.as_ref())?);
        let metrics = Arc::new(Metrics::new());
        let instance_id = instance_id()?;
        let traces = settings.traces.as_ref().map(|target| start_traces(target, &instance_id, &metrics)).transpose()?;
        let context = ServingContext {
            live: Arc::new(ArcSwap::from_pointee(settings.live.clone())),
            links: Arc::default(),
            drain: Arc::default(),
            failing: Arc::new(Failing::new(Arc::clone(&metrics))),
            metrics,
        };
        let serving = Serving::start(&context)?;
        let ServingContext { live, links, drain, failing, metrics } = context;
        Ok(Self {
            serving,
            spare_memory: SpareMemory::new(settings.max_buffered_bytes),
            live,
            trust,
            instance_id,
            links,
            conversations: Arc::default(),
            failing,
            drain,
            unlinked: watch::channel(false).0,
            relay_count: watch::channel(1).0,
            traces,
            metrics,
            started: Instant::now(),
            newest_credential: watch::channel(None).0,
            reloaded: Notify::new(),
            secret_error: Mutex::new(None),
            config_error: Mutex::new(None),
            settings,
        })
    }

    /// Returns the secret or token to dial with. It is read again each time; while its file is invalid, the last good
    /// one is returned. Waits for the first one.
    pub async fn credential(&self) -> Credential {
        loop {
            if let Some(credential) = self.credential_now() {
                return credential;
            }
            tokio::time::sleep(CREDENTIAL_INTERVAL).await;
        }
    }

    /// Updates the metrics that show the present state.
    pub async fn observe(&self) {
        self.serving.observe().await;
        self.metrics.in_flight.set(i64::from(self.serving.running()));
        self.metrics.max_concurrency.set(i64::from(self.serving.max_concurrency()));
    }

    /// Starts to push metrics, if this is configured.
    pub fn start_metric_export(self: &Arc<Self>) -> Result<Option<MetricExport>, SettingError> {
        let start = |target: &MetricsTarget| {
            let worker = Arc::clone(self);
            let gather = Box::new(move || {
                let worker = Arc::clone(&worker);
                let gathering = async move {
                    worker.observe().await;
                    worker.metrics.gather()
                };
                Box::pin(gathering) as GatherFuture
            });
            MetricExport::start(target, &service(&self.instance_id), gather)
        };
        let started = self.settings.metric_export.as_ref().map(start).transpose();
        started.map_err(|error| settings::export_error(&error))
    }

    /// Spawns the tasks that maintain this state.
    pub fn spawn_upkeep(self: &Arc<Self>) {
        tokio::spawn(undo::undo_drains(Arc::clone(self)));
        tokio::spawn(reports::report_homes(Arc::clone(self)));
        let worker = Arc::clone(self);
        tokio::spawn(async move { worker.try_failing_models().await });
        let worker = Arc::clone(self);
        tokio::spawn(async move { worker.watch_credential().await });
    }

    /// Waits until there is a secret or token other than the one that a relay rejected.
    pub async fn other_credential(&self, refused: &Credential) {
        loop {
            tokio::time::sleep(CREDENTIAL_INTERVAL).await;
            if self.live.load().credential.read().is_ok_and(|credential| credential != *refused) {
                return;
            }
        }
    }

    /// Returns the newest secret or token, as a channel that reports changes.
    pub fn newest_credential(&self) -> watch::Receiver<Option<Credential>> {
        self.newest_credential.subscribe()
    }

    /// Checks the file of the secret or token for changes each second. A value in the settings changes only with them.
    /// Never returns.
    async fn watch_credential(&self) {
        loop {
            let is_file = self.live.load().credential.is_file();
            if is_file {
                tokio::time::sleep(CREDENTIAL_INTERVAL).await;
            } else {
                self.reloaded.notified().await;
            }
            self.credential_now();
        }
    }

    /// Returns why there is no secret or token to dial with, or only an old one.
    pub fn secret_error(&self) -> Option<String> {
        lock(&self.secret_error).clone()
    }

    /// Reads the secret or token. The same error is logged once.
    fn credential_now(&self) -> Option<Credential> {
        let (read, noun) = {
            let live = self.live.load();
            (live.credential.read(), live.credential.noun())
        };
        let had_one = self.newest_credential.borrow().is_some();
        let error = read.as_ref().err().map(ToString::to_string);
        let previous = std::mem::replace(&mut *lock(&self.secret_error), error.clone());
        match (read, error) {
            (Ok(credential), _) => {
                if previous.is_some() {
                    tracing::info!("{noun} found");
                }
                self.newest_credential.send_if_modified(|newest| {
                    let is_new = newest.as_ref() != Some(&credential);
                    *newest = Some(credential);
                    is_new
                });
            }
            (Err(_), error) if error == previous => {}
            (Err(error), _) if had_one => {
                tracing::warn!(%error, "cannot read the {noun}; dialling with the previous one");
            }
            (Err(error), _) => tracing::warn!(%error, "there is no {noun} yet; waiting for it"),
        }
        self.newest_credential.borrow().clone()
    }

    /// A link has registered with these models.
    pub fn attach(&self, link: &Arc<Link>, registered: &Advertised) {
        self.serving.attach(link, registered);
        self.conversations.attach(link.id, link.homes1);
        // The published ModelRelay dispatches queued requests when a list of models arrives, and not when a worker
        // registers.
        let advertised = self.serving.advertised();
        if !link.core1 && !advertised.models.is_empty() {
            link.announce(&advertised, self.serving.running());
        }
        self.metrics.connected.with_label_values(&[&*link.relay]).inc();
    }

    /// Applies the status of a forwarded response, and reports to relays if the model is failing now, or no longer.
    pub fn note_status(&self, model: &str, status: u16) {
        if self.failing.handle_status(model, status) {
            self.serving.announce();
        }
    }

    /// Ends expired ejections, so that relays try those models again. Never returns.
    async fn try_failing_models(&self) {
        loop {
            self.failing.expired().await;
            self.serving.announce();
        }
    }

    /// A link has ended: cancels its requests at once.
    pub fn detach(&self, link: &Arc<Link>) {
        let aborted = link.cancel_all();
        if aborted > 0 {
            tracing::warn!(relay = %link.relay, aborted, "link closed with running requests; aborting them");
        }
        self.serving.detach(link);
        self.links.remove(link.id);
        self.conversations.detach(link.id);
        let gauge = self.metrics.connected.with_label_values(&[&*link.relay]);
        gauge.dec();
        if gauge.get() <= 0 {
            self.metrics.forget_relay(&link.relay);
        }
    }

    /// Sets the number of relays, as a relay reports it.
    pub fn set_relay_count(&self, count: u32) {
        self.relay_count.send_if_modified(|now| std::mem::replace(now, count.max(1)) != count.max(1));
    }

    /// Begins a drain: the worker accepts no more requests.
    pub fn begin_drain(&self, cause: Cause, timeout: Duration) -> DrainOrder {
        let order = self.drain.begin(cause, timeout, Instant::now());
        let running = self.links.unanswered();
        tracing::info!(cause = cause.as_str(), running, "graceful shutdown");
        self.serving.handle_drain(order.cause);
        order
    }

    /// An admin's order: finish, and stay away until restarted.
    pub fn drain_by_admin(&self, timeout: Option<Duration>) {
        self.begin_drain(Cause::Admin, timeout.unwrap_or(self.settings.shutdown_timeout));
    }

    /// Returns why the file's newest content is not in effect.
    pub fn config_error(&self) -> Option<String> {
        lock(&self.config_error).clone()
    }

    /// Applies the settings of a changed `worker.yaml`.
    pub fn apply(&self, settings: Settings) {
        let (old, mut new) = (self.live.load_full(), settings.live.clone());
        if new.relay_ca_file != old.relay_ca_file {
            match trust(new.relay_ca_file.as_ref()) {
                Ok(trust) => self.trust.store(Arc::new(trust)),
                Err(error) => return self.refuse(&error),
            }
        }
        let rest = Settings { live: self.settings.live.clone(), ..settings };
        if rest != self.settings {
            tracing::warn!("worker.yaml changed settings that require a restart; keeping the previous values");
        }
        if new.relay.every_address != old.relay.every_address {
            tracing::warn!(
                "worker.yaml changed between a single relay address and dns+; restart the worker to apply it"
            );
            new.relay = old.relay.clone();
        }
        lock(&self.config_error).take();
        self.live.store(Arc::new(new.clone()));
        self.reloaded.notify_one();
        self.serving.reconfigure(&old, &new);
        tracing::info!("worker.yaml applied");
    }

    /// Keeps the settings, because those of a changed `worker.yaml` cannot be used.
    pub fn refuse(&self, error: &SettingError) {
        tracing::error!(%error, "worker.yaml reload failed; keeping previous configuration");
        *lock(&self.config_error) = Some(error.to_string());
    }
}

/// Returns the trusted certificates for relays; detects an unusable file at once.
pub(crate) fn trust(relay_ca_file: Option<&PathBuf>) -> Result<Trust, SettingError> {
    let trust = Trust::new(relay_ca_file.cloned());
    trust.check().map_err(|error| {
        let path = relay_ca_file.cloned().unwrap_or_default();
        SettingError::new("RELAY_CA_FILE", path.display().to_string(), error.to_string())
    })?;
    Ok(trust)
}

fn start_traces(target: &Target, instance_id: &str, metrics: &Arc<Metrics>) -> Result<Traces, SettingError> {
    let service = service(instance_id);
    let metrics = Arc::clone(metrics);
    let on_loss = move |loss: Loss, spans| metrics.spans_dropped(loss.as_str(), spans);
    Traces::start(target, &service, Arc::new(on_loss)).map_err(|error| settings::export_error(&error))
}

fn service(instance_id: &str) -> Service<'_> {
    Service { name: "modelrelay-worker", version: env!("CARGO_PKG_VERSION"), instance: instance_id }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn instance_id() -> Result<String, SettingError> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        SettingError::hidden("instance_id", format!("system random number generator failed: {error}"))
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
