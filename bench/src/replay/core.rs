//! The relay's dispatch core as a router: one relay, or several that share all workers.
//!
//! Workers speak `core1` and grant an equal part of their slots to each relay. Every request goes to a relay at random.
//! Workers report the conversations and the backlog of one relay to the others, as the worker does.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_relay::dispatch::{
    Conversation, Decision, Dispatch, Effect, Event, Grant, Model, NewRequest, NewWorker, Placement, RequestKey,
    Settings, WorkerKey,
};

use super::Time;
use super::cases::Case;
use super::policy::{Counts, Router, Sent};
use super::worker::Served;
use super::workload::Turn;
use crate::simulation::rng::Rng;

/// Bytes of a request's body per token of its prompt.
const TOKEN_BYTES: u64 = 4;

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(1 << 20);

/// The least time between two reports of a worker to one relay about the requests of the others.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
fn var(name: &str) -> Option<u64> { std::env::var(name).ok().map(|v| v.parse().unwrap()) }

/// Relays with the same workers.
#[derive(Debug)]
pub struct Relays {
    cores: Vec<Core>,
    requests: HashMap<usize, Request>,
    /// By worker and relay.
    links: Vec<Vec<Link>>,
    /// Reports that are due, with their worker and relay.
    due: BTreeSet<(Time, usize, usize)>,
    capacity: u32,
    model: Model,
    epoch: Instant,
    rng: Rng,
    last: Vec<HashMap<Conversation, u64>>,
    counts: Counts,
}

#[derive(Debug)]
struct Core {
    dispatch: Dispatch,
    waiting: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    relay: usize,
    conversation: Conversation,
    bytes: u64,
    awaited: u64,
    /// The worker and the attempt, once it is sent.
    running: Option<(usize, u32)>,
}

/// A relay's connection to a worker, as the worker sees it.
#[derive(Clone, Debug, Default)]
struct Link {
    /// Bytes of this relay's requests whose response has not begun.
    awaited: u64,
    running: u32,
    /// Conversations of other relays that are not reported to this one yet.
    homes: BTreeMap<Conversation, u64>,
    is_due: bool,
    /// The time at which the next report may be sent.
    next: Time,
}

impl Relays {
    /// Starts relays, with all workers of a case connected.
    pub fn new(placement: Placement, relays: usize, case: &Case, seed: u64) -> Self {
        let settings = Settings {
            enabled: true,
            max_queue_len: usize::MAX,
            max_queue_bytes: u64::MAX,
            queue_timeout: FOREVER,
            absent_timeout: None,
            cold_timeout: None,
            cold_models: HashSet::new(),
            request_timeout: FOREVER,
            placement,
            max_homes: 100_000,
        };
        let core = || Core { dispatch: Dispatch::new(settings.clone()), waiting: BTreeSet::new() };
        let mut relays = Self {
            cores: (0..relays).map(|_| core()).collect(),
            requests: HashMap::new(),
            links: vec![vec![Link::default(); relays]; case.workers],
            due: BTreeSet::new(),
            capacity: case.concurrency as u32,
            model: Model::from("model"),
            epoch: Instant::now(),
            rng: Rng::new(seed),
            last: vec![HashMap::new(); case.workers],
            counts: Counts::default(),
        };
        for relay in 0..relays.cores.len() {
            for worker in 0..case.workers {
                relays.join(relay, worker);
            }
        }
        relays
    }

    fn join(&mut self, relay: usize, worker: usize) {
        let key = WorkerKey(worker as u64);
        let joined = NewWorker {
            key,
            models: vec![Model::clone(&self.model)],
            failing: Vec::new(),
            max_concurrent: self.capacity,
            load: 0,
            core1: true,
            multiplexer: None,
            instance: Some(Arc::from(format!("worker-{worker}"))),
        };
        let grant = self.grant(relay, worker);
        for event in [Event::WorkerJoined(joined), Event::Granted { worker: key, grant }] {
            self.handle(relay, event, Time::ZERO, &mut Vec::new());
        }
    }

    /// An equal part of the worker's slots.
    fn grant(&self, relay: usize, worker: usize) -> Grant {
        let links = self.cores.len() as u32;
        let all: u32 = self.links[worker].iter().map(|link| link.running).sum();
        let others = all - self.links[worker][relay].running;
        Grant { slots: if var("X_ALL").is_some() { self.capacity } else { self.capacity / links }, others, capacity: self.capacity, links }
    }

    fn handle(&mut self, relay: usize, event: Event, now: Time, sent: &mut Vec<Sent>) {
        let mut effects = Vec::new();
        self.cores[relay].dispatch.handle(event, self.epoch + now, &mut effects);
        for effect in effects {
            if let Effect::Send { worker, request, attempt, decision, .. } = effect {
                if let Decision::Moved(_) = decision {
                    *self.counts.moves.entry(decision.reason()).or_default() += 1;
                }
                let (id, worker) = (request.0 as usize, worker.0 as usize);
                self.handle_sent(id, (worker, attempt), now);
                sent.push(Sent { id, worker });
            }
        }
    }

    fn handle_sent(&mut self, id: usize, (worker, attempt): (usize, u32), now: Time) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.running = Some((worker, attempt));
        let Request { relay, conversation, bytes, .. } = *request;
        let waiting = &mut self.cores[relay].waiting;
        waiting.remove(&id);
        self.counts.overtakes += u64::from(waiting.first().is_some_and(|first| *first < id));
        let before = self.last[worker].insert(conversation, bytes).filter(|_| var("X_GROWTH").is_some()).unwrap_or(0);
        let cost = bytes - before.min(bytes);
        if let Some(request) = self.requests.get_mut(&id) { request.awaited = cost; }
        for (other, link) in self.links[worker].iter_mut().enumerate() {
            if other == relay {
                link.awaited += cost;
                link.running += 1;
            } else {
                link.homes.insert(conversation, bytes);
            }
        }
        self.plan_reports(relay, worker, now);
    }

    /// Plans a worker's reports to the other relays after a change of one relay's requests.
    fn plan_reports(&mut self, relay: usize, worker: usize, now: Time) {
        for (other, link) in self.links[worker].iter_mut().enumerate() {
            if other != relay && !std::mem::replace(&mut link.is_due, true) {
                self.due.insert((now.max(link.next), worker, other));
            }
        }
    }

    fn report(&mut self, relay: usize, worker: usize, now: Time, sent: &mut Vec<Sent>) {
        let all: u64 = self.links[worker].iter().map(|link| link.awaited).sum();
        let grant = self.grant(relay, worker);
        let link = &mut self.links[worker][relay];
        link.is_due = false;
        link.next = now + var("X_MS").map_or(REPORT_INTERVAL, Duration::from_millis);
        let backlog = all - link.awaited;
        let homes = std::mem::take(&mut link.homes).into_iter().collect();
        let worker = WorkerKey(worker as u64);
        for event in [Event::Granted { worker, grant }, Event::HomesReported { worker, homes, backlog }] {
            self.handle(relay, event, now, sent);
        }
    }
}

impl Router for Relays {
    fn arrive(&mut self, id: usize, turn: &Turn, now: Time, sent: &mut Vec<Sent>) {
        let relay = (self.rng.unit() * self.cores.len() as f64) as usize;
        let (conversation, bytes) = (Conversation(turn.conversation), u64::from(turn.tokens) * TOKEN_BYTES);
        self.cores[relay].waiting.insert(id);
        self.requests.insert(id, Request { relay, conversation, bytes, awaited: 0, running: None });
        let new = NewRequest {
            key: RequestKey(id as u64),
            model: Model::clone(&self.model),
            bytes,
            pin: None,
            needs_core1: false,
            allowed: None,
            share: None,
            conversation: Some(conversation),
        };
        self.handle(relay, Event::Submit(new), now, sent);
    }

    fn begin(&mut self, id: usize, now: Time, sent: &mut Vec<Sent>) {
        let Some(Request { relay, awaited, running: Some((worker, attempt)), .. }) = self.requests.get(&id).copied()
        else {
            return;
        };
        self.links[worker][relay].awaited -= awaited;
        self.plan_reports(relay, worker, now);
        let (worker, request) = (WorkerKey(worker as u64), RequestKey(id as u64));
        self.handle(relay, Event::Begun { worker, request, attempt }, now, sent);
    }

    fn end(&mut self, id: usize, turn: &Turn, served: &Served, now: Time, sent: &mut Vec<Sent>) {
        let Some(Request { relay, running: Some((worker, attempt)), .. }) = self.requests.remove(&id) else {
            return;
        };
        self.links[worker][relay].running -= 1;
        self.plan_reports(relay, worker, now);
        let cached = u16::try_from(u64::from(served.cached) * 1000 / u64::from(turn.tokens)).ok();
        let (worker, request) = (WorkerKey(worker as u64), RequestKey(id as u64));
        self.handle(relay, Event::Completed { worker, request, attempt, cached }, now, sent);
    }

    fn tick(&mut self, now: Time, sent: &mut Vec<Sent>) {
        while let Some((_, worker, relay)) = self.due.first().copied().filter(|(at, ..)| *at <= now) {
            self.due.pop_first();
            self.report(relay, worker, now, sent);
        }
        for relay in 0..self.cores.len() {
            self.handle(relay, Event::Tick, now, sent);
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        let timeouts = self.cores.iter().filter_map(|core| core.dispatch.next_timeout());
        let timeouts = timeouts.map(|at| at.saturating_duration_since(self.epoch));
        timeouts.chain(self.due.first().map(|(at, ..)| *at)).min()
    }

    fn counts(&self) -> Counts {
        self.counts.clone()
    }
}
