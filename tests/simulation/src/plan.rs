//! The meaning of a seed: hosts, requests and faults, with their times.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// The possible models.
pub const MODELS: [&str; 3] = ["alpha", "beta", "gamma"];

/// The period in which faults and requests begin.
const TROUBLE: Duration = Duration::from_secs(20);

/// Everything that a seed decides.
#[derive(Debug)]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The resolution of time. Events within one tick on two hosts have no order.
    pub tick: Duration,
    /// The longest latency of a packet without faults.
    pub latency: Duration,
    /// The number of relays, which are `relay-0`, `relay-1` and so on.
    pub relays: usize,
    /// True if the last relay is a published one, which uses only the first messages of the protocol.
    pub has_old_relay: bool,
    /// The workers, which are `worker-0` and so on.
    pub workers: Vec<WorkerPlan>,
    /// Settings of the relays.
    pub settings: Settings,
    /// The API keys that the relays require; empty if they require none.
    pub keys: Vec<KeyPlan>,
    /// The clients' requests.
    pub requests: Vec<RequestPlan>,
    /// The final requests: one for each served model, at each relay.
    pub probes: Vec<RequestPlan>,
    /// The faults, in order of their start.
    pub faults: Vec<Fault>,
}

/// A worker and its backend.
#[derive(Debug)]
pub struct WorkerPlan {
    /// The models that it serves.
    pub models: Vec<&'static str>,
    /// Its capacity.
    pub capacity: usize,
    /// Its multiplexer's only slot; `None` if its backend has all models at once.
    pub slot: Option<SlotPlan>,
    /// True if it is a published worker, which uses only the first messages of the protocol, with one relay.
    pub is_old: bool,
}

/// A slot that holds one model at a time.
#[derive(Debug, Clone)]
pub struct SlotPlan {
    /// The duration of a load.
    pub loads_in: Duration,
    /// Every load whose number is a multiple of this fails; 0 if none does.
    pub fails_each: usize,
    /// `drainTimeout`, in seconds.
    pub drain_timeout: u64,
}

/// An API key.
#[derive(Debug, Default)]
pub struct KeyPlan {
    /// The only models that it may use.
    pub models: Option<Vec<&'static str>>,
    /// The number of requests that it may have in flight at each relay.
    pub max_in_flight: Option<u32>,
    /// True if it was revoked.
    pub revoked: bool,
}

/// Settings of the relays.
#[derive(Debug)]
pub struct Settings {
    /// `MAX_QUEUE_LEN`.
    pub queue_len: usize,
    /// `QUEUE_TIMEOUT_SECS`.
    pub queue_timeout: u64,
    /// `COLD_TIMEOUT_SECS`.
    pub cold_timeout: u64,
    /// `REQUEST_TIMEOUT_SECS`.
    pub request_timeout: u64,
    /// `DRAIN_TIMEOUT_SECS`.
    pub drain_timeout: u64,
    /// `STREAM_KEEPALIVE_SECS`.
    pub keepalive: u64,
    /// True for `PLACEMENT=cache`.
    pub places_by_cache: bool,
}

/// One request of one client.
#[derive(Debug, Clone)]
pub struct RequestPlan {
    /// Its place in [`Plan::requests`].
    pub nonce: usize,
    /// The time at which it is sent.
    pub at: Duration,
    /// The relay to which it is sent.
    pub relay: usize,
    /// True if that is an old relay.
    pub is_to_old_relay: bool,
    /// The model.
    pub model: &'static str,
    /// The size of the prompt in bytes.
    pub prompt_bytes: usize,
    /// The backend's response.
    pub answer: Answer,
    /// The time after which the client disconnects.
    pub leaves_after: Option<Duration>,
    /// The interval at which the client reads a piece, instead of reading at once.
    pub reads_each: Option<Duration>,
    /// The index in [`Plan::keys`] of the key that the client presents; `None` for one that no relay knows.
    pub key: Option<usize>,
    /// The client that sends it, of those that keep their connection and send one request after the other; `None` for a
    /// separate one.
    pub client: Option<usize>,
    /// The conversation that it is a turn of.
    pub conversation: Option<usize>,
}

/// A backend's response to a request.
#[derive(Debug, Clone)]
pub struct Answer {
    /// True for server-sent events, false for one JSON document.
    pub streams: bool,
    /// The number of pieces.
    pub pieces: usize,
    /// The size of each piece in bytes.
    pub piece_bytes: usize,
    /// The delay before the head.
    pub thinks: Duration,
    /// The pause between pieces.
    pub pause: Duration,
    /// The failure, on each attempt.
    pub trouble: Trouble,
}

/// A backend's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// No failure.
    None,
    /// It returns 500.
    Refuses,
    /// It closes the connection without a head.
    ClosesBeforeHead,
    /// It closes the connection before the last piece.
    ClosesMidway,
    /// It stalls before the last piece.
    HangsMidway,
    /// It never responds.
    Hangs,
}

/// One fault.
#[derive(Debug, Clone)]
pub struct Fault {
    /// Its start.
    pub at: Duration,
    /// Its duration.
    pub lasts: Duration,
    /// Its kind.
    pub kind: FaultKind,
}

/// The kinds of faults.
#[derive(Debug, Clone)]
pub enum FaultKind {
    /// The process is killed and restarted: its peers are notified.
    Kill(String),
    /// The machine loses power and comes back: its peers are not notified.
    PowerLoss(String),
    /// SIGTERM; restarted when it has ended and the duration is over.
    Terminate(String),
    /// Packets between two hosts are lost, both ways: existing connections stay half open.
    Partition(String, String),
    /// Packets from one host to the other are lost.
    Deaf(String, String),
    /// Packets between two hosts are all delayed.
    Hold(String, String),
    /// The latency between two hosts is up to this value.
    Slow(String, String, Duration),
    /// The backend of a worker closes its connections and accepts none.
    BackendDown(usize),
    /// The wall clock of all hosts jumps, in milliseconds.
    ClockJump(i64),
}

impl Plan {
    /// Returns the plan of `seed`. With odd seeds some workers swap models; every third seed has API keys, and clients
    /// that keep their connections; with every fifth some workers are old, and one of two relays may be; every fourth
    /// has conversations, which are placed by cache, and half of those have no faults.
    pub fn new(seed: u64) -> Self {
        let mut plan = Self::without_slots(seed);
        if seed.is_multiple_of(5) {
            let mut rng = SmallRng::seed_from_u64(seed.rotate_left(16));
            plan.workers.iter_mut().for_each(|worker| worker.is_old = rng.random_bool(0.5));
            // An old relay does not support API keys.
            plan.has_old_relay = plan.relays > 1 && !seed.is_multiple_of(3) && rng.random_bool(0.7);
            let old = plan.has_old_relay.then_some(plan.relays - 1);
            plan.requests.iter_mut().for_each(|request| request.is_to_old_relay = old == Some(request.relay));
            plan.probes = plan.probes();
        }
        if !seed.is_multiple_of(2) {
            // From a separate generator, so that the rest of the seed stays unchanged.
            let mut rng = SmallRng::seed_from_u64(!seed);
            for worker in &mut plan.workers {
                let slot = rng.random_bool(0.4).then(|| SlotPlan::new(&mut rng));
                worker.slot = slot.filter(|_| !worker.is_old);
            }
            plan.settings.cold_timeout = rng.random_range(5..=20);
        }
        if seed.is_multiple_of(3) {
            let mut rng = SmallRng::seed_from_u64(seed.rotate_left(32));
            plan.add_keys(&mut rng);
            plan.keep_connections(&mut rng);
        }
        if seed.is_multiple_of(4) {
            let mut rng = SmallRng::seed_from_u64(seed.rotate_left(48));
            plan.settings.places_by_cache = true;
            for request in &mut plan.requests {
                request.conversation = rng.random_bool(0.8).then(|| rng.random_range(0..4));
            }
            if rng.random() {
                plan.faults.clear();
            }
        }
        plan
    }

    /// The first key permits everything, and is used for the final requests.
    fn add_keys(&mut self, rng: &mut SmallRng) {
        let limited = (0..rng.random_range(1..=3)).map(|_| KeyPlan::new(rng));
        self.keys = [KeyPlan::default()].into_iter().chain(limited).collect();
        for request in &mut self.requests {
            request.key = rng.random_bool(0.95).then(|| rng.random_range(0..self.keys.len()));
        }
        self.probes.iter_mut().for_each(|probe| probe.key = Some(0));
    }

    fn keep_connections(&mut self, rng: &mut SmallRng) {
        let relays = self.relays;
        let clients = (self.requests.len() / 3).next_multiple_of(relays);
        for request in &mut self.requests {
            // Each has one relay.
            let client = rng.random_range(0..clients / relays) * relays + request.relay;
            request.client = rng.random_bool(0.8).then_some(client);
        }
    }

    fn without_slots(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let relays = rng.random_range(1..=2);
        let models = &MODELS[..rng.random_range(1..=MODELS.len())];
        let workers: Vec<_> = (0..rng.random_range(1..=3)).map(|_| WorkerPlan::new(&mut rng, models)).collect();
        let requests = rng.random_range(10..=60);
        let mut requests: Vec<_> = (0..requests).map(|_| RequestPlan::new(&mut rng, relays, models)).collect();
        requests.sort_by_key(|request| request.at);
        requests.iter_mut().enumerate().for_each(|(nonce, request)| request.nonce = nonce);
        let faults = rng.random_range(0..=6);
        let mut faults: Vec<_> = (0..faults).map(|_| Fault::new(&mut rng, relays, workers.len())).collect();
        faults.sort_by_key(|fault| fault.at);
        let mut plan = Self {
            seed,
            probes: Vec::new(),
            tick: Duration::from_millis(*[2, 5, 10].choose(&mut rng).expect("three")),
            latency: Duration::from_millis(rng.random_range(1..=50)),
            relays,
            has_old_relay: false,
            workers,
            settings: Settings::new(&mut rng),
            keys: Vec::new(),
            requests,
            faults,
        };
        plan.probes = plan.probes();
        plan
    }

    /// True if a worker serves the model to that relay, in the absence of faults.
    pub fn is_served(&self, model: &str, relay: usize) -> bool {
        let reaches = |number: usize| !self.workers[number].is_old || self.only_relay_of(number) == relay;
        let mut workers = self.workers.iter().enumerate();
        workers.any(|(number, worker)| worker.models.contains(&model) && reaches(number))
    }

    /// Returns one request for each model at each relay to which a worker serves it.
    fn probes(&self) -> Vec<RequestPlan> {
        let places = MODELS.iter().flat_map(|model| (0..self.relays).map(move |relay| (*model, relay)));
        let first = &self.requests[0];
        let probe = |(index, (model, relay))| {
            let answer = Answer { trouble: Trouble::None, ..first.answer.clone() };
            let (nonce, is_to_old_relay) = (self.requests.len() + index, self.is_old_relay(relay));
            RequestPlan {
                nonce,
                relay,
                is_to_old_relay,
                model,
                answer,
                leaves_after: None,
                reads_each: None,
                ..first.clone()
            }
        };
        places.filter(|(model, relay)| self.is_served(model, *relay)).enumerate().map(probe).collect()
    }

    /// Returns the relay that an old worker dials: never an old one.
    pub fn only_relay_of(&self, worker: usize) -> usize {
        worker % (self.relays - usize::from(self.has_old_relay))
    }

    /// True if this relay is an old one.
    pub fn is_old_relay(&self, relay: usize) -> bool {
        self.has_old_relay && relay + 1 == self.relays
    }

    /// Returns the request of that nonce, including probes.
    pub fn request(&self, nonce: usize) -> Option<&RequestPlan> {
        self.requests.iter().chain(&self.probes).nth(nonce)
    }

    /// Returns the end of the last fault.
    pub fn healed_at(&self) -> Duration {
        self.faults.iter().map(|fault| fault.at + fault.lasts).max().unwrap_or_default()
    }
}

impl WorkerPlan {
    fn new(rng: &mut SmallRng, models: &[&'static str]) -> Self {
        let count = rng.random_range(1..=models.len());
        Self {
            models: models.choose_multiple(rng, count).copied().collect(),
            capacity: rng.random_range(1..=4),
            slot: None,
            is_old: false,
        }
    }
}

impl SlotPlan {
    fn new(rng: &mut SmallRng) -> Self {
        Self {
            loads_in: within(rng, Duration::from_secs(3)),
            fails_each: *[0, 0, 4].choose(rng).expect("three"),
            drain_timeout: rng.random_range(1..=5),
        }
    }
}

impl KeyPlan {
    fn new(rng: &mut SmallRng) -> Self {
        let some = |rng: &mut SmallRng| vec![*MODELS.choose(rng).expect("three")];
        Self {
            models: rng.random_bool(0.3).then(|| some(rng)),
            max_in_flight: rng.random_bool(0.5).then(|| rng.random_range(1..=3)),
            revoked: rng.random_bool(0.1),
        }
    }
}

impl Settings {
    fn new(rng: &mut SmallRng) -> Self {
        let queue_len = *[2, 10, 100].choose(rng).expect("three");
        let queue_timeout = rng.random_range(2..=10);
        Self {
            queue_len,
            queue_timeout,
            cold_timeout: queue_timeout,
            request_timeout: rng.random_range(12..=30),
            drain_timeout: rng.random_range(2..=10),
            keepalive: *[0, 0, 2].choose(rng).expect("three"),
            places_by_cache: false,
        }
    }
}

impl RequestPlan {
    fn new(rng: &mut SmallRng, relays: usize, models: &[&'static str]) -> Self {
        Self {
            nonce: 0,
            at: within(rng, TROUBLE),
            relay: rng.random_range(0..relays),
            is_to_old_relay: false,
            model: models.choose(rng).expect("at least one"),
            prompt_bytes: *[10, 500, 20_000, 200_000].choose(rng).expect("four"),
            answer: Answer::new(rng),
            leaves_after: rng.random_bool(0.15).then(|| within(rng, Duration::from_secs(4))),
            reads_each: rng.random_bool(0.1).then(|| within(rng, Duration::from_millis(200))),
            key: None,
            client: None,
            conversation: None,
        }
    }
}

impl Answer {
    fn new(rng: &mut SmallRng) -> Self {
        let troubles =
            [Trouble::Refuses, Trouble::ClosesBeforeHead, Trouble::ClosesMidway, Trouble::HangsMidway, Trouble::Hangs];
        Self {
            streams: rng.random_bool(0.7),
            pieces: rng.random_range(1..=40),
            piece_bytes: *[1, 40, 300, 9_000].choose(rng).expect("four"),
            thinks: within(rng, Duration::from_millis(800)),
            pause: within(rng, Duration::from_millis(150)),
            trouble: if rng.random_bool(0.1) { *troubles.choose(rng).expect("five") } else { Trouble::None },
        }
    }
}

impl Fault {
    fn new(rng: &mut SmallRng, relays: usize, workers: usize) -> Self {
        let relay = format!("relay-{}", rng.random_range(0..relays));
        let number = rng.random_range(0..workers);
        let worker = format!("worker-{number}");
        let clients = || "clients".to_owned();
        let someone = if rng.random_bool(0.3) { relay.clone() } else { worker.clone() };
        let kind = match rng.random_range(0..14) {
            0 | 1 => FaultKind::Kill(someone),
            2 => FaultKind::PowerLoss(someone),
            3 | 4 => FaultKind::Terminate(someone),
            5 | 6 => FaultKind::Partition(relay, worker),
            7 => FaultKind::Deaf(relay, worker),
            8 => FaultKind::Deaf(worker, relay),
            9 if rng.random() => FaultKind::Hold(relay, worker),
            9 => FaultKind::Hold(relay, clients()),
            10 => FaultKind::Slow(relay, clients(), slow(rng)),
            11 => FaultKind::Slow(relay, worker, slow(rng)),
            12 => FaultKind::BackendDown(number),
            _ => FaultKind::ClockJump(rng.random_range(-7_200_000..=7_200_000)),
        };
        Self { at: within(rng, TROUBLE), lasts: within(rng, Duration::from_secs(8)), kind }
    }
}

fn slow(rng: &mut SmallRng) -> Duration {
    Duration::from_millis(rng.random_range(100..=2_000))
}

fn within(rng: &mut SmallRng, most: Duration) -> Duration {
    Duration::from_millis(rng.random_range(1..=most.as_millis() as u64))
}

impl FaultKind {
    /// Returns a human-readable name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Kill(_) => "kill -9",
            Self::PowerLoss(_) => "power loss",
            Self::Terminate(_) => "SIGTERM",
            Self::Partition(..) => "partition",
            Self::Deaf(..) => "partition, one way",
            Self::Hold(..) => "held packets",
            Self::Slow(..) => "slow link",
            Self::BackendDown(_) => "backend down",
            Self::ClockJump(_) => "clock jump",
        }
    }
}
