//! Waiting requests. The oldest that a worker can serve comes first, at a cost that does not depend on the length of
//! the queue.
//!
//! The requests of one model stand in *lanes*: all requests of a lane can be served by exactly the same workers (same
//! pin, same need of `core1`, same workers that failed them, same meanings of the name), so all of a lane wait for a
//! load or none does, and they share their clocks. They also belong to one key and class, so they are served in order of
//! arrival. Usually a model has one lane for each key.
//!
//! The whole queue knows the [`Front`] of each lane: its first request, and its next deadline. A worker with room walks
//! through the lanes in the order of [`Flows`], and gets the first request of the first lane that is open to it. A
//! request knows its place, so cancelling and expiring need no search.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::{Axis, LaneClock, Moment, Span};
use super::event::{RequestKey, WorkerKey};
use super::fairness::Class;
use super::flows::{FairRank, FlowId, Flows};
use super::models::ModelId;
use super::registry::Worker;
use super::request::{FailedOn, Request, Scope, refuses};
use super::shares::{QueueTotals, Shares};
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

    pub(crate) fn youngest(&self) -> Option<RequestKey> {
        self.list.last()
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
    pub(crate) totals: QueueTotals,
    pub(crate) shares: Shares,
    /// The keys that share the workers, with the first request of each lane that is not pinned.
    pub(crate) flows: Flows<LaneRef>,
    /// When the first requests of those lanes are promoted, if they are not yet.
    promotions: BTreeSet<(Moment, RequestKey, LaneRef, FlowId)>,
    /// The first request of each pinned lane, by its worker.
    pub(crate) pinned_firsts: BTreeSet<(WorkerKey, RequestKey, LaneRef)>,
    /// The next deadline of each lane.
    pub(crate) dues: BTreeSet<(Moment, LaneRef)>,
}

impl Queue {
    /// Adds a request that begins to wait to the totals.
    pub(crate) fn handle_waiting(&mut self, request: &Request) {
        self.totals.add(request.class, request.new.bytes);
        self.flows.handle_waiting(request.flow);
        if let Some(share) = &request.new.share {
            self.shares.handle_waiting(share, (request.class, request.new.key), request.new.bytes);
        }
    }

    /// Subtracts a request that no longer waits from the totals.
    pub(crate) fn handle_gone(&mut self, request: &Request) {
        self.totals.subtract(request.class, request.new.bytes);
        self.flows.handle_gone(request.flow);
        if let Some(share) = &request.new.share {
            self.shares.handle_gone(share, (request.class, request.new.key), request.new.bytes);
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

    /// Returns the first request of each lane that is pinned to some worker, in no order.
    pub(crate) fn pinned_firsts(&self) -> impl Iterator<Item = (RequestKey, LaneRef)> {
        self.pinned_firsts.iter().map(|(_, first, lane)| (*first, *lane))
    }

    /// The oldest waiting request.
    pub(crate) fn oldest(&self) -> Option<RequestKey> {
        self.flows.oldest().into_iter().chain(self.pinned_firsts().map(|(key, _)| key)).min()
    }

    /// Returns the place of a request among those that the same slot can serve.
    pub(crate) fn rank(&self, flow: FlowId, class: Class, key: RequestKey) -> FairRank {
        FairRank { class, service: self.flows.service(flow), key }
    }

    /// Promotes the requests that have waited long enough. Called before each event.
    pub(crate) fn promote(&mut self, now: Moment) {
        while let Some((_, first, lane, flow)) = self.promotions.first().copied().filter(|(at, ..)| *at <= now) {
            self.promotions.pop_first();
            self.flows.promote(flow, (first, lane));
        }
    }

    /// The next deadline of any waiting request.
    pub(crate) fn next_due(&self) -> Option<Moment> {
        self.dues.first().map(|(due, _)| *due)
    }

    /// Records a lane's new front.
    pub(crate) fn note(&mut self, lane: LaneRef, FrontChange { pin, flow, class, old, new }: FrontChange, now: Moment) {
        if (old.first, old.promoted) != (new.first, new.promoted) {
            match pin {
                Some(pin) => {
                    if let Some(old) = old.first {
                        self.pinned_firsts.remove(&(pin, old, lane));
                    }
                    self.pinned_firsts.extend(new.first.map(|new| (pin, new, lane)));
                }
                None => {
                    self.remove_front((flow, class), old, lane);
                    self.add_front((flow, class), new, lane, now);
                }
            }
        }
        if old.due != new.due {
            if let Some(old) = old.due {
                self.dues.remove(&(old, lane));
            }
            self.dues.extend(new.due.map(|due| (due, lane)));
        }
    }

    fn add_front(&mut self, (flow, class): (FlowId, Class), front: Front, lane: LaneRef, now: Moment) {
        let Some(first) = front.first else { return };
        self.flows.add(flow, class, (first, lane));
        match front.promoted {
            Some(at) if at <= now => self.flows.promote(flow, (first, lane)),
            Some(at) => _ = self.promotions.insert((at, first, lane, flow)),
            None => {}
        }
    }

    fn remove_front(&mut self, (flow, class): (FlowId, Class), front: Front, lane: LaneRef) {
        let Some(first) = front.first else { return };
        self.flows.remove(flow, class, (first, lane));
        if let Some(at) = front.promoted
            && !self.promotions.remove(&(at, first, lane, flow))
        {
            self.flows.demote(flow, (first, lane));
        }
    }
}
