//! The relay's dispatch core as a router: one relay, or several that share all workers.
//!
//! Workers speak `core1` and divide their slots among the relays as real workers do. Every request goes to a relay at
//! random. Messages between relays and workers take no time.

pub mod links;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use modelrelay_protocol::message::Homes;
use modelrelay_relay::dispatch::{
    AttemptFailure, Conversation, Decision, Dispatch, Distance, Effect, Event, Model, NewRequest, NewWorker, Placement,
    RequestKey, Settings, WorkerKey,
};

use super::Time;
use super::cases::Case;
use super::policy::{Router, Sent};
use super::worker::Served;
use super::workload::Turn;
use crate::dispatch_core::unlimited;
use crate::simulation::rng::Rng;
use links::Links;

/// The largest number of homes that a relay remembers.
const MAX_HOMES: usize = 100_000;

/// The number of relays, and what they know of each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// One relay.
    One,
    /// Two, which know only their own requests.
    Apart,
    /// Two. Each worker reports the conversations and the backlog of one relay to the other.
    Reported,
}

/// Relays with the same workers.
#[derive(Debug)]
pub struct Relays {
    relays: Vec<Relay>,
    workers: Vec<Links>,
    requests: HashMap<usize, Request>,
    /// Events that the relays have yet to handle.
    events: VecDeque<(usize, Event)>,
    epoch: Instant,
    rng: Rng,
    overtakes: u64,
    reasons: BTreeMap<&'static str, u64>,
}

#[derive(Debug)]
struct Relay {
    dispatch: Dispatch,
    waiting: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    relay: usize,
    conversation: Conversation,
    bytes: u64,
    running: Option<Running>,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    worker: usize,
    attempt: u32,
    /// The bytes that wait for their computation, as the worker counts them.
    awaited: u64,
}

impl Relays {
    /// Starts relays, with all workers of a case connected.
    pub fn new(placement: Placement, sharing: Sharing, case: &Case, seed: u64) -> Self {
        let settings = || Settings { placement, max_homes: MAX_HOMES, ..unlimited() };
        let relay = || Relay { dispatch: Dispatch::new(settings()), waiting: BTreeSet::new() };
        let number = if sharing == Sharing::One { 1 } else { 2 };
        let (capacity, epoch) = (case.concurrency as u32, Instant::now());
        let mut relays = Self {
            relays: (0..number).map(|_| relay()).collect(),
            workers: (0..case.workers)
                .map(|_| Links::new(capacity, number, sharing == Sharing::Reported, epoch))
                .collect(),
            requests: HashMap::new(),
            events: VecDeque::new(),
            epoch,
            rng: Rng::new(seed),
            overtakes: 0,
            reasons: BTreeMap::new(),
        };
        for worker in 0..case.workers {
            let joined = |relay| (relay, Event::WorkerJoined(new_worker(worker, capacity)));
            relays.events.extend((0..number).map(joined));
            relays.pass_grants(worker);
        }
        relays.settle(Time::ZERO, &mut Vec::new());
        relays
    }

    /// Passes events to the relays until nothing happens any more at this time.
    fn settle(&mut self, now: Time, sent: &mut Vec<Sent>) {
        let at = self.epoch + now;
        let mut effects = Vec::new();
        while let Some((relay, event)) = self.events.pop_front() {
            self.relays[relay].dispatch.handle(event, at, &mut effects);
            for effect in effects.drain(..) {
                self.apply(relay, effect, at, sent);
            }
        }
    }

    fn apply(&mut self, relay: usize, effect: Effect, now: Instant, sent: &mut Vec<Sent>) {
        match effect {
            Effect::Send { worker, request, attempt, decision, .. } => {
                let (id, worker) = (request.0 as usize, worker.0 as usize);
                if self.send(id, worker, attempt, now) {
                    sent.push(Sent { id, worker });
                    if let Decision::Moved(_) = decision {
                        *self.reasons.entry(decision.reason()).or_default() += 1;
                    }
                } else {
                    let failure = AttemptFailure::AtCapacity;
                    let worker = WorkerKey(worker as u64);
                    self.events.push_back((relay, Event::AttemptFailed { worker, request, attempt, failure }));
                }
            }
            Effect::Demand { worker, demand } => {
                let worker = worker.0 as usize;
                self.workers[worker].handle_demand(relay, demand.iter().map(|model| model.waiting).sum(), now);
                self.pass_grants(worker);
            }
            Effect::Finished { .. } | Effect::Requeued { .. } => {}
            Effect::CancelSent { .. }
            | Effect::Fail { .. }
            | Effect::Cancelled { .. }
            | Effect::Severed { .. }
            | Effect::DrainedIdle { .. } => panic!("every request of a replay is served: {effect:?}"),
        }
    }

    /// Sends a request to a worker. Returns false if the worker refuses it.
    fn send(&mut self, id: usize, worker: usize, attempt: u32, now: Instant) -> bool {
        let request = self.requests.get_mut(&id).expect("a request is sent once");
        let prompt = (request.conversation, request.bytes);
        let awaited = self.workers[worker].handle_request(request.relay, prompt, now);
        if let Some(awaited) = awaited {
            request.running = Some(Running { worker, attempt, awaited });
            let waiting = &mut self.relays[request.relay].waiting;
            waiting.remove(&id);
            self.overtakes += u64::from(waiting.first().is_some_and(|first| *first < id));
            self.pass_reports(worker, now);
        }
        self.pass_grants(worker);
        awaited.is_some()
    }

    fn pass_grants(&mut self, worker: usize) {
        let key = WorkerKey(worker as u64);
        let grants = self.workers[worker].next_grants();
        self.events.extend(grants.into_iter().map(|(relay, grant)| (relay, Event::Granted { worker: key, grant })));
    }

    fn pass_reports(&mut self, worker: usize, now: Instant) {
        let reports = self.workers[worker].next_reports(now);
        let worker = WorkerKey(worker as u64);
        let event = |(relay, report): (usize, Homes)| {
            let homes = report.homes.into_iter().map(|(key, bytes)| (Conversation(key.0), bytes)).collect();
            (relay, Event::HomesReported { worker, homes, backlog: report.backlog })
        };
        self.events.extend(reports.into_iter().map(event));
    }

    fn running(&self, id: usize) -> (usize, Running) {
        let request = self.requests.get(&id);
        request.and_then(|it| Some((it.relay, it.running?))).expect("a response belongs to a request that was sent")
    }
}

fn new_worker(number: usize, capacity: u32) -> NewWorker {
    NewWorker {
        key: WorkerKey(number as u64),
        models: vec![Model::from("model")],
        failing: Vec::new(),
        max_concurrent: capacity,
        load: 0,
        core1: true,
        multiplexer: None,
        instance: Some(Arc::from(format!("worker-{number}"))),
        distance: Distance::default(),
    }
}

impl Router for Relays {
    fn arrive(&mut self, id: usize, turn: &Turn, now: Time, sent: &mut Vec<Sent>) {
        let relay = (self.rng.unit() * self.relays.len() as f64) as usize;
        let (conversation, bytes) = (Conversation(turn.conversation), turn.bytes);
        self.relays[relay].waiting.insert(id);
        self.requests.insert(id, Request { relay, conversation, bytes, running: None });
        let new = NewRequest {
            conversation: Some(conversation),
            ..NewRequest::new(RequestKey(id as u64), Model::from("model"), bytes)
        };
        self.events.push_back((relay, Event::Submit(new)));
        self.settle(now, sent);
    }

    fn begin(&mut self, id: usize, now: Time, sent: &mut Vec<Sent>) {
        let (relay, Running { worker, attempt, awaited }) = self.running(id);
        self.workers[worker].handle_begun(relay, awaited);
        self.pass_reports(worker, self.epoch + now);
        let (worker, request) = (WorkerKey(worker as u64), RequestKey(id as u64));
        self.events.push_back((relay, Event::Begun { worker, request, attempt }));
        self.settle(now, sent);
    }

    fn end(&mut self, id: usize, turn: &Turn, served: &Served, now: Time, sent: &mut Vec<Sent>) {
        let (relay, Running { worker, attempt, .. }) = self.running(id);
        self.requests.remove(&id);
        self.workers[worker].handle_end(relay, self.epoch + now);
        // A worker sends the grants before the completion.
        self.pass_grants(worker);
        let cached = u16::try_from(u64::from(served.cached) * 1000 / u64::from(turn.tokens)).ok();
        let (worker, request) = (WorkerKey(worker as u64), RequestKey(id as u64));
        self.events.push_back((relay, Event::Completed { worker, request, attempt, cached, usage: None }));
        self.settle(now, sent);
    }

    fn tick(&mut self, now: Time, sent: &mut Vec<Sent>) {
        let at = self.epoch + now;
        for worker in 0..self.workers.len() {
            self.workers[worker].handle_timeout(at);
            self.pass_grants(worker);
            self.pass_reports(worker, at);
        }
        self.events.extend((0..self.relays.len()).map(|relay| (relay, Event::Tick)));
        self.settle(now, sent);
    }

    fn next_timeout(&self) -> Option<Time> {
        let relays = self.relays.iter().filter_map(|relay| relay.dispatch.next_timeout());
        let workers = self.workers.iter().filter_map(Links::next_timeout);
        relays.chain(workers).min().map(|at| at.saturating_duration_since(self.epoch))
    }

    fn overtakes(&self) -> u64 {
        self.overtakes
    }

    fn reasons(&self) -> BTreeMap<&'static str, u64> {
        self.reasons.clone()
    }
}
