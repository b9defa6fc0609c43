//! Waiting requests. The oldest that a worker can serve comes first, at a cost that does not depend on the length of
//! the queue.
//!
//! The requests of one model stand in *lanes*: all requests of a lane can be served by exactly the same workers (same
//! pin, same need of `core1`, same workers that failed them, same meanings of the name), so all of a lane wait for a
//! load or none does, and they share their clocks. Usually a model has one lane.
//!
//! The whole queue knows the [`Front`] of each lane: its first request, and its next deadline. A worker with room walks
//! through the lanes by their first request, and gets that of the first lane that is open to it. A request knows its
//! place, so cancelling and expiring need no search.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::{Axis, LaneClock, Moment, Span};
use super::event::{RequestKey, WorkerKey};
use super::models::ModelId;
use super::registry::Worker;
use super::request::{FailedOn, Request, Scope, refuses};
use super::shares::Shares;
use super::wait_list::{EntryIndex, QueueEntry, WaitList};

/// The properties that all requests of a lane have in common, besides their pin.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LaneKey {
    pub(crate) model: ModelId,
    pub(crate) needs_core1: bool,
    pub(crate) failed_on: Vec<FailedOn>,
    pub(crate) scope: Option<Scope>,
}

impl LaneKey {
    pub(crate) fn admits(&self, worker: &Worker) -> bool {
        (worker.core1 || !self.needs_core1)
            && !refuses(&self.failed_on, self.model, worker)
            && self.scope.as_ref().is_none_or(|scope| scope.admits(worker))
    }
}

/// One lane of a model's queue.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LaneId {
    /// The only worker that may serve the requests of the lane.
    pub(crate) pin: Option<WorkerKey>,
    pub(crate) key: LaneKey,
}

/// A lane's number within its model's queue, valid while the lane is not empty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LaneNo(u32);

/// The place of a request in its model's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QueuePlace {
    pub(crate) lane: LaneNo,
    index: EntryIndex,
}

/// Requests that exactly the same workers can serve.
#[derive(Debug)]
pub(crate) struct QueueLane {
    id: LaneId,
    list: WaitList,
    /// Cold while they wait for a load.
    clock: LaneClock,
    /// The whole queue's view of this lane.
    front: Front,
}

/// The view of a lane from outside. Empty for an empty lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Front {
    first: Option<RequestKey>,
    due: Option<Moment>,
}

/// A change of a lane's front.
#[derive(Debug)]
pub(crate) struct FrontChange {
    pin: Option<WorkerKey>,
    old: Front,
    new: Front,
}

/// A waiting request whose time is over on one axis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expired {
    pub(crate) key: RequestKey,
    pub(crate) axis: Axis,
}

impl QueueLane {
    fn new(id: LaneId, cold: bool, now: Moment) -> Self {
        Self { id, list: WaitList::default(), clock: LaneClock::new(cold, now), front: Front::default() }
    }

    /// Returns at most twice `count` requests, among them the `count` oldest.
    pub(crate) fn oldest(&self, count: usize) -> impl Iterator<Item = RequestKey> {
        self.list.oldest(count).map(|entry| entry.key)
    }

    /// All waiting requests, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.list.keys()
    }

    pub(crate) fn is_cold(&self) -> bool {
        self.clock.is_cold()
    }

    pub(crate) fn admits(&self, worker: &Worker) -> bool {
        self.id.key.admits(worker)
    }

    pub(crate) fn key(&self) -> &LaneKey {
        &self.id.key
    }

    fn front(&self, now: Moment) -> Front {
        let due = |axis| self.clock.when(axis, self.list.next_due(axis)?.0, now);
        Front { first: self.list.first().map(|first| first.key), due: Axis::ALL.into_iter().filter_map(due).min() }
    }

    fn expired(&self, now: Moment) -> Option<Expired> {
        Axis::ALL.into_iter().find_map(|axis| {
            let (due, key) = self.list.next_due(axis)?;
            (self.clock.at(axis, now) >= due).then_some(Expired { key, axis })
        })
    }
}

type Lanes = BTreeMap<LaneKey, LaneNo>;

/// The number of waiting requests, and since when they wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) count: u32,
    pub(crate) oldest: Option<Moment>,
    pub(crate) arrivals: i128,
}

/// The queue of one model.
#[derive(Debug, Default)]
pub(crate) struct ModelQueue {
    lanes: Vec<Option<QueueLane>>,
    /// Unused numbers.
    free: Vec<LaneNo>,
    open: Lanes,
    pinned: BTreeMap<WorkerKey, Lanes>,
}

impl ModelQueue {
    /// Returns the position of the lane's cold clock. That of a lane that does not exist yet will begin at zero.
    pub(crate) fn cold(&self, id: &LaneId, now: Moment) -> Span {
        self.number(id).and_then(|lane| self.lane(lane)).map_or(0, |lane| lane.clock.at(Axis::Cold, now))
    }

    /// Inserts a request; `cold` is the current state of its lane.
    pub(crate) fn insert(&mut self, id: LaneId, entry: QueueEntry, cold: bool, now: Moment) -> QueuePlace {
        let lane = self.number(&id).unwrap_or_else(|| self.add(id, cold, now));
        let index = self.lanes[lane.0 as usize].as_mut().expect("a lane has a number").list.insert(entry);
        QueuePlace { lane, index }
    }

    /// Removes a request; returns the position of the lane's cold clock.
    pub(crate) fn remove(&mut self, place: QueuePlace, now: Moment) -> Span {
        let Some(lane) = self.lane_mut(place.lane) else {
            return 0;
        };
        lane.list.remove(place.index);
        lane.clock.at(Axis::Cold, now)
    }

    /// Switches the lane to its other clock.
    pub(crate) fn set_cold(&mut self, lane: LaneNo, cold: bool, now: Moment) {
        if let Some(lane) = self.lane_mut(lane) {
            lane.clock.set_cold(cold, now);
        }
    }

    /// Called after any of these: updates the first request and the next deadline, returns the change if there is one,
    /// and removes an empty lane.
    pub(crate) fn refresh(&mut self, number: LaneNo, now: Moment) -> Option<FrontChange> {
        let lane = self.lane_mut(number)?;
        let new = lane.front(now);
        let old = std::mem::replace(&mut lane.front, new);
        let (pin, is_empty) = (lane.id.pin, lane.list.is_empty());
        if is_empty {
            self.forget(number);
        }
        (old != new).then_some(FrontChange { pin, old, new })
    }

    /// All lanes.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (LaneNo, &LaneId, &QueueLane)> {
        let pinned = self.pinned.values().flat_map(BTreeMap::values);
        let numbers = self.open.values().chain(pinned).copied();
        numbers.filter_map(|number| self.lane(number).map(|lane| (number, &lane.id, lane)))
    }

    pub(crate) fn lane(&self, LaneNo(number): LaneNo) -> Option<&QueueLane> {
        self.lanes.get(number as usize)?.as_ref()
    }

    /// Returns a request of the lane whose time is over.
    pub(crate) fn expired(&self, lane: LaneNo, now: Moment) -> Option<Expired> {
        self.lane(lane)?.expired(now)
    }

    fn lane_mut(&mut self, LaneNo(number): LaneNo) -> Option<&mut QueueLane> {
        self.lanes.get_mut(number as usize)?.as_mut()
    }

    fn number(&self, id: &LaneId) -> Option<LaneNo> {
        let lanes = match id.pin {
            Some(worker) => self.pinned.get(&worker)?,
            None => &self.open,
        };
        lanes.get(&id.key).copied()
    }

    fn add(&mut self, id: LaneId, cold: bool, now: Moment) -> LaneNo {
        let number = self.free.pop().unwrap_or_else(|| {
            self.lanes.push(None);
            LaneNo(u32::try_from(self.lanes.len() - 1).expect("fewer than four billion lanes"))
        });
        let lanes = match id.pin {
            Some(worker) => self.pinned.entry(worker).or_default(),
            None => &mut self.open,
        };
        lanes.insert(id.key.clone(), number);
        self.lanes[number.0 as usize] = Some(QueueLane::new(id, cold, now));
        number
    }

    fn forget(&mut self, number: LaneNo) {
        let Some(QueueLane { id, .. }) = self.lanes[number.0 as usize].take() else {
            return;
        };
        self.free.push(number);
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

    /// Returns the oldest request that this worker can serve, among those without a pin, in the lanes that are due for
    /// it.
    pub(crate) fn oldest_open_for(&self, worker: &Worker, is_due: impl Fn(&LaneKey) -> bool) -> Option<RequestKey> {
        let due = self.open_lanes().filter(|(key, _)| key.admits(worker) && is_due(key));
        due.filter_map(|(_, lane)| lane.front.first).min()
    }

    /// Returns the requests that this worker could be sent, in the lanes that are due for it and those pinned to it.
    pub(crate) fn waiting_for(&self, worker: &Worker, is_due: impl Fn(&LaneKey) -> bool) -> Waiting {
        total(self.lanes_for(worker, is_due))
    }

    /// Returns the sum of the arrivals of the oldest `count` of those, in nanoseconds.
    pub(crate) fn first_arrivals(&self, worker: &Worker, count: u32, is_due: impl Fn(&LaneKey) -> bool) -> i128 {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let mut first: Vec<_> = self.lanes_for(worker, is_due).flat_map(|lane| lane.list.oldest(count)).collect();
        first.sort_unstable_by_key(|entry| entry.key);
        first.iter().take(count).map(|entry| entry.arrived.nanos()).sum()
    }

    /// Returns all waiting requests of the model.
    pub(crate) fn waiting(&self) -> Waiting {
        total(self.lanes().map(|(_, _, lane)| lane))
    }

    /// Returns the lanes of requests that are not pinned, by their needs.
    pub(crate) fn open_lanes(&self) -> impl Iterator<Item = (&LaneKey, &QueueLane)> {
        self.all_of(&self.open)
    }

    /// Returns the requests that only this worker may serve, in no order.
    pub(crate) fn pinned_to(&self, worker: WorkerKey) -> Vec<RequestKey> {
        self.lanes_pinned_to(worker).flat_map(|(_, lane)| lane.keys()).collect()
    }

    /// Returns the workers that requests are pinned to.
    pub(crate) fn pins(&self) -> impl Iterator<Item = WorkerKey> {
        self.pinned.keys().copied()
    }

    /// Returns the requests that wait for this worker alone.
    pub(crate) fn pinned_waiting_for(&self, worker: &Worker) -> Waiting {
        let lanes = self.lanes_pinned_to(worker.key);
        total(lanes.filter(|(key, _)| key.admits(worker)).map(|(_, lane)| lane))
    }

    fn lanes_for<'a>(
        &'a self,
        worker: &'a Worker,
        is_due: impl Fn(&LaneKey) -> bool,
    ) -> impl Iterator<Item = &'a QueueLane> {
        self.open_lanes()
            .filter(move |(key, _)| is_due(key))
            .chain(self.lanes_pinned_to(worker.key))
            .filter(|(key, _)| key.admits(worker))
            .map(|(_, lane)| lane)
    }

    fn lanes_pinned_to(&self, worker: WorkerKey) -> impl Iterator<Item = (&LaneKey, &QueueLane)> {
        self.pinned.get(&worker).into_iter().flat_map(|lanes| self.all_of(lanes))
    }

    fn all_of<'a>(&'a self, lanes: &'a Lanes) -> impl Iterator<Item = (&'a LaneKey, &'a QueueLane)> {
        lanes.iter().filter_map(|(key, number)| Some((key, self.lane(*number)?)))
    }
}

fn total<'a>(lanes: impl Iterator<Item = &'a QueueLane>) -> Waiting {
    lanes.fold(Waiting::default(), |sum, lane| Waiting {
        count: sum.count.saturating_add(u32::try_from(lane.list.len()).unwrap_or(u32::MAX)),
        oldest: lane.list.first().map(|first| first.arrived).into_iter().chain(sum.oldest).min(),
        arrivals: sum.arrivals + lane.list.arrivals(),
    })
}

/// A lane of a model.
pub(crate) type LaneRef = (ModelId, LaneNo);

/// The provider's whole queue: its size, the first request of each lane, and the next deadlines.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) len: usize,
    pub(crate) bytes: u64,
    pub(crate) shares: Shares,
    /// The first request of each lane that is not pinned, oldest first.
    pub(crate) firsts: BTreeSet<(RequestKey, LaneRef)>,
    /// The first request of each pinned lane, by its worker.
    pub(crate) pinned_firsts: BTreeSet<(WorkerKey, RequestKey, LaneRef)>,
    /// The next deadline of each lane.
    pub(crate) dues: BTreeSet<(Moment, LaneRef)>,
}

impl Queue {
    /// Adds a request that begins to wait to the totals.
    pub(crate) fn handle_waiting(&mut self, request: &Request) {
        self.len += 1;
        self.bytes = self.bytes.saturating_add(request.new.bytes);
        if let Some(share) = &request.new.share {
            self.shares.handle_waiting(share, request.new.bytes);
        }
    }

    /// Subtracts a request that no longer waits from the totals.
    pub(crate) fn handle_gone(&mut self, request: &Request) {
        self.len -= 1;
        self.bytes = self.bytes.saturating_sub(request.new.bytes);
        if let Some(share) = &request.new.share {
            self.shares.handle_gone(share, request.new.bytes);
        }
    }

    /// Returns the first request of each lane pinned to this worker, oldest first.
    pub(crate) fn firsts_pinned_to(&self, worker: WorkerKey) -> impl Iterator<Item = (RequestKey, LaneRef)> {
        let from = (worker, RequestKey(0), (ModelId::FIRST, LaneNo(0)));
        // Nearly always there is none, and no search is needed.
        let all = (!self.pinned_firsts.is_empty()).then(|| self.pinned_firsts.range(from..));
        let all = all.into_iter().flatten().take_while(move |(pin, ..)| *pin == worker);
        all.map(|(_, first, lane)| (*first, *lane))
    }

    /// Returns the first request of each lane, oldest first.
    pub(crate) fn all_firsts(&self) -> Vec<RequestKey> {
        let open = self.firsts.iter().map(|(key, _)| *key);
        let mut all: Vec<_> = open.chain(self.pinned_firsts.iter().map(|(_, key, _)| *key)).collect();
        all.sort_unstable();
        all
    }

    /// The oldest waiting request.
    pub(crate) fn oldest(&self) -> Option<RequestKey> {
        let open = self.firsts.first().map(|(key, _)| *key);
        open.into_iter().chain(self.pinned_firsts.iter().map(|(_, key, _)| *key)).min()
    }

    /// The next deadline of any waiting request.
    pub(crate) fn next_due(&self) -> Option<Moment> {
        self.dues.first().map(|(due, _)| *due)
    }

    /// Records a lane's new front.
    pub(crate) fn note(&mut self, lane: LaneRef, FrontChange { pin, old, new }: FrontChange) {
        if old.first != new.first {
            if let Some(old) = old.first {
                self.forget_first(pin, old, lane);
            }
            match (pin, new.first) {
                (_, None) => {}
                (None, Some(new)) => _ = self.firsts.insert((new, lane)),
                (Some(pin), Some(new)) => _ = self.pinned_firsts.insert((pin, new, lane)),
            }
        }
        if old.due != new.due {
            if let Some(old) = old.due {
                self.dues.remove(&(old, lane));
            }
            self.dues.extend(new.due.map(|due| (due, lane)));
        }
    }

    fn forget_first(&mut self, pin: Option<WorkerKey>, first: RequestKey, lane: LaneRef) {
        match pin {
            None => self.firsts.remove(&(first, lane)),
            Some(pin) => self.pinned_firsts.remove(&(pin, first, lane)),
        };
    }
}
