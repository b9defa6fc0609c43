//! One model of a slot: its waiting requests, the division of its capacity among the relays, and what is known about
//! it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use modelrelay_protocol::grants::{Admission, LinkKind, SlotAllocator};

use super::state::LastFailure;
use crate::Model;
use crate::config::ModelConfig;
use crate::estimate::{Concurrency, Costs, Gaps, LoadKind};
use crate::event::{Arrival, Demand, RelayKey, RequestClass, RequestKey};

/// Older than any request can be. Ages come from relays, and must not overflow sums.
const OLDEST: Duration = Duration::from_secs(24 * 3600);

/// One model of a slot.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) config: ModelConfig,
    /// Divides the model's capacity among the relays; capacity 0 while the gate is closed.
    pub(super) allocator: SlotAllocator<RelayKey>,
    /// Requests that wait here, oldest first.
    pub(super) held: Vec<Waiter>,
    /// The ages of the requests that wait at each relay. The allocator knows their number.
    ages: BTreeMap<RelayKey, Ages>,
    pub(super) gate_open: bool,
    pub(super) costs: Costs,
    pub(super) gaps: Gaps,
    pub(super) concurrency: Concurrency,
    /// Its memory when it was last measured, in bytes.
    pub(super) measured: Option<u64>,
    /// True if its settings have changed since it was last loaded: its current size is not the size of its next load.
    pub(super) is_outdated: bool,
    pub(super) asleep: bool,
    /// True if waking reads the weights again.
    pub(super) wakes_slowly: bool,
    pub(super) pinned: bool,
    pub(super) failure: Option<LastFailure>,
    /// Failed loads in a row.
    pub(super) failures: u32,
    /// True if it is no longer in the configuration; kept while the slot still deals with it.
    pub(super) removed: bool,
    /// True if the warning that `max_wait` cannot be kept was emitted.
    pub(super) warned: bool,
    /// The class of its last request that began.
    pub(super) last_class: RequestClass,
    /// The end of its last turn: a backlog that is older has had its turn.
    pub(super) left_at: Option<Instant>,
}

/// A request that waits here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Waiter {
    pub(super) at: Instant,
    pub(super) request: RequestKey,
    pub(super) relay: RelayKey,
    pub(super) class: RequestClass,
}

impl From<&Arrival> for Waiter {
    fn from(arrival: &Arrival) -> Self {
        Self { at: arrival.at, request: arrival.request, relay: arrival.relay, class: arrival.class }
    }
}

#[derive(Clone, Copy, Debug)]
struct Ages {
    stated: Instant,
    oldest: Duration,
    mean: Duration,
    place: FairPlace,
}

/// The place of requests in the fair order: the least of several is that of the first. `Default`: no class, no rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FairPlace {
    pub(super) class: RequestClass,
    /// As the relay reports it, and comparable with its other reports only. Of several relays, the least one for the
    /// highest class is used, so a model that is first at one of them is first.
    pub(super) rank: u32,
}

/// All requests that wait for a model, here and at relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Waiting {
    pub(super) count: u32,
    pub(super) oldest: Duration,
    pub(super) sum: Duration,
    /// `None` if none waits.
    pub(super) place: Option<FairPlace>,
}

impl Waiting {
    fn add(&mut self, count: u32, oldest: Duration, mean: Duration, place: FairPlace) {
        if count > 0 {
            self.place = Some(self.place.map_or(place, |first| first.min(place)));
        }
        self.count = self.count.saturating_add(count);
        self.oldest = self.oldest.max(oldest);
        self.sum = self.sum.saturating_add(mean.saturating_mul(count));
    }
}

impl Entry {
    pub(super) fn new(config: ModelConfig) -> Self {
        Self {
            allocator: SlotAllocator::new(0),
            held: Vec::new(),
            ages: BTreeMap::new(),
            gate_open: false,
            costs: Costs::default(),
            gaps: Gaps::default(),
            concurrency: Concurrency::default(),
            measured: None,
            is_outdated: false,
            asleep: false,
            wakes_slowly: false,
            pinned: config.pin,
            failure: None,
            failures: 0,
            removed: false,
            warned: false,
            last_class: RequestClass::default(),
            left_at: None,
            config,
        }
    }

    pub(super) fn model(&self) -> &Model {
        &self.config.id
    }

    /// The kind of its next load.
    pub(super) fn load_kind(&self) -> LoadKind {
        if self.asleep { LoadKind::Wake } else { LoadKind::Cold }
    }

    /// Its failure, while it is in back-off.
    pub(super) fn failing(&self, now: Instant) -> Option<&LastFailure> {
        self.failure.as_ref().filter(|failure| failure.until > now)
    }

    /// Applies new settings. A pin that an operator set stays, unless the configuration's own `pin` has changed.
    pub(super) fn reconfigure(&mut self, config: ModelConfig, now: Instant) {
        if config.pin != self.config.pin {
            self.pinned = config.pin;
        }
        self.config = config;
        self.removed = false;
        if self.gate_open {
            self.allocator.set_capacity(self.config.capacity, now);
        }
    }

    pub(super) fn open_gate(&mut self, now: Instant) {
        self.gate_open = true;
        self.allocator.set_capacity(self.config.capacity, now);
    }

    pub(super) fn close_gate(&mut self, now: Instant) {
        self.gate_open = false;
        self.allocator.set_capacity(0, now);
    }

    /// Returns the waiting requests, here and at relays.
    pub(super) fn waiting(&self, now: Instant) -> Waiting {
        let mut waiting = Waiting::default();
        for waiter in &self.held {
            let age = now.saturating_duration_since(waiter.at).min(OLDEST);
            waiting.add(1, age, age, FairPlace { class: waiter.class, rank: 0 });
        }
        for (relay, ages) in &self.ages {
            let passed = now.saturating_duration_since(ages.stated);
            waiting.add(self.allocator.awaited(*relay), ages.oldest + passed, ages.mean + passed, ages.place);
        }
        waiting
    }

    /// True if a relay reports requests for both models, of the same class, and those for this one first. Only the
    /// ranks of one relay can be compared.
    pub(super) fn precedes_at_a_relay(&self, other: &Self) -> bool {
        let waits = |entry: &Self, relay| entry.allocator.awaited(relay) > 0;
        self.ages.iter().any(|(relay, own)| {
            let theirs = other.ages.get(relay).map(|ages| ages.place);
            theirs.is_some_and(|place| own.place.class == place.class && own.place.rank < place.rank)
                && waits(self, *relay)
                && waits(other, *relay)
        })
    }

    /// Returns how long it has waited for its turn: since the oldest request arrived, or since its last turn if that
    /// ended later.
    pub(super) fn waiting_for_turn(&self, waiting: &Waiting, now: Instant) -> Duration {
        let absent = self.left_at.map_or(OLDEST, |left_at| now.saturating_duration_since(left_at));
        waiting.oldest.min(absent)
    }

    /// True if a request waits.
    pub(super) fn is_wanted(&self) -> bool {
        !self.held.is_empty() || self.ages.keys().any(|relay| self.allocator.awaited(*relay) > 0)
    }

    /// A request arrived. If it may not run and its relay cannot keep it, it waits here.
    pub(super) fn handle_request(&mut self, waiter: Waiter, kind: LinkKind, now: Instant) -> Admission {
        let admission = self.allocator.on_request(waiter.relay, now);
        if admission == Admission::AtCapacity {
            match kind {
                LinkKind::Held => {
                    let (Ok(place) | Err(place)) = self.held.binary_search(&waiter);
                    self.held.insert(place, waiter);
                }
                // It is back in the relay's queue, and may not have been in the last demand.
                LinkKind::Granted => {
                    let place = FairPlace { class: waiter.class, rank: 0 };
                    let new = Ages { stated: now, oldest: Duration::ZERO, mean: Duration::ZERO, place };
                    self.ages.entry(waiter.relay).or_insert(new);
                }
            }
        }
        admission
    }

    /// Returns the next request that waits here and may begin now.
    pub(super) fn next_held(&mut self, now: Instant) -> Option<Waiter> {
        let mut seen = Vec::new();
        for index in 0..self.held.len() {
            let waiter = self.held[index];
            if seen.contains(&waiter.relay) {
                continue;
            }
            if self.allocator.resume(waiter.relay, now) {
                return Some(self.held.remove(index));
            }
            seen.push(waiter.relay);
        }
        None
    }

    /// Removes a waiting request. Returns false if it is not here.
    pub(super) fn cancel(&mut self, request: RequestKey, now: Instant) -> bool {
        let Some(index) = self.held.iter().position(|waiter| waiter.request == request) else {
            return false;
        };
        let waiter = self.held.remove(index);
        self.allocator.on_held_cancelled(waiter.relay, now);
        true
    }

    /// A relay reported its waiting requests, possibly none.
    pub(super) fn handle_demand(&mut self, relay: RelayKey, demand: Option<&Demand>, now: Instant) {
        let waiting = demand.map_or(0, |demand| demand.waiting);
        self.allocator.on_demand(relay, waiting, now);
        match demand {
            Some(demand) if waiting > 0 => {
                let oldest = demand.oldest.min(OLDEST);
                let place = FairPlace { class: demand.class, rank: demand.rank };
                let ages = Ages { stated: now, oldest, mean: (demand.sum / waiting).min(oldest), place };
                self.ages.insert(relay, ages);
            }
            Some(_) | None => {
                self.ages.remove(&relay);
            }
        }
    }

    /// Forgets the requests that wait at relays: the relays will report them again.
    pub(super) fn forget_demand(&mut self, now: Instant) {
        for relay in std::mem::take(&mut self.ages).into_keys() {
            self.allocator.on_demand(relay, 0, now);
        }
    }

    /// A relay sends no more requests over this link. Requests of this link that wait here have already arrived.
    pub(super) fn handle_leaving(&mut self, relay: RelayKey, now: Instant) {
        self.ages.remove(&relay);
        self.allocator.on_leaving(relay, now);
    }

    /// A link is gone.
    pub(super) fn remove_relay(&mut self, relay: RelayKey, now: Instant) {
        self.held.retain(|waiter| waiter.relay != relay);
        self.ages.remove(&relay);
        self.allocator.remove_link(relay, now);
    }

    /// Removes all requests that wait here.
    pub(super) fn take_held(&mut self, now: Instant) -> Vec<Waiter> {
        self.take_first(self.held.len(), now)
    }

    /// Removes the requests that have waited here since `until` or longer.
    pub(super) fn take_held_until(&mut self, until: Instant, now: Instant) -> Vec<Waiter> {
        let count = self.held.partition_point(|waiter| waiter.at <= until);
        self.take_first(count, now)
    }

    fn take_first(&mut self, count: usize, now: Instant) -> Vec<Waiter> {
        let taken: Vec<_> = self.held.drain(..count).collect();
        for waiter in &taken {
            self.allocator.on_held_cancelled(waiter.relay, now);
        }
        taken
    }
}
