//! How a worker divides its capacity over its links. Only the worker knows what runs, so it sends each relay the number
//! of requests that this relay may have here (`grant`).
//!
//! - A link's slots = its running requests + free slots handed to it + unclaimed free slots.
//! - A free slot is handed to the waiting link with the fewest running and handed slots. Ties go to the link served
//!   longest ago, by its last request that began or ended: if only beginnings were compared, seven slots among five
//!   busy links would stay with the same two indefinitely. Waiting = the last demand, less one per request read since,
//!   plus one per refusal since.
//! - A handed slot that is not used within [`UNUSED_AFTER`] passes on, and its link is treated as not waiting until its
//!   next message. Otherwise a handed slot is revoked only when capacity or demand falls.
//!
//! Unclaimed free slots are shown to every link, so two relays can use the same one: the second request is refused
//! (`at_capacity`), and that link waits. A handed slot belongs to its link: a request of another link that meets only
//! handed slots is refused as well. Otherwise a busy relay whose request crosses a grant would use the slot that was
//! meant for a quiet one.
//!
//! A link that leaves finishes its running requests. Its relay sends no more requests there and may never withdraw its
//! last demand, so that demand is ignored: otherwise the link would be handed slots repeatedly, each to idle for
//! [`UNUSED_AFTER`].
//!
//! Links to relays without `core1` receive no grants and state no demand. The worker holds requests beyond their share;
//! these are treated as waiting, and begin when [`SlotAllocator::resume`] returns true.
//!
//! The same rule divides one model of a multiplexer, with an allocator of its own; a closed gate is capacity 0.
//!
//! Pure: each call passes the time in.

mod step;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// The time that a handed slot waits for its request.
pub const UNUSED_AFTER: Duration = Duration::from_secs(1);

/// The upper limit of a capacity: slots are handed out one by one.
pub const MAX_CAPACITY: u32 = 65_536;

/// The decision on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The request runs; [`SlotAllocator::on_finished`] ends it.
    Run,
    /// The request does not run: reply `at_capacity`, or hold it if the relay does not know that code.
    AtCapacity,
}

/// The protocol that the relay at the other end supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A relay with `core1`: it receives grants, states demand and requeues refused requests.
    Granted,
    /// A relay that knows only the seed messages: requests over capacity are held here.
    Held,
}

/// The numbers of one `grant`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantValues {
    /// The number of requests of this link that may run at once.
    pub slots: u32,
    /// The number of requests that run for other links.
    pub others: u32,
    /// The maximum of requests that run at once.
    pub capacity: u32,
    /// The number of live links.
    pub links: u32,
}

/// Divides `capacity` over links named `L`.
#[derive(Clone, Debug)]
pub struct SlotAllocator<L> {
    capacity: u32,
    links: BTreeMap<L, Link>,
    /// Counts beginnings and ends of requests, to find the link served longest ago.
    served: u64,
}

#[derive(Clone, Debug)]
struct Link {
    kind: LinkKind,
    running: u32,
    waiting: u32,
    /// One deadline per handed slot, soonest first.
    handed: VecDeque<Instant>,
    /// The link let a handed slot pass unused, and has sent nothing since.
    quiet: bool,
    /// The relay sends no more requests over this link, whatever its last demand was.
    leaving: bool,
    last_served: u64,
    reported: Option<GrantValues>,
}

impl<L: Copy + Ord> SlotAllocator<L> {
    /// Creates an allocator without links.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self { capacity: capacity.min(MAX_CAPACITY), links: BTreeMap::new(), served: 0 }
    }

    /// Changes the capacity. Running requests are not affected; handed slots beyond it are revoked.
    pub fn set_capacity(&mut self, capacity: u32, now: Instant) {
        self.capacity = capacity.min(MAX_CAPACITY);
        self.hand_out(now);
    }

    /// Adds a link that has registered. A link that exists already is reset.
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
                // Before all links that were ever served.
                last_served: 0,
                reported: None,
            },
        );
        self.hand_out(now);
    }

    /// Removes a link and its requests.
    pub fn remove_link(&mut self, link: L, now: Instant) {
        self.links.remove(&link);
        self.hand_out(now);
    }

    /// Decides on a request that was read. On a link with `core1` it was part of the demand, and a refused request is
    /// part of it again. For [`LinkKind::Held`] the caller holds a refused request until [`SlotAllocator::resume`] or
    /// [`SlotAllocator::on_held_cancelled`].
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
            // Requests held before this one go first.
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

    /// Begins the oldest held request of a [`LinkKind::Held`] link, if a slot was handed to it. Called after every
    /// other call, until it returns false.
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

    /// Records that a held request was cancelled before it began.
    pub fn on_held_cancelled(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link).filter(|state| state.kind == LinkKind::Held) {
            state.waiting = state.waiting.saturating_sub(1);
            self.hand_out(now);
        }
    }

    /// Records that a running request freed its slot: the backend's body was read to the end, or a cancel was read.
    pub fn on_finished(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link) {
            self.served += 1;
            state.last_served = self.served;
            state.running = state.running.saturating_sub(1);
            self.hand_out(now);
        }
    }

    /// Records the number of the relay's requests that wait for this worker, after all requests before it.
    pub fn on_demand(&mut self, link: L, waiting: u32, now: Instant) {
        let state = self.links.get_mut(&link);
        if let Some(state) = state.filter(|state| state.kind == LinkKind::Granted && !state.leaving) {
            state.waiting = waiting;
            state.quiet = false;
            self.hand_out(now);
        }
    }

    /// Records that the relay sends no more requests over this link, which finishes its running ones. Requests held for
    /// a [`LinkKind::Held`] link have arrived already, and run.
    pub fn on_leaving(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link).filter(|state| state.kind == LinkKind::Granted) {
            state.leaving = true;
            state.waiting = 0;
            self.hand_out(now);
        }
    }

    /// Records any other message: a link that let a slot pass is active again.
    pub fn on_message(&mut self, link: L, now: Instant) {
        if let Some(state) = self.links.get_mut(&link).filter(|state| state.quiet) {
            state.quiet = false;
            self.hand_out(now);
        }
    }

    /// True if the next message of some link would change anything; otherwise [`SlotAllocator::on_message`] need not be
    /// called.
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

    /// The time at which [`SlotAllocator::on_timeout`] is due next.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Instant> {
        self.links.values().filter_map(|state| state.handed.front().copied()).min()
    }

    /// Returns the grants that differ from the last ones reported to each link, and marks them as reported. Called
    /// after every call; they are queued before the completion or error that caused the change.
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
            if state.kind == LinkKind::Granted && state.reported != Some(values) {
                state.reported = Some(values);
                changes.push((link, values));
            }
        }
        changes
    }

    /// The number of running requests over all links.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.links.values().map(|state| state.running).sum()
    }

    /// The number of requests that wait at a link, as far as this side knows.
    #[must_use]
    pub fn waiting(&self, link: L) -> u32 {
        self.links.get(&link).map_or(0, |state| state.waiting)
    }

    /// The same, but 0 once the link let a handed slot pass unused: nothing is done for it until its next message.
    #[must_use]
    pub fn awaited(&self, link: L) -> u32 {
        self.links.get(&link).filter(|state| !state.quiet).map_or(0, |state| state.waiting)
    }

    /// The maximum of requests that may run.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The number of free slots that are not handed to a link. It is above 0 only while no link waits for a slot.
    fn unclaimed(&self) -> u32 {
        let claimed = self.links.values().map(Link::held_and_running).fold(0, u32::saturating_add);
        self.capacity.saturating_sub(claimed)
    }

    /// Revokes slots that exceed capacity or demand, then hands out the free ones one at a time.
    fn hand_out(&mut self, now: Instant) {
        for state in self.links.values_mut() {
            state.handed.truncate(state.waiting as usize);
        }
        self.revoke_beyond_capacity();
        for _ in 0..self.unclaimed() {
            let next = self.links.values_mut().filter(|state| state.wants_more());
            let Some(state) = next.min_by_key(|state| (state.held_and_running(), state.last_served)) else {
                return;
            };
            state.handed.push_back(now + UNUSED_AFTER);
        }
    }

    fn revoke_beyond_capacity(&mut self) {
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
