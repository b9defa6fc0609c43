//! The slots of a multiplexer, the connections to their backends, and the details of their models.

mod recovery;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use http::HeaderMap;
use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::actor::{CancelHandle, ConnectFailureReport, Lease, PendingLease};
use modelrelay_multiplexer::board::RelaySink;
use modelrelay_multiplexer::driver::build::{Driven, slot_drivers};
use modelrelay_multiplexer::driver::roster::Changes;
use modelrelay_multiplexer::error::SlotError;
use modelrelay_multiplexer::event::RelayKey;
use modelrelay_multiplexer::metrics::MultiplexerMetrics;
use modelrelay_multiplexer::policy::{self, Candidate};
use modelrelay_multiplexer::slots::Multiplexer;
use modelrelay_protocol::message::{CommandResult, Grant, RequestClass, Slots, WorkerToRelay, encode};
use modelrelay_protocol::names::Naming;
use modelrelay_protocol::outbox::Latest;

use super::{Failing, ServingContext};
use crate::backend::Backend;
use crate::link::{Advertised, Link, Links, ModelLoads, random};
use crate::settings::{BackendSettings, Declared, DriverSettings, Engine, Live, SettingError, SlotSettings};

/// The number of backends whose connections are kept: more than a machine's GPUs serve at once. A process that is
/// loaded again listens elsewhere, and the entry for its former port is evicted here.
const MAX_BACKENDS: usize = 32;

/// The slots and the connections to their backends.
#[derive(Debug)]
pub struct MultiplexedBackend {
    /// The slots.
    pub(super) multiplexer: Multiplexer,
    /// The settings in effect, in the order of the slots. Never held over an await.
    settings: Mutex<Vec<SlotSettings>>,
    /// The driver of each slot.
    driven: Vec<Driven>,
    /// The declared details of all models, by each of their names. Never held over an await.
    details: Mutex<Declared>,
    /// The id of each alias's model. Never held over an await.
    aliases: Mutex<BTreeMap<String, String>>,
    /// The models whose requests their backends fail, by their ids.
    failing: Arc<Failing>,
    /// Live links.
    links: Arc<Links>,
    /// The most recently used first. Never held over an await.
    backends: Mutex<Vec<Arc<Backend>>>,
    running: AtomicU32,
    /// True once every slot has held a model, or needs none.
    has_served: AtomicBool,
}

/// A lease. It is included in the running requests until it is released.
#[derive(Debug)]
pub struct Leased {
    lease: Option<Lease>,
    slots: Arc<MultiplexedBackend>,
}

/// The lease of a request that is queued; dropping it cancels the request.
#[derive(Debug)]
pub struct PendingStart {
    arriving: PendingLease,
    slots: Arc<MultiplexedBackend>,
}

impl MultiplexedBackend {
    /// Starts the slots; must be called within a runtime.
    pub(super) fn start(slots: Vec<SlotSettings>, context: ServingContext) -> Result<Arc<Self>, SettingError> {
        let ServingContext { live, links, failing, metrics, .. } = context;
        metrics.forget_backend();
        let supervisor = std::env::current_exe().map_err(|error| {
            SettingError::hidden("multiplexer", format!("cannot find this program's executable: {error}"))
        })?;
        let driven = slot_drivers(&slots, &supervisor)?;
        // Not awaited: a GPU driver may hang.
        for Driven { driver, .. } in &driven {
            let driver = Arc::clone(driver);
            tokio::spawn(async move { driver.measure().await });
        }
        let drivers = driven.iter().map(|slot| Arc::clone(&slot.driver));
        let machines = slots.iter().map(|slot| slot.config.clone()).zip(drivers).collect();
        let seed = (random() * 9_007_199_254_740_992.0) as u64;
        Ok(Arc::new(Self {
            multiplexer: Multiplexer::start(machines, Arc::new(MultiplexerMetrics::new(metrics.registry())), seed),
            details: Mutex::new(with_aliases(&live.load().model_details, &slots)),
            aliases: Mutex::new(aliases(&slots)),
            failing,
            links,
            settings: Mutex::new(slots),
            driven,
            backends: Mutex::default(),
            running: AtomicU32::new(0),
            has_served: AtomicBool::new(false),
        }))
    }

    fn settings(&self) -> MutexGuard<'_, Vec<SlotSettings>> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a link that has registered with these models.
    pub(super) fn attach(self: &Arc<Self>, link: &Arc<Link>, registered: &Advertised) {
        self.links.insert(link);
        let advertised = self.advertised();
        if advertised != *registered {
            link.announce(&advertised, self.running());
        }
        let sink = Arc::new(LinkSink { link: Arc::downgrade(link), slots: Arc::downgrade(self) });
        link.take_seat(self.multiplexer.join(link.peer(), sink));
    }

    /// Calls the multiplexer with its key for a link, if the link has joined.
    pub(super) fn with_seat(&self, link: &Link, call: impl FnOnce(&Multiplexer, RelayKey)) {
        if let Some(seat) = link.seat() {
            call(&self.multiplexer, seat);
        }
    }

    /// Announces the models to all links.
    pub(super) fn announce(&self) {
        let advertised = self.advertised();
        self.links.all().iter().for_each(|link| link.announce(&advertised, self.running()));
    }

    /// Returns the models of all slots, with their declared details.
    pub(super) fn advertised(&self) -> Advertised {
        self.with_details(self.multiplexer.models())
    }

    fn with_details(&self, models: Vec<String>) -> Advertised {
        let is_ollama = |slot: &SlotSettings| matches!(slot.driver, DriverSettings::Ollama(..));
        let naming = if self.settings().iter().all(is_ollama) { Naming::Ollama } else { Naming::Exact };
        let details = self.details.lock().unwrap_or_else(PoisonError::into_inner);
        let aliases = self.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        let id = |name: &str| aliases.get(name).map_or(name, String::as_str).to_owned();
        Advertised::new(models, &Declared::default(), &details)
            .with_naming(naming)
            .with_failing(|name| self.failing.contains(&id(name)))
    }

    /// Returns the loads of the resident models.
    pub(super) fn loads(&self) -> ModelLoads {
        let residents = self.multiplexer.residents().into_iter();
        residents.map(|(slot, number, model)| (slot, number, Some(model.into()))).collect()
    }

    /// Returns the id of the model with this name.
    pub(super) fn model_id(&self, name: &str) -> Arc<str> {
        let aliases = self.aliases.lock().unwrap_or_else(PoisonError::into_inner);
        aliases.get(name).map_or(name, String::as_str).into()
    }

    /// Warns if a relay times out requests that the worker would still have served.
    pub(super) fn check_patience(&self, link: &Link, patience: Duration) {
        if link.slots1
            && let Some((model, wait)) = self.longest_wait()
            && wait > patience
        {
            tracing::warn!(
                relay = %link.relay, model, longest_wait_secs = wait.as_secs(), cold_timeout_secs = patience.as_secs(),
                "a request may wait longer for its model than the relay's cold timeout; raise the cold timeout, or \
                 lower maxWait or minResidency"
            );
        }
    }

    /// Returns the longest time that the policy may let a request wait while all other models of its slot are busy, and
    /// the model for which that is the case.
    fn longest_wait(&self) -> Option<(String, Duration)> {
        let slots = self.multiplexer.slots().slots;
        let settings = self.settings();
        let in_force = |id: &str| settings.iter().find(|slot| slot.config.id == id);
        let waits = slots.iter().filter_map(|slot| Some((slot, &in_force(&slot.id)?.config.knobs))).flat_map(
            |(slot, knobs)| {
                let cost = |ms: u64| Duration::from_millis(ms);
                let candidate = |ms| Candidate { waiting: 1, cost: cost(ms), ..Candidate::default() };
                let candidates: Vec<_> = slot.models.iter().map(|model| candidate(model.swap_cost_ms)).collect();
                let longest = |index| policy::longest_wait(knobs, false, &candidates, index);
                let waits = slot.models.iter().enumerate().map(|(index, model)| (model.id.clone(), longest(index)));
                waits.collect::<Vec<_>>()
            },
        );
        waits.max_by_key(|(_, wait)| *wait)
    }

    /// A request arrived. It is queued when this returns. Returns `None` if its link is gone.
    pub(super) fn arrive(self: &Arc<Self>, link: &Link, model: &str, class: RequestClass) -> Option<PendingStart> {
        let arriving = self.multiplexer.arrive(link.seat()?, (model, class), Instant::now());
        Some(PendingStart { arriving, slots: Arc::clone(self) })
    }

    /// The number of running requests.
    pub(super) fn running(&self) -> u32 {
        self.running.load(Ordering::Relaxed)
    }

    /// Returns why the slots could never serve; `None` once they could. A slot without a default waits for its first
    /// request by design.
    pub(super) fn never_served(&self) -> Option<String> {
        if self.has_served.load(Ordering::Relaxed) {
            return None;
        }
        let slots = self.multiplexer.slots().slots;
        let is_empty = |id: &str| slots.iter().any(|slot| slot.id == id && slot.resident.is_none());
        let settings = self.settings();
        let awaited = settings.iter().map(|slot| &slot.config).filter(|slot| slot.default.is_some());
        match awaited.map(|slot| slot.id.as_str()).find(|id| is_empty(id)) {
            Some(id) => Some(format!("slot {id} has not loaded its default model yet")),
            None => {
                self.has_served.store(true, Ordering::Relaxed);
                None
            }
        }
    }

    /// Applies new settings to the slots that exist since the start, and logs changes that take effect only at the next
    /// start.
    pub(super) fn reconfigure(self: &Arc<Self>, old: &Live, new: &Live) {
        let Some(slots) = &new.slots else { return };
        if new.slots == old.slots && new.model_details == old.model_details {
            return;
        }
        *self.details.lock().unwrap_or_else(PoisonError::into_inner) = with_aliases(&new.model_details, slots);
        *self.aliases.lock().unwrap_or_else(PoisonError::into_inner) = aliases(slots);
        for slot in slots {
            let mut settings = self.settings();
            let running =
                settings.iter_mut().zip(&self.driven).find(|(running, _)| running.config.id == slot.config.id);
            let id = &slot.config.id;
            match running {
                Some((running, driven)) => match slot.fixed_difference(running) {
                    None => self.reconfigure_slot(slot, running, driven),
                    Some(setting) => tracing::warn!(
                        slot = id,
                        setting,
                        "worker.yaml changed a slot setting that requires a restart; keeping the previous value"
                    ),
                },
                None => tracing::warn!(slot = id, "worker.yaml has a new slot; restart the worker to use it"),
            }
        }
        let gone = |running: &&SlotSettings| slots.iter().all(|slot| slot.config.id != running.config.id);
        for slot in self.settings().iter().filter(gone) {
            tracing::warn!(slot = slot.config.id, "worker.yaml removed a slot; restart the worker to remove it");
        }
        let this = Arc::clone(self);
        tokio::spawn(async move {
            // A slot that sends its report has processed its new settings.
            let _ = this.multiplexer.reports().await;
            this.announce();
        });
    }

    /// The driver is changed first: the slot may load a new model at once.
    fn reconfigure_slot(&self, slot: &SlotSettings, running: &mut SlotSettings, driven: &Driven) {
        driven.driver.key().set(slot.api_key.clone());
        let changes = match driven.roster.reconfigure(slot) {
            Ok(changes) => changes,
            Err(error) => {
                tracing::error!(slot = slot.config.id, %error, "invalid slot settings; keeping the previous ones");
                return;
            }
        };
        driven.driver.driver().set_load_timeout(slot.config.knobs.load_timeout);
        if changes != Changes::default() {
            let Changes { added, removed, changed } = &changes;
            driven.driver.expect_new_models();
            tracing::info!(
                slot = slot.config.id,
                ?added,
                ?removed,
                ?changed,
                "worker.yaml changed the models of a slot; removed models are drained, changed settings apply from the next load"
            );
        }
        self.multiplexer.reconfigure(slot.config.clone(), &changes.changed);
        *running = slot.clone();
    }

    /// Returns when the slots' backends have gone and returned.
    pub(super) async fn backends_returned(&self) {
        let drivers: Vec<_> = self.driven.iter().map(|slot| Arc::clone(&slot.driver)).collect();
        recovery::returned(&drivers).await;
    }

    fn backend(&self, lease: &Lease) -> Arc<Backend> {
        let mut backends = self.backends.lock().unwrap_or_else(PoisonError::into_inner);
        let leads_there = |backend: &Arc<Backend>| {
            let BackendSettings { url, api_key, .. } = backend.settings();
            url == lease.url() && api_key.as_ref() == lease.key()
        };
        let backend = match backends.iter().position(leads_there) {
            Some(index) => backends.remove(index),
            None => Arc::new(backend_of(lease)),
        };
        backends.insert(0, Arc::clone(&backend));
        backends.truncate(MAX_BACKENDS);
        backend
    }
}

/// Returns the declared details, for the aliases of their models too. An alias may have its own details.
fn with_aliases(declared: &Declared, slots: &[SlotSettings]) -> Declared {
    let models = slots.iter().flat_map(|slot| &slot.config.models);
    let of_aliases = models.filter_map(|model| Some((&model.aliases, declared.get(&*model.id)?)));
    let of_aliases =
        of_aliases.flat_map(|(names, details)| names.iter().map(|name| (name.to_string(), details.clone())));
    let own = declared.iter().map(|(name, details)| (name.clone(), details.clone()));
    of_aliases.chain(own).collect()
}

/// Returns the id of each alias's model. An id is never an alias; if two models have the same alias, the first one gets
/// it.
fn aliases(slots: &[SlotSettings]) -> BTreeMap<String, String> {
    let models = || slots.iter().flat_map(|slot| &slot.config.models);
    let mut all = BTreeMap::new();
    for model in models() {
        for alias in model.aliases.iter().filter(|alias| models().all(|other| other.id != **alias)) {
            all.entry(alias.to_string()).or_insert_with(|| model.id.to_string());
        }
    }
    all
}

fn backend_of(lease: &Lease) -> Backend {
    let (url, api_key) = (lease.url().clone(), lease.key().cloned());
    Backend::new(BackendSettings { url, engine: Engine::OpenAi, api_key, headers: HeaderMap::new() })
}

impl PendingStart {
    /// Returns the handle that cancels the request.
    pub fn ticket(&self) -> CancelHandle {
        self.arriving.ticket()
    }

    /// Waits until the request may run, and returns its lease and the backend.
    pub async fn wait(self) -> Result<(Leased, Arc<Backend>), SlotError> {
        let Self { arriving, slots } = self;
        let lease = arriving.await?;
        slots.running.fetch_add(1, Ordering::Relaxed);
        let backend = slots.backend(&lease);
        Ok((Leased { lease: Some(lease), slots }, backend))
    }
}

impl Leased {
    /// Returns the backend's name for the model.
    pub fn backend_name(&self) -> Option<&str> {
        self.lease.as_ref().map(Lease::backend_name)
    }

    /// The id of the model.
    pub fn model(&self) -> Option<&str> {
        self.lease.as_ref().map(|lease| &**lease.model())
    }

    /// Returns when the slot requires the request to end.
    pub async fn ended(&self) -> SlotError {
        match &self.lease {
            // A lost link has no receiver for the reason.
            Some(lease) => lease.cancelled().await.error().unwrap_or(SlotError::Draining),
            None => std::future::pending().await,
        }
    }

    /// Returns a report that the backend could not be reached, or closed the connection.
    pub fn failure_report(&self) -> Option<ConnectFailureReport> {
        self.lease.as_ref()?.failure_report()
    }

    /// Releases the lease and waits until every relay's new grant is queued. The connection to the backend must be
    /// closed by now, or be ready for its next request.
    pub async fn release(mut self, answered: bool) {
        let lease = self.lease.take();
        drop(self);
        if let Some(lease) = lease {
            lease.release(answered).await;
        }
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.slots.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Sends the multiplexer's messages over a link. Weak references, or the two would keep each other alive.
#[derive(Debug)]
struct LinkSink {
    link: Weak<Link>,
    slots: Weak<MultiplexedBackend>,
}

impl RelaySink for LinkSink {
    fn grant(&self, grant: Grant) {
        if let Some(link) = self.link.upgrade() {
            link.set_latest(Latest::Grant, encode(&WorkerToRelay::Grant(grant)));
        }
    }

    fn slots(&self, slots: Slots) {
        if let Some(link) = self.link.upgrade() {
            link.set_latest(Latest::Slots, encode(&WorkerToRelay::Slots(slots)));
        }
    }

    fn models(&self, names: &[Model]) {
        if let (Some(link), Some(slots)) = (self.link.upgrade(), self.slots.upgrade()) {
            let names: Vec<_> = names.iter().map(ToString::to_string).collect();
            link.announce(&slots.with_details(names), slots.running());
        }
    }

    fn command_result(&self, result: CommandResult) {
        if let Some(link) = self.link.upgrade() {
            link.push(&WorkerToRelay::CommandResult(result));
        }
    }
}
