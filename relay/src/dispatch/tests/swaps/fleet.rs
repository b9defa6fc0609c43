//! The fleet: relays, workers, and messages with latency.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use modelrelay_protocol::grants::{Admission, LinkKind};
use modelrelay_protocol::message::Slot;

use super::node::{CAPACITY, Job, MODELS, Node};
use crate::dispatch::tests::harness::{request, settings, worker};
use crate::dispatch::{
    AttemptFailure, CancelReason, Dispatch, Effect, Event, Failure, Gate, Grant, LossCause, Model, NewMultiplexer,
    RequestKey, RequeueReason, WorkerKey,
};

const SERVICE: Duration = Duration::from_millis(40);
const STEP: Duration = Duration::from_millis(2);
const SLOWEST: u64 = 12;
/// A request that loses its worker more often than this fails, as it should.
const MOST_LOSSES: u32 = 3;

enum Down {
    Request { request: RequestKey, attempt: u32, model: usize },
    Cancel { request: RequestKey, attempt: u32 },
    Demand(BTreeMap<usize, u32>),
}

enum Up {
    Gates(Vec<(Model, Gate)>),
    Slots(Vec<Slot>),
    Done { request: RequestKey, attempt: u32 },
    Refused { request: RequestKey, attempt: u32 },
}

/// A worker's socket to one relay.
struct Link {
    key: WorkerKey,
    down: VecDeque<(Duration, Down)>,
    up: VecDeque<(Duration, Up)>,
}

pub(super) struct Fleet {
    start: Instant,
    pub(super) now: Duration,
    relays: Vec<Dispatch>,
    alive: Vec<BTreeMap<RequestKey, usize>>,
    /// The number of times that each request was on a link that broke.
    losses: BTreeMap<RequestKey, u32>,
    pub(super) nodes: Vec<Node>,
    /// Link `node * relays + relay`.
    links: Vec<Link>,
    last_key: u64,
    chance: u64,
    seed: u64,
}

impl Fleet {
    pub(super) fn new(relays: usize, nodes: usize, seed: u64) -> Self {
        let mut limits = settings();
        (limits.queue_timeout, limits.request_timeout) = (Duration::from_secs(9_000), Duration::from_secs(9_000));
        (limits.cold_timeout, limits.max_queue_len) = (Some(Duration::from_secs(9_000)), 10_000);
        let mut fleet = Self {
            start: Instant::now(),
            now: Duration::ZERO,
            relays: (0..relays).map(|_| Dispatch::new(limits.clone())).collect(),
            alive: vec![BTreeMap::new(); relays],
            losses: BTreeMap::new(),
            nodes: (0..nodes).map(|_| Node::new()).collect(),
            links: Vec::new(),
            last_key: 0,
            chance: seed | 1,
            seed,
        };
        for link in 0..relays * nodes {
            let key = fleet.key();
            fleet.links.push(Link::new(key));
            fleet.join(link);
        }
        fleet
    }

    pub(super) fn waiting(&self) -> usize {
        self.alive.iter().map(BTreeMap::len).sum()
    }

    pub(super) fn loads(&self) -> u32 {
        self.nodes.iter().map(|node| node.loads).sum()
    }

    pub(super) fn submit(&mut self, r: usize, model: usize) -> RequestKey {
        let key = self.key().0;
        self.alive[r].insert(RequestKey(key), model);
        self.relay(r, Event::Submit(request(key, MODELS[model])));
        RequestKey(key)
    }

    pub(super) fn waits(&self, r: usize, request: RequestKey) -> bool {
        self.alive[r].contains_key(&request)
    }

    pub(super) fn cancel(&mut self, r: usize, index: usize) {
        let live: Vec<_> = self.alive[r].keys().copied().collect();
        if let Some(request) = live.get(index % live.len().max(1)).copied() {
            self.relay(r, Event::Cancel { request, reason: CancelReason::ClientDisconnect });
        }
    }

    pub(super) fn rejoin(&mut self, link: usize) {
        let (w, r) = self.ends(link);
        let now = self.instant();
        let worker = self.links[link].key;
        self.nodes[w].forget(r, now);
        self.links[link] = Link::new(self.key());
        self.relay(r, Event::WorkerLost { worker, started: HashSet::new(), cause: LossCause::Disconnected });
        self.join(link);
        self.send_changes(w, false);
    }

    pub(super) fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now += STEP;
            for r in 0..self.relays.len() {
                if self.relays[r].next_timeout().is_some_and(|due| due <= self.instant()) {
                    self.relay(r, Event::Tick);
                }
            }
            for link in 0..self.links.len() {
                self.carry(link);
            }
            for w in 0..self.nodes.len() {
                self.work(w);
            }
        }
    }

    fn join(&mut self, link: usize) {
        let (w, r) = self.ends(link);
        let mut new = worker(self.links[link].key.0, &MODELS, CAPACITY, true);
        let slots = vec![self.nodes[w].slot(self.now)];
        new.multiplexer = Some(NewMultiplexer { instance: format!("node {w} of {}", self.seed).into(), slots });
        let now = self.instant();
        self.nodes[w].allocators.iter_mut().for_each(|allocator| allocator.add_link(r, LinkKind::Granted, now));
        self.relay(r, Event::WorkerJoined(new));
        self.send_changes(w, false);
    }

    /// Delivers the messages that have arrived by now, in either direction.
    fn carry(&mut self, link: usize) {
        let (w, r) = self.ends(link);
        while self.links[link].down.front().is_some_and(|(at, _)| *at <= self.now) {
            let (_, message) = self.links[link].down.pop_front().unwrap();
            self.read_down(w, r, message);
        }
        while self.links[link].up.front().is_some_and(|(at, _)| *at <= self.now) {
            let (_, message) = self.links[link].up.pop_front().unwrap();
            self.read_up(link, message);
        }
    }

    fn read_down(&mut self, w: usize, r: usize, message: Down) {
        let (now, until) = (self.instant(), self.now + SERVICE);
        let node = &mut self.nodes[w];
        match message {
            Down::Request { request, attempt, model } => {
                let runs = node.serves(model) && node.allocators[model].on_request(r, now) == Admission::Run;
                if runs {
                    node.jobs.push(Job { relay: r, request, attempt, until });
                    self.send_changes(w, false);
                } else {
                    // The state first, then its consequence for the request.
                    self.send_changes(w, true);
                    self.send_up(w, r, Up::Refused { request, attempt });
                }
            }
            Down::Cancel { request, attempt } => {
                let job =
                    node.jobs.iter().position(|job| (job.relay, job.request, job.attempt) == (r, request, attempt));
                if let Some(job) = job {
                    node.jobs.remove(job);
                    node.finish(r, now);
                }
                self.send_changes(w, false);
            }
            Down::Demand(demand) => {
                let before = node.all_wanted();
                for model in 0..MODELS.len() {
                    let waiting = demand.get(&model).copied().unwrap_or(0);
                    node.wanted[model].insert(r, waiting);
                    if node.serves(model) {
                        node.allocators[model].on_demand(r, waiting, now);
                    }
                }
                let moved = self.nodes[w].all_wanted() != before;
                self.send_changes(w, moved);
            }
        }
    }

    fn read_up(&mut self, link: usize, message: Up) {
        let (worker, r) = (self.links[link].key, self.ends(link).1);
        self.relay(
            r,
            match message {
                Up::Gates(gates) => {
                    let sums = Grant { slots: 0, others: 0, capacity: CAPACITY, links: 1 };
                    Event::GatesSet { worker, sums, gates }
                }
                Up::Slots(slots) => Event::SlotsReported { worker, slots },
                Up::Done { request, attempt } => {
                    Event::Completed { worker, request, attempt, cached: None, usage: None }
                }
                Up::Refused { request, attempt } => {
                    Event::AttemptFailed { worker, request, attempt, failure: AttemptFailure::AtCapacity }
                }
            },
        );
    }

    /// Runs a worker's own steps.
    fn work(&mut self, w: usize) {
        let now = self.instant();
        while let Some(done) = self.nodes[w].jobs.iter().position(|job| job.until <= self.now) {
            let Job { relay, request, attempt, .. } = self.nodes[w].jobs.remove(done);
            self.nodes[w].finish(relay, now);
            self.send_changes(w, false);
            self.send_up(w, relay, Up::Done { request, attempt });
        }
        for allocator in &mut self.nodes[w].allocators {
            if allocator.next_timeout().is_some_and(|due| due <= now) {
                allocator.on_timeout(now);
            }
        }
        let moved = self.nodes[w].advance(self.now, now);
        let settled = self.nodes[w].note_idle(self.now);
        self.send_changes(w, moved || settled);
    }

    /// Sends changes: gates to the relays concerned, slots to all after a step of the slot.
    fn send_changes(&mut self, w: usize, moved: bool) {
        let relays = self.relays.len();
        let node = &mut self.nodes[w];
        let mut concerned: HashSet<usize> = if moved { (0..relays).collect() } else { HashSet::new() };
        for (model, allocator) in node.allocators.iter_mut().enumerate() {
            for (r, values) in allocator.changes() {
                node.granted[model].insert(r, values);
                concerned.insert(r);
            }
        }
        for r in (0..relays).filter(|r| concerned.contains(r)) {
            let gates = self.nodes[w].gates(r);
            let slot = self.nodes[w].slot(self.now);
            self.send_up(w, r, Up::Gates(gates));
            if moved {
                self.send_up(w, r, Up::Slots(vec![slot]));
            }
        }
    }

    fn send_up(&mut self, w: usize, r: usize, message: Up) {
        let at = self.arrival();
        let link = &mut self.links[w * self.relays.len() + r];
        let last = link.up.back().map_or(Duration::ZERO, |(last, _)| *last);
        link.up.push_back((at.max(last), message));
    }

    fn relay(&mut self, r: usize, event: Event) {
        let mut out = Vec::new();
        let now = self.instant();
        self.relays[r].handle(event, now, &mut out);
        for effect in out {
            self.obey(r, effect);
        }
    }

    fn obey(&mut self, r: usize, effect: Effect) {
        let (worker, message) = match effect {
            Effect::Send { worker, request, attempt, .. } => {
                let model = self.alive[r][&request];
                (worker, Down::Request { request, attempt, model })
            }
            Effect::CancelSent { worker, request, attempt, .. } => (worker, Down::Cancel { request, attempt }),
            Effect::Demand { worker, demand } => {
                let index = |name: &Model| MODELS.iter().position(|model| **model == **name).unwrap();
                let demand = demand.iter().map(|entry| (index(&entry.model), entry.waiting)).collect();
                (worker, Down::Demand(demand))
            }
            Effect::Finished { request, .. } | Effect::Cancelled { request, .. } => {
                self.alive[r].remove(&request);
                return;
            }
            Effect::Requeued { request, reason: RequeueReason::WorkerLost, .. } => {
                *self.losses.entry(request).or_default() += 1;
                return;
            }
            Effect::Fail { request, failure: Failure::RequeueExhausted, .. }
                if self.losses.get(&request) == Some(&MOST_LOSSES) =>
            {
                self.alive[r].remove(&request);
                return;
            }
            Effect::Fail { request, failure, .. } => panic!("request {request:?} failed: {failure:?}"),
            Effect::Severed { .. } | Effect::Requeued { .. } | Effect::DrainedIdle { .. } => return,
        };
        let at = self.arrival();
        let link = self.links.iter_mut().find(|link| link.key == worker).expect("a live link");
        let last = link.down.back().map_or(Duration::ZERO, |(last, _)| *last);
        link.down.push_back((at.max(last), message));
    }

    fn arrival(&mut self) -> Duration {
        self.chance = self.chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.now + Duration::from_millis(1 + (self.chance >> 33) % SLOWEST)
    }

    fn key(&mut self) -> WorkerKey {
        self.last_key += 1;
        WorkerKey(self.last_key)
    }

    fn ends(&self, link: usize) -> (usize, usize) {
        (link / self.relays.len(), link % self.relays.len())
    }

    fn instant(&self) -> Instant {
        self.start + self.now
    }
}

impl Link {
    fn new(key: WorkerKey) -> Self {
        Self { key, down: VecDeque::new(), up: VecDeque::new() }
    }
}
