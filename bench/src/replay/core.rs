//! The relay's dispatch core as a router: one relay, or several that share all workers.
//!
//! Workers speak `core1` and grant an equal part of their slots to each relay. Every request goes to a relay at random.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use modelrelay_relay::dispatch::{
    Dispatch, Effect, Event, Grant, Model, NewRequest, NewWorker, RequestKey, Settings, WorkerKey,
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

/// How a relay chooses among workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// By load.
    LeastLoad,
}

/// Relays with the same workers.
#[derive(Debug)]
pub struct Relays {
    cores: Vec<Core>,
    /// The relay, worker and attempt of each running request.
    running: HashMap<usize, (usize, usize, u32)>,
    model: Model,
    epoch: Instant,
    rng: Rng,
    counts: Counts,
}

#[derive(Debug)]
struct Core {
    dispatch: Dispatch,
    waiting: BTreeSet<usize>,
}

impl Relays {
    /// Starts relays, with all workers of a case connected.
    pub fn new(mode: Mode, relays: usize, case: &Case, seed: u64) -> Self {
        let Mode::LeastLoad = mode;
        let settings = Settings {
            enabled: true,
            max_queue_len: usize::MAX,
            max_queue_bytes: u64::MAX,
            queue_timeout: FOREVER,
            absent_timeout: None,
            cold_timeout: None,
            cold_models: HashSet::new(),
            request_timeout: FOREVER,
        };
        let core = || Core { dispatch: Dispatch::new(settings.clone()), waiting: BTreeSet::new() };
        let mut relays = Self {
            cores: (0..relays).map(|_| core()).collect(),
            running: HashMap::new(),
            model: Model::from("model"),
            epoch: Instant::now(),
            rng: Rng::new(seed),
            counts: Counts::default(),
        };
        for relay in 0..relays.cores.len() {
            for worker in 0..case.workers {
                relays.join(relay, worker, case.concurrency);
            }
        }
        relays
    }

    fn join(&mut self, relay: usize, worker: usize, concurrency: usize) {
        let (key, capacity) = (WorkerKey(worker as u64), concurrency as u32);
        let links = self.cores.len() as u32;
        let joined = NewWorker {
            key,
            models: vec![Model::clone(&self.model)],
            failing: Vec::new(),
            max_concurrent: capacity,
            load: 0,
            core1: true,
            multiplexer: None,
        };
        let grant = Grant { slots: capacity / links, others: 0, capacity, links };
        for event in [Event::WorkerJoined(joined), Event::Granted { worker: key, grant }] {
            self.handle(relay, event, Time::ZERO, &mut Vec::new());
        }
    }

    fn handle(&mut self, relay: usize, event: Event, now: Time, sent: &mut Vec<Sent>) {
        let mut effects = Vec::new();
        let core = &mut self.cores[relay];
        core.dispatch.handle(event, self.epoch + now, &mut effects);
        for effect in effects {
            if let Effect::Send { worker, request, attempt, .. } = effect {
                let (id, worker) = (request.0 as usize, worker.0 as usize);
                core.waiting.remove(&id);
                self.counts.overtakes += u64::from(core.waiting.first().is_some_and(|first| *first < id));
                self.running.insert(id, (relay, worker, attempt));
                sent.push(Sent { id, worker });
            }
        }
    }
}

impl Router for Relays {
    fn arrive(&mut self, id: usize, turn: &Turn, now: Time, sent: &mut Vec<Sent>) {
        let relay = (self.rng.unit() * self.cores.len() as f64) as usize;
        self.cores[relay].waiting.insert(id);
        let new = NewRequest {
            key: RequestKey(id as u64),
            model: Model::clone(&self.model),
            bytes: u64::from(turn.tokens) * TOKEN_BYTES,
            pin: None,
            needs_core1: false,
            allowed: None,
            share: None,
        };
        self.handle(relay, Event::Submit(new), now, sent);
    }

    fn begin(&mut self, _: usize, _: Time, _: &mut Vec<Sent>) {}

    fn end(&mut self, id: usize, _: &Turn, _: &Served, now: Time, sent: &mut Vec<Sent>) {
        if let Some((relay, worker, attempt)) = self.running.remove(&id) {
            let (worker, request) = (WorkerKey(worker as u64), RequestKey(id as u64));
            self.handle(relay, Event::Completed { worker, request, attempt }, now, sent);
        }
    }

    fn tick(&mut self, now: Time, sent: &mut Vec<Sent>) {
        for relay in 0..self.cores.len() {
            self.handle(relay, Event::Tick, now, sent);
        }
    }

    fn next_timeout(&self) -> Option<Time> {
        let timeouts = self.cores.iter().filter_map(|core| core.dispatch.next_timeout());
        timeouts.min().map(|at| at.saturating_duration_since(self.epoch))
    }

    fn counts(&self) -> Counts {
        self.counts.clone()
    }
}
