//! Matches requests and workers. Two rules hold between any two events: no request waits while a worker that could
//! serve it has room, and waiting requests are served in a [fair](super::fair) order.
//!
//! A worker that fails a model is [passed over](super::outliers) as if it could not serve it.
//!
//! Hence a new request may go straight to a free worker, because no waiting request could use it; and a worker that
//! gains room gets requests from the queue until one of the two is used up.

use crate::dispatch::Dispatch;
use crate::dispatch::model::clock::duration;
use crate::dispatch::model::effect::Effect;
use crate::dispatch::model::event::{RequestKey, WorkerKey};
use crate::dispatch::model::fairness::estimate;
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::queue::{LaneNo, LaneRef};
use crate::dispatch::model::registry::Worker;
use crate::dispatch::model::request::{Request, RequestState};
use crate::dispatch::model::select::Rank;

impl Dispatch {
    /// Returns the best free worker for a request, if there is one.
    pub(super) fn pick(&self, request: &Request) -> Option<WorkerKey> {
        let suits = |worker: &Worker| !request.refuses(worker);
        let Some(pin) = request.new.pin else {
            return self.best_of(request, suits);
        };
        let worker = self.workers.get(&pin)?;
        // A request that needs `core1` is never pinned to a worker without it.
        let has_room = worker.serves(request.model) && worker.has_room_for(&self.models[request.model].name);
        (has_room && suits(worker)).then_some(pin)
    }

    /// Returns the best free worker among those that `suits` a request without a pin.
    pub(super) fn best_of(&self, request: &Request, suits: impl Fn(&Worker) -> bool) -> Option<WorkerKey> {
        let is_suited = |key| self.workers.get(&key).is_some_and(&suits);
        let group = &self.models[request.model];
        // If the best one fails the model, all of them do.
        let (needs_core1, spill) = (request.new.needs_core1, self.settings.spill);
        let best = if self.places_by_cache() && request.new.conversation.is_some() {
            group.available.least_backlog(needs_core1, spill, is_suited)?
        } else {
            group.available.best(needs_core1, spill, is_suited)?
        };
        if self.is_passed_over(group, best.worker, needs_core1, &suits) {
            return None;
        }
        Some(self.home_before(best, request, suits).unwrap_or(best.worker))
    }

    /// Sends a waiting request to a free worker, if there is one.
    pub(super) fn place(&mut self, key: RequestKey) {
        self.refresh_ranks();
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        if let Some(worker) = self.pick(request) {
            self.dequeue(key);
            self.send(key, worker);
        }
    }

    /// Sends a worker with room the requests that it can serve, in their order.
    pub(super) fn dispatch_queued(&mut self, key: WorkerKey) {
        self.dispatch_queued_before(None, key);
    }

    /// Sends a worker with room the requests before `requeued` that it can serve.
    pub(super) fn dispatch_queued_before(&mut self, requeued: Option<RequestKey>, key: WorkerKey) {
        loop {
            if requeued.is_some() {
                self.refresh_ranks();
            }
            let Some(worker) = self.workers.get(&key).filter(|worker| !worker.draining) else {
                return;
            };
            let mut choice = self.choice_for(worker, requeued.is_some());
            let requeued = requeued.and_then(|requeued| self.requests.get(&requeued));
            let placeable =
                requeued.filter(|requeued| self.is_queued(requeued.new.key) && self.pick(requeued).is_some());
            if let Some(requeued) = placeable {
                self.consider(requeued, &mut choice);
            }
            let Some(next) = choice.chosen() else {
                return;
            };
            let limit = requeued.filter(|requeued| self.requests.get(&next).is_some_and(|it| it.is_like(requeued)));
            let limit = limit.map_or(RequestKey(u64::MAX), |requeued| requeued.new.key);
            if next >= limit {
                return;
            }
            let request = self.overtake(next, limit, key).unwrap_or(next);
            self.dequeue(request);
            self.send(request, key);
        }
    }

    /// Returns the oldest request of the same key and class that waits in another lane and may concern a worker; none
    /// is [`u64::MAX`].
    pub(super) fn oldest_in_other_lanes(&self, of: &Request, lane: LaneRef, worker: WorkerKey) -> RequestKey {
        let serves = |model| self.workers.get(&worker).is_some_and(|worker| worker.serves(model));
        let mut others = self.queue.flows.lanes_of(of.flow, of.class);
        let open = others.find(|(_, other)| *other != lane && serves(other.0)).map(|(key, _)| key);
        let is_like = |key: &RequestKey| self.requests.get(key).is_some_and(|request| request.is_like(of));
        let pinned = self.queue.firsts_pinned_to(worker).map(|(key, _)| key).find(is_like);
        open.into_iter().chain(pinned).min().unwrap_or(RequestKey(u64::MAX))
    }

    /// Sends a request that is in no queue to a worker.
    pub(super) fn send(&mut self, key: RequestKey, to: WorkerKey) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let (decision, believed) = self.decision(request, to);
        let by_cache = self.places_by_cache();
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let Some(worker) = self.workers.get_mut(&to) else {
            return;
        };
        let RequestState::Queued { since, .. } = request.state else {
            return;
        };
        let group = &self.models[request.model];
        request.believed = 0;
        if by_cache {
            request.believed = believed;
            request.cost = request.new.bytes - worker.cache.expected(believed);
            worker.cache.handle_sent(request.cost);
        }
        request.attempts += 1;
        let due = request.running_due();
        request.state = RequestState::Running { worker: to, due };
        self.running.insert((due, key));

        self.turn += 1;
        worker.turn = self.turn;
        request.sent = self.turn;
        request.charge = self.queue.flows.charge_estimate(request.flow, estimate(request.new.bytes));
        worker.in_flight.insert(key);
        if let Some(multiplexer) = &mut worker.multiplexer {
            multiplexer.handle_sent(&group.name);
        }
        let is_used_up = worker.demand.handle_sent(&group.name);
        let model = request.model;
        self.out.push(Effect::Send {
            worker: to,
            request: key,
            attempt: request.attempts,
            waited: duration(self.clock.now.since(since)),
            decision,
            class: request.class,
        });
        let home = request.conversation().map(|conversation| (conversation, request.new.bytes));
        if let Some((conversation, bytes)) = home {
            self.set_home(conversation, to, bytes);
        }
        self.note_load(to);
        if is_used_up {
            self.report_demand_now(to, model);
        }
    }

    /// Removes a running request from its worker, which frees the slot. The caller decides on the request.
    pub(super) fn take_from_worker(&mut self, key: RequestKey) {
        self.end_backlog(key);
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let RequestState::Running { worker, due } = request.state else {
            return;
        };
        self.running.remove(&(due, key));
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.in_flight.remove(&key);
            if let Some(multiplexer) = &mut worker.multiplexer {
                multiplexer.handle_taken(&self.models[request.model].name);
            }
            let key = worker.key;
            self.note_freed(key);
        }
    }

    /// Updates a worker's rank among the available workers.
    pub(super) fn refresh_rank(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let placement = self.settings.placement;
        let shared = worker.shared_rank(placement);
        if worker.multiplexer.is_none() && worker.ranks.first().is_none_or(|rank| rank.map(Rank::as_sound) == shared) {
            return;
        }
        for place in 0..worker.models.len() {
            let model = worker.models[place];
            let group = &mut self.models[model];
            let new = match &worker.multiplexer {
                Some(multiplexer) => worker.rank_for(&group.name, multiplexer, placement),
                None => shared,
            };
            let new = new.map(|rank| Rank { is_failing: worker.is_failing(model), ..rank });
            let old = std::mem::replace(&mut worker.ranks[place], new);
            if old == new {
                continue;
            }
            if let Some(old) = old {
                group.available.remove(&old, worker.core1);
            }
            if let Some(new) = new {
                group.available.insert(new, worker.core1);
            }
        }
    }

    /// Puts a request into the queue at the place of its key. Its cold clock continues where it stopped.
    pub(super) fn enqueue(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        if self.is_first_of_its_class(request.class) {
            self.begin_classes();
            return self.enqueue(key);
        }
        let lane = request.lane_id();
        let cold = self.is_cold(&self.models[request.model], lane.pin, &lane.key);
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let group = &mut self.models[request.model];
        let (lane, cold_now) = group.queue.open_lane(lane, cold, self.clock.now);
        let cold_start = cold_now - request.cold_waited;
        let place = group.queue.insert(lane, request.entry(cold_start));
        request.state = RequestState::Queued { place: Some(place), since: self.clock.now, cold_start };
        self.queue.handle_waiting(request);
        let (model, pin) = (request.model, request.new.pin);
        if !group.queue.is_behind(place) {
            self.refresh_lane(model, place.lane);
        }
        self.note_queue(model, pin);
    }

    /// Pins a request, queued or not, to another worker than before. Its clocks continue.
    pub(super) fn pin_to(&mut self, key: RequestKey, to: WorkerKey) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let (model, from) = (request.model, request.new.pin);
        request.new.pin = Some(to);
        let RequestState::Queued { place: Some(old), since, cold_start } = request.state else {
            return;
        };
        let lane = request.lane_id();
        let cold = self.is_cold(&self.models[model], lane.pin, &lane.key);
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let queue = &mut self.models[model].queue;
        request.cold_waited = queue.remove(old, self.clock.now) - cold_start;
        let (lane, cold_now) = queue.open_lane(lane, cold, self.clock.now);
        let cold_start = cold_now - request.cold_waited;
        let new = queue.insert(lane, request.entry(cold_start));
        request.state = RequestState::Queued { place: Some(new), since, cold_start };
        self.refresh_lane(model, old.lane);
        self.note_queue(model, from);
        self.refresh_lane(model, new.lane);
        self.note_queue(model, Some(to));
    }

    /// Removes a request from the queue.
    pub(in super::super) fn dequeue(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let RequestState::Queued { place: Some(place), since, cold_start } = request.state else {
            return;
        };
        let (model, pin) = (request.model, request.new.pin);
        let queue = &mut self.models[model].queue;
        let is_front = !queue.is_behind(place);
        request.cold_waited = queue.remove(place, self.clock.now) - cold_start;
        request.state = RequestState::Queued { place: None, since, cold_start };
        self.queue.handle_gone(request);
        self.drain_rate.handle_departure(self.clock.now);
        if is_front {
            self.refresh_lane(model, place.lane);
        }
        self.note_queue(model, pin);
    }

    /// Records that the queued requests of a model have changed.
    fn note_queue(&mut self, model: ModelId, pin: Option<WorkerKey>) {
        self.mark_listeners(model, pin);
        self.models.touch(model);
    }

    /// Updates the whole queue's view of a lane.
    pub(super) fn refresh_lane(&mut self, model: ModelId, lane: LaneNo) {
        let promote_after = self.promote_after();
        if let Some(change) = self.models[model].queue.refresh(lane, promote_after, self.clock.now) {
            self.queue.note((model, lane), change, self.clock.now);
        }
    }
}
