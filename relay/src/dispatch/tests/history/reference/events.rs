//! The direct consequence of each event in the reference model. `settle` and `expire` find the rest by a full scan.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use super::{Multiplexer, Reference, Request, Worker};
use crate::dispatch::{
    AttemptFailure, CancelReason, Effect, Event, Failure, LossCause, Model, NewRequest, NewWorker, RequestKey,
    RequeueReason, Stage, WorkerKey,
};

impl Reference {
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Submit(new) => self.submit(new),
            Event::Cancel { request, reason } => self.cancel(request, reason),
            Event::WorkerJoined(new) => self.join(new),
            Event::WorkerLost { worker, started, cause } => self.lost(worker, &started, cause),
            Event::ModelsUpdated { worker, models, failing, load } => self.update(worker, models, failing, load),
            Event::LoadReported { worker, load } => self.report(worker, load),
            Event::Granted { worker, grant } => {
                if let Some(known) = self.workers.get_mut(&worker).filter(|w| w.new.core1) {
                    known.grant = Some(grant);
                    let running = self.requests.values_mut().filter(|request| request.worker == Some(worker));
                    running.for_each(|request| request.granted_since = true);
                }
            }
            Event::GatesSet { worker, sums, gates } => self.set_gates(worker, sums, gates),
            Event::SlotsReported { worker, slots } => self.set_slots(worker, slots),
            Event::Begun { worker, request, attempt } => {
                if self.is_current(worker, request, attempt) {
                    self.request(request).cost = 0;
                }
            }
            Event::Used { request, usage } => {
                if self.requests.get(&request).is_some_and(|request| request.worker.is_some()) {
                    self.use_tokens(request, usage);
                }
            }
            Event::HomesReported { worker, homes, backlog } => self.report_homes(worker, &homes, backlog),
            Event::Completed { worker, request, attempt, cached, usage } => {
                if self.is_current(worker, request, attempt) {
                    usage.iter().for_each(|usage| self.use_tokens(request, *usage));
                    self.note_cached(worker, request, cached);
                    self.requests.remove(&request);
                    self.out.push(Effect::Finished { request, worker, attempt });
                }
            }
            Event::AttemptFailed { worker, request, attempt, failure } => {
                if self.is_current(worker, request, attempt) {
                    self.attempt_failed(worker, request, failure);
                }
            }
            Event::Silent { request } => self.silent(request),
            Event::WorkerSucceeded { older, newer } => {
                if self.workers.get(&newer).is_some_and(|worker| worker.new.core1 && !worker.draining) {
                    let pinned = self.requests.values_mut().filter(|request| request.new.pin == Some(older));
                    pinned.for_each(|request| request.new.pin = Some(newer));
                }
            }
            Event::WorkerDraining { worker } => self.drain(worker),
            Event::SettingsChanged(settings) => {
                self.settings = settings;
                self.homes.limit(self.settings.max_homes);
                if !self.settings.enabled {
                    self.fail_queued(&Failure::Disabled);
                }
            }
            Event::Deleted => {
                self.deleted = true;
                self.fail_queued(&Failure::Deleted);
                self.workers.values_mut().for_each(|worker| worker.draining = true);
            }
            Event::DrainBegun => self.shutting_down = true,
            Event::DrainDeadline => {
                self.shutting_down = true;
                self.fail_queued(&Failure::Draining);
                for key in self.requests.keys().copied().collect::<Vec<_>>() {
                    self.revoke(key, CancelReason::DrainDeadline);
                    self.fail(key, Failure::Draining);
                }
            }
            Event::Tick => {}
        }
    }

    fn lost(&mut self, worker: WorkerKey, started: &HashSet<RequestKey>, cause: LossCause) {
        let reason = match cause {
            LossCause::Disconnected => RequeueReason::WorkerLost,
            LossCause::HeartbeatTimeout => RequeueReason::HeartbeatTimeout,
        };
        if let Some(lost) = self.workers.remove(&worker) {
            self.note_left(&lost);
        }
        for key in self.running_on(worker).collect::<Vec<_>>() {
            if started.contains(&key) {
                self.requests.remove(&key);
                self.out.push(Effect::Severed { request: key, worker });
            } else {
                self.lose(key, reason);
            }
        }
    }

    fn update(&mut self, worker: WorkerKey, models: Vec<Model>, failing: Vec<Model>, load: Option<u32>) {
        if let Some(load) = load {
            self.report(worker, load);
        }
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let before = std::mem::replace(&mut known.models, models.into_iter().collect());
        known.announced.clear();
        known.announce(known.models.clone());
        known.failing = failing.into_iter().collect();
        for request in self.requests.values_mut() {
            if known.models.contains(&request.new.model) {
                request.failed_on.remove(&worker);
            }
        }
        if before.iter().any(|model| !known.models.contains(model)) {
            self.lose_caches(worker, None);
        }
    }

    fn submit(&mut self, new: NewRequest) {
        let key = new.key;
        let in_slot = self.multiplexers(&new.model).next().is_some();
        let reserved = self.is_full_of_unserved(&new.model);
        let (flow, class) = self.share_of(&new);
        self.requests.insert(
            key,
            Request {
                new,
                limits: self.settings.clone(),
                arrived: self.now,
                since: self.now,
                cold_waited: Duration::ZERO,
                in_slot,
                requeues: 0,
                severed: 0,
                attempts: 0,
                granted_since: false,
                failed_on: BTreeSet::new(),
                failures: BTreeSet::new(),
                silent: BTreeSet::new(),
                trouble: None,
                worker: None,
                believed: 0,
                cost: 0,
                overtaken: 0,
                flow,
                class,
                charged: 0,
                is_estimated: false,
            },
        );
        let refused = if self.deleted {
            Some(Failure::Deleted)
        } else if self.shutting_down {
            Some(Failure::Draining)
        } else if !self.settings.enabled {
            Some(Failure::Disabled)
        } else {
            self.unservable(key)
        };
        let is_full = self.is_full(key);
        let no_place = || {
            let full = (reserved || is_full) && self.best_for(key).is_none();
            full.then_some(Failure::QueueFull { retry_after_secs: 1 })
        };
        let no_share = || {
            let percent = self.share_is_full(key, class).filter(|_| self.best_for(key).is_none())?;
            Some(Failure::QueueShareFull { percent })
        };
        let no_load = || self.best_for(key).is_none().then(|| self.no_load(key)).flatten();
        if let Some(failure) = refused.or_else(no_load).or_else(no_place).or_else(no_share) {
            self.fail(key, failure);
            return;
        }
        while self.best_for(key).is_none()
            && let Some(displaced) = self.displaced_by(key)
        {
            self.fail(displaced, Failure::Displaced { retry_after_secs: 1 });
        }
        self.arrive(key);
    }

    /// True if no worker serves the model, and such requests fill all but a tenth of the queue although workers are
    /// connected.
    fn is_full_of_unserved(&self, model: &Model) -> bool {
        let staying = || self.workers.values().filter(|worker| !worker.draining);
        let unserved =
            |model: &Model| !staying().any(|worker| worker.models.contains(model) && worker.is_open_for(model));
        let waiting = self.queued().filter(|key| unserved(&self.requests[key].new.model)).count();
        let most = self.settings.max_queue_len;
        staying().next().is_some() && unserved(model) && waiting >= most - most / 10
    }

    fn cancel(&mut self, request: RequestKey, reason: CancelReason) {
        let Some(stage) = self.requests.get(&request).map(|r| match r.worker {
            Some(_) => Stage::InFlight,
            None => Stage::Queued,
        }) else {
            return;
        };
        if stage == Stage::InFlight {
            self.revoke(request, reason);
        }
        if reason == CancelReason::Admin {
            self.fail(request, Failure::CancelledByAdmin);
        } else {
            self.requests.remove(&request);
            self.out.push(Effect::Cancelled { request, reason, stage });
        }
    }

    fn join(&mut self, new: NewWorker) {
        self.note_joined(&new);
        let worker = Worker {
            models: new.models.iter().cloned().collect(),
            failing: new.failing.iter().cloned().collect(),
            foreign: new.load,
            taken_back: 0,
            grant: None,
            draining: self.deleted,
            is_idle_reported: false,
            turn: 0,
            multiplexer: new.multiplexer.clone().map(|new| Multiplexer::new(new, self.now)),
            announcements: 0,
            announced: new.models.iter().map(|model| (model.clone(), 0)).collect(),
            trust: 1000,
            backlog_of_others: 0,
            has_reported: false,
            new,
        };
        self.workers.insert(worker.new.key, worker);
    }

    fn report(&mut self, key: WorkerKey, load: u32) {
        let own = self.own(key);
        if let Some(worker) = self.workers.get_mut(&key) {
            worker.foreign = load.saturating_sub(own).saturating_sub(worker.taken_back);
            worker.taken_back = 0;
        }
    }

    fn drain(&mut self, worker: WorkerKey) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.draining = true;
        }
    }

    fn fail_queued(&mut self, failure: &Failure) {
        for key in self.queued().collect::<Vec<_>>() {
            self.fail(key, failure.clone());
        }
    }

    fn is_current(&self, worker: WorkerKey, request: RequestKey, attempt: u32) -> bool {
        let request = self.requests.get(&request);
        request.is_some_and(|r| r.worker == Some(worker) && r.attempts == attempt)
    }

    /// Returns the provider's failure for a request that would have to wait again.
    fn no_queue(&self) -> Option<Failure> {
        let disabled = (!self.settings.enabled).then_some(Failure::Disabled);
        if self.deleted { Some(Failure::Deleted) } else { disabled }
    }

    fn lose(&mut self, key: RequestKey, reason: RequeueReason) {
        let request = &self.requests[&key];
        let is_there = |pin: WorkerKey| self.workers.get(&pin).is_some_and(|worker| !worker.draining);
        let ended = if request.new.pin.is_some_and(|pin| !is_there(pin)) {
            Some(Failure::AffinityLost)
        } else if request.requeues == 3 {
            Some(Failure::RequeueExhausted)
        } else {
            self.no_queue()
        };
        match ended {
            Some(failure) => self.fail(key, failure),
            None => {
                self.request(key).requeues += 1;
                self.requeue(key, reason);
            }
        }
    }

    fn requeue(&mut self, key: RequestKey, reason: RequeueReason) {
        self.return_charge(key);
        let now = self.now;
        let request = self.request(key);
        request.worker = None;
        request.since = now;
        self.requeued.insert(key);
        let request = &self.requests[&key];
        let attempt = request.attempts;
        self.out.push(Effect::Requeued { request: key, reason, attempt });
    }

    fn attempt_failed(&mut self, worker: WorkerKey, key: RequestKey, failure: AttemptFailure) {
        self.request(key).worker = None;
        match failure {
            AttemptFailure::AtCapacity => {
                self.refused(worker, key);
                self.again(key, RequeueReason::AtCapacity);
            }
            AttemptFailure::Draining => {
                self.drain(worker);
                self.again(key, RequeueReason::Draining);
            }
            AttemptFailure::SeveredBySwap => {
                self.request(key).severed += 1;
                if self.requests[&key].severed > 3 {
                    self.fail(key, Failure::SeveredBySwap);
                } else {
                    self.again(key, RequeueReason::SeveredBySwap);
                }
            }
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset => {
                let reason = if failure == AttemptFailure::BackendReset {
                    RequeueReason::BackendReset
                } else {
                    RequeueReason::BackendUnreachable
                };
                let failure = Failure::BackendUnreachable;
                let model = self.request(key).new.model.clone();
                let multiplexer = self.workers.get(&worker).and_then(|worker| worker.multiplexer.as_ref());
                // A worker that has closed the gate since will be ready again before it receives requests.
                let is_shut = multiplexer.is_some_and(|multiplexer| multiplexer.gate(&model).is_none());
                let request = self.request(key);
                request.trouble = Some(failure.clone());
                if !is_shut {
                    request.failed_on.insert(worker);
                    self.note_failure(worker, key);
                }
                let request = self.request(key);
                if request.requeues == 3 || request.new.pin.is_some() {
                    self.fail(key, failure);
                } else {
                    request.requeues += 1;
                    self.again(key, reason);
                }
            }
            AttemptFailure::LoadFailed { code, retry_after, report } => {
                let failure = Failure::LoadFailed { code, retry_after, report };
                let request = self.request(key);
                request.failed_on.insert(worker);
                request.trouble = Some(failure.clone());
                self.note_failure(worker, key);
                let request = &self.requests[&key];
                let pinned = request.new.pin.is_some();
                let untried = self.workers.keys().any(|worker| self.could_serve(*worker, key));
                if pinned || !untried {
                    self.fail(key, failure);
                } else {
                    self.again(key, RequeueReason::LoadFailed);
                }
            }
            AttemptFailure::Fatal(report) => self.fail(key, Failure::Fatal(report)),
        }
    }

    fn silent(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get(&key) else { return };
        let Some(worker) = request.worker.filter(|_| request.new.pin.is_none() && request.requeues < 3) else { return };
        let except = request.silent.iter().copied().chain([worker]).collect();
        let Some(to) = self.best_except(key, &except).filter(|_| self.no_queue().is_none()) else { return };
        self.revoke(key, CancelReason::Timeout);
        let request = self.request(key);
        request.requeues += 1;
        request.silent.insert(worker);
        self.requeue(key, RequeueReason::FirstByteTimeout);
        self.requeued.clear();
        self.send(key, to);
    }

    /// Handles a worker's refusal of a request for which it has no slot.
    fn refused(&mut self, worker: WorkerKey, key: RequestKey) {
        let own = self.own(worker);
        let model = self.requests[&key].new.model.clone();
        let own_of_model = self.own_of_model(worker, &model);
        let granted_since = self.requests[&key].granted_since;
        let known = self.workers.get_mut(&worker).unwrap();
        match &mut known.grant {
            Some(_) if known.new.core1 && granted_since => {}
            _ if known.multiplexer.is_some() => {
                let multiplexer = known.multiplexer.as_mut().unwrap();
                let id = multiplexer.id(&model);
                if let Some(gate) = multiplexer.gates.get_mut(&id) {
                    gate.slots = gate.slots.min(own_of_model);
                }
            }
            Some(grant) if known.new.core1 => grant.slots = grant.slots.min(own),
            _ => {
                let free = known.new.max_concurrent.saturating_sub(own);
                known.foreign = known.foreign.max(free);
            }
        }
    }

    fn again(&mut self, key: RequestKey, reason: RequeueReason) {
        let new = &self.requests[&key].new;
        let stranded = new.pin.is_some_and(|pin| self.workers.get(&pin).is_none_or(|worker| worker.draining));
        match self.no_queue().or(stranded.then_some(Failure::AffinityLost)) {
            Some(failure) => self.fail(key, failure),
            None => self.requeue(key, reason),
        }
    }
}
