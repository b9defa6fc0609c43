//! Which models are advertised: none until the backend is healthy, then the configured ones or those that it lists.
//!
//! [`condition`](crate::backend::condition) decides whether the backend is healthy. A request that cannot connect, and
//! a failed request whose health check fails too, withdraw all models before the failure itself is reported. The
//! backend is then probed each second until it is back. A healthy backend is probed every 5 s, and lists its models
//! every 30 s unless they are fixed. A model whose requests a healthy backend fails stays advertised, and is reported
//! as [failing](outliers).
//!
//! Locks: this one is taken before a link's, never after.

mod concurrency;
mod failing;
mod list;
mod outliers;
mod silence;

pub use failing::Failing;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use modelrelay_protocol::message::WorkerError;
use tokio::sync::{Notify, watch};

use super::SingleBackend;
use crate::backend::Backend;
use crate::backend::condition::{Condition, Monitor};
use crate::backend::health::{self, Health, Listing};
use crate::link::{Advertised, Capacity, Link, LinkId, Links, naming};
use crate::metrics::Metrics;
use crate::settings::{Declared, Models};
use silence::{ResponseProgress, Silence};

/// The interval between requests for the model list while the backend has not listed any model.
const FIRST_LIST_INTERVAL: Duration = Duration::from_secs(2);

/// The interval after that.
const LIST_INTERVAL: Duration = Duration::from_secs(30);

/// The time that a health check after a failed request may take. The client waits for it.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// The state of the backend and its models.
#[derive(Debug)]
pub struct Catalogue {
    state: Mutex<CatalogueState>,
    wake: Notify,
    healthy: watch::Sender<bool>,
    /// The newest check after a failed request. Failures that wait for it share its result.
    check: tokio::sync::Mutex<Option<Check>>,
    links: Arc<Links>,
    capacity: Arc<Capacity>,
    failing: Arc<Failing>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
struct CatalogueState {
    backend: Monitor,
    /// The models that the backend serves while healthy.
    models: Advertised,
    /// The time of the last list.
    listed: Option<Instant>,
    /// The reason why the last list could not be read. Logged once.
    list_error: Option<String>,
    /// The entries that were left out of the last list. Logged when they change.
    list_warnings: Vec<String>,
    /// Links whose relay requested the models. They get a reply even if nothing changed.
    requesters: Vec<LinkId>,
    /// The number of times that the backend became healthy.
    recoveries: u64,
    /// True once the models of a healthy backend were known.
    served: bool,
    /// True once the backend's concurrency was compared with the settings.
    advised: bool,
    /// The running requests of a backend that is gone.
    silence: Silence,
}

/// A health check after a failed request.
#[derive(Clone, Copy, Debug)]
struct Check {
    began: Instant,
    lost: bool,
}

impl CatalogueState {
    fn new(now: Instant) -> Self {
        Self {
            backend: Monitor::new(now),
            models: Advertised::default(),
            listed: None,
            list_error: None,
            list_warnings: Vec::new(),
            requesters: Vec::new(),
            recoveries: 0,
            served: false,
            advised: false,
            silence: Silence::default(),
        }
    }

    fn advertised(&self, failing: &Failing) -> Advertised {
        if !self.backend.is_healthy() {
            return Advertised::default();
        }
        self.models.clone().with_failing(|model| failing.contains(model))
    }

    fn list_interval(&self) -> Duration {
        if self.models.models.is_empty() { FIRST_LIST_INTERVAL } else { LIST_INTERVAL }
    }

    fn is_list_due(&self, now: Instant) -> bool {
        let since = |listed: Instant| now.saturating_duration_since(listed);
        !self.backend.is_healthy() || self.listed.is_none_or(|listed| since(listed) >= self.list_interval())
    }
}

impl Catalogue {
    /// Creates a catalogue of which nothing is known yet.
    pub fn new(links: Arc<Links>, capacity: Arc<Capacity>, failing: Arc<Failing>, metrics: Arc<Metrics>) -> Self {
        let state = Mutex::new(CatalogueState::new(Instant::now()));
        let (healthy, check) = (watch::channel(false).0, tokio::sync::Mutex::default());
        metrics.backend_condition(Condition::Unknown);
        Self { state, wake: Notify::new(), healthy, check, links, capacity, failing, metrics }
    }

    /// Returns the models to advertise now.
    pub fn advertised(&self) -> Advertised {
        self.lock().advertised(&self.failing)
    }

    /// The backend's condition, its reason and its age.
    pub fn monitor(&self) -> Monitor {
        self.lock().backend.clone()
    }

    /// Returns the number of times that the backend became healthy. Its cache may be empty each time.
    pub fn recoveries(&self) -> u64 {
        self.lock().recoveries
    }

    /// Returns why the backend could never serve; `None` once it could, whatever happened since. A healthy backend that
    /// lists no models could: no wait adds a model, only a user who pulls one.
    pub fn never_served(&self) -> Option<String> {
        let state = self.lock();
        let why = || match (state.backend.is_healthy(), state.backend.reason(), &state.list_error) {
            (true, _, Some(why)) => unlisted(why),
            (false, Some(why), _) => not_ready(why),
            (true, _, None) | (false, None, _) => "the backend has not been probed yet".to_owned(),
        };
        (!state.served).then(why)
    }

    /// Returns whether the backend is healthy, now and at each change.
    pub fn healthy(&self) -> watch::Receiver<bool> {
        self.healthy.subscribe()
    }

    /// Runs `attach`, which adds a link that registered with these models, and passes it the models if they have
    /// changed since.
    pub fn attach(&self, registered: &Advertised, attach: impl FnOnce(Option<&Advertised>)) {
        let state = self.lock();
        let advertised = state.advertised(&self.failing);
        attach((advertised != *registered).then_some(&advertised));
    }

    /// Announces the models again, because the failing ones have changed.
    pub fn announce(&self) {
        let state = self.lock();
        self.send_to_all(&state.advertised(&self.failing));
    }

    fn send_to_all(&self, advertised: &Advertised) {
        self.links.all().iter().for_each(|link| link.announce(advertised, self.capacity.load()));
    }

    /// A connection to the backend failed: it gets no more requests.
    pub fn handle_unreachable(&self, why: &str) {
        self.change(|state| state.backend.handle_refused(why, Instant::now()));
        self.wake.notify_one();
    }

    /// Probes the backend after it has failed a request. If the probe fails too, the models are withdrawn and the
    /// backend is lost: it will not serve the next request either. A backend that does not respond in time may only be
    /// busy.
    pub async fn is_lost(&self, single: &SingleBackend, backend: &Backend) -> bool {
        let failed = Instant::now();
        let mut newest = self.check.lock().await;
        if let Some(check) = *newest
            && check.began >= failed
        {
            return check.lost;
        }
        let began = Instant::now();
        let health = tokio::time::timeout(CHECK_TIMEOUT, health::probe(backend)).await;
        let lost = match &health {
            Ok(health @ (Health::NotReady(_) | Health::Gone(_))) if is_current(single, backend) => {
                self.change(|state| {
                    state.backend.handle_probe(health, began, Instant::now());
                });
                true
            }
            Ok(Health::NotReady(_) | Health::Gone(_) | Health::Alive | Health::Silent(_)) | Err(_) => false,
        };
        *newest = Some(Check { began, lost });
        self.wake.notify_one();
        lost
    }

    /// The backend's state may have changed, because it closed a connection or its settings changed. The advertised
    /// models stay until the next probe ends.
    pub fn poll_now(&self) {
        self.wake.notify_one();
    }

    /// A relay requests the models, and gets a reply.
    pub fn refresh(&self, link: LinkId) {
        self.lock().requesters.push(link);
        self.wake.notify_one();
    }

    /// The settings name another backend, of which nothing is known.
    pub fn reset(&self) {
        self.change(|state| {
            state.backend.handle_replaced(Instant::now());
            state.models = Advertised::default();
            state.listed = None;
            state.advised = false;
        });
        self.wake.notify_one();
    }

    /// Keeps the catalogue up to date. Never returns.
    pub async fn run(&self, single: &SingleBackend) {
        let mut drain = single.drain.subscribe();
        let mut is_woken = true;
        loop {
            self.poll(single, is_woken).await;
            let pause = self.pause(&single.live.load().models, single.drain.is_undoable());
            is_woken = tokio::select! {
                () = tokio::time::sleep(pause) => false,
                () = self.wake.notified() => true,
                Ok(()) = drain.changed() => true,
            };
        }
    }

    fn pause(&self, models: &Models, undoable: bool) -> Duration {
        let state = self.lock();
        let probe = state.backend.next_probe(undoable);
        match models {
            Models::Fixed(_) => probe,
            Models::Listed => probe.min(state.list_interval()),
        }
    }

    async fn poll(&self, single: &SingleBackend, is_woken: bool) {
        let backend = single.backend();
        let (models, declared) = {
            let live = single.live.load();
            (live.models.clone(), live.model_details.clone())
        };
        let began = Instant::now();
        let is_list_due = is_woken || self.lock().is_list_due(began);
        let health = health::probe(&backend).await;
        let listing = match (&models, &health) {
            (Models::Listed, Health::Alive) if is_list_due => Some(health::list(&backend).await),
            (Models::Listed, Health::Alive | Health::NotReady(_) | Health::Silent(_) | Health::Gone(_))
            | (Models::Fixed(_), _) => None,
        };
        if !is_current(single, &backend) {
            // The settings were reloaded in the meantime; the next probe examines the new backend.
            self.wake.notify_one();
            return;
        }
        let naming = naming(backend.settings());
        let changed = self.change(|state| {
            let now = Instant::now();
            state.backend.handle_probe(&health, began, now);
            match (&models, listing.as_ref()) {
                (Models::Fixed(fixed), _) => {
                    state.models = Advertised::new(fixed.clone(), &Declared::default(), &declared).with_naming(naming);
                }
                (Models::Listed, Some(Listing::Models { listed, details, odd, .. })) => {
                    let cleaned = list::clean(listed, *odd);
                    state.models = Advertised::new(cleaned.models, details, &declared).with_naming(naming);
                    state.listed = Some(now);
                    warn_of_new(&mut state.list_warnings, cleaned.warnings);
                }
                (Models::Listed, Some(Listing::Failed(_)) | None) => return,
            }
            state.served |= state.backend.is_healthy();
        });
        self.note_listing(listing.as_ref());
        self.break_off_silent(Instant::now());
        let requesters = std::mem::take(&mut self.lock().requesters);
        if !changed {
            let advertised = self.advertised();
            for link in requesters.into_iter().filter_map(|id| self.links.find(id)) {
                link.announce(&advertised, self.capacity.load());
            }
        }
        self.advise(single, &backend, listing.as_ref()).await;
    }

    /// Ends the requests that wait in vain for a backend that is gone. Their relays send them to another worker, if
    /// nothing of their responses has arrived.
    fn break_off_silent(&self, now: Instant) {
        let silent = {
            let mut state = self.lock();
            if state.backend.condition() != Condition::Gone {
                return state.silence.clear();
            }
            let of = |link: Arc<Link>| {
                let waiting = link.waiting_for_backend().into_iter();
                waiting.map(move |(key, pieces)| ResponseProgress { link: link.id, key, pieces })
            };
            state.silence.observe(self.links.all().into_iter().flat_map(of).collect(), now)
        };
        for ResponseProgress { link, key, .. } in silent {
            let message = "the backend closed its port without completing the response";
            let link = self.links.find(link);
            if link.is_some_and(|link| link.break_off(&key, WorkerError::BACKEND_RESET, message)) {
                tracing::warn!(request_id = %key.id, "{message}");
                self.metrics.backend_errors("reset");
            }
        }
    }

    /// Changes the state and announces the difference to every link. Returns true if there is one.
    fn change(&self, change: impl FnOnce(&mut CatalogueState)) -> bool {
        let mut state = self.lock();
        let (before, monitor) = (state.advertised(&self.failing), state.backend.clone());
        change(&mut state);
        self.report(&monitor, &state.backend);
        if !monitor.is_healthy() && state.backend.is_healthy() {
            self.failing.clear();
            state.recoveries += 1;
        }
        let advertised = state.advertised(&self.failing);
        if advertised == before {
            return false;
        }
        if advertised.models == before.models {
            tracing::info!("details of advertised models changed");
        } else {
            tracing::info!(models = advertised.models.len(), "advertised models changed");
        }
        self.send_to_all(&advertised);
        true
    }

    /// Logs and exports a change of the backend's condition, or of its reason.
    fn report(&self, before: &Monitor, now: &Monitor) {
        let is_healthy = now.is_healthy();
        self.healthy.send_if_modified(|healthy| std::mem::replace(healthy, is_healthy) != is_healthy);
        let (condition, was) = (now.condition(), before.condition());
        if condition != was {
            self.metrics.backend_condition(condition);
        } else if before.reason() == now.reason() {
            return;
        }
        let (condition, was) = (condition.as_str(), was.as_str());
        match (is_healthy, now.reason()) {
            (true, None) => tracing::info!(condition, was, "the backend is healthy"),
            (true, Some(why)) => tracing::warn!(condition, "the backend does not respond; keeping its models: {why}"),
            (false, Some(why)) => tracing::warn!(condition, was, "{}", not_ready(why)),
            (false, None) => tracing::info!(condition, was, "the backend changed"),
        }
    }

    /// Warns once if the backend could run more requests at once than the default sends it.
    async fn advise(&self, single: &SingleBackend, backend: &Backend, listing: Option<&Listing>) {
        let is_due = {
            let state = self.lock();
            single.live.load().is_default_concurrency && state.served && !state.advised
        };
        if !is_due {
            return;
        }
        let owner = match listing {
            Some(Listing::Models { owner, .. }) => owner.as_deref(),
            Some(Listing::Failed(_)) | None => None,
        };
        if let Some(advice) = concurrency::advice(backend, owner).await {
            tracing::warn!("{advice}");
        }
        self.lock().advised = true;
    }

    /// Logs a list of models or the failure to read one, and updates the metric.
    fn note_listing(&self, listing: Option<&Listing>) {
        let error = match listing {
            None => return,
            Some(Listing::Models { .. }) => None,
            Some(Listing::Failed(why)) => Some(why.clone()),
        };
        self.metrics.refreshed(if error.is_none() { "ok" } else { "error" });
        let mut state = self.lock();
        if let Some(why) = error.as_ref().filter(|_| error != state.list_error) {
            tracing::warn!("{}", unlisted(why));
        }
        state.list_error = error;
    }

    fn lock(&self) -> MutexGuard<'_, CatalogueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn warn_of_new(known: &mut Vec<String>, warnings: Vec<String>) {
    for warning in warnings.iter().filter(|warning| !known.contains(warning)) {
        tracing::warn!("{warning}");
    }
    *known = warnings;
}

/// True unless a reload has replaced the backend.
fn is_current(single: &SingleBackend, backend: &Backend) -> bool {
    std::ptr::eq(backend, Arc::as_ptr(&single.backend()))
}

fn not_ready(why: &str) -> String {
    format!("the backend is not ready: {why}")
}

fn unlisted(why: &str) -> String {
    format!("cannot list the backend's models: {why}")
}

#[cfg(test)]
mod tests;
