//! Several relays and workers together, with real components: relays are cores, workers are allocators, and between
//! them are the outboxes of both programs, written and read at random times. Whatever happened before, once the network
//! works again every request is served soon, even while another relay has more requests than there are slots.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use modelrelay_protocol::frame::BodyKind;
use modelrelay_protocol::grants::{Admission, LinkKind, SlotAllocator};
use modelrelay_protocol::outbox::{CancelOutcome, Frame, Latest, Outbox};
use proptest::collection::vec;
use proptest::prelude::*;

use super::harness::{request, settings, worker};
use crate::dispatch::{AttemptFailure, CancelReason, Dispatch, Effect, Event, Grant, LossCause, RequestKey, WorkerKey};

const MODELS: [&str; 2] = ["a", "b"];
const SERVICE: Duration = Duration::from_millis(100);
const STEP: Duration = Duration::from_millis(5);
/// The interval at which relays ping their workers.
const HEARTBEAT: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
enum Op {
    Submit {
        relay: usize,
        model: usize,
    },
    Cancel {
        relay: usize,
        request: usize,
    },
    Finish {
        worker: usize,
        request: usize,
    },
    /// A side's writer writes this number of messages.
    Write {
        link: usize,
        up: bool,
        count: usize,
    },
    /// A side reads this number of messages.
    Read {
        link: usize,
        up: bool,
        count: usize,
    },
    Break {
        link: usize,
    },
    Capacity {
        worker: usize,
        slots: u32,
    },
    Pass {
        millis: u64,
    },
}

/// A worker's socket to one relay.
struct Link {
    key: WorkerKey,
    down: Way,
    up: Way,
    /// The message that the worker's reader sends before its next read: another task may free a slot, and write a
    /// grant, before.
    refusal: Option<String>,
    streams: BTreeMap<(u64, u32), u32>,
}

struct Way {
    outbox: Outbox,
    moving: VecDeque<String>,
}

struct Job {
    relay: usize,
    request: (u64, u32),
    since: Duration,
}

struct Node {
    allocator: SlotAllocator<usize>,
    jobs: Vec<Job>,
}

struct World {
    start: Instant,
    now: Duration,
    relays: Vec<Dispatch>,
    waiting_since: Vec<BTreeMap<u64, Duration>>,
    workers: Vec<Node>,
    /// Link `w * relays + r`.
    links: Vec<Link>,
    last_key: u64,
}

impl Way {
    fn new(kind: BodyKind) -> Self {
        Self { outbox: Outbox::new(kind, |_, _| String::new()), moving: VecDeque::new() }
    }

    fn write(&mut self, count: usize) {
        for _ in 0..count {
            let Some(Frame::Text(text)) = self.outbox.next_frame() else { return };
            self.moving.push_back(text);
        }
    }
}

impl Link {
    fn new(key: WorkerKey) -> Self {
        let (down, up) = (Way::new(BodyKind::Request), Way::new(BodyKind::Response));
        Self { key, down, up, refusal: None, streams: BTreeMap::new() }
    }
}

impl World {
    fn new(relays: usize, capacities: &[u32]) -> Self {
        let mut limits = settings();
        (limits.queue_timeout, limits.request_timeout) = (Duration::from_secs(9_000), Duration::from_secs(9_000));
        limits.max_queue_len = 10_000;
        let workers = capacities.iter().map(|slots| Node { allocator: SlotAllocator::new(*slots), jobs: Vec::new() });
        let mut world = Self {
            start: Instant::now(),
            now: Duration::ZERO,
            relays: (0..relays).map(|_| Dispatch::new(limits.clone())).collect(),
            waiting_since: vec![BTreeMap::new(); relays],
            workers: workers.collect(),
            links: Vec::new(),
            last_key: 0,
        };
        for link in 0..relays * capacities.len() {
            let key = WorkerKey(world.key());
            world.links.push(Link::new(key));
            world.join(link);
        }
        world
    }

    fn key(&mut self) -> u64 {
        self.last_key += 1;
        self.last_key
    }

    fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn ends(&self, link: usize) -> (usize, usize) {
        (link / self.relays.len(), link % self.relays.len())
    }

    fn join(&mut self, link: usize) {
        let (w, r) = self.ends(link);
        self.relay(r, Event::WorkerJoined(worker(self.links[link].key.0, &MODELS, 8, true)));
        let now = self.instant();
        self.workers[w].allocator.add_link(r, LinkKind::Granted, now);
        self.send_grants(w);
    }

    fn rejoin(&mut self, link: usize) {
        let (w, r) = self.ends(link);
        let lost = self.links[link].key;
        self.relay(r, Event::WorkerLost { worker: lost, started: HashSet::new(), cause: LossCause::Disconnected });
        let now = self.instant();
        self.workers[w].jobs.retain(|job| job.relay != r);
        self.workers[w].allocator.remove_link(r, now);
        self.send_grants(w);
        self.links[link] = Link::new(WorkerKey(self.key()));
        self.join(link);
    }

    fn relay(&mut self, r: usize, event: Event) {
        let mut out = Vec::new();
        let now = self.instant();
        self.relays[r].handle(event, now, &mut out);
        for effect in out {
            let link_of = |key| self.links.iter().position(|link| link.key == key).expect("a live link");
            match effect {
                Effect::Send { worker, request, attempt, .. } => {
                    let link = link_of(worker);
                    let link = &mut self.links[link];
                    let stream = u32::try_from(link.streams.len()).unwrap() + 1;
                    link.streams.insert((request.0, attempt), stream);
                    let text = format!("request {} {attempt}", request.0);
                    link.down.outbox.push_request(stream, &request.0.to_string(), text, Bytes::new(), 0);
                }
                Effect::CancelSent { worker, request, attempt, .. } => {
                    let link = link_of(worker);
                    let link = &mut self.links[link];
                    let stream = link.streams[&(request.0, attempt)];
                    let text = format!("cancel {} {attempt}", request.0);
                    let _: CancelOutcome = link.down.outbox.cancel(stream, text);
                }
                Effect::Demand { worker, demand } => {
                    let sum: u32 = demand.iter().map(|entry| entry.waiting).sum();
                    let link = link_of(worker);
                    self.links[link].down.outbox.set_demand(format!("demand {sum}"));
                }
                Effect::Finished { request, .. } | Effect::Cancelled { request, .. } | Effect::Fail { request, .. } => {
                    self.waiting_since[r].remove(&request.0);
                }
                Effect::Severed { .. } | Effect::Requeued { .. } | Effect::DrainedIdle { .. } => {}
            }
        }
    }

    fn submit(&mut self, r: usize, model: usize) {
        let key = self.key();
        self.waiting_since[r].insert(key, self.now);
        self.relay(r, Event::Submit(request(key, MODELS[model])));
    }

    fn send_grants(&mut self, w: usize) {
        for (r, values) in self.workers[w].allocator.changes() {
            let text = format!("grant {} {} {} {}", values.slots, values.others, values.capacity, values.links);
            self.links[w * self.relays.len() + r].up.outbox.set_latest(Latest::Grant, text);
        }
    }

    /// The worker's reader reads one message, and then sends its reply.
    fn read_down(&mut self, link: usize) -> bool {
        let (w, r) = self.ends(link);
        if let Some(refusal) = self.links[link].refusal.take() {
            self.links[link].up.outbox.push_text(refusal);
            return true;
        }
        let Some(text) = self.links[link].down.moving.pop_front() else { return false };
        let words: Vec<&str> = text.split(' ').collect();
        let number = |at: usize| words.get(at).map_or(0, |word| word.parse::<u64>().unwrap());
        let id = (number(1), u32::try_from(number(2)).unwrap());
        let now = self.instant();
        let node = &mut self.workers[w];
        match words[0] {
            "request" => match node.allocator.on_request(r, now) {
                Admission::Run => node.jobs.push(Job { relay: r, request: id, since: self.now }),
                Admission::AtCapacity => self.links[link].refusal = Some(format!("full {} {}", id.0, id.1)),
            },
            "cancel" => {
                let before = node.jobs.len();
                node.jobs.retain(|job| (job.relay, job.request) != (r, id));
                if node.jobs.len() < before {
                    node.allocator.on_finished(r, now);
                }
                node.allocator.on_message(r, now);
            }
            "demand" => node.allocator.on_demand(r, u32::try_from(number(1)).unwrap(), now),
            "ping" => node.allocator.on_message(r, now),
            other => panic!("a relay does not say {other}"),
        }
        self.send_grants(w);
        true
    }

    fn read_up(&mut self, link: usize) -> bool {
        let r = self.ends(link).1;
        let worker = self.links[link].key;
        let Some(text) = self.links[link].up.moving.pop_front() else { return false };
        let (what, rest) = text.split_once(' ').unwrap();
        let numbers: Vec<u32> = rest.split(' ').map(|word| word.parse().unwrap()).collect();
        let key = || RequestKey(u64::from(numbers[0]));
        self.relay(
            r,
            match what {
                "grant" => {
                    let [slots, others, capacity, links] = numbers[..] else { panic!("{text}") };
                    Event::Granted { worker, grant: Grant { slots, others, capacity, links } }
                }
                "done" => Event::Completed { worker, request: key(), attempt: numbers[1], cached: None, usage: None },
                "full" => {
                    let failure = AttemptFailure::AtCapacity;
                    Event::AttemptFailed { worker, request: key(), attempt: numbers[1], failure }
                }
                other => panic!("a worker does not say {other}"),
            },
        );
        true
    }

    fn finish(&mut self, w: usize, index: usize) {
        let job = self.workers[w].jobs.remove(index);
        let now = self.instant();
        self.workers[w].allocator.on_finished(job.relay, now);
        self.send_grants(w);
        let link = w * self.relays.len() + job.relay;
        self.links[link].up.outbox.push_text(format!("done {} {}", job.request.0, job.request.1));
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let core = self.relays.iter().filter_map(Dispatch::next_timeout);
            let due = core.chain(self.workers.iter().filter_map(|node| node.allocator.next_timeout())).min();
            let Some(due) = due.map(|due| due.saturating_duration_since(self.start)).filter(|due| *due <= until) else {
                break;
            };
            self.now = self.now.max(due);
            for r in 0..self.relays.len() {
                self.relay(r, Event::Tick);
            }
            for w in 0..self.workers.len() {
                let now = self.instant();
                self.workers[w].allocator.on_timeout(now);
                self.send_grants(w);
            }
        }
        self.now = until;
    }

    fn act(&mut self, op: &Op) {
        let (relays, workers, links) = (self.relays.len(), self.workers.len(), self.links.len());
        match *op {
            Op::Submit { relay, model } => self.submit(relay % relays, model),
            Op::Cancel { relay, request } => {
                let r = relay % relays;
                let live: Vec<u64> = self.waiting_since[r].keys().copied().collect();
                if !live.is_empty() {
                    let request = RequestKey(live[request % live.len()]);
                    self.relay(r, Event::Cancel { request, reason: CancelReason::ClientDisconnect });
                }
            }
            Op::Finish { worker, request } => {
                let w = worker % workers;
                let running = self.workers[w].jobs.len();
                if running > 0 {
                    self.finish(w, request % running);
                }
            }
            Op::Write { link, up: true, count } => self.links[link % links].up.write(count),
            Op::Write { link, up: false, count } => self.links[link % links].down.write(count),
            Op::Read { link, up, count } => {
                let link = link % links;
                let _ = (0..count).all(|_| if up { self.read_up(link) } else { self.read_down(link) });
            }
            Op::Break { link } => self.rejoin(link % links),
            Op::Capacity { worker, slots } => {
                let now = self.instant();
                self.workers[worker % workers].allocator.set_capacity(slots, now);
                self.send_grants(worker % workers);
            }
            Op::Pass { millis } => self.pass(Duration::from_millis(millis)),
        }
    }

    /// Lets every side write, read and process all its messages.
    fn flow(&mut self) {
        for link in 0..self.links.len() {
            self.links[link].down.write(64);
            while self.read_down(link) {}
            self.links[link].up.write(64);
            while self.read_up(link) {}
        }
        for w in 0..self.workers.len() {
            while let Some(done) = self.workers[w].jobs.iter().position(|job| job.since + SERVICE <= self.now) {
                self.finish(w, done);
            }
        }
    }

    /// Serves all requests of relays other than `hog`; returns the time that it took.
    fn settle(&mut self, hog: usize) -> Duration {
        let since = self.now;
        let mut beat = self.now + HEARTBEAT;
        let patience = HEARTBEAT + Duration::from_secs(60);
        while (0..self.relays.len()).any(|r| r != hog && !self.waiting_since[r].is_empty()) {
            if self.now >= beat {
                beat = self.now + HEARTBEAT;
                self.links.iter_mut().for_each(|link| link.down.outbox.push_text("ping".to_owned()));
            }
            while self.relays[hog].queue_len() < 20 {
                self.submit(hog, 0);
            }
            self.flow();
            self.pass(STEP);
            assert!(self.now - since < patience, "a relay starves: {:?}", self.waiting_since);
        }
        self.now - since
    }
}

fn op() -> impl Strategy<Value = Op> {
    let some = 0..64_usize;
    prop_oneof![
        12 => (some.clone(), 0..2_usize).prop_map(|(relay, model)| Op::Submit { relay, model }),
        2 => (some.clone(), some.clone()).prop_map(|(relay, request)| Op::Cancel { relay, request }),
        6 => (some.clone(), some.clone()).prop_map(|(worker, request)| Op::Finish { worker, request }),
        14 => (some.clone(), any::<bool>(), 1..4_usize).prop_map(|(link, up, count)| Op::Write { link, up, count }),
        16 => (some.clone(), any::<bool>(), 1..4_usize).prop_map(|(link, up, count)| Op::Read { link, up, count }),
        1 => some.clone().prop_map(|link| Op::Break { link }),
        1 => (some, 1..4_u32).prop_map(|(worker, slots)| Op::Capacity { worker, slots }),
        6 => prop::sample::select(vec![1, 20, 60, 400, 1_100]).prop_map(|millis| Op::Pass { millis }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn busy_relay_starves_no_other(
        relays in 2..4_usize,
        capacities in vec(1..4_u32, 1..3),
        ops in vec(op(), 20..250),
        hog in 0..4_usize,
    ) {
        let mut world = World::new(relays, &capacities);
        for op in &ops {
            world.act(op);
        }
        let slots: u32 = world.workers.iter().map(|node| node.allocator.capacity()).sum();
        let others: usize = world.waiting_since.iter().map(BTreeMap::len).sum();
        let took = world.settle(hog % relays);
        // Each in turn with the busy one; then the silences, and the slots that the old state still holds.
        let rounds = u32::try_from(others).unwrap().div_ceil(slots) * 2 + 2;
        prop_assert!(took <= (SERVICE + 4 * STEP) * rounds + Duration::from_secs(3), "took {:?} for {}", took, others);
    }

    /// If only one relay is not idle, its requests are served at once: no request waits for a message that was sent
    /// already.
    #[test]
    fn only_busy_relay_is_served_at_once(
        relays in 2..4_usize,
        capacities in vec(1..4_u32, 1..3),
        ops in vec(op(), 20..250),
        last in 0..4_usize,
    ) {
        let mut world = World::new(relays, &capacities);
        for op in &ops {
            world.act(op);
        }
        for r in 0..relays {
            let live: Vec<u64> = world.waiting_since[r].keys().copied().collect();
            for request in live.into_iter().filter(|_| r != last % relays) {
                let reason = CancelReason::ClientDisconnect;
                world.relay(r, Event::Cancel { request: RequestKey(request), reason });
            }
        }
        let slots: u32 = world.workers.iter().map(|node| node.allocator.capacity()).sum();
        let left = u32::try_from(world.waiting_since[last % relays].len()).unwrap();
        let since = world.now;
        while !world.waiting_since[last % relays].is_empty() {
            world.pass(STEP);
            world.flow();
            prop_assert!(world.now - since <= (SERVICE + 4 * STEP) * (left.div_ceil(slots) + 1) + Duration::from_secs(2));
        }
    }
}
