//! One running provider: the shell around its dispatch core.
//!
//! The core decides and returns effects; this file executes them. Effects are executed while the core's lock is held,
//! which keeps a `cancel` behind its `request` on the socket. Each of them only queues data, so the lock is held for
//! microseconds and never over an await.

pub mod affinity;
pub mod conversation;
mod core_settings;
mod details;
mod drain;
mod effects;
mod endings;
mod homes;
mod listed;
mod multiplexer;
pub mod operations;
pub mod request;
pub mod response;
pub mod routing;
pub mod shared;
mod silence;
mod snapshot;
mod succession;
#[cfg(test)]
mod tests;
pub mod worker;

pub use details::Details;
pub use snapshot::{LiveRequest, ProviderState, WorkerState};

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use modelrelay_protocol::grant_step;
use modelrelay_protocol::message::{ModelsUpdate, RegisterAck, RelayToWorker};
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use crate::dispatch::{
    Allowed, Conversation, Dispatch, Effect, Event, Grant, LossCause, NewRequest, NewWorker, Owner, QueueShare,
    RequestKey, WorkerKey,
};
use crate::provider::conversation::HashKey;
use crate::provider::request::RequestRecord;
use crate::provider::response::Detached;
use crate::provider::shared::Shared;
use crate::provider::worker::link::{Attempt, WorkerLink};
use crate::provider::worker::places::LinkLimiter;
use crate::provider::worker::register;
use crate::settings::config::{ProviderConfig, distance};
use crate::settings::worker_credential::{Credential, CredentialStatus};
use crate::telemetry::metrics::ProviderSeries;
use core_settings::settings;
use listed::Listed;
use worker::close::{Close, DRAINED, SECRET_REMOVED};

/// One provider.
pub struct Provider {
    /// Its name.
    pub name: Arc<str>,
    /// The state that the whole process shares.
    pub shared: Arc<Shared>,
    /// Its metrics.
    pub series: Arc<ProviderSeries>,
    /// The limit of its workers' links.
    pub places: Arc<LinkLimiter>,
    config: ArcSwap<ProviderConfig>,
    conversation_key: ArcSwap<HashKey>,
    /// The core and the objects of its keys. Locked for one event and its effects.
    state: Mutex<ProviderCore>,
    /// Notified when the core's next deadline moved nearer, or the provider was deleted.
    timer: Notify,
    joined: Notify,
}

struct ProviderCore {
    core: Dispatch,
    requests: HashMap<RequestKey, Arc<RequestRecord>>,
    links: HashMap<WorkerKey, Arc<WorkerLink>>,
    by_instance: HashMap<Arc<str>, WorkerKey>,
    listed: Listed,
    /// Older links by the key of the link that succeeds them, until that one has sent a grant.
    succeeded: HashMap<WorkerKey, Arc<WorkerLink>>,
    effects: Vec<Effect>,
    /// The deadline that the timer task waits for.
    armed: Option<Instant>,
    deleted: bool,
}

impl Provider {
    /// Starts a provider with these settings; its timer runs until it is deleted.
    pub fn start(config: ProviderConfig, shared: Arc<Shared>) -> Arc<Self> {
        let state = ProviderCore {
            core: Dispatch::new(settings(&config)),
            requests: HashMap::new(),
            links: HashMap::new(),
            by_instance: HashMap::new(),
            listed: Listed::default(),
            succeeded: HashMap::new(),
            effects: Vec::new(),
            armed: None,
            deleted: false,
        };
        let provider = Arc::new(Self {
            name: config.name.as_str().into(),
            series: shared.metrics.provider(&config.name),
            shared,
            places: Arc::default(),
            conversation_key: ArcSwap::from_pointee(HashKey::of_provider(&config).unwrap_or_else(HashKey::random)),
            config: ArcSwap::from_pointee(config),
            state: Mutex::new(state),
            timer: Notify::new(),
            joined: Notify::new(),
        });
        tokio::spawn(Arc::clone(&provider).drive_timer());
        provider
    }

    /// Its settings.
    pub fn config(&self) -> Arc<ProviderConfig> {
        self.config.load_full()
    }

    /// Submits a request; its pipe reports how it ends. `pin`, `allowed`, `share` and `owner` are those of
    /// [`NewRequest`].
    pub fn submit(
        &self,
        record: &Arc<RequestRecord>,
        pin: Option<WorkerKey>,
        allowed: Option<Allowed>,
        share: Option<QueueShare>,
        owner: Option<Owner>,
    ) {
        let mut state = self.lock();
        // The worker may have changed its link since the pin was resolved.
        let pin = pin.map(|pin| state.newest_link(pin));
        let request = NewRequest {
            key: record.key,
            model: Arc::clone(&record.model),
            bytes: record.body_bytes,
            pin,
            needs_core1: record.needs_core1.is_some(),
            allowed,
            share,
            conversation: record.conversation.map(Conversation),
            owner,
        };
        record.progress().waiting_since = Some(Instant::now());
        state.requests.insert(record.key, Arc::clone(record));
        let (model, key_id) = (record.logged_model(), record.api_key.as_deref());
        debug!(request_id = record.id, provider = %self.name, model, key_id, "request submitted");
        self.handle(&mut state, Event::Submit(request));
    }

    /// Adds a worker. The older link of the same process is closed, the acknowledgement is written first, then requests
    /// are sent. `accepted` is the registration after validation by `config`. An older link that this one `succeeds` is
    /// not closed: it finishes its requests.
    pub fn join(
        &self,
        link: &Arc<WorkerLink>,
        accepted: &register::Accepted,
        config: &Arc<ProviderConfig>,
        load: u32,
        ack: RegisterAck,
        succeeds: bool,
    ) {
        let worker = NewWorker {
            key: link.info.key,
            models: accepted.models.clone(),
            failing: link.failing(),
            max_concurrent: accepted.max_concurrent,
            load,
            core1: link.info.core1,
            multiplexer: multiplexer::registered(link),
            instance: link.info.instance.clone(),
            distance: distance(&self.shared.config.load().location, &link.info.location),
        };
        let mut state = self.lock();
        let instance = link.info.instance.as_ref();
        let older = instance.and_then(|instance| state.by_instance.insert(Arc::clone(instance), link.info.key));
        let older = older.and_then(|older| state.links.get(&older).cloned());
        if let Some(older) = &older {
            link.inherit_failures(older);
        }
        let (succeeded, replaced) = if succeeds { (older, None) } else { (None, older) };
        if let Some(older) = replaced {
            older.close(Close { code: 1000, reason: "replaced" });
            self.remove(&mut state, &older, LossCause::Disconnected);
        }
        self.shared.mark_worker();
        grant_step!("opens", link.info.id);
        link.push(&RelayToWorker::RegisterAck(ack));
        state.links.insert(link.info.key, Arc::clone(link));
        state.listed.add(&worker.models, accepted.naming);
        self.handle(&mut state, Event::WorkerJoined(worker));
        if let Some(older) = &succeeded {
            self.shared.operations.worker_moved(older.info.key, link.info.key, Instant::now());
            self.begin_succession(&mut state, older, link);
        }
        if !Arc::ptr_eq(config, &self.config()) {
            // The settings were replaced after the registration was read.
            self.apply_catalogue(&mut state, link);
        }
        drop(state);
        self.joined.notify_waiters();
        self.shared.models_listed.notify_waiters();
        self.send_away_if_refused(link);
    }

    /// Drains a worker that may not stay any more: its provider was deleted, or the secret or token that admitted it is
    /// no longer valid. Called again after it has joined, because that may happen between its handshake and its
    /// registration.
    pub fn send_away_if_refused(&self, link: &Arc<WorkerLink>) {
        let deleted = self.lock().deleted;
        let (config, now) = (self.config(), SystemTime::now());
        let status = config.credential_status(&link.info.credential, now);
        if deleted {
            self.drain_worker(link, "provider_deleted", Some(DRAINED));
        } else if status != CredentialStatus::Good && link.draining_since().is_none() {
            let what = match &link.info.credential {
                Credential::Secret(_) => "the worker's secret was removed; draining the worker",
                Credential::Token(_) => "the worker's token is no longer valid; draining the worker",
            };
            let identity = link.info.credential.identity();
            warn!(provider = %self.name, worker = %link.info.name, worker_id = %link.info.id, identity, "{what}");
            let drain = self.shared.config.load().drain_timeout;
            // After a rotation, the credentials of all workers of a Provider expire at once. Their running requests
            // were admitted by a valid secret and may finish; a secret that an administrator removed gets the usual
            // drain time.
            let time = if status == CredentialStatus::Over { drain.max(config.request_timeout()) } else { drain };
            self.drain_link(link, "secret_removed", Some(time.as_secs()), Some(SECRET_REMOVED));
        }
    }

    /// Removes a worker whose socket is closed.
    pub fn lose(&self, link: &Arc<WorkerLink>, cause: LossCause) {
        let mut state = self.lock();
        if let Some(instance) = &link.info.instance
            && state.by_instance.get(instance) == Some(&link.info.key)
        {
            state.by_instance.remove(instance);
        }
        self.remove(&mut state, link, cause);
    }

    /// Replaces the models that the worker serves.
    ///
    /// They are cleaned here, under the lock under which settings are replaced, so a concurrent change of the catalogue
    /// is never missed.
    pub fn models_updated(&self, link: &WorkerLink, update: ModelsUpdate) {
        link.pace_update();
        let mut warnings = Vec::new();
        let mut state = self.lock();
        link.set_advertised(update.models);
        link.set_details(update.model_details);
        link.set_failing(&update.failing);
        let models = register::sanitize_models(&link.advertised(), &self.config.load(), &mut warnings);
        let count = models.len();
        let load = update.current_load;
        state.listed.add(&models, update.naming);
        let failing = link.failing();
        self.handle(&mut state, Event::ModelsUpdated { worker: link.info.key, models, failing, load });
        drop(state);
        self.shared.models_listed.notify_waiters();
        let Some(suppressed) = link.note_update() else { return };
        info!(provider = %self.name, worker = %link.info.name, models = count, suppressed, "models updated");
        for warning in warnings {
            warn!(provider = %self.name, worker = %link.info.name, "{warning}");
        }
    }

    /// Records the worker's total load.
    pub fn load_reported(&self, link: &WorkerLink, load: u32) {
        self.apply(Event::LoadReported { worker: link.info.key, load });
    }

    /// Records the worker's grant to this relay.
    pub fn granted(&self, link: &WorkerLink, grant: Grant) {
        let mut state = self.lock();
        grant_step!(
            "reads_grant",
            link.info.id,
            slots = grant.slots,
            others = grant.others,
            capacity = grant.capacity,
            links = grant.links
        );
        self.end_succession(&mut state, link.info.key);
        self.handle(&mut state, Event::Granted { worker: link.info.key, grant });
    }

    /// Records the first bytes of a response's body: its prompt is computed. Has an effect once per attempt.
    pub fn begun(&self, link: &WorkerLink, held: &Attempt) {
        if link.mark_begun(held.stream) {
            let (worker, request, attempt) = (link.info.key, held.record.key, held.attempt);
            self.apply(Event::Begun { worker, request, attempt });
        }
    }

    /// Returns the link of a worker, by its public id.
    pub fn link(&self, id: &str) -> Option<Arc<WorkerLink>> {
        self.lock().links.values().find(|link| &*link.info.id == id).cloned()
    }

    /// All links.
    pub fn links(&self) -> Vec<Arc<WorkerLink>> {
        self.lock().links.values().cloned().collect()
    }

    /// Returns the current connection of a worker process.
    pub fn worker_of_instance(&self, instance: &str) -> Option<WorkerKey> {
        self.lock().by_instance.get(instance).copied()
    }

    /// Resolves at the next join; create it before checking the workers, so that no join is missed.
    pub fn joined(&self) -> tokio::sync::futures::Notified<'_> {
        self.joined.notified()
    }

    /// Returns the requests that came with an API key and have not ended.
    pub fn requests_of_key(&self, id: &str) -> Vec<RequestKey> {
        let state = self.lock();
        let of_key = |record: &&Arc<RequestRecord>| record.api_key.as_deref() == Some(id);
        state.requests.values().filter(of_key).map(|record| record.key).collect()
    }

    /// Replaces the settings. Connected workers keep the models that the new catalogue allows.
    pub fn reconfigure(&self, config: &ProviderConfig) {
        let mut state = self.lock();
        let catalogue_changed = self.config.load().models != config.models
            || self.config.load().max_models_per_worker != config.max_models_per_worker;
        self.config.store(Arc::new(config.clone()));
        self.renew_conversation_key(config);
        self.handle(&mut state, Event::SettingsChanged(settings(config)));
        if catalogue_changed {
            let links: Vec<_> = state.links.values().cloned().collect();
            for link in links {
                self.apply_catalogue(&mut state, &link);
            }
        }
    }

    /// Reduces a worker's models to those that the current catalogue allows.
    fn apply_catalogue(&self, state: &mut ProviderCore, link: &WorkerLink) {
        let models = register::sanitize_models(&link.advertised(), &self.config.load(), &mut Vec::new());
        let failing = link.failing();
        self.handle(state, Event::ModelsUpdated { worker: link.info.key, models, failing, load: None });
    }

    /// Removes the provider: queued requests end, running ones finish, workers drain and are closed.
    pub fn delete(&self) {
        let mut state = self.lock();
        state.deleted = true;
        self.handle(&mut state, Event::Deleted);
        drop(state);
        for link in self.links() {
            self.send_away_if_refused(&link);
        }
        self.timer.notify_one();
    }

    /// Begins the end of the process: no new requests are accepted.
    pub fn begin_drain(&self) {
        self.apply(Event::DrainBegun);
    }

    /// Ends the drain of the process at its deadline.
    pub fn end_drain(&self) {
        self.apply(Event::DrainDeadline);
    }

    /// True if no request is left.
    pub fn is_idle(&self) -> bool {
        self.lock().requests.is_empty()
    }

    fn remove(&self, state: &mut ProviderCore, link: &Arc<WorkerLink>, cause: LossCause) {
        if state.links.remove(&link.info.key).is_none() {
            return;
        }
        grant_step!("loses", link.info.id);
        let begun = |held: &Attempt| held.response().detach(held.attempt) == Detached::Begun;
        let mut started = link.release_all();
        started.retain(begun);
        for held in &started {
            self.settle(state, &held.record);
        }
        let started = started.iter().map(|held| held.record.key).collect();
        self.end_succession(state, link.info.key);
        self.handle(state, Event::WorkerLost { worker: link.info.key, started, cause });
        self.shared.operations.worker_left(link.info.key, Instant::now());
        self.shared.progress.notify_waiters();
        if state.deleted {
            // The last lost worker ends the timer.
            self.timer.notify_one();
        }
    }

    fn apply(&self, event: Event) {
        let mut state = self.lock();
        self.handle(&mut state, event);
    }

    fn handle(&self, state: &mut ProviderCore, event: Event) {
        self.handle_quietly(state, event);
        self.execute_all(state);
        self.arm(state);
    }

    fn handle_quietly(&self, state: &mut ProviderCore, event: Event) {
        let now = Instant::now();
        Self::settle_running_out(state, now);
        state.core.handle(event, now, &mut state.effects);
    }

    fn execute_all(&self, state: &mut ProviderCore) {
        let mut effects = std::mem::take(&mut state.effects);
        for effect in effects.drain(..) {
            self.execute(state, effect);
        }
        state.effects = effects;
    }

    fn arm(&self, state: &mut ProviderCore) {
        let next = state.core.next_timeout();
        let nearer = next.is_some_and(|next| state.armed.is_none_or(|armed| next < armed));
        if nearer {
            state.armed = next;
            self.timer.notify_one();
        }
    }

    async fn drive_timer(self: Arc<Self>) {
        let mut checked_at = Instant::now();
        loop {
            let (next, done) = {
                let mut state = self.lock();
                let next_check = (!state.requests.is_empty()).then(|| checked_at + self.poll_interval());
                let next = state.core.next_timeout().into_iter().chain(next_check).min();
                state.armed = next;
                (next, state.deleted && state.requests.is_empty() && state.links.is_empty())
            };
            if done {
                return;
            }
            let Some(next) = next else {
                self.timer.notified().await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {
                    self.apply(Event::Tick);
                    self.check_silence(&mut checked_at, Instant::now());
                }
                () = self.timer.notified() => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProviderCore> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProviderCore {
    /// Returns the newest link of the worker process that this link belongs to.
    fn newest_link(&self, link: WorkerKey) -> WorkerKey {
        let instance = self.links.get(&link).and_then(|link| link.info.instance.as_ref());
        instance.and_then(|instance| self.by_instance.get(instance)).copied().unwrap_or(link)
    }
}
