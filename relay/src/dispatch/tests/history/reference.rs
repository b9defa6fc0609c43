//! The same rules once more, as plainly as possible: lists that are walked from end to end, clocks that are added up as
//! time passes. Slow, and independent of everything that makes the core fast.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::dispatch::{
    AttemptFailure, CancelReason, Effect, Event, Failure, Grant, LossCause, Model, NewRequest,
    NewWorker, RequestKey, RequeueReason, Settings, Stage, WorkerKey,
};

pub(super) struct Reference {
    pub(super) now: Duration,
    settings: Settings,
    deleted: bool,
    shutting_down: bool,
    pub(super) requests: BTreeMap<RequestKey, Request>,
    pub(super) workers: BTreeMap<WorkerKey, Worker>,
    turn: u64,
    out: Vec<Effect>,
}

pub(super) struct Request {
    new: NewRequest,
    limits: Settings,
    arrived: Duration,
    /// When this wait began.
    since: Duration,
    cold_waited: Duration,
    requeues: u32,
    severed: u32,
    pub(super) attempts: u32,
    failed_on: BTreeSet<WorkerKey>,
    trouble: Option<Failure>,
    pub(super) worker: Option<WorkerKey>,
}

pub(super) struct Worker {
    new: NewWorker,
    pub(super) models: BTreeSet<Model>,
    foreign: u32,
    taken_back: u32,
    pub(super) grant: Option<Grant>,
    pub(super) draining: bool,
    idle_told: bool,
    turn: u64,
}

impl Reference {
    pub(super) fn new(settings: Settings) -> Self {
        Self {
            now: Duration::ZERO,
            settings,
            deleted: false,
            shutting_down: false,
            requests: BTreeMap::new(),
            workers: BTreeMap::new(),
            turn: 0,
            out: Vec::new(),
        }
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let cold: Vec<_> = self.queued().filter(|key| !self.is_warm(*key)).collect();
        for key in cold {
            self.request(key).cold_waited += time;
        }
        self.now += time;
    }

    pub(super) fn handle(&mut self, event: Event) -> Vec<Effect> {
        self.expire();
        self.apply(event);
        self.settle();
        self.expire();
        std::mem::take(&mut self.out)
    }

    /// The earliest deadline, if nothing else happens before.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        self.requests
            .keys()
            .filter_map(|key| self.time_left(*key))
            .min()
            .map(|left| self.now + left)
    }

    /// How many requests of each model this worker could be sent, if it had room.
    pub(super) fn waiting_for(&self, worker: WorkerKey) -> BTreeMap<Model, u32> {
        let mut waiting = BTreeMap::new();
        for key in self.queued().filter(|key| self.could_serve(worker, *key)) {
            *waiting
                .entry(self.requests[&key].new.model.clone())
                .or_default() += 1;
        }
        waiting
    }

    pub(super) fn queued(&self) -> impl Iterator<Item = RequestKey> {
        self.requests
            .iter()
            .filter(|(_, r)| r.worker.is_none())
            .map(|(key, _)| *key)
    }

    pub(super) fn running_on(&self, worker: WorkerKey) -> impl Iterator<Item = RequestKey> {
        self.requests
            .iter()
            .filter(move |(_, r)| r.worker == Some(worker))
            .map(|(key, _)| *key)
    }

    fn request(&mut self, key: RequestKey) -> &mut Request {
        self.requests.get_mut(&key).expect("a live request")
    }

    fn own(&self, worker: WorkerKey) -> u32 {
        u32::try_from(self.running_on(worker).count()).unwrap()
    }

    fn load(&self, key: WorkerKey) -> u32 {
        let worker = &self.workers[&key];
        let others = if worker.new.core1 {
            worker.grant.map_or(worker.foreign, |grant| grant.others)
        } else {
            worker.foreign
        };
        self.own(key) + others
    }

    fn has_room(&self, key: WorkerKey) -> bool {
        let worker = &self.workers[&key];
        if worker.draining {
            false
        } else if worker.new.core1 {
            worker
                .grant
                .is_some_and(|grant| self.own(key) < grant.slots)
        } else {
            self.load(key) < worker.new.max_concurrent
        }
    }

    /// Whether the worker would be right for the request, room or not.
    fn could_serve(&self, key: WorkerKey, request: RequestKey) -> bool {
        let (worker, request) = (&self.workers[&key], &self.requests[&request]);
        !worker.draining
            && worker.models.contains(&request.new.model)
            && request.new.pin.is_none_or(|pin| pin == key)
            && (worker.new.core1 || !request.new.needs_core1)
            && !request.failed_on.contains(&key)
    }

    fn best_for(&self, request: RequestKey) -> Option<WorkerKey> {
        self.workers
            .iter()
            .filter(|(key, _)| self.could_serve(**key, request) && self.has_room(**key))
            .min_by_key(|(key, worker)| (self.load(**key), worker.turn, **key))
            .map(|(key, _)| *key)
    }

    fn is_warm(&self, request: RequestKey) -> bool {
        let model = &self.requests[&request].new.model;
        self.workers
            .values()
            .any(|worker| !worker.draining && worker.models.contains(model))
    }

    /// Brings together what fits, oldest first, and ends what has no hope left.
    fn settle(&mut self) {
        for key in self.queued().collect::<Vec<_>>() {
            if let Some(worker) = self.best_for(key) {
                self.send(key, worker);
            }
        }
        for key in self.queued().collect::<Vec<_>>() {
            if let Some(failure) = self.hopeless(key) {
                self.fail(key, failure);
            }
        }
        let idle: Vec<_> = self
            .workers
            .iter()
            .filter(|(key, worker)| worker.draining && !worker.idle_told && self.own(**key) == 0)
            .map(|(key, _)| *key)
            .collect();
        for worker in idle {
            self.workers.get_mut(&worker).unwrap().idle_told = true;
            self.out.push(Effect::DrainedIdle { worker });
        }
    }

    fn hopeless(&self, key: RequestKey) -> Option<Failure> {
        let request = &self.requests[&key];
        if let Some(pin) = request.new.pin {
            let there = self.workers.get(&pin).filter(|worker| !worker.draining);
            let Some(worker) = there else {
                return Some(Failure::AffinityLost);
            };
            let too_old = request.new.needs_core1 && !worker.new.core1;
            return too_old.then_some(Failure::WorkerTooOld { worker: pin });
        }
        let serving = || {
            self.workers
                .iter()
                .filter(|(_, w)| w.models.contains(&request.new.model))
        };
        if request.new.needs_core1
            && !serving().any(|(_, worker)| worker.new.core1)
            && let Some((worker, _)) = serving().find(|(_, worker)| !worker.draining)
        {
            return Some(Failure::WorkerTooOld { worker: *worker });
        }
        let failure = request.trouble?;
        let untried = self
            .workers
            .keys()
            .any(|worker| self.could_serve(*worker, key));
        (matches!(failure, Failure::LoadFailed { .. }) && !untried).then_some(failure)
    }

    fn send(&mut self, key: RequestKey, worker: WorkerKey) {
        self.turn += 1;
        self.workers.get_mut(&worker).unwrap().turn = self.turn;
        let now = self.now;
        let request = self.request(key);
        request.attempts += 1;
        request.worker = Some(worker);
        let (attempt, waited) = (request.attempts, now - request.since);
        self.out.push(Effect::Send {
            worker,
            request: key,
            attempt,
            waited,
        });
    }

    fn fail(&mut self, key: RequestKey, failure: Failure) {
        let request = self.requests.remove(&key).expect("a live request");
        let (attempts, age) = (request.attempts, self.now - request.arrived);
        self.out.push(Effect::Fail {
            request: key,
            failure,
            attempts,
            age,
        });
    }

    /// How long until its deadline, if the world stays as it is.
    fn time_left(&self, key: RequestKey) -> Option<Duration> {
        let request = &self.requests[&key];
        let limits = &request.limits;
        let age = self.now - request.arrived;
        let counted = age - request.cold_waited;
        let request_left = limits.request_timeout.saturating_sub(counted);
        if request.worker.is_some() {
            return Some(request_left);
        }
        let warm = self.is_warm(key);
        let Some(cold_timeout) = request.cold_timeout() else {
            let left = limits.queue_timeout.saturating_sub(age);
            return Some(if warm { left.min(request_left) } else { left });
        };
        let over = counted >= limits.queue_timeout || counted >= limits.request_timeout;
        if over || request.cold_waited >= cold_timeout {
            Some(Duration::ZERO)
        } else if warm {
            Some(request_left.min(limits.queue_timeout - counted))
        } else {
            Some(cold_timeout - request.cold_waited)
        }
    }

    /// Ends what is over: first what waits, then what runs, in the order in which it was due.
    fn expire(&mut self) {
        for key in self.queued().collect::<Vec<_>>() {
            if self.time_left(key) == Some(Duration::ZERO) {
                let failure = self.requests[&key].waiting_failure(self.now);
                self.fail(key, failure);
            }
        }
        loop {
            let running = self.requests.iter().filter(|(_, r)| r.worker.is_some());
            let over = running
                .filter(|(key, _)| self.time_left(**key) == Some(Duration::ZERO))
                .min_by_key(|(key, r)| {
                    (r.arrived + r.cold_waited + r.limits.request_timeout, **key)
                });
            let Some((key, _)) = over else { return };
            let key = *key;
            self.take_back(key, CancelReason::Timeout);
            self.fail(key, Failure::RequestTimeout);
            self.settle();
        }
    }

    fn take_back(&mut self, key: RequestKey, reason: CancelReason) {
        let request = self.request(key);
        let (worker, attempt) = (request.worker.take().unwrap(), request.attempts);
        self.workers.get_mut(&worker).unwrap().taken_back += 1;
        self.out.push(Effect::CancelSent {
            worker,
            request: key,
            attempt,
            reason,
        });
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Submit(new) => self.submit(new),
            Event::Cancel { request, reason } => self.cancel(request, reason),
            Event::WorkerJoined(new) => self.join(new),
            Event::WorkerLost {
                worker,
                started,
                cause,
            } => {
                let reason = match cause {
                    LossCause::Disconnected => RequeueReason::WorkerLost,
                    LossCause::HeartbeatTimeout => RequeueReason::HeartbeatTimeout,
                };
                self.workers.remove(&worker);
                for key in self.running_on(worker).collect::<Vec<_>>() {
                    if started.contains(&key) {
                        self.requests.remove(&key);
                        self.out.push(Effect::Severed {
                            request: key,
                            worker,
                        });
                    } else {
                        self.lose(key, reason);
                    }
                }
            }
            Event::ModelsUpdated {
                worker,
                models,
                load,
            } => {
                if let Some(load) = load {
                    self.report(worker, load);
                }
                let Some(known) = self.workers.get_mut(&worker) else {
                    return;
                };
                known.models = models.into_iter().collect();
                for request in self.requests.values_mut() {
                    if known.models.contains(&request.new.model) {
                        request.failed_on.remove(&worker);
                    }
                }
            }
            Event::LoadReported { worker, load } => self.report(worker, load),
            Event::Granted { worker, grant } => {
                if let Some(worker) = self.workers.get_mut(&worker).filter(|w| w.new.core1) {
                    worker.grant = Some(grant);
                }
            }
            Event::Completed {
                worker,
                request,
                attempt,
            } => {
                if self.is_current(worker, request, attempt) {
                    self.requests.remove(&request);
                    self.out.push(Effect::Finished {
                        request,
                        worker,
                        attempt,
                    });
                }
            }
            Event::AttemptFailed {
                worker,
                request,
                attempt,
                failure,
            } => {
                if self.is_current(worker, request, attempt) {
                    self.attempt_failed(worker, request, failure);
                }
            }
            Event::WorkerDraining { worker } => self.drain(worker),
            Event::SettingsChanged(settings) => {
                self.settings = settings;
                if !self.settings.enabled {
                    self.fail_queued(Failure::Disabled);
                }
            }
            Event::Deleted => {
                self.deleted = true;
                self.fail_queued(Failure::Deleted);
                self.workers
                    .values_mut()
                    .for_each(|worker| worker.draining = true);
            }
            Event::DrainBegun => self.shutting_down = true,
            Event::DrainDeadline => {
                self.shutting_down = true;
                self.fail_queued(Failure::Draining);
                for key in self.requests.keys().copied().collect::<Vec<_>>() {
                    self.take_back(key, CancelReason::DrainDeadline);
                    self.fail(key, Failure::Draining);
                }
            }
            Event::Tick => {}
        }
    }

    fn submit(&mut self, new: NewRequest) {
        let key = new.key;
        let queued: Vec<_> = self.queued().collect();
        let bytes: u64 = queued.iter().map(|key| self.requests[key].new.bytes).sum();
        let full = queued.len() >= self.settings.max_queue_len
            || bytes + new.bytes > self.settings.max_queue_bytes;
        self.requests.insert(
            key,
            Request {
                new,
                limits: self.settings.clone(),
                arrived: self.now,
                since: self.now,
                cold_waited: Duration::ZERO,
                requeues: 0,
                severed: 0,
                attempts: 0,
                failed_on: BTreeSet::new(),
                trouble: None,
                worker: None,
            },
        );
        let refused = if self.deleted {
            Some(Failure::Deleted)
        } else if self.shutting_down {
            Some(Failure::Draining)
        } else if !self.settings.enabled {
            Some(Failure::Disabled)
        } else {
            self.hopeless(key)
        };
        let no_place = || {
            let full = full && self.best_for(key).is_none();
            full.then_some(Failure::QueueFull {
                retry_after_secs: 0,
            })
        };
        if let Some(failure) = refused.or_else(no_place) {
            self.fail(key, failure);
        }
    }

    fn cancel(&mut self, request: RequestKey, reason: CancelReason) {
        let Some(stage) = self.requests.get(&request).map(|r| match r.worker {
            Some(_) => Stage::InFlight,
            None => Stage::Queued,
        }) else {
            return;
        };
        if stage == Stage::InFlight {
            self.take_back(request, reason);
        }
        if reason == CancelReason::Admin {
            self.fail(request, Failure::CancelledByAdmin);
        } else {
            self.requests.remove(&request);
            self.out.push(Effect::Cancelled {
                request,
                reason,
                stage,
            });
        }
    }

    fn join(&mut self, new: NewWorker) {
        let worker = Worker {
            models: new.models.iter().cloned().collect(),
            foreign: new.load,
            taken_back: 0,
            grant: None,
            draining: self.deleted,
            idle_told: false,
            turn: 0,
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

    fn fail_queued(&mut self, failure: Failure) {
        for key in self.queued().collect::<Vec<_>>() {
            self.fail(key, failure);
        }
    }

    fn is_current(&self, worker: WorkerKey, request: RequestKey, attempt: u32) -> bool {
        let request = self.requests.get(&request);
        request.is_some_and(|r| r.worker == Some(worker) && r.attempts == attempt)
    }

    /// What a provider says to a request that would have to wait again.
    fn no_queue(&self) -> Option<Failure> {
        let disabled = (!self.settings.enabled).then_some(Failure::Disabled);
        if self.deleted {
            Some(Failure::Deleted)
        } else {
            disabled
        }
    }

    fn lose(&mut self, key: RequestKey, reason: RequeueReason) {
        let request = &self.requests[&key];
        let ended = if request.new.pin.is_some() {
            Some(Failure::AffinityLost)
        } else if request.requeues == 3 || !request.new.resendable {
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
        let now = self.now;
        let request = self.request(key);
        request.worker = None;
        request.since = now;
        let attempt = request.attempts;
        self.out.push(Effect::Requeued {
            request: key,
            reason,
            attempt,
        });
    }

    fn attempt_failed(&mut self, worker: WorkerKey, key: RequestKey, failure: AttemptFailure) {
        self.request(key).worker = None;
        match failure {
            AttemptFailure::AtCapacity => {
                let own = self.own(worker);
                let known = self.workers.get_mut(&worker).unwrap();
                match &mut known.grant {
                    Some(grant) if known.new.core1 => grant.slots = grant.slots.min(own),
                    _ => {
                        let free = known.new.max_concurrent.saturating_sub(own);
                        known.foreign = known.foreign.max(free);
                    }
                }
                self.again(key, RequeueReason::AtCapacity, Failure::RequeueExhausted);
            }
            AttemptFailure::Draining => {
                self.drain(worker);
                self.again(key, RequeueReason::Draining, Failure::RequeueExhausted);
            }
            AttemptFailure::SeveredBySwap => {
                self.request(key).severed += 1;
                if self.requests[&key].severed > 3 {
                    self.fail(key, Failure::SeveredBySwap);
                } else {
                    self.again(key, RequeueReason::SeveredBySwap, Failure::SeveredBySwap);
                }
            }
            AttemptFailure::BackendUnreachable | AttemptFailure::BackendReset => {
                let reason = if failure == AttemptFailure::BackendReset {
                    RequeueReason::BackendReset
                } else {
                    RequeueReason::BackendUnreachable
                };
                let failure = Failure::BackendUnreachable;
                let request = self.request(key);
                request.failed_on.insert(worker);
                request.trouble = Some(failure);
                if request.requeues == 3 || request.new.pin.is_some() {
                    self.fail(key, failure);
                } else {
                    request.requeues += 1;
                    self.again(key, reason, failure);
                }
            }
            AttemptFailure::LoadFailed { code, retry_after } => {
                let failure = Failure::LoadFailed { code, retry_after };
                let request = self.request(key);
                request.failed_on.insert(worker);
                request.trouble = Some(failure);
                let pinned = request.new.pin.is_some();
                let untried = self
                    .workers
                    .keys()
                    .any(|worker| self.could_serve(*worker, key));
                if pinned || !untried {
                    self.fail(key, failure);
                } else {
                    self.again(key, RequeueReason::LoadFailed, failure);
                }
            }
            AttemptFailure::Fatal => self.fail(key, Failure::Fatal),
        }
    }

    fn again(&mut self, key: RequestKey, reason: RequeueReason, otherwise: Failure) {
        let new = &self.requests[&key].new;
        let stranded = new.pin.is_some_and(|pin| self.workers[&pin].draining);
        let ended = if new.resendable {
            self.no_queue()
                .or(stranded.then_some(Failure::AffinityLost))
        } else {
            Some(otherwise)
        };
        match ended {
            Some(failure) => self.fail(key, failure),
            None => self.requeue(key, reason),
        }
    }
}

impl Request {
    fn cold_timeout(&self) -> Option<Duration> {
        let declared = self.limits.cold_models.contains(&self.new.model);
        let default = self.limits.queue_timeout.max(Duration::from_secs(300));
        self.limits.cold_timeout.or(declared.then_some(default))
    }

    /// How its wait ends.
    fn waiting_failure(&self, now: Duration) -> Failure {
        let counted = now - self.arrived - self.cold_waited;
        let limits = &self.limits;
        if let Some(trouble) = self.trouble {
            trouble
        } else if counted >= limits.request_timeout && limits.request_timeout < limits.queue_timeout
        {
            Failure::RequestTimeout
        } else {
            Failure::QueueTimeout {
                retry_after_secs: 0,
            }
        }
    }
}
