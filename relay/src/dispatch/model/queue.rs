//! Waiting requests. The oldest that a worker can serve comes first, at a cost that does not depend on the length of
//! the queue.
//!
//! The requests of one model stand in *lanes*: all requests of a lane can be served by exactly the same workers (same
//! pin, same need of `core1`, same workers that failed them, same meanings of the name), so all of a lane wait for a
//! load or none does, and they share their clocks. They also belong to one key and class, so they are served in order
//! of arrival. Usually a model has one lane for each key.
//!
//! The whole queue knows the [`Front`] of each lane: its first request, and its next deadline. A worker with room walks
//! through the lanes in the order of [`Flows`](super::flows::Flows), and gets the first request of the first lane that
//! is open to it. A request knows its place, so cancelling and expiring need no search.

mod index;

pub(crate) use index::{LaneRef, Queue};

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use super::clock::{Axis, LaneClock, Moment, Span};
use super::event::{RequestKey, WorkerKey};
use super::flows::FlowId;
use super::models::ModelId;
use super::owner::Class;
use super::registry::Worker;
use super::request::{FailedOn, Scope, refuses};
use super::wait_list::{EntryIndex, QueueEntry, WaitList};

/// The properties that all requests of a lane have in common, besides their pin.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct LaneKey {
    pub(crate) model: ModelId,
    pub(crate) flow: FlowId,
    pub(crate) class: Class,
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

/// Requests of one key and class that exactly the same workers can serve.
#[derive(Clone, Debug)]
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
    /// When the first request is promoted; `None`: never.
    promoted: Option<Moment>,
    due: Option<Moment>,
}

/// A change of a lane's front.
#[derive(Debug)]
pub(crate) struct FrontChange {
    pin: Option<WorkerKey>,
    flow: FlowId,
    class: Class,
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

    /// Returns the first request with its flow and class.
    pub(crate) fn first(&self) -> Option<(FlowId, Class, RequestKey)> {
        self.front.first.map(|first| (self.id.key.flow, self.id.key.class, first))
    }

    /// True if the first request competes with higher classes.
    pub(crate) fn is_promoted(&self, now: Moment) -> bool {
        self.front.promoted.is_some_and(|at| at <= now)
    }

    fn front(&self, promote_after: Option<Span>, now: Moment) -> Front {
        let due = |axis| self.clock.when(axis, self.list.next_due(axis)?.0, now);
        let first = self.list.first();
        // There is no higher class than the highest.
        let promote_after = promote_after.filter(|_| self.id.key.class != Class::Interactive);
        Front {
            first: first.map(|first| first.key),
            promoted: promote_after.and_then(|after| Some(first?.arrived.plus(after))),
            due: Axis::ALL.into_iter().filter_map(due).min(),
        }
    }

    fn expired(&self, now: Moment) -> Option<Expired> {
        Axis::ALL.into_iter().find_map(|axis| {
            let (due, key) = self.list.next_due(axis)?;
            (self.clock.at(axis, now) >= due).then_some(Expired { key, axis })
        })
    }
}

type Lanes = BTreeMap<LaneKey, LaneNo>;

/// A waiting request with the time left on each axis.
#[cfg(test)]
pub(crate) type CanonicalEntry = (RequestKey, [Option<Span>; Axis::ALL.len()]);

/// The number of waiting requests, and since when they wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Waiting {
    pub(crate) count: u32,
    pub(crate) oldest: Option<Moment>,
    pub(crate) arrivals: i128,
}

/// The queue of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelQueue {
    lanes: Vec<Option<QueueLane>>,
    /// Unused numbers.
    free: Vec<LaneNo>,
    open: Lanes,
    pinned: BTreeMap<WorkerKey, Lanes>,
    /// The number of all its waiting requests.
    len: usize,
}

impl ModelQueue {
    /// Returns a lane with the position of its cold clock. A lane that does not exist yet is added, for a request that
    /// is inserted next; `cold` is its current state, and its clock begins at zero.
    pub(crate) fn open_lane(&mut self, id: LaneId, cold: bool, now: Moment) -> (LaneNo, Span) {
        let lane = self.number(&id).unwrap_or_else(|| self.add(id, cold, now));
        (lane, self.lane(lane).map_or(0, |lane| lane.clock.at(Axis::Cold, now)))
    }

    /// Inserts a request into a lane.
    pub(crate) fn insert(&mut self, lane: LaneNo, entry: QueueEntry) -> QueuePlace {
        let index = self.lanes[lane.0 as usize].as_mut().expect("a lane has a number").list.insert(entry);
        self.len += 1;
        QueuePlace { lane, index }
    }

    /// True if the lane's front does not depend on this request.
    pub(crate) fn is_behind(&self, place: QueuePlace) -> bool {
        self.lane(place.lane).is_some_and(|lane| lane.list.is_behind(place.index))
    }

    /// Removes a request; returns the position of the lane's cold clock.
    pub(crate) fn remove(&mut self, place: QueuePlace, now: Moment) -> Span {
        let Some(lane) = self.lane_mut(place.lane) else {
            return 0;
        };
        lane.list.remove(place.index);
        let cold = lane.clock.at(Axis::Cold, now);
        self.len -= 1;
        cold
    }

    /// Switches the lane to its other clock.
    pub(crate) fn set_cold(&mut self, lane: LaneNo, cold: bool, now: Moment) {
        if let Some(lane) = self.lane_mut(lane) {
            lane.clock.set_cold(cold, now);
        }
    }

    /// Called after any of these: updates the first request and the next deadline, returns the change if there is one,
    /// and removes an empty lane.
    pub(crate) fn refresh(&mut self, number: LaneNo, promote_after: Option<Span>, now: Moment) -> Option<FrontChange> {
        let lane = self.lane_mut(number)?;
        let new = lane.front(promote_after, now);
        let old = std::mem::replace(&mut lane.front, new);
        let LaneId { pin, key: LaneKey { flow, class, .. } } = lane.id;
        let is_empty = lane.list.is_empty();
        if is_empty {
            self.forget(number);
        }
        (old != new).then_some(FrontChange { pin, flow, class, old, new })
    }

    /// The number of waiting requests.
    pub(crate) fn len(&self) -> usize {
        self.len
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

    /// Returns the requests that this worker could be sent, in the lanes that are due for it and those pinned to it.
    /// Costs a step for each lane, which are as many as the keys that wait for the model, unless workers have failed
    /// requests.
    pub(crate) fn waiting_for(&self, worker: &Worker, is_due: impl Fn(&LaneKey) -> bool) -> Waiting {
        total(self.lanes_for(worker, is_due))
    }

    /// Returns the class and key of each of those lanes, in no order.
    pub(crate) fn shares_for<'a>(
        &'a self,
        worker: &'a Worker,
        is_due: impl Fn(&LaneKey) -> bool + 'a,
    ) -> impl Iterator<Item = (Class, FlowId)> {
        self.lanes_for(worker, is_due).map(|lane| (lane.key().class, lane.key().flow))
    }

    /// Returns the sum of the arrivals of the oldest `count` of those, in nanoseconds. Costs a step for each lane and
    /// for each of these requests.
    pub(crate) fn first_arrivals(&self, worker: &Worker, count: u32, is_due: impl Fn(&LaneKey) -> bool) -> i128 {
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let mut lanes: Vec<_> = self.lanes_for(worker, is_due).map(|lane| lane.list.in_order()).collect();
        let place = |number, entry: &QueueEntry| Reverse((entry.key, entry.arrived, number));
        let firsts = lanes.iter_mut().enumerate().filter_map(|(number, lane)| Some(place(number, lane.next()?)));
        let mut firsts: BinaryHeap<_> = firsts.collect();
        let next = || {
            let Reverse((_, arrived, number)) = firsts.pop()?;
            firsts.extend(lanes[number].next().map(|entry| place(number, entry)));
            Some(arrived.nanos())
        };
        std::iter::from_fn(next).take(count).sum()
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

    /// Returns the requests of each lane with the time left on each axis: the queue without the numbers of its lanes
    /// and entries, whose values do not matter.
    #[cfg(test)]
    pub(crate) fn canonical(&self, now: Moment) -> Vec<(&LaneId, bool, Vec<CanonicalEntry>)> {
        let mut lanes: Vec<_> = self.lanes().map(|(_, id, lane)| (id, lane)).collect();
        lanes.sort_unstable_by_key(|(_, lane)| lane.list.first().map(|first| first.key));
        let left =
            |lane: &QueueLane, entry: &QueueEntry| (entry.key, entry.deadlines.left(|axis| lane.clock.at(axis, now)));
        let entries = |lane: &QueueLane| lane.list.in_order().map(|entry| left(lane, entry)).collect();
        lanes.into_iter().map(|(id, lane)| (id, lane.is_cold(), entries(lane))).collect()
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
