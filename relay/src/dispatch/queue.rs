//! What waits. Oldest first among those that a worker can serve, at a cost that does not depend on how much waits.
//!
//! The requests of one model stand in *lanes*: all requests of a lane can be served by exactly the same workers (same
//! pin, same need of `core1`, same workers that failed them, same meanings of the name), so all of a lane wait for a load or none does, and they
//! share their clocks. A worker with room looks at the head of each lane that is open to it and takes the smallest key;
//! there is one lane per model in the usual case. Cancelling and expiring take a request out of its lane and its deadline
//! sets by key.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::{LaneClock, Moment, Span};
use super::event::{RequestKey, WorkerKey};
use super::models::ModelId;
use super::registry::Worker;
use super::request::{Deadlines, FailedOn, Scope, refuses};

/// What all requests of a lane have in common, besides their pin.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LaneKey {
    pub(super) model: ModelId,
    pub(super) needs_core1: bool,
    pub(super) failed_on: Vec<FailedOn>,
    pub(super) scope: Option<Scope>,
}

impl LaneKey {
    pub(super) fn admits(&self, worker: &Worker) -> bool {
        (worker.core1 || !self.needs_core1)
            && !refuses(&self.failed_on, self.model, worker)
            && self.scope.as_ref().is_none_or(|scope| scope.admits(worker))
    }
}

/// One lane of a model's queue.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LaneId {
    /// The one worker that may serve what is in it.
    pub(super) pin: Option<WorkerKey>,
    pub(super) key: LaneKey,
}

/// Requests that exactly the same workers can serve, with their arrivals.
#[derive(Debug)]
pub(super) struct Lane {
    waiting: BTreeMap<RequestKey, Moment>,
    /// The sum of all arrivals, in nanoseconds: ages are reported as sums.
    arrivals: i128,
    /// Cold while they wait for a load.
    clock: LaneClock,
    warm_due: BTreeSet<(Span, RequestKey)>,
    cold_due: BTreeSet<(Span, RequestKey)>,
    /// Its entry in the queue's list of deadlines.
    due: Option<Moment>,
}

/// Which clock of a waiting request ran out.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expired {
    Warm(RequestKey),
    Cold(RequestKey),
}

impl Lane {
    fn new(cold: bool, now: Moment) -> Self {
        Self {
            waiting: BTreeMap::new(),
            arrivals: 0,
            clock: LaneClock::new(cold, now),
            warm_due: BTreeSet::new(),
            cold_due: BTreeSet::new(),
            due: None,
        }
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.waiting.keys().copied()
    }

    pub(super) fn is_cold(&self) -> bool {
        self.clock.is_cold()
    }

    fn insert(&mut self, place: &Place) {
        let Place { key, arrived, deadlines, .. } = *place;
        self.warm_due.extend(deadlines.warm.map(|due| (due, key)));
        self.cold_due.extend(deadlines.cold.map(|due| (due, key)));
        self.waiting.insert(key, arrived);
        self.arrivals += arrived.nanos();
    }

    fn remove(&mut self, place: &Place) {
        let Place { key, arrived, deadlines, .. } = *place;
        if let Some(due) = deadlines.warm {
            self.warm_due.remove(&(due, key));
        }
        if let Some(due) = deadlines.cold {
            self.cold_due.remove(&(due, key));
        }
        if self.waiting.remove(&key).is_some() {
            self.arrivals -= arrived.nanos();
        }
    }

    /// Finds out anew when the next of its requests runs out of time; returns the time before and now, if they differ.
    fn refresh_due(&mut self, now: Moment) -> Option<DueChange> {
        let new = self.next_due(now);
        let old = std::mem::replace(&mut self.due, new);
        (old != new).then_some(DueChange { old, new })
    }

    /// When the next of its requests runs out of warm or cold time.
    fn next_due(&self, now: Moment) -> Option<Moment> {
        let warm = self.warm_due.first().and_then(|(due, _)| self.clock.when_warm(*due, now));
        let cold = self.cold_due.first().and_then(|(due, _)| self.clock.when_cold(*due, now));
        warm.into_iter().chain(cold).min()
    }

    fn expired(&self, now: Moment) -> Option<Expired> {
        let warm = self.warm_due.first().filter(|(due, _)| self.clock.warm(now) >= *due);
        let cold = self.cold_due.first().filter(|(due, _)| self.clock.cold(now) >= *due);
        warm.map(|(_, key)| Expired::Warm(*key)).or(cold.map(|(_, key)| Expired::Cold(*key)))
    }
}

/// What is to be changed in the queue's list of deadlines.
struct DueChange {
    old: Option<Moment>,
    new: Option<Moment>,
}

type Lanes = BTreeMap<LaneKey, Lane>;

/// Where in a model's queue a request stands.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) key: RequestKey,
    pub(super) lane: LaneId,
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
    /// When the next of each lane runs out of time.
    dues: BTreeSet<(Moment, LaneId)>,
}

impl ModelQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty() && self.pinned.is_empty()
    }

    /// Where the lane's cold clock stands. That of a lane that is not there yet will begin at zero.
    pub(super) fn cold(&self, lane: &LaneId, now: Moment) -> Span {
        self.lane(lane).map_or(0, |lane| lane.clock.cold(now))
    }

    /// Takes a request in; `cold` is how things stand for its lane.
    pub(super) fn insert(&mut self, place: &Place, cold: bool, now: Moment) {
        let LaneId { pin, key } = &place.lane;
        let lanes = match pin {
            Some(worker) => self.pinned.entry(*worker).or_default(),
            None => &mut self.open,
        };
        let lane = lanes.entry(key.clone()).or_insert_with(|| Lane::new(cold, now));
        lane.insert(place);
        if let Some(change) = lane.refresh_due(now) {
            self.move_due(&place.lane, change);
        }
    }

    /// Takes a request out; returns where the lane's cold clock stands.
    pub(super) fn remove(&mut self, place: &Place, now: Moment) -> Span {
        let Some(lane) = self.lane_mut(&place.lane) else {
            return 0;
        };
        lane.remove(place);
        let (cold, is_empty) = (lane.clock.cold(now), lane.waiting.is_empty());
        if let Some(change) = lane.refresh_due(now) {
            self.move_due(&place.lane, change);
        }
        if is_empty {
            self.forget(&place.lane);
        }
        cold
    }

    /// Switches the lane to its other clock.
    pub(super) fn set_cold(&mut self, lane: &LaneId, cold: bool, now: Moment) {
        if let Some(lane) = self.lane_mut(lane) {
            lane.clock.set_cold(cold, now);
        }
        self.refresh_due(lane, now);
    }

    /// All lanes.
    pub(super) fn lanes(&self) -> impl Iterator<Item = (Option<WorkerKey>, &LaneKey, &Lane)> {
        let pinned =
            self.pinned.iter().flat_map(|(pin, lanes)| lanes.iter().map(|(key, lane)| (Some(*pin), key, lane)));
        self.open.iter().map(|(key, lane)| (None, key, lane)).chain(pinned)
    }

    /// A request whose time is over. Brings the list of deadlines up to date where there is none after all.
    pub(super) fn pop_expired(&mut self, now: Moment) -> Option<Expired> {
        while let Some((_, lane)) = self.dues.first().filter(|(due, _)| *due <= now).cloned() {
            if let Some(expired) = self.lane(&lane).and_then(|lane| lane.expired(now)) {
                return Some(expired);
            }
            self.refresh_due(&lane, now);
        }
        None
    }

    fn lane(&self, id: &LaneId) -> Option<&Lane> {
        match id.pin {
            Some(worker) => self.pinned.get(&worker)?.get(&id.key),
            None => self.open.get(&id.key),
        }
    }

    fn lane_mut(&mut self, id: &LaneId) -> Option<&mut Lane> {
        match id.pin {
            Some(worker) => self.pinned.get_mut(&worker)?.get_mut(&id.key),
            None => self.open.get_mut(&id.key),
        }
    }

    fn forget(&mut self, id: &LaneId) {
        let Some(worker) = id.pin else {
            self.open.remove(&id.key);
            return;
        };
        if let Some(lanes) = self.pinned.get_mut(&worker) {
            lanes.remove(&id.key);
            if lanes.is_empty() {
                self.pinned.remove(&worker);
            }
        }
    }

    fn refresh_due(&mut self, id: &LaneId, now: Moment) {
        if let Some(change) = self.lane_mut(id).and_then(|lane| lane.refresh_due(now)) {
            self.move_due(id, change);
        }
    }

    fn move_due(&mut self, id: &LaneId, DueChange { old, new }: DueChange) {
        if let Some(old) = old {
            self.dues.remove(&(old, id.clone()));
        }
        self.dues.extend(new.map(|due| (due, id.clone())));
    }

    /// The oldest request that this worker can serve.
    pub(super) fn oldest_for(&self, worker: &Worker) -> Option<RequestKey> {
        self.lanes_for(worker).filter_map(|lane| lane.waiting.keys().next().copied()).min()
    }

    /// How much this worker could be sent.
    pub(super) fn waiting_for(&self, worker: &Worker) -> Waiting {
        total(self.lanes_for(worker))
    }

    /// The sum of the arrivals of the oldest `count` that this worker could be sent, in nanoseconds.
    pub(super) fn first_arrivals(&self, worker: &Worker, count: u32) -> i128 {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let mut first: Vec<_> = self.lanes_for(worker).flat_map(|lane| lane.waiting.iter().take(count)).collect();
        first.sort_unstable_by_key(|(key, _)| **key);
        first.iter().take(count).map(|(_, arrived)| arrived.nanos()).sum()
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
    pub(super) fn next_due(&self) -> Option<Moment> {
        self.dues.first().map(|(due, _)| *due)
    }

    fn lanes_for<'a>(&'a self, worker: &'a Worker) -> impl Iterator<Item = &'a Lane> {
        self.open
            .iter()
            .chain(self.pinned.get(&worker.key).into_iter().flatten())
            .filter(|(key, _)| key.admits(worker))
            .map(|(_, lane)| lane)
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
