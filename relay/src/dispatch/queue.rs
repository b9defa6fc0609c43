//! What waits. Oldest first among those that a worker can serve, at a cost that does not depend on how much waits.
//!
//! The requests of one model stand in *lanes*: all requests of a lane can be served by exactly the same workers (same
//! pin, same need of `core1`, same workers that failed them). A worker with room looks at the head of each lane that is
//! open to it and takes the smallest key; there is one lane per model in the usual case. Cancelling and expiring take
//! a request out of its lane and its deadline sets by key.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::{ModelClock, Moment, Span};
use super::event::{RequestKey, WorkerKey};
use super::models::ModelId;
use super::registry::Worker;
use super::request::{Deadlines, FailedOn, refuses};

/// What all requests of a lane have in common, besides model and pin.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LaneKey {
    pub(super) needs_core1: bool,
    pub(super) failed_on: Vec<FailedOn>,
}

impl LaneKey {
    pub(super) fn admits(&self, worker: &Worker) -> bool {
        (worker.core1 || !self.needs_core1) && !refuses(&self.failed_on, worker.key, worker.announcements)
    }
}

/// Requests that exactly the same workers can serve, with their arrivals.
#[derive(Debug, Default)]
pub(super) struct Lane {
    waiting: BTreeMap<RequestKey, Moment>,
    /// The sum of all arrivals, in nanoseconds: ages are reported as sums.
    arrivals: i128,
}

impl Lane {
    pub(super) fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.waiting.keys().copied()
    }
}

type Lanes = BTreeMap<LaneKey, Lane>;

/// Where in a model's queue a request stands.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) key: RequestKey,
    pub(super) pin: Option<WorkerKey>,
    pub(super) lane: LaneKey,
    pub(super) arrived: Moment,
    pub(super) deadlines: Deadlines,
}

/// How much waits, and since when.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Waiting {
    pub(super) count: u32,
    pub(super) oldest: Option<Moment>,
    pub(super) arrivals: i128,
}

/// The queue of one model.
#[derive(Debug, Default)]
pub(super) struct ModelQueue {
    open: Lanes,
    pinned: BTreeMap<WorkerKey, Lanes>,
    warm_due: BTreeSet<(Span, RequestKey)>,
    cold_due: BTreeSet<(Span, RequestKey)>,
}

impl ModelQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.pinned.is_empty()
    }

    pub(super) fn insert(&mut self, place: Place) {
        let Place { key, pin, lane, arrived, deadlines } = place;
        self.warm_due.extend(deadlines.warm.map(|due| (due, key)));
        self.cold_due.extend(deadlines.cold.map(|due| (due, key)));
        let lanes = match pin {
            Some(worker) => self.pinned.entry(worker).or_default(),
            None => &mut self.open,
        };
        let lane = lanes.entry(lane).or_default();
        lane.waiting.insert(key, arrived);
        lane.arrivals += arrived.nanos();
    }

    pub(super) fn remove(&mut self, place: &Place) {
        let Place { key, pin, lane, arrived, deadlines } = place;
        if let Some(due) = deadlines.warm {
            self.warm_due.remove(&(due, *key));
        }
        if let Some(due) = deadlines.cold {
            self.cold_due.remove(&(due, *key));
        }
        match pin {
            None => leave(&mut self.open, lane, *key, *arrived),
            Some(worker) => {
                if let Some(lanes) = self.pinned.get_mut(worker) {
                    leave(lanes, lane, *key, *arrived);
                    if lanes.is_empty() {
                        self.pinned.remove(worker);
                    }
                }
            }
        }
    }

    /// The oldest request that this worker can serve.
    pub(super) fn oldest_for(&self, worker: &Worker) -> Option<RequestKey> {
        self.lanes_for(worker).filter_map(|lane| lane.waiting.keys().next().copied()).min()
    }

    /// How much this worker could be sent.
    pub(super) fn waiting_for(&self, worker: &Worker) -> Waiting {
        total(self.lanes_for(worker))
    }

    /// How much waits altogether.
    pub(super) fn waiting(&self) -> Waiting {
        let pinned = self.pinned.values().flat_map(BTreeMap::values);
        total(self.open.values().chain(pinned))
    }

    /// The lanes of requests that are not pinned, by what they need.
    pub(super) fn open_lanes(&self) -> impl Iterator<Item = (&LaneKey, &Lane)> {
        self.open.iter()
    }

    /// The requests that only this worker may serve.
    pub(super) fn pinned_to(&self, worker: WorkerKey) -> Vec<RequestKey> {
        self.pinned.get(&worker).into_iter().flat_map(BTreeMap::values).flat_map(Lane::keys).collect()
    }

    /// The workers that something waits for and nobody else may serve.
    pub(super) fn pins(&self) -> impl Iterator<Item = WorkerKey> {
        self.pinned.keys().copied()
    }

    /// How much waits for this worker alone.
    pub(super) fn pinned_waiting_for(&self, worker: &Worker) -> Waiting {
        let lanes = self.pinned.get(&worker.key).into_iter().flatten();
        total(lanes.filter(|(key, _)| key.admits(worker)).map(|(_, lane)| lane))
    }

    /// When the next of its requests runs out of warm or cold time.
    pub(super) fn next_due(&self, clock: &ModelClock, now: Moment) -> Option<Moment> {
        let warm = self.warm_due.first().and_then(|(due, _)| clock.when_warm(*due, now));
        let cold = self.cold_due.first().and_then(|(due, _)| clock.when_cold(*due, now));
        warm.into_iter().chain(cold).min()
    }

    /// A request whose warm time is over.
    pub(super) fn warm_expired(&self, clock: &ModelClock, now: Moment) -> Option<RequestKey> {
        self.warm_due.first().filter(|(due, _)| clock.warm(now) >= *due).map(|(_, key)| *key)
    }

    /// A request whose cold time is over.
    pub(super) fn cold_expired(&self, clock: &ModelClock, now: Moment) -> Option<RequestKey> {
        self.cold_due.first().filter(|(due, _)| clock.cold(now) >= *due).map(|(_, key)| *key)
    }

    fn lanes_for<'a>(&'a self, worker: &'a Worker) -> impl Iterator<Item = &'a Lane> {
        self.open
            .iter()
            .chain(self.pinned.get(&worker.key).into_iter().flatten())
            .filter(|(key, _)| key.admits(worker))
            .map(|(_, lane)| lane)
    }
}

fn leave(lanes: &mut Lanes, key: &LaneKey, request: RequestKey, arrived: Moment) {
    let Some(lane) = lanes.get_mut(key) else {
        return;
    };
    if lane.waiting.remove(&request).is_some() {
        lane.arrivals -= arrived.nanos();
    }
    if lane.waiting.is_empty() {
        lanes.remove(key);
    }
}

fn total<'a>(lanes: impl Iterator<Item = &'a Lane>) -> Waiting {
    lanes.fold(Waiting::default(), |sum, lane| Waiting {
        count: sum.count.saturating_add(u32::try_from(lane.waiting.len()).unwrap_or(u32::MAX)),
        oldest: lane.waiting.values().next().copied().into_iter().chain(sum.oldest).min(),
        arrivals: sum.arrivals + lane.arrivals,
    })
}

/// The provider's queue as a whole: its size, its order, and who is due next.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Everything that waits, oldest first.
    pub(super) order: BTreeSet<RequestKey>,
    pub(super) bytes: u64,
    /// Models for which something waits.
    pub(super) models: BTreeSet<ModelId>,
    /// When each model's next deadline on a warm or cold axis comes.
    pub(super) dues: BTreeSet<(Moment, ModelId)>,
    /// Deadlines of requests with one waiting clock.
    pub(super) walls: BTreeSet<(Moment, RequestKey)>,
}

impl Queue {
    /// The next deadline of anything that waits.
    pub(super) fn next_due(&self) -> Option<Moment> {
        let due = self.dues.first().map(|(due, _)| *due);
        let wall = self.walls.first().map(|(due, _)| *due);
        due.into_iter().chain(wall).min()
    }
}
