//! The life of a request: submitted, sent, and ended exactly once. Requeuing is in `requeue`.

use modelrelay_protocol::queue_position::QueuePosition;

use crate::dispatch::model::clock::{Moment, duration, span};
use crate::dispatch::model::effect::{Effect, Failure, Stage};
use crate::dispatch::model::event::{CancelReason, NewRequest, RequestKey, WorkerKey};
use crate::dispatch::model::fairness::TokenUsage;
use crate::dispatch::model::flows::Charge;
use crate::dispatch::model::request::{Limits, Request, RequestState};
use crate::dispatch::{Dispatch, ProviderPhase};

impl Dispatch {
    pub(in super::super) fn handle_submit(&mut self, new: NewRequest) {
        // A key identifies one request; if it came twice, the first request would keep it.
        if self.requests.contains_key(&new.key) {
            return;
        }
        let key = new.key;
        let refusal = self.refuses_new().or_else(|| self.cannot_carry(&new));
        self.admit(new);
        if let Some(failure) = refusal {
            self.fail(key, failure);
            return;
        }
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let unservable = || match request.new.pin {
            Some(pin) => self.refuses_to_load_pinned(request.model, pin),
            None => self.refuses_to_load(request.model, &request.lane()),
        };
        let (flow, class) = (request.flow, request.class);
        if let Some(worker) = self.pick(request) {
            self.queue.flows.handle_arrival(flow);
            self.send(key, worker);
        } else if let Some(failure) = unservable() {
            self.fail(key, failure);
        } else if let Some(failure) = self.refuses_place(request) {
            let position = self.position(key, self.clock.now);
            self.fail_at(key, failure, position);
        } else {
            self.make_room_for(key, class);
            self.queue.flows.handle_arrival(flow);
            self.enqueue(key);
        }
    }

    /// Returns the failure of any new request in the provider's current state.
    fn refuses_new(&self) -> Option<Failure> {
        match self.phase {
            ProviderPhase::Deleted => Some(Failure::Deleted),
            ProviderPhase::Draining => Some(Failure::Draining),
            ProviderPhase::Open => (!self.settings.enabled).then_some(Failure::Disabled),
        }
    }

    /// Returns the failure of this request if no worker can carry it, whether workers have room or not.
    fn cannot_carry(&self, new: &NewRequest) -> Option<Failure> {
        if let Some(pin) = new.pin {
            let Some(worker) = self.workers.get(&pin).filter(|worker| !worker.draining) else {
                return Some(Failure::AffinityLost);
            };
            let too_old = new.needs_core1 && !worker.core1;
            return too_old.then_some(Failure::WorkerTooOld { worker: pin });
        }
        if !new.needs_core1 {
            return None;
        }
        let worker = self.models.find(&new.model)?.only_too_old()?;
        Some(Failure::WorkerTooOld { worker })
    }

    /// True if a worker is connected and accepts new requests.
    pub(super) fn takes_requests(&self, worker: WorkerKey) -> bool {
        self.workers.get(&worker).is_some_and(|worker| !worker.draining)
    }

    /// Registers the request as waiting, but not in the queue yet.
    fn admit(&mut self, new: NewRequest) {
        let model = self.models.intern(&new.model);
        self.models.retain(model);
        let key = new.key;
        let (flow, class) = self.share_of(&new);
        self.pinned.extend(new.pin.map(|pin| (pin, key)));
        let request = Request {
            limits: Limits::new(&self.settings, &new.model, !self.models[model].multiplexers.is_empty()),
            new,
            model,
            arrived: self.clock.now,
            cold_waited: 0,
            requeues: 0,
            severed: 0,
            attempts: 0,
            sent: 0,
            failed_on: Vec::new(),
            silent: Vec::new(),
            last_failure: None,
            state: RequestState::Queued { place: None, since: self.clock.now, cold_start: 0 },
            believed: 0,
            cost: 0,
            overtaken: 0,
            flow,
            class,
            charge: Charge::default(),
        };
        self.requests.insert(key, Box::new(request));
    }

    pub(in super::super) fn retry_after_secs(&self, now: Moment) -> u32 {
        let at_most = span(self.settings.absent());
        self.drain_rate.retry_after_secs(self.queue_len(), at_most, now)
    }

    pub(in super::super) fn handle_cancel(&mut self, key: RequestKey, reason: CancelReason) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        match request.state {
            RequestState::Queued { .. } => {
                self.dequeue(key);
                self.end_cancelled(key, reason, Stage::Queued);
            }
            RequestState::Running { .. } => {
                self.revoke(key, reason);
                self.end_cancelled(key, reason, Stage::InFlight);
            }
        }
    }

    fn end_cancelled(&mut self, request: RequestKey, reason: CancelReason, stage: Stage) {
        if reason == CancelReason::Admin {
            self.fail(request, Failure::CancelledByAdmin);
        } else {
            self.end(request);
            self.out.push(Effect::Cancelled { request, reason, stage });
        }
    }

    /// Cancels a running request at its worker. Its slot is free at once, even if the worker never replies.
    pub(in super::super) fn revoke(&mut self, key: RequestKey, reason: CancelReason) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let RequestState::Running { worker, .. } = request.state else {
            return;
        };
        self.out.push(Effect::CancelSent { worker, request: key, attempt: request.attempts, reason });
        self.take_from_worker(key);
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.handle_revoked();
        }
    }

    /// True for the attempt that runs now; any other is a late reply and is ignored.
    pub(super) fn is_current(&self, worker: WorkerKey, key: RequestKey, attempt: u32) -> bool {
        self.requests.get(&key).is_some_and(|request| {
            let runs_there = matches!(request.state, RequestState::Running { worker: on, .. } if on == worker);
            runs_there && request.attempts == attempt
        })
    }

    /// `cached` is the share of the prompt that came from the backend's cache, in permille, if it was reported.
    pub(in super::super) fn handle_completed(
        &mut self,
        (worker, request, attempt): (WorkerKey, RequestKey, u32),
        cached: Option<u16>,
        usage: Option<TokenUsage>,
    ) {
        if !self.is_current(worker, request, attempt) {
            return;
        }
        if let Some(usage) = usage {
            self.handle_used(request, usage);
        }
        let sent = self.requests.get(&request).map(|request| (request.believed, request.new.bytes));
        if let (Some((believed, bytes)), Some(cached), Some(worker)) = (sent, cached, self.workers.get_mut(&worker)) {
            worker.cache.handle_cached(believed, bytes, cached);
        }
        self.take_from_worker(request);
        self.end(request);
        self.out.push(Effect::Finished { request, worker, attempt });
    }

    /// Ends a request that is in no queue and on no worker, and reports the failure to the client.
    pub(in super::super) fn fail(&mut self, key: RequestKey, failure: Failure) {
        self.fail_at(key, failure, None);
    }

    /// As [`fail`](Self::fail), with the request's position in the queue.
    pub(super) fn fail_at(&mut self, key: RequestKey, failure: Failure, position: Option<QueuePosition>) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let (attempts, age) = (request.attempts, duration(self.clock.now.since(request.arrived)));
        self.out.push(Effect::Fail { request: key, failure, attempts, age, position });
        self.end(key);
    }

    /// Ends waiting requests, oldest first.
    pub(super) fn fail_waiting(&mut self, mut failures: Vec<(RequestKey, Failure)>) {
        failures.sort_unstable_by_key(|(key, _)| *key);
        for (key, failure) in failures {
            self.dequeue(key);
            self.fail(key, failure);
        }
    }

    /// Removes a request, and its model if that was its last use.
    pub(super) fn end(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.remove(&key) {
            if let Some(pin) = request.new.pin {
                self.pinned.remove(&(pin, key));
            }
            self.queue.flows.release(request.flow, request.charge);
            self.models.release(request.model);
        }
    }
}
