//! How a worker divides its capacity over its links: the worker alone knows what runs, so it tells each
//! relay how many requests that one may have here (`grant`).
//!
//! - A link's slots = its running requests + free slots handed to it + free slots that nobody waits for.
//! - A free slot is handed to the waiting link with the fewest running and handed, ties to the one served
//!   longest ago (by its last request that began or ended: counting only beginnings, seven slots among
//!   five busy links stay with the same two for ever). Waiting = the last demand, less one per request read since, plus one per refusal since.
//! - A handed slot that is not used within [`UNUSED_AFTER`] passes on, and its link counts as not waiting
//!   until its next message. Nothing else takes a handed slot away but less capacity or less demand.
//!
//! Free slots that nobody waits for are shown to every link, so two relays can use the same one: the
//! second request is refused (`at_capacity`), and that link waits. A handed slot is its link's own: a request
//! of another link that meets only handed slots is refused as well, or a busy relay whose request
//! crosses a grant would take the slot that was meant for a quiet one.
//!
//! A link that leaves finishes what runs on it. Its relay sends nothing more there and may never take its last demand
//! back, so that counts no longer: it would be handed slots again and again, each to idle for [`UNUSED_AFTER`].
//!
//! Links to relays without `core1` are told nothing and ask for nothing; what exceeds their share is held
//! by the worker, counts as waiting, and begins when [`Divider::resume`] says so.
//!
//! The same rule divides one model of a multiplexer, by a divider of its own; a closed gate is capacity 0.
//!
//! Pure: time comes in with each call.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// How long a handed slot waits for its request.
pub const UNUSED_AFTER: Duration = Duration::from_secs(1);

/// A larger capacity counts as this: slots are handed out one by one.
pub const MAX_CAPACITY: u32 = 65_536;

/// Whether a request may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It runs; [`Divider::on_finished`] ends it.
    Run,
    /// It does not: answer `at_capacity`, or hold it where the relay does not know that code.
    AtCapacity,
}

/// What the relay at the other end can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A relay with `core1`: gets grants, states demand, requeues what was refused.
    Granted,
    /// A relay that knows only the seeds: requests over capacity are held here.
    Held,
}

/// The numbers of one `grant`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantValues {
    /// Requests of this link that may run at once.
    pub slots: u32,
    /// Requests that run for other links.
    pub others: u32,
    /// All that run at once at most.
    pub capacity: u32,
    /// Live links.
    pub links: u32,
}

/// Divides `capacity` over links named `L`.
#[derive(Clone, Debug)]
pub struct Divider<L> {
    capacity: u32,
    links: BTreeMap<L, Link>,
    /// Counts beginnings and ends of requests: who was served longest ago.
    served: u64,
}

#[derive(Clone, Debug)]
struct Link {
    kind: LinkKind,
    running: u32,
    waiting: u32,
    /// One deadline per handed slot, soonest first.
    handed: VecDeque<Instant>,
    /// Let a handed slot pass unused, and has not said anything since.
    quiet: bool,
    /// No more requests come over it, whatever its relay said waits there.
    leaving: bool,
    last_served: u64,
    told: Option<GrantValues>,
}

impl<L: Copy + Ord> Divider<L> {
    /// No links yet.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self { capacity: capacity.min(MAX_CAPACITY), links: BTreeMap::new(), served: 0 }
    }

    /// More or less may run from now on. Running requests are not touched; handed slots beyond it go.
    pub fn set_capacity(&mut self, capacity: u32, now: Instant) {
        self.capacity = capacity.min(MAX_CAPACITY);
        self.hand_out(now);
    }

    /// A link has registered. One that was there already begins anew.
    pub fn add_link(&mut self, link: L, kind: LinkKind, now: Instant) {
        self.links.insert(
            link,
            Link {
                kind,
                running: 0,
                waiting: 0,
                handed: VecDeque::new(),
                quiet: false,
                leaving: false,
                // Before all who were ever served.
                last_served: 0,
                told: None,
            },
        );
        self.hand_out(now);
    }

    /// A link is gone, and its requests with it.
    pub fn remove_link(&mut self, link: L, now: Instant) {
        self.links.remove(&link);
        self.hand_out(now);
    }

    /// A request was read. On a link with `core1` it was part of the demand; a refused one is back in it.
    /// For [`LinkKind::Held`] the caller holds a refused one until [`Divider::resume`] or
    /// [`Divider::on_held_cancelled`].
    pub fn on_request(&mut self, link: L, now: Instant) -> Admission {
        let unclaimed = self.unclaimed();
        let Some(state) = self.links.get_mut(&link) else {
            return Admission::AtCapacity;
        };
        state.quiet = false;
        let held_before = match state.kind {
            LinkKind::Granted => {
                state.waiting = state.waiting.saturating_sub(1);
                false
            }
            // Those that wait came first.
            LinkKind::Held => state.waiting > 0,
        };
        let fits = !held_before && (state.handed.pop_front().is_some() || unclaimed > 0);
        let admission = if fits {
            self.served += 1;
            state.start(self.served);
            Admission::Run
        } else {
            if !state.leaving {
                state.waiting = state.waiting.saturating_add(1);
            }
            Admission::AtCapacity
        };
        self.hand_out(now);
        admission
    }

    /// Begins the oldest held request of a [`LinkKind::Held`] link, if a slot was handed to it. Asked
    /// after every other call, until it says no.
    pub fn resume(&mut self, link: L, now: Instant) -> bool {
        let Some(state) = self.links.get_mut(&link).filter(|state| state.kind == LinkKind::Held) else {
            return false;
        };
        if state.waiting == 0 || state.handed.pop_front().is_none() {
            return false;
        }
        state.waiting -= 1;
        self.served += 1;
        state.start(self.served);
        self.hand_out(now);
        true
    }

    /// A held request was cancelled before it began.
    pub fn on_held_cancelled(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link).filter(|state| state.kind == LinkKind::Held) {
            state.waiting = state.waiting.saturating_sub(1);
            self.hand_out(now);
        }
    }

    /// A running request freed its slot: its backend's body was read to the end, or its cancel was read.
    pub fn on_finished(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link) {
            self.served += 1;
            state.last_served = self.served;
            state.running = state.running.saturating_sub(1);
            self.hand_out(now);
        }
    }

    /// The relay said how many of its requests wait for this worker, after all requests before it.
    pub fn on_demand(&mut self, link: L, waiting: u32, now: Instant) {
        let state = self.links.get_mut(&link);
        if let Some(state) = state.filter(|state| state.kind == LinkKind::Granted && !state.leaving) {
            state.waiting = waiting;
            state.quiet = false;
            self.hand_out(now);
        }
    }

    /// The relay sends no more requests over this link, which finishes those that it has. What is held for a
    /// [`LinkKind::Held`] link has come already, and runs.
    pub fn on_leaving(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link).filter(|state| state.kind == LinkKind::Granted) {
            state.leaving = true;
            state.waiting = 0;
            self.hand_out(now);
        }
    }

    /// Any other message was read: a link that let a slot pass is heard again.
    pub fn on_message(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link).filter(|state| state.quiet) {
            state.quiet = false;
            self.hand_out(now);
        }
    }

    /// Whether the next message of some link would change anything: only then one has to be told of.
    pub fn is_listening(&self) -> bool {
        self.links.values().any(|state| state.quiet)
    }

    /// Passes on the handed slots whose time is over.
    pub fn on_timeout(&mut self, now: Instant) {
        for state in self.links.values_mut() {
            while state.handed.front().is_some_and(|&deadline| deadline <= now) {
                state.handed.pop_front();
                state.quiet = state.kind == LinkKind::Granted;
            }
        }
        self.hand_out(now);
    }

    /// When [`Divider::on_timeout`] is due next.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Instant> {
        self.links.values().filter_map(|state| state.handed.front().copied()).min()
    }

    /// The grants that differ from what each link was told last; they count as told now. Taken after
    /// every call, and queued before the completion or error that caused the change.
    pub fn changes(&mut self) -> Vec<(L, GrantValues)> {
        let running = self.running();
        let unclaimed = self.unclaimed();
        let links = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        let capacity = self.capacity;
        let mut changes = Vec::new();
        for (&link, state) in &mut self.links {
            let values = GrantValues {
                slots: state.held_and_running().saturating_add(unclaimed),
                others: running - state.running,
                capacity,
                links,
            };
            if state.kind == LinkKind::Granted && state.told != Some(values) {
                state.told = Some(values);
                changes.push((link, values));
            }
        }
        changes
    }

    /// Requests that run, over all links.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.links.values().map(|state| state.running).sum()
    }

    /// How many requests wait at a link, as far as it is known here.
    #[must_use]
    pub fn waiting(&self, link: L) -> u32 {
        self.links.get(&link).map_or(0, |state| state.waiting)
    }

    /// The same, but none once the link let a handed slot pass unused: then nothing is to be done for its sake until it
    /// says something.
    #[must_use]
    pub fn awaited(&self, link: L) -> u32 {
        self.links.get(&link).filter(|state| !state.quiet).map_or(0, |state| state.waiting)
    }

    /// The most that may run.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Free slots that were not handed to anybody, which is so only while nobody waits for them.
    fn unclaimed(&self) -> u32 {
        let claimed = self.links.values().map(Link::held_and_running).fold(0, u32::saturating_add);
        self.capacity.saturating_sub(claimed)
    }

    /// Takes back what exceeds capacity or demand, then hands out what is free, one slot at a time.
    fn hand_out(&mut self, now: Instant) {
        for state in self.links.values_mut() {
            state.handed.truncate(state.waiting as usize);
        }
        self.take_back_beyond_capacity();
        for _ in 0..self.unclaimed() {
            let next = self.links.values_mut().filter(|state| state.wants_more());
            let Some(state) = next.min_by_key(|state| (state.held_and_running(), state.last_served)) else {
                return;
            };
            state.handed.push_back(now + UNUSED_AFTER);
        }
    }

    fn take_back_beyond_capacity(&mut self) {
        let claimed = self.links.values().map(Link::held_and_running).fold(0, u32::saturating_add);
        for _ in self.capacity..claimed {
            let holders = self.links.values_mut().filter(|state| !state.handed.is_empty());
            let Some(state) = holders.max_by_key(|state| (state.held_and_running(), state.last_served)) else {
                return;
            };
            state.handed.pop_back();
        }
    }
}

impl Link {
    fn start(&mut self, served: u64) {
        self.running += 1;
        self.last_served = served;
    }

    fn held_and_running(&self) -> u32 {
        self.running.saturating_add(u32::try_from(self.handed.len()).unwrap_or(u32::MAX))
    }

    fn wants_more(&self) -> bool {
        !self.quiet && self.handed.len() < self.waiting as usize
    }
}

#[cfg(test)]
mod tests;
