//! The life of a request: submitted, sent, perhaps sent again, and ended exactly once.

use super::clock::{Moment, duration, span};
use super::effect::{Effect, Failure, RequeueReason, Stage};
use super::event::{AttemptFailure, CancelReason, NewRequest, RequestKey, WorkerKey};
use super::models::ModelId;
use super::queue::LaneKey;
use super::request::{FailedOn, Limits, MAX_REQUEUES, MAX_SEVERED, Request, State, Trouble};
use super::{Dispatch, Phase};

impl Dispatch {
    pub(super) fn handle_submit(&mut self, new: NewRequest, now: Moment, out: &mut Vec<Effect>) {
        // A key names one request for ever; were it to come twice, the first one keeps it.
        if self.requests.contains_key(&new.key) {
            return;
        }
        let key = new.key;
        let refusal = self.refuses_new().or_else(|| self.cannot_carry(&new));
        self.admit(new, now);
        if let Some(failure) = refusal {
            self.fail(key, failure, now, out);
            return;
        }
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        if let Some(worker) = self.pick(request) {
            self.send(key, worker, now, out);
        } else if self.is_full_for(request.bytes) {
            let retry_after_secs = self.retry_after_secs(now);
            self.fail(key, Failure::QueueFull { retry_after_secs }, now, out);
        } else {
            self.enqueue(key, now);
        }
    }

    /// What the provider's state says to any new request.
    fn refuses_new(&self) -> Option<Failure> {
        match self.phase {
            Phase::Deleted => Some(Failure::Deleted),
            Phase::Draining => Some(Failure::Draining),
            Phase::Open => (!self.settings.enabled).then_some(Failure::Disabled),
        }
    }

    /// What the workers say to this one, whether they have room or not.
    fn cannot_carry(&self, new: &NewRequest) -> Option<Failure> {
        if let Some(pin) = new.pin {
            let Some(worker) = self.workers.get(&pin).filter(|worker| !worker.draining) else {
                return Some(Failure::AffinityLost);
            };
            let too_old = new.needs_core1 && !worker.core1;
            return too_old.then_some(Failure::WorkerTooOld { worker: pin });
        }
        let group = self.models.find(&new.model).filter(|_| new.needs_core1)?;
        group
            .only_too_old()
            .map(|worker| Failure::WorkerTooOld { worker })
    }

    /// Makes the request known, waiting but not in the queue yet.
    fn admit(&mut self, new: NewRequest, now: Moment) {
        let model = self.models.intern(&new.model, now);
        self.models.hold(model);
        let request = Request {
            key: new.key,
            model,
            bytes: new.bytes,
            pin: new.pin,
            needs_core1: new.needs_core1,
            resendable: new.resendable,
            arrived: now,
            limits: Limits::new(&self.settings, &new.model),
            cold_waited: 0,
            requeues: 0,
            severed: 0,
            attempts: 0,
            failed_on: Vec::new(),
            trouble: None,
            state: State::Queued {
                since: now,
                cold_start: group.clock.cold(now),
            },
        };
        self.requests.insert(new.key, request);
    }

    fn is_full_for(&self, bytes: u64) -> bool {
        self.queue.order.len() >= self.settings.max_queue_len
            || self.queue.bytes.saturating_add(bytes) > self.settings.max_queue_bytes
    }

    pub(super) fn retry_after_secs(&self, now: Moment) -> u32 {
        let at_most = span(self.settings.queue_timeout);
        self.drain_rate
            .retry_after_secs(self.queue.order.len(), at_most, now)
    }

    pub(super) fn handle_cancel(
        &mut self,
        key: RequestKey,
        reason: CancelReason,
        now: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        match request.state {
            State::Queued { .. } => {
                self.dequeue(key, now);
                self.end_cancelled(key, reason, Stage::Queued, now, out);
            }
            State::Running { worker, .. } => {
                self.take_back(key, reason, out);
                self.end_cancelled(key, reason, Stage::InFlight, now, out);
                self.settle(worker, now, out);
            }
        }
    }

    fn end_cancelled(
        &mut self,
        request: RequestKey,
        reason: CancelReason,
        stage: Stage,
        now: Moment,
        out: &mut Vec<Effect>,
    ) {
        if reason == CancelReason::Admin {
            self.fail(request, Failure::CancelledByAdmin, now, out);
        } else {
            self.end(request);
            out.push(Effect::Cancelled {
                request,
                reason,
                stage,
            });
        }
    }

    /// Tells the worker of a running request to stop. Its slot is free at once, even if it never answers.
    pub(super) fn take_back(
        &mut self,
        key: RequestKey,
        reason: CancelReason,
        out: &mut Vec<Effect>,
    ) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let State::Running { worker, .. } = request.state else {
            return;
        };
        out.push(Effect::CancelSent {
            worker,
            request: key,
            attempt: request.attempts,
            reason,
        });
        self.take_from_worker(key);
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.handle_taken_back();
        }
    }

    /// Whether this is the sending that runs now; anything else is a late answer and means nothing.
    fn is_current(&self, worker: WorkerKey, key: RequestKey, attempt: u32) -> bool {
        self.requests.get(&key).is_some_and(|request| {
            let runs_there =
                matches!(request.state, State::Running { worker: on, .. } if on == worker);
            runs_there && request.attempts == attempt
        })
    }

    pub(super) fn handle_completed(
        &mut self,
        worker: WorkerKey,
        request: RequestKey,
        attempt: u32,
        now: Moment,
        out: &mut Vec<Effect>,
    ) {
        if !self.is_current(worker, request, attempt) {
            return;
        }
        self.take_from_worker(request);
        self.end(request);
        out.push(Effect::Finished {
            request,
            worker,
            attempt,
        });
        self.settle(worker, now, out);
    }

    pub(super) fn handle_attempt_failed(
        &mut self,
        (worker, key, attempt): (WorkerKey, RequestKey, u32),
        failure: AttemptFailure,
        now: Moment,
        out: &mut Vec<Effect>,
    ) {
        if !self.is_current(worker, key, attempt) {
            return;
        }
        self.take_from_worker(key);
        match failure {
            AttemptFailure::AtCapacity => self.note_at_capacity(worker, key, now),
            AttemptFailure::Draining => self.begin_drain(worker, now, out),
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset => {
                self.note_failed_on(worker, key, Trouble::Unreachable);
            }
            AttemptFailure::LoadFailed { code, retry_after } => {
                self.note_failed_on(worker, key, Trouble::Load { code, retry_after });
            }
            AttemptFailure::SeveredBySwap | AttemptFailure::Fatal => {}
        }
        match self.verdict(key, failure) {
            Err(failure) => {
                self.fail(key, failure, now, out);
                self.settle(worker, now, out);
            }
            Ok(reason) => {
                out.push(Effect::Requeued {
                    request: key,
                    reason,
                    attempt,
                });
                self.enqueue(key, now);
                // The worker's own slot goes by age like any other; only then does this request look elsewhere.
                self.settle(worker, now, out);
                self.place_if_queued(key, now, out);
                self.end_if_hopeless(key, now, out);
            }
        }
    }

    /// What changed while the request ran may have left it nobody.
    fn end_if_hopeless(&mut self, key: RequestKey, now: Moment, out: &mut Vec<Effect>) {
        if let Some(model) = self.requests.get(&key).map(|request| request.model) {
            self.fail_hopeless(model, now, out);
        }
    }

    fn note_at_capacity(&mut self, worker: WorkerKey, key: RequestKey, now: Moment) {
        let Some(model) = self.requests.get(&key).map(|request| request.model) else {
            return;
        };
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.handle_refusal();
        }
        self.refresh_rank(worker);
        self.note_refusal(worker, model, now);
    }

    fn note_failed_on(&mut self, worker: WorkerKey, key: RequestKey, trouble: Trouble) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let Some(announcement) = self.workers.get(&worker).map(|worker| worker.announcements)
        else {
            return;
        };
        // Failures of workers that are gone, or have announced themselves anew, no longer matter.
        request.failed_on.retain(|entry| {
            self.workers
                .get(&entry.worker)
                .is_some_and(|worker| worker.announcements == entry.announcement)
        });
        request.note_failed_on(FailedOn {
            worker,
            announcement,
        });
        request.trouble = Some(trouble);
    }

    /// Whether a request whose worker failed it waits again, and how it ends if not.
    fn verdict(
        &mut self,
        key: RequestKey,
        failure: AttemptFailure,
    ) -> Result<RequeueReason, Failure> {
        let refusal = self.refuses_waiting();
        let hopeless = self.is_hopeless(key);
        let Some(request) = self.requests.get_mut(&key) else {
            return Err(Failure::Fatal);
        };
        let (reason, otherwise) = match failure {
            AttemptFailure::Fatal => return Err(Failure::Fatal),
            AttemptFailure::AtCapacity => (RequeueReason::AtCapacity, Failure::RequeueExhausted),
            AttemptFailure::Draining if request.pin.is_some() => return Err(Failure::AffinityLost),
            AttemptFailure::Draining => (RequeueReason::Draining, Failure::RequeueExhausted),
            AttemptFailure::SeveredBySwap => {
                request.severed += 1;
                if request.severed > MAX_SEVERED {
                    return Err(Failure::SeveredBySwap);
                }
                (RequeueReason::SeveredBySwap, Failure::SeveredBySwap)
            }
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset => {
                if request.requeues == MAX_REQUEUES || request.pin.is_some() {
                    return Err(Failure::BackendUnreachable);
                }
                request.requeues += 1;
                let unreachable = failure == AttemptFailure::BackendUnreachable;
                let reason = if unreachable {
                    RequeueReason::BackendUnreachable
                } else {
                    RequeueReason::BackendReset
                };
                (reason, Failure::BackendUnreachable)
            }
            AttemptFailure::LoadFailed { code, retry_after } => {
                let failure = Failure::LoadFailed { code, retry_after };
                if !untried || request.pin.is_some() {
                    return Err(failure);
                }
                (RequeueReason::LoadFailed, failure)
            }
        };
        if !request.resendable {
            return Err(otherwise);
        }
        refusal.map_or(Ok(reason), Err)
    }

    /// What a provider without a queue says to a request that would have to wait again. A relay that shuts down still
    /// has its queue.
    fn refuses_waiting(&self) -> Option<Failure> {
        match self.phase {
            Phase::Deleted => Some(Failure::Deleted),
            Phase::Open | Phase::Draining => (!self.settings.enabled).then_some(Failure::Disabled),
        }
    }

    /// Requeues what a lost worker had and nobody had seen anything of. Returns whether it waits again.
    pub(super) fn requeue_lost(
        &mut self,
        key: RequestKey,
        reason: RequeueReason,
        now: Moment,
        out: &mut Vec<Effect>,
    ) -> bool {
        let refusal = self.refuses_waiting();
        let Some(request) = self.requests.get_mut(&key) else {
            return false;
        };
        let failure = if request.pin.is_some() {
            Some(Failure::AffinityLost)
        } else if request.requeues == MAX_REQUEUES || !request.resendable {
            Some(Failure::RequeueExhausted)
        } else {
            refusal
        };
        if let Some(failure) = failure {
            self.fail(key, failure, now, out);
            return false;
        }
        request.requeues += 1;
        out.push(Effect::Requeued {
            request: key,
            reason,
            attempt: request.attempts,
        });
        self.enqueue(key, now);
        true
    }

    pub(super) fn place_if_queued(&mut self, key: RequestKey, now: Moment, out: &mut Vec<Effect>) {
        if self.queue.order.contains(&key) {
            self.place(key, now, out);
        }
    }

    /// Ends requests of a model that no worker could ever serve as things stand: what needs `core1` where all workers
    /// are too old, and what could not be loaded where everybody has tried.
    pub(super) fn fail_hopeless(&mut self, model: ModelId, now: Moment, out: &mut Vec<Effect>) {
        let group = &self.models[model];
        let too_old = group.only_too_old();
        let mut failures = Vec::new();
        for (lane, waiting) in group.queue.open_lanes() {
            if let Some(worker) = too_old.filter(|_| lane.needs_core1) {
                failures.extend(
                    waiting
                        .keys()
                        .map(|key| (key, Failure::WorkerTooOld { worker })),
                );
            } else if !lane.failed_on.is_empty() && !self.has_candidate(model, lane) {
                failures.extend(waiting.keys().filter_map(|key| {
                    let trouble = self.requests.get(&key)?.trouble?;
                    trouble
                        .ends_without_candidate()
                        .then_some((key, trouble.failure()))
                }));
            }
        }
        failures.sort_unstable_by_key(|(key, _)| *key);
        for (key, failure) in failures {
            self.dequeue(key, now);
            self.fail(key, failure, now, out);
        }
    }

    /// Whether some worker that takes requests could serve this lane, now or when it has room.
    fn has_candidate(&self, model: ModelId, lane: &LaneKey) -> bool {
        let mut able = self.models[model].serving.able(lane.needs_core1);
        able.any(|key| {
            self.workers
                .get(&key)
                .is_some_and(|worker| lane.admits(worker))
        })
    }

    /// Ends a request, which is in no queue and on no worker any more, with a word to the client.
    pub(super) fn fail(
        &mut self,
        key: RequestKey,
        failure: Failure,
        now: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let (attempts, age) = (request.attempts, duration(now.since(request.arrived)));
        out.push(Effect::Fail {
            request: key,
            failure,
            attempts,
            age,
        });
        self.end(key);
    }

    /// Forgets a request, and its model if that was all.
    pub(super) fn end(&mut self, key: RequestKey) {
        if let Some(request) = self.requests.remove(&key) {
            self.models.let_go(request.model);
        }
    }
}
