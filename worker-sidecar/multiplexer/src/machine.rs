//! One slot: the resident model, the requests that wait for each model, and the next step.
//!
//! Pure: [`Machine::handle`] takes one event with the time at which it happened and returns the effects. It handles the
//! event first, then everything that has become due, then the policy; so a request that arrives at the very moment at
//! which its model would have been unloaded finds it loaded.
//!
//! Invariants between two events:
//!
//! - at most one model is between the beginning of its load and the confirmed end of its eviction; nothing is loaded
//!   into memory that is not confirmed to be free;
//! - a lease exists only for the resident generation, and is created in the same step that finds its gate open: no swap
//!   fits between admission and accounting;
//! - every request that arrives ends exactly once: with a lease, with an error, or cancelled from outside;
//! - a swap can be aborted until the eviction begins, and not after; nothing that could still fail for reasons known
//!   beforehand closes a gate;
//! - results of superseded driver calls change nothing.
//!
//! Requests of relays with `slots1` never wait here. Their relays report the waiting requests, which are treated as
//! waiting with their own age, and send them when the gate is open, through the
//! [`SlotAllocator`](modelrelay_protocol::grants::SlotAllocator) of that model; a closed gate is capacity 0. Only
//! requests of relays that do not support grants wait here, for at most the hold budget.

#![warn(clippy::disallowed_types, clippy::iter_over_hash_type)]

mod admission;
mod backend;
mod entry;
mod eta;
mod eviction;
mod loading;
mod orders;
mod preflight;
mod snapshot;
mod state;
mod swap;
#[cfg(test)]
mod tests;
mod timers;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use modelrelay_protocol::grants::LinkKind;

pub use self::snapshot::{DrainView, Requests};

use self::entry::Entry;
use self::orders::Pending;
use self::snapshot::Face;
use self::state::{Preflight, Resident, State, SwapRecord};
use super::Model;
use super::config::{NEVER, SlotConfig};
use super::effect::{Effect, SlotEvent};
use super::event::{Event, Generation, OpId, Outcome, RelayKey, RequestClass, RequestKey};

/// If the driver has not replied to a question by then, the question is treated as failed.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(10);

/// A probe that has not ended by then is treated as silence. The longest probe makes four calls in sequence: to an API
/// server for a scale and for Pods, 4 s each, and to a backend for its health and for its models, 5 s each. Each may
/// use its full time without anything being wrong with the backend.
const LOOK_TIMEOUT: Duration = Duration::from_secs(20);

/// One slot.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Machine {
    config: SlotConfig,
    models: BTreeMap<Model, Entry>,
    relays: BTreeMap<RelayKey, LinkKind>,
    leases: BTreeMap<RequestKey, LeaseState>,
    state: State,
    /// The time at which it entered this state.
    since: Instant,
    /// The time since which no request waits and the slot is empty or its resident idle.
    quiet_since: Option<Instant>,
    generation: Generation,
    preflight: Option<Preflight>,
    probe: Option<Probe>,
    /// The time of the next probe of the backend.
    next_probe: Option<Instant>,
    /// True until the model that was resident before this worker started is known.
    starting: bool,
    /// True if the last resident was lost, and may come back by itself.
    is_bereft: bool,
    /// The number of probes since the start that found only silence.
    silent_starts: u8,
    /// True if the default was unloaded on purpose: then it is not loaded again by itself.
    default_dismissed: bool,
    pending: Vec<Pending>,
    swap: Option<SwapRecord>,
    next_op: u64,
    jitter: Jitter,
    now: Instant,
    out: Vec<Effect>,
    reported: Face,
}

/// A request that may use the backend. All leases are of the resident generation.
#[derive(Clone, Debug)]
struct LeaseState {
    model: Model,
    relay: RelayKey,
    class: RequestClass,
    /// True if its holder has been notified to end it.
    cancelled: bool,
    /// True if its request is no longer wanted. It then occupies no capacity, but holds the model until it is released.
    unwanted: bool,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    op: OpId,
    deadline: Instant,
}

/// Shortens waits at random, so that loads that failed together are not retried together.
#[derive(Clone, Copy, Debug)]
pub enum Jitter {
    /// No jitter.
    None,
    /// By up to a quarter, drawn from this seed.
    Seeded(u64),
}

impl Jitter {
    fn apply(&mut self, wait: Duration) -> Duration {
        match self {
            Self::None => wait,
            Self::Seeded(state) => {
                // splitmix64
                *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
                let mut z = *state;
                z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
                let unit = (z ^ (z >> 31)) as f64 / u64::MAX as f64;
                wait.mul_f64(0.25f64.mul_add(-unit, 1.0))
            }
        }
    }
}

impl Machine {
    /// Creates a slot of which nothing is known yet; [`Event::Started`] starts it.
    pub fn new(config: SlotConfig, jitter: Jitter, now: Instant) -> Self {
        let config = config.within_reason();
        let models = config.models.iter().map(|model| (model.id.clone(), Entry::new(model.clone()))).collect();
        let mut machine = Self {
            config,
            models,
            relays: BTreeMap::new(),
            leases: BTreeMap::new(),
            state: State::Empty,
            since: now,
            quiet_since: Some(now),
            generation: 0,
            preflight: None,
            probe: None,
            next_probe: None,
            starting: true,
            is_bereft: false,
            silent_starts: 0,
            default_dismissed: false,
            pending: Vec::new(),
            swap: None,
            next_op: 0,
            jitter,
            now,
            out: Vec::new(),
            reported: Face::default(),
        };
        machine.reported = machine.face();
        machine
    }

    /// Handles an event that happened at `now` and returns the effects.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Effect> {
        // Two tasks may read the clock in one order and arrive here in the other.
        self.now = self.now.max(now);
        self.apply(event);
        self.settle();
        self.send_changes();
        std::mem::take(&mut self.out)
    }

    /// Returns the lease's generation while the request has a lease.
    #[cfg(test)]
    fn lease_of(&self, request: RequestKey) -> Option<Generation> {
        self.leases.contains_key(&request).then_some(self.generation)
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Started => self.handle_started(),
            Event::RelayJoined { relay, kind } => self.handle_relay_joined(relay, kind),
            Event::RelayLeaving { relay } => {
                for entry in self.models.values_mut() {
                    entry.handle_leaving(relay, self.now);
                }
            }
            Event::RelayLost { relay } => self.handle_relay_lost(relay),
            Event::Arrived(arrival) => self.handle_arrived(&arrival),
            Event::Demand { relay, models } => self.handle_demand(relay, &models),
            Event::Heard { relay } => self.handle_heard(relay),
            Event::Cancelled { request } => self.handle_cancelled(request),
            Event::Released { request, answered } => self.handle_released(request, answered),
            Event::Done { op, outcome } => self.handle_done(op, outcome),
            Event::BackendDown { generation, cause } => self.handle_backend_down(generation, cause),
            Event::ConnectFailed { generation } => self.handle_connect_failed(generation),
            Event::Ordered { id, order } => self.handle_ordered(id, order),
            Event::ConfigChanged(config) => self.handle_config(*config),
            Event::ModelChanged { model } => self.handle_model_changed(&model),
            Event::Stop { timeout } => self.handle_stop(timeout),
            Event::Tick => {}
        }
    }

    /// A driver call has ended. Results of superseded calls are ignored: an abandoned load is followed by a kill of its
    /// backend, whatever its result.
    fn handle_done(&mut self, op: OpId, outcome: Outcome) {
        match outcome {
            Outcome::Preflight(result) => self.handle_preflight(op, result),
            Outcome::Evicted(result) => self.handle_evicted(op, result),
            Outcome::ForceEvicted(result) => self.handle_force_evicted(op, result),
            Outcome::MemoryChecked { freed } => self.handle_memory_checked(op, freed),
            Outcome::Loaded(result) => self.handle_loaded(op, result),
            Outcome::Probed(found) => self.handle_probed(op, found),
        }
    }

    /// Carries out everything that is due and what the policy decides, until nothing is left.
    fn settle(&mut self) {
        loop {
            self.expire_held();
            self.expire_unused();
            self.lease_held();
            self.note_idleness();
            // The cost of a forgotten model must not affect estimates for others, so it is dropped before the next
            // decision.
            self.forget_removed();
            if !self.advance() {
                break;
            }
        }
    }

    /// Performs one step. Returns false if there is none.
    fn advance(&mut self) -> bool {
        if self.expire_questions() {
            return true;
        }
        match &self.state {
            State::Empty | State::Backoff { .. } => self.advance_vacant(),
            State::Ready(_) => self.advance_ready(),
            State::Draining(_) => self.advance_draining(),
            State::Severing(_) => self.advance_severing(),
            State::Evicting(_) => self.advance_evicting(),
            State::Loading(_) | State::RollingBack(_) => self.advance_loading(),
            State::Quarantined { .. } => false,
            State::Stopping { .. } => self.advance_stopping(),
        }
    }

    fn enter(&mut self, state: State) {
        if let Some(old) = self.state.resident()
            && state.resident().is_none_or(|new| new.generation != old.generation)
        {
            let lasted = self.now.saturating_duration_since(old.since);
            let model = old.model.clone();
            if let Some(entry) = self.models.get_mut(&model) {
                entry.left_at = Some(self.now);
            }
            self.news(SlotEvent::ResidencyEnded { model, lasted });
        }
        self.state = state;
        self.since = self.now;
    }

    /// Returns the time `wait` from now.
    fn after(&self, wait: Duration) -> Instant {
        self.now + wait.min(NEVER)
    }

    fn next_op(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op)
    }

    fn news(&mut self, news: SlotEvent) {
        self.out.push(Effect::SlotEvent(news));
    }

    fn ready(&self) -> Option<&Resident> {
        match &self.state {
            State::Ready(resident) => Some(resident),
            State::Empty
            | State::Draining(_)
            | State::Severing(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. }
            | State::Quarantined { .. }
            | State::Stopping { .. } => None,
        }
    }

    /// Sends relays their new grants, and reports if the snapshot has changed.
    fn send_changes(&mut self) {
        for entry in self.models.values_mut() {
            // A closed gate is reported by the entry's absence, so the allocator's changes do not matter.
            let changes = entry.allocator.changes();
            if entry.gate_open {
                let model = entry.model().clone();
                let grants = changes.into_iter();
                self.out.extend(grants.map(|(relay, values)| Effect::Grant { relay, model: model.clone(), values }));
            }
        }
        let face = self.face();
        if face != self.reported {
            self.reported = face;
            self.out.push(Effect::Changed);
        }
    }
}
