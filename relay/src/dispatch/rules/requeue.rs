//! Decides on a request that its worker did not serve: it waits again at its original place, or it ends.
//!
//! A loss or a broken backend spends one of three requeues, a swap one of three of its own, a refusal none. A pinned
//! request waits again only for its own worker, and ends if that worker is lost or its backend fails. If the worker has
//! a newer link that succeeded the lost one, the request continues over the newer one.

use std::sync::Arc;

use crate::dispatch::model::effect::{Effect, Failure, RequeueReason};
use crate::dispatch::model::event::{AttemptFailure, RequestKey, WorkerKey};
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::queue::LaneKey;
use crate::dispatch::model::request::{FailedOn, LastFailure, MAX_REQUEUES, MAX_SEVERED};
use crate::dispatch::{Dispatch, ProviderPhase, RequestPlace};

impl Dispatch {
    pub(in super::super) fn handle_attempt_failed(
        &mut self,
        (worker, key, attempt): (WorkerKey, RequestKey, u32),
        failure: AttemptFailure,
    ) {
        if !self.is_current(worker, key, attempt) {
            return;
        }
        self.take_from_worker(key);
        match &failure {
            AttemptFailure::AtCapacity => self.note_at_capacity(worker, key),
            AttemptFailure::Draining => self.begin_drain(worker),
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset => {
                self.note_failed_on(worker, key, LastFailure::Unreachable);
            }
            AttemptFailure::LoadFailed { code, retry_after, report } => {
                let (code, retry_after, report) = (*code, *retry_after, Arc::clone(report));
                self.note_failed_on(worker, key, LastFailure::Load { code, retry_after, report });
            }
            AttemptFailure::SeveredBySwap | AttemptFailure::Fatal(_) => {}
        }
        match self.requeue_decision(key, failure) {
            Err(failure) => self.fail(key, failure),
            Ok(reason) => {
                self.out.push(Effect::Requeued { request: key, reason, attempt });
                self.return_charge(key);
                self.enqueue(key);
                // First the requests for this worker that go before it, then this request for any worker, then the
                // rest.
                self.place_if_servers_changed();
                self.dispatch_queued_before(Some(key), worker);
                self.place_if_queued(key);
                if let Some(request) = self.requests.get(&key) {
                    self.note_suspect(request.model);
                }
            }
        }
    }

    fn note_at_capacity(&mut self, key: WorkerKey, refused: RequestKey) {
        if let (Some(worker), Some(request)) = (self.workers.get_mut(&key), self.requests.get(&refused)) {
            worker.handle_refusal(request.sent, &self.models[request.model].name);
        }
        self.note_refusal(key);
    }

    fn note_failed_on(&mut self, worker: WorkerKey, key: RequestKey, last_failure: LastFailure) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let model = request.model;
        let Some(failing) = self.workers.get(&worker) else {
            return;
        };
        let name = &self.models[model].name;
        if matches!(last_failure, LastFailure::Unreachable)
            && failing.multiplexer.is_some()
            && !failing.is_open_for(name)
        {
            // The worker has closed the gate since, and serves the model again before it receives requests for it.
            request.last_failure = Some(last_failure);
            return;
        }
        let announcement = failing.announcement(model);
        // Failures are dropped if their worker is gone or has announced the model again.
        request.failed_on.retain(|entry| {
            self.workers.get(&entry.worker).is_some_and(|worker| worker.announcement(model) == entry.announcement)
        });
        request.note_failed_on(FailedOn { worker, announcement });
        request.last_failure = Some(last_failure);
    }

    /// Returns whether a request whose worker failed it waits again, or how it ends.
    fn requeue_decision(&mut self, key: RequestKey, failure: AttemptFailure) -> Result<RequeueReason, Failure> {
        let refusal = self.refuses_waiting();
        let request = self.requests.get(&key);
        let untried = request.is_some_and(|request| self.has_candidate(request.model, &request.lane()));
        let Some(request) = self.requests.get_mut(&key) else {
            return Err(Failure::Fatal(Arc::default()));
        };
        let reason = match failure {
            AttemptFailure::Fatal(report) => return Err(Failure::Fatal(report)),
            AttemptFailure::AtCapacity => RequeueReason::AtCapacity,
            AttemptFailure::Draining => RequeueReason::Draining,
            AttemptFailure::SeveredBySwap => {
                request.severed += 1;
                if request.severed > MAX_SEVERED {
                    return Err(Failure::SeveredBySwap);
                }
                RequeueReason::SeveredBySwap
            }
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset => {
                if request.requeues == MAX_REQUEUES || request.new.pin.is_some() {
                    return Err(Failure::BackendUnreachable);
                }
                request.requeues += 1;
                let unreachable = failure == AttemptFailure::BackendUnreachable;
                if unreachable { RequeueReason::BackendUnreachable } else { RequeueReason::BackendReset }
            }
            AttemptFailure::LoadFailed { code, retry_after, report } => {
                if !untried || request.new.pin.is_some() {
                    return Err(Failure::LoadFailed { code, retry_after, report });
                }
                RequeueReason::LoadFailed
            }
        };
        let pin = request.new.pin;
        let stranded = pin.is_some_and(|pin| !self.takes_requests(pin));
        let refusal = refusal.or(stranded.then_some(Failure::AffinityLost));
        refusal.map_or(Ok(reason), Err)
    }

    /// Returns the failure of a request that would have to wait again, if the provider has no queue. A relay that is
    /// shutting down still has its queue.
    pub(super) fn refuses_waiting(&self) -> Option<Failure> {
        match self.phase {
            ProviderPhase::Deleted => Some(Failure::Deleted),
            ProviderPhase::Open | ProviderPhase::Draining => (!self.settings.enabled).then_some(Failure::Disabled),
        }
    }

    /// Requeues a request of a lost worker of which the client has received nothing. Returns true if it waits again.
    pub(super) fn requeue_lost(&mut self, key: RequestKey, reason: RequeueReason) -> bool {
        let refusal = self.refuses_waiting();
        let Some(request) = self.requests.get(&key) else {
            return false;
        };
        // The process may have a newer link, for which such a request waits from now on.
        let is_stranded = request.new.pin.is_some_and(|pin| !self.takes_requests(pin));
        let Some(request) = self.requests.get_mut(&key) else {
            return false;
        };
        let failure = if is_stranded {
            Some(Failure::AffinityLost)
        } else if request.requeues == MAX_REQUEUES {
            Some(Failure::RequeueExhausted)
        } else {
            refusal
        };
        if let Some(failure) = failure {
            self.fail(key, failure);
            return false;
        }
        request.requeues += 1;
        self.out.push(Effect::Requeued { request: key, reason, attempt: request.attempts });
        self.return_charge(key);
        self.enqueue(key);
        true
    }

    pub(super) fn place_if_queued(&mut self, key: RequestKey) {
        if self.is_queued(key) {
            self.place(key);
        }
    }

    pub(super) fn is_queued(&self, key: RequestKey) -> bool {
        self.place_of(key) == Some(RequestPlace::Queued)
    }

    /// Ends requests of a model that no worker can serve: those that need `core1` if all workers are too old, and those
    /// whose load failed on all workers.
    pub(super) fn fail_unservable(&mut self, model: ModelId) {
        let group = &self.models[model];
        let too_old = group.only_too_old();
        let mut failures = Vec::new();
        for (lane, waiting) in group.queue.open_lanes() {
            if let Some(worker) = too_old.filter(|_| lane.needs_core1) {
                failures.extend(waiting.keys().map(|key| (key, Failure::WorkerTooOld { worker })));
            } else if !lane.failed_on.is_empty() && !self.has_candidate(model, lane) {
                failures.extend(waiting.keys().filter_map(|key| {
                    let last_failure = self.requests.get(&key)?.last_failure.as_ref()?;
                    last_failure.ends_without_candidate().then_some((key, last_failure.failure()))
                }));
            }
        }
        self.fail_waiting(failures);
    }

    /// True if some worker that accepts requests could serve this lane, now or when it has room.
    fn has_candidate(&self, model: ModelId, lane: &LaneKey) -> bool {
        let mut able = self.models[model].serving.able(lane.needs_core1);
        able.any(|key| self.workers.get(&key).is_some_and(|worker| lane.admits(worker)))
    }
}
