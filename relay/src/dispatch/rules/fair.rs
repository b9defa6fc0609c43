//! Fair shares between API keys.
//!
//! A free slot gets, of the requests that it can serve, the one of the highest class; of those, the one whose key has
//! attained the least service divided by its weight; of those, the oldest. A request that has waited for a stated time
//! is *promoted*: it goes before requests of higher classes whose keys have attained more service. So a busy higher
//! class delays lower ones and does not starve them, and a request that is only old does not go before its own class.
//!
//! This is the Virtual Token Counter of <https://arxiv.org/abs/2401.00588>. A key is charged an estimate when a request
//! is sent, which is settled by its usage when it ends, reported or estimated. A key none of whose requests waits is
//! lifted to the least of those that wait when its next request arrives, without the estimates of their running
//! requests. While two keys of one class and weight wait for the same workers, and no other class does, what they
//! attain differs by at most twice the cost of two requests for each slot and one more, however long they wait. If a
//! lower class waits too, a new key may also catch up what its class was sent before the lower one was promoted.
//!
//! Requests without an owner share one key of the class [`Normal`](Class::Normal). Within one key and class the order
//! is that of arrival, so it is the contract's if no request has an owner. A requeue returns the charge of its attempt,
//! and waits at its place among the requests of its key and class.

use std::collections::BTreeSet;

use crate::dispatch::Dispatch;
use crate::dispatch::model::clock::{Span, span};
use crate::dispatch::model::event::{NewRequest, RequestKey};
use crate::dispatch::model::fairness::{Fairness, TokenUsage};
use crate::dispatch::model::flows::{FairChoice, FlowId, TooFar};
use crate::dispatch::model::models::{Group, ModelId};
use crate::dispatch::model::owner::Class;
use crate::dispatch::model::queue::{LaneRef, QueueLane};
use crate::dispatch::model::registry::Worker;
use crate::dispatch::model::request::{Request, RequestState};

impl Dispatch {
    /// Returns the wait after which a request is promoted. Promotion matters only between classes, so it costs nothing
    /// while all waiting requests are of one.
    pub(super) fn promote_after(&self) -> Option<Span> {
        match self.settings.fairness {
            Fairness::Fifo => None,
            Fairness::Shared { promote_after } => self.queue.has_classes().then(|| span(promote_after)),
        }
    }

    /// Updates what depends on the time, before an event.
    pub(in super::super) fn begin_event(&mut self) {
        self.queue.promote(self.clock.now);
        self.queue.flows.raise_floor();
    }

    /// Returns the flow and class of a new request. They stay if the settings change while it waits.
    pub(super) fn share_of(&mut self, new: &NewRequest) -> (FlowId, Class) {
        let owner = new.owner.as_ref().filter(|_| self.settings.fairness != Fairness::Fifo);
        let class = owner.map_or(Class::default(), |owner| owner.class);
        self.queue.last_arrivals[class as usize] = Some(self.clock.now);
        (self.queue.flows.retain(owner), class)
    }

    /// True if a request of this class is about to wait, and so far all were [`Normal`](Class::Normal).
    pub(super) fn is_first_of_its_class(&self, class: Class) -> bool {
        class != Class::Normal && !self.queue.has_classes()
    }

    /// Distinguishes classes from now on, until the queue is empty. Costs one walk through the queue in that time.
    pub(super) fn begin_classes(&mut self) {
        let waiting: Vec<_> = self.queued().collect();
        self.queue.begin_classes(waiting);
        self.refresh_promotions();
    }

    /// Returns the charge of an attempt that has to be repeated.
    pub(super) fn return_charge(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.get_mut(&key) {
            request.charge = self.queue.flows.settle(request.flow, request.charge, 0);
        }
    }

    /// Replaces the charge of a running request by its actual cost.
    pub(in super::super) fn handle_used(&mut self, key: RequestKey, usage: TokenUsage) {
        if let Some(request) = self.requests.get_mut(&key)
            && matches!(request.state, RequestState::Running { .. })
        {
            request.charge = self.queue.flows.settle(request.flow, request.charge, usage.cost());
        }
    }

    /// Returns the request that this worker should be sent next. It searches only the first request of each lane.
    /// `has_rivals`: the caller adds others.
    pub(super) fn choice_for(&self, worker: &Worker, has_rivals: bool) -> FairChoice {
        if worker.is_full() {
            return FairChoice::default();
        }
        let has_room = |model: ModelId| worker.has_room_for(&self.models[model].name);
        let suits = |(model, lane): LaneRef| {
            let admits = |group: &Group| group.queue.lane(lane).is_some_and(|lane| lane.admits(worker));
            worker.serves(model) && has_room(model) && admits(&self.models[model])
        };
        let is_due = |(model, lane): LaneRef| {
            let group = &self.models[model];
            group.queue.lane(lane).is_some_and(|lane| !self.passes_over(group, worker.key, lane.key()))
        };
        // Most workers serve most of the waiting requests. A worker that serves few of them searches its own models
        // instead, at the cost of a step for each key that waits for one of them.
        let has_pinned = self.queue.has_pinned();
        let has_rivals = has_rivals || has_pinned && self.queue.firsts_pinned_to(worker.key).next().is_some();
        let open = self.queue.flows.choose(worker.models.len(), has_rivals, |_, lane| suits(lane) && is_due(lane));
        let mut choice = open.unwrap_or_else(|TooFar| {
            let mut choice = FairChoice::default();
            for model in worker.models.iter().filter(|model| has_room(**model)) {
                let group = &self.models[*model];
                let open = group.queue.open_lanes();
                let due = open.filter(|(key, _)| key.admits(worker) && !self.passes_over(group, worker.key, key));
                due.for_each(|(_, lane)| self.consider_lane(lane, &mut choice));
            }
            choice
        });
        if !has_pinned {
            return choice;
        }
        for (_, (model, lane)) in self.queue.firsts_pinned_to(worker.key).filter(|(_, lane)| suits(*lane)) {
            if let Some(lane) = self.models[model].queue.lane(lane) {
                self.consider_lane(lane, &mut choice);
            }
        }
        choice
    }

    /// Returns the request that should be placed next, among those that some worker with room can serve.
    pub(super) fn placeable_choice(&self) -> FairChoice {
        let is_placeable = |key| self.requests.get(&key).is_some_and(|request| self.pick(request).is_some());
        let open = self.queue.flows.choose(usize::MAX, true, |key, _| is_placeable(key));
        let mut choice = open.unwrap_or_default();
        for (_, (model, lane)) in self.queue.pinned_firsts().filter(|(key, _)| is_placeable(*key)) {
            if let Some(lane) = self.models[model].queue.lane(lane) {
                self.consider_lane(lane, &mut choice);
            }
        }
        choice
    }

    fn consider_lane(&self, lane: &QueueLane, choice: &mut FairChoice) {
        if let Some((flow, class, first)) = lane.first() {
            choice.add(self.queue.rank(flow, class, first), lane.is_promoted(self.clock.now));
        }
    }

    /// Adds a waiting request to a choice.
    pub(super) fn consider(&self, request: &Request, choice: &mut FairChoice) {
        let promoted = self.promote_after().is_some_and(|after| request.arrived.plus(after) <= self.clock.now);
        let rank = self.queue.rank(request.flow, request.class, request.new.key);
        choice.add(rank, promoted && request.class != Class::Interactive);
    }

    /// Places those of these requests that wait, in their order, while workers have room for them.
    pub(super) fn place_all(&mut self, mut waiting: Vec<RequestKey>) {
        waiting.retain(|key| self.is_queued(*key));
        loop {
            let mut choice = FairChoice::default();
            for request in waiting.iter().filter_map(|key| self.requests.get(key)) {
                self.consider(request, &mut choice);
            }
            let (Some(first), Some(next)) = (choice.first(), choice.chosen()) else { return };
            self.refresh_ranks();
            // Only those that some worker has room for compete.
            let is_placeable = |key: &RequestKey| self.requests.get(key).is_some_and(|it| self.pick(it).is_some());
            let unplaceable = [first, next].into_iter().find(|key| !is_placeable(key));
            let done = unplaceable.unwrap_or(next);
            waiting.retain(|key| *key != done);
            if unplaceable.is_none() {
                self.place(next);
            }
        }
    }

    /// Updates the order of the queue after a change of the settings.
    pub(in super::super) fn refresh_promotions(&mut self) {
        let lane = |request: &Request| match request.state {
            RequestState::Queued { place: Some(place), .. } => Some((request.model, place.lane)),
            RequestState::Queued { place: None, .. } | RequestState::Running { .. } => None,
        };
        let lanes: BTreeSet<_> = self.requests.values().filter_map(|request| lane(request)).collect();
        for (model, lane) in lanes {
            self.refresh_lane(model, lane);
        }
    }
}
