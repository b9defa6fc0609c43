//! The same rules again, as plainly as possible: lists that are walked from end to end, clocks that are summed up as
//! time passes. Slow, and independent of everything that makes the core fast.

mod events;
mod fair;
mod homes;
mod multiplexer;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use self::fair::{Accounts, Flow};
pub(super) use self::homes::process;
use self::homes::{Homes, changes_servers};
use self::multiplexer::{Choice, Multiplexer};
use crate::dispatch::{
    CancelReason, Class, Effect, Event, Failure, Grant, Model, NewRequest, NewWorker, RequestKey, Settings, WorkerKey,
};

#[derive(Clone)]
pub(super) struct Reference {
    pub(super) now: Duration,
    pub(super) settings: Settings,
    deleted: bool,
    shutting_down: bool,
    pub(super) requests: BTreeMap<RequestKey, Request>,
    pub(super) workers: BTreeMap<WorkerKey, Worker>,
    turn: u64,
    /// The assigned worker of each model, and the one whose assignment expired before.
    choices: BTreeMap<Model, Choice>,
    passed_over: BTreeMap<Model, WorkerKey>,
    /// The multiplexer whose slots this event was about.
    just_notified: Option<WorkerKey>,
    homes: Homes,
    accounts: Accounts,
    /// The requests that this event put back into the queue.
    requeued: BTreeSet<RequestKey>,
    /// The order in which the core sends requests, where two orders are right.
    order: Option<Vec<RequestKey>>,
    out: Vec<Effect>,
}

#[derive(Clone)]
pub(super) struct Request {
    pub(super) new: NewRequest,
    limits: Settings,
    arrived: Duration,
    /// The time when this wait began.
    since: Duration,
    cold_waited: Duration,
    /// True if a multiplexer had the model when the request arrived.
    in_slot: bool,
    requeues: u32,
    severed: u32,
    pub(super) attempts: u32,
    /// True if its worker has sent a grant since the attempt.
    granted_since: bool,
    failed_on: BTreeSet<WorkerKey>,
    /// The same with those that are forgiven, as they were when it last failed.
    failures: BTreeSet<(WorkerKey, u64)>,
    silent: BTreeSet<WorkerKey>,
    trouble: Option<Failure>,
    pub(super) worker: Option<WorkerKey>,
    /// The bytes of its prompt believed to be in its worker's cache.
    believed: u64,
    /// The bytes that its worker has yet to compute.
    cost: u64,
    /// The number of requests that were sent before it although they came later.
    pub(super) overtaken: u32,
    flow: Flow,
    class: Class,
    /// The service that its key was charged for this attempt.
    charged: u64,
    is_estimated: bool,
}

#[derive(Clone)]
pub(super) struct Worker {
    pub(super) new: NewWorker,
    pub(super) models: BTreeSet<Model>,
    failing: BTreeSet<Model>,
    foreign: u32,
    taken_back: u32,
    pub(super) grant: Option<Grant>,
    pub(super) draining: bool,
    is_idle_reported: bool,
    turn: u64,
    multiplexer: Option<Multiplexer>,
    announcements: u64,
    /// The last announcement of each model.
    announced: BTreeMap<Model, u64>,
    /// In permille.
    pub(super) trust: u64,
    backlog_of_others: u64,
    has_reported: bool,
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
            choices: BTreeMap::new(),
            passed_over: BTreeMap::new(),
            just_notified: None,
            homes: Homes::default(),
            accounts: Accounts::default(),
            requeued: BTreeSet::new(),
            order: None,
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

    /// Returns the effects that were due before the event, and the event's own. `order` is that of the core's effects.
    pub(super) fn handle(&mut self, event: Event, order: &[Effect]) -> (Vec<Effect>, Vec<Effect>) {
        self.raise_floor();
        self.expire();
        let due = std::mem::take(&mut self.out);
        let (changes_servers, had_failing) = (changes_servers(&event), self.has_failing());
        self.apply(event);
        if changes_servers && (had_failing || self.has_failing()) {
            self.order = Some(order.iter().filter_map(sent).collect());
        }
        self.settle();
        (self.order, self.requeued) = (None, BTreeSet::new());
        self.expire();
        self.choose();
        (due, std::mem::take(&mut self.out))
    }

    /// Returns the earliest deadline, if no other event happens before.
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        let left = self.requests.keys().filter_map(|key| self.time_left(*key)).min().map(|left| self.now + left);
        left.into_iter().chain(self.choices.values().map(|choice| choice.until)).min()
    }

    /// Returns the number of requests of each model that this worker could be sent if it had room, and for a
    /// multiplexer their highest class.
    pub(super) fn waiting_for(&self, worker: WorkerKey) -> BTreeMap<Model, (u32, Class)> {
        let reported = self.reported_to(worker).into_iter().map(|(model, requests)| {
            let class = requests.iter().map(|key| self.requests[key].class).min();
            let count = (requests.len() as u32).min(self.max_demand(worker, &model));
            (model, (count, class.filter(|_| self.has_multiplexer(worker)).unwrap_or_default()))
        });
        reported.collect()
    }

    /// Returns the requests of each model that this worker could be sent if it had room, and is told of.
    pub(super) fn reported_to(&self, worker: WorkerKey) -> BTreeMap<Model, Vec<RequestKey>> {
        let mut waiting: BTreeMap<Model, Vec<RequestKey>> = BTreeMap::new();
        for key in self.queued().filter(|key| self.could_serve(worker, *key) && !self.passes_over(worker, *key)) {
            if self.reports_demand(worker, key) {
                waiting.entry(self.requests[&key].new.model.clone()).or_default().push(key);
            }
        }
        waiting
    }

    /// The number of keys with waiting requests.
    pub(super) fn keys_waiting(&self) -> usize {
        let shares = self.queued().filter_map(|key| self.requests[&key].new.share.as_ref());
        shares.map(|share| &share.key).collect::<BTreeSet<_>>().len()
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.queued().map(|key| self.requests[&key].new.bytes).sum()
    }

    /// Returns every model that a worker serves or a request names.
    pub(super) fn models(&self) -> BTreeSet<Model> {
        let requested = self.requests.values().map(|request| &request.new.model);
        let served = self.workers.values().flat_map(|worker| &worker.models);
        requested.chain(served).cloned().collect()
    }

    pub(super) fn queued(&self) -> impl Iterator<Item = RequestKey> {
        self.requests.iter().filter(|(_, r)| r.worker.is_none()).map(|(key, _)| *key)
    }

    pub(super) fn running_on(&self, worker: WorkerKey) -> impl Iterator<Item = RequestKey> {
        self.requests.iter().filter(move |(_, r)| r.worker == Some(worker)).map(|(key, _)| *key)
    }

    fn request(&mut self, key: RequestKey) -> &mut Request {
        self.requests.get_mut(&key).expect("a live request")
    }

    fn own(&self, worker: WorkerKey) -> u32 {
        u32::try_from(self.running_on(worker).count()).unwrap()
    }

    fn load(&self, key: WorkerKey, model: &Model) -> u32 {
        if let Some(load) = self.load_of_model(key, model) {
            return load;
        }
        let worker = &self.workers[&key];
        let others =
            if worker.new.core1 { worker.grant.map_or(worker.foreign, |grant| grant.others) } else { worker.foreign };
        self.own(key) + others
    }

    pub(super) fn has_room(&self, key: WorkerKey, model: &Model) -> bool {
        let worker = &self.workers[&key];
        if worker.draining {
            false
        } else if let Some(multiplexer) = &worker.multiplexer {
            multiplexer.gate(model).is_some_and(|gate| self.own_of_model(key, model) < gate.slots)
        } else if worker.new.core1 {
            worker.grant.is_some_and(|grant| self.own(key) < grant.slots)
        } else {
            self.load(key, model) < worker.new.max_concurrent
        }
    }

    /// True if the worker could serve the request, with or without room.
    pub(super) fn could_serve(&self, key: WorkerKey, request: RequestKey) -> bool {
        let (worker, request) = (&self.workers[&key], &self.requests[&request]);
        !worker.draining
            && worker.models.contains(&request.new.model)
            && request.new.pin.is_none_or(|pin| pin == key)
            && (worker.new.core1 || !request.new.needs_core1)
            && !request.failed_on.contains(&key)
            && request.new.allowed.as_ref().is_none_or(|allowed| allowed.contains(&worker.id(&request.new.model)))
    }

    /// True if the worker fails the request's model, and another one serves it without failing.
    pub(super) fn passes_over(&self, key: WorkerKey, request: RequestKey) -> bool {
        self.passes_over_except(key, request, &BTreeSet::new())
    }

    fn passes_over_except(&self, key: WorkerKey, request: RequestKey, except: &BTreeSet<WorkerKey>) -> bool {
        let model = &self.requests[&request].new.model;
        let is_sound = |(key, worker): (&WorkerKey, &Worker)| {
            !except.contains(key)
                && self.could_serve(*key, request)
                && worker.is_open_for(model)
                && !worker.failing.contains(model)
        };
        self.requests[&request].new.pin.is_none() && self.fails(key, request) && self.workers.iter().any(is_sound)
    }

    /// True if the worker's backend fails the model that a request names.
    pub(super) fn fails(&self, key: WorkerKey, request: RequestKey) -> bool {
        let model = self.requests.get(&request).map(|request| &request.new.model);
        let worker = self.workers.get(&key);
        worker.zip(model).is_some_and(|(worker, model)| worker.failing.contains(model))
    }

    /// True if a request waits for a sound worker while one that fails its model has room.
    pub(super) fn waits_with_failing_worker(&self) -> bool {
        let passed_over = |request: RequestKey, key: WorkerKey| {
            self.has_room(key, &self.requests[&request].new.model) && self.passes_over(key, request)
        };
        self.queued().any(|request| self.workers.keys().any(|key| passed_over(request, *key)))
    }

    fn best_for(&self, request: RequestKey) -> Option<WorkerKey> {
        self.best_except(request, &BTreeSet::new())
    }

    fn best_except(&self, request: RequestKey, except: &BTreeSet<WorkerKey>) -> Option<WorkerKey> {
        let model = &self.requests[&request].new.model;
        let able = self
            .workers
            .keys()
            .copied()
            .filter(|key| self.could_serve(*key, request) && self.has_room(*key, model))
            .filter(|key| !except.contains(key) && !self.passes_over_except(*key, request, except));
        self.best_of(request, &able.collect::<Vec<_>>())
    }

    fn is_warm(&self, request: RequestKey) -> bool {
        let model = &self.requests[&request].new.model;
        let serves = |worker: &Worker| worker.models.contains(model) && worker.is_open_for(model);
        self.workers.values().any(|worker| !worker.draining && serves(worker)) && !self.is_to_be_loaded(request)
    }

    /// Matches requests and workers, in the fair order, and ends requests that cannot be served.
    fn settle(&mut self) {
        loop {
            let able: Vec<_> = self.queued().filter(|key| self.best_for(*key).is_some()).collect();
            let Some(key) = self.fairest(&able) else { break };
            self.place(key);
        }
        for key in self.queued().collect::<Vec<_>>() {
            if let Some(failure) = self.unservable(key) {
                self.fail(key, failure);
            }
        }
        let idle: Vec<_> = self
            .workers
            .iter()
            .filter(|(key, worker)| worker.draining && !worker.is_idle_reported && self.own(**key) == 0)
            .map(|(key, _)| *key)
            .collect();
        for worker in idle {
            self.workers.get_mut(&worker).unwrap().is_idle_reported = true;
            self.out.push(Effect::DrainedIdle { worker });
        }
    }

    /// Sends a waiting request to the best worker, or one at home there that may overtake it.
    fn place(&mut self, key: RequestKey) {
        let worker = self.best_for(key).expect("a worker with room");
        self.note_distance(key, worker);
        let is_overtaken = |(first, _): &(RequestKey, Vec<RequestKey>)| {
            let Some(order) = &self.order else { return true };
            let place = |key| order.iter().position(|sent| *sent == key).unwrap_or(usize::MAX);
            place(*first) < place(key)
        };
        let overtaker = self.overtaker(key, worker).filter(is_overtaken);
        let (first, overtaken) = overtaker.unwrap_or((key, vec![]));
        overtaken.into_iter().for_each(|key| self.request(key).overtaken += 1);
        self.send(first, worker);
    }

    /// Returns the occurrences that concern fair shares and distances since the last call.
    pub(super) fn occurrences(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.accounts.seen)
    }

    fn unservable(&self, key: RequestKey) -> Option<Failure> {
        let request = &self.requests[&key];
        if let Some(pin) = request.new.pin {
            let there = self.workers.get(&pin).filter(|worker| !worker.draining);
            let Some(worker) = there else {
                return Some(Failure::AffinityLost);
            };
            let too_old = request.new.needs_core1 && !worker.new.core1;
            return too_old.then_some(Failure::WorkerTooOld { worker: pin });
        }
        let serving = || self.workers.iter().filter(|(_, w)| w.models.contains(&request.new.model));
        if request.new.needs_core1
            && !serving().any(|(_, worker)| worker.new.core1)
            && let Some((worker, _)) = serving().find(|(_, worker)| !worker.draining)
        {
            return Some(Failure::WorkerTooOld { worker: *worker });
        }
        let failure = request.trouble.clone()?;
        let untried = self.workers.keys().any(|worker| self.could_serve(*worker, key));
        (matches!(failure, Failure::LoadFailed { .. }) && !untried).then_some(failure)
    }

    fn send(&mut self, key: RequestKey, worker: WorkerKey) {
        self.turn += 1;
        self.workers.get_mut(&worker).unwrap().turn = self.turn;
        let decision = self.note_send(key, worker);
        self.charge(key);
        let now = self.now;
        let request = self.request(key);
        request.attempts += 1;
        request.granted_since = false;
        request.worker = Some(worker);
        let (attempt, waited, class) = (request.attempts, now - request.since, request.class);
        self.out.push(Effect::Send { worker, request: key, attempt, waited, decision, class });
    }

    fn fail(&mut self, key: RequestKey, failure: Failure) {
        let request = self.requests.remove(&key).expect("a live request");
        let (attempts, age) = (request.attempts, self.now - request.arrived);
        self.out.push(Effect::Fail { request: key, failure, attempts, age, position: None });
    }

    /// Returns the time to its deadline, if nothing else changes.
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

    /// Ends expired requests: first waiting ones, then running ones, in the order of their deadlines.
    fn expire(&mut self) {
        for key in self.queued().collect::<Vec<_>>() {
            if self.time_left(key) == Some(Duration::ZERO) {
                let failure = self.requests[&key].waiting_failure(self.now, self.is_to_be_loaded(key));
                self.fail(key, failure);
            }
        }
        loop {
            let running = self.requests.iter().filter(|(_, r)| r.worker.is_some());
            let over = running
                .filter(|(key, _)| self.time_left(**key) == Some(Duration::ZERO))
                .min_by_key(|(key, r)| (r.arrived + r.cold_waited + r.limits.request_timeout, **key));
            let Some((key, _)) = over else { return };
            let key = *key;
            self.revoke(key, CancelReason::Timeout);
            self.fail(key, Failure::RequestTimeout);
            self.settle();
        }
    }

    fn revoke(&mut self, key: RequestKey, reason: CancelReason) {
        let request = self.request(key);
        let (worker, attempt) = (request.worker.take().unwrap(), request.attempts);
        self.workers.get_mut(&worker).unwrap().taken_back += 1;
        self.out.push(Effect::CancelSent { worker, request: key, attempt, reason });
    }
}

fn sent(effect: &Effect) -> Option<RequestKey> {
    if let Effect::Send { request, .. } = effect { Some(*request) } else { None }
}

impl Request {
    fn cold_timeout(&self) -> Option<Duration> {
        let declared = self.in_slot || self.limits.cold_models.contains(&self.new.model);
        let absent = self.limits.absent_timeout;
        let default = absent.unwrap_or(self.limits.queue_timeout).max(Duration::from_secs(600));
        self.limits.cold_timeout.or(declared.then_some(default)).or(absent)
    }

    /// Returns the failure that ends its wait.
    fn waiting_failure(&self, now: Duration, to_be_loaded: bool) -> Failure {
        let counted = now - self.arrived - self.cold_waited;
        let limits = &self.limits;
        if let Some(trouble) = &self.trouble {
            trouble.clone()
        } else if counted >= limits.request_timeout && limits.request_timeout < limits.queue_timeout {
            Failure::RequestTimeout
        } else if to_be_loaded {
            Failure::ModelLoading { retry_after: None }
        } else {
            Failure::QueueTimeout { retry_after_secs: 1 }
        }
    }
}
