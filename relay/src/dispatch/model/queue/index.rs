//! The provider's whole queue: its size, the first request of each lane, and the next deadlines.

use std::collections::BTreeSet;

use super::{Front, FrontChange, LaneNo};
use crate::dispatch::model::clock::Moment;
use crate::dispatch::model::event::{RequestKey, WorkerKey};
use crate::dispatch::model::flows::{FairRank, FlowId, Flows};
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::owner::Class;
use crate::dispatch::model::request::Request;
use crate::dispatch::model::shares::{QueueTotals, Shares};
use crate::dispatch::model::small_set::SmallSet;

/// A lane of a model.
pub(crate) type LaneRef = (ModelId, LaneNo);

/// The provider's whole queue: its size, the first request of each lane, and the next deadlines.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    pub(crate) totals: QueueTotals,
    pub(crate) shares: Shares,
    /// The keys that share the workers, with the first request of each lane that is not pinned.
    pub(crate) flows: Flows<LaneRef>,
    /// When the first requests of those lanes are promoted, if they are not yet.
    promotions: SmallSet<(Moment, RequestKey, LaneRef, FlowId)>,
    /// The first request of each pinned lane, by its worker.
    pub(crate) pinned_firsts: BTreeSet<(WorkerKey, RequestKey, LaneRef)>,
    /// All waiting requests by class, oldest first; `None` while all are [`Normal`](Class::Normal), as they usually
    /// are. Once it is kept, it is until the queue is empty, so that building it costs no request more than its own
    /// entry.
    by_class: Option<BTreeSet<(Class, RequestKey)>>,
    /// When the last request of each class came.
    pub(crate) last_arrivals: [Option<Moment>; Class::ALL.len()],
    /// The next deadline of each lane.
    pub(crate) dues: SmallSet<(Moment, LaneRef)>,
}

impl Queue {
    /// Adds a request that begins to wait to the totals.
    pub(crate) fn handle_waiting(&mut self, request: &Request) {
        self.totals.add(request.class, request.new.bytes);
        self.flows.handle_waiting(request.flow);
        if let Some(by_class) = &mut self.by_class {
            by_class.insert((request.class, request.new.key));
        }
        if let Some(share) = &request.new.share {
            self.shares.handle_waiting(share, (request.class, request.new.key), request.new.bytes);
        }
    }

    /// Subtracts a request that no longer waits from the totals.
    pub(crate) fn handle_gone(&mut self, request: &Request) {
        self.totals.subtract(request.class, request.new.bytes);
        self.flows.handle_gone(request.flow);
        if let Some(by_class) = &mut self.by_class {
            by_class.remove(&(request.class, request.new.key));
            if by_class.is_empty() {
                self.by_class = None;
            }
        }
        if let Some(share) = &request.new.share {
            self.shares.handle_gone(share, (request.class, request.new.key), request.new.bytes);
        }
    }

    /// True if any request waits with a pin.
    pub(crate) fn has_pinned(&self) -> bool {
        !self.pinned_firsts.is_empty()
    }

    /// Returns the first request of each lane pinned to this worker, oldest first.
    pub(crate) fn firsts_pinned_to(&self, worker: WorkerKey) -> impl Iterator<Item = (RequestKey, LaneRef)> {
        let from = (worker, RequestKey(0), (ModelId::FIRST, LaneNo(0)));
        let all = self.pinned_firsts.range(from..).take_while(move |(pin, ..)| *pin == worker);
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

    /// True if requests of other classes than [`Normal`](Class::Normal) wait, or have since the queue was empty.
    pub(crate) fn has_classes(&self) -> bool {
        self.by_class.is_some()
    }

    /// Begins to distinguish classes. All of these waiting requests are [`Normal`](Class::Normal).
    pub(crate) fn begin_classes(&mut self, waiting: Vec<RequestKey>) {
        self.by_class = Some(waiting.into_iter().map(|key| (Class::Normal, key)).collect());
    }

    /// Returns the youngest request of a class. Requires that classes are distinguished.
    pub(crate) fn youngest_of(&self, class: Class) -> Option<RequestKey> {
        let of_class = (class, RequestKey(0))..=(class, RequestKey(u64::MAX));
        self.by_class.as_ref()?.range(of_class).next_back().map(|(_, key)| *key)
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
                    self.remove_promotion(flow, old, lane);
                    self.flows.replace((flow, class), lane, old.first, new.first);
                    self.add_promotion(flow, new, lane, now);
                }
            }
        }
        if old.due != new.due {
            let entry = |due| (due, lane);
            self.dues.replace(old.due.map(entry).as_ref(), new.due.map(entry));
        }
    }

    fn add_promotion(&mut self, flow: FlowId, front: Front, lane: LaneRef, now: Moment) {
        let Some(first) = front.first else { return };
        match front.promoted {
            Some(at) if at <= now => self.flows.promote(flow, (first, lane)),
            Some(at) => self.promotions.insert((at, first, lane, flow)),
            None => {}
        }
    }

    fn remove_promotion(&mut self, flow: FlowId, front: Front, lane: LaneRef) {
        let Some(first) = front.first else { return };
        if let Some(at) = front.promoted
            && !self.promotions.remove(&(at, first, lane, flow))
        {
            self.flows.demote(flow, (first, lane));
        }
    }
}
