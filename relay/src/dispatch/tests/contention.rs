//! Ten minutes of a busy provider with eight slots: a batch job that keeps many requests in flight, and people who
//! chat.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::harness::{request, secs, settings, worker};
use crate::dispatch::{
    Class, Dispatch, Effect, Event, Fairness, Owner, RequestKey, Settings, TokenUsage, Weight, WorkerKey,
};

const SLOTS: u32 = 8;
const LENGTH: Duration = Duration::from_secs(600);
const SHARED: Fairness = Fairness::Shared { promote_after: Duration::from_secs(15) };

/// The time that a request of the batch job takes. With 64 in flight and no order but arrival, a request waits for 42
/// s.
const BATCH_TIME: Duration = Duration::from_secs(6);
const CHAT_TIME: Duration = Duration::from_millis(1_500);

/// A key whose requests are all alike.
#[derive(Clone)]
struct Client {
    owner: Owner,
    bytes: u64,
    usage: TokenUsage,
    time: Duration,
}

impl Client {
    fn batch(class: Class) -> Self {
        let usage = TokenUsage { input: 2_000, output: 500 };
        Self { owner: owner("batch", 100, class), bytes: 8_000, usage, time: BATCH_TIME }
    }

    fn chat(name: &str, class: Class) -> Self {
        let usage = TokenUsage { input: 1_000, output: 200 };
        Self { owner: owner(name, 100, class), bytes: 4_000, usage, time: CHAT_TIME }
    }
}

fn owner(key: &str, hundredths: u16, class: Class) -> Owner {
    Owner { key: Some(key.into()), weight: Weight::from_hundredths(hundredths).unwrap(), class }
}

#[derive(Default, Debug)]
struct Outcome {
    completed: usize,
    failed: usize,
    waits: Vec<Duration>,
}

impl Outcome {
    fn percentile(&mut self, percent: usize) -> Duration {
        self.waits.sort_unstable();
        self.waits[(self.waits.len() - 1) * percent / 100]
    }
}

struct Scene {
    core: Dispatch,
    start: Instant,
    now: Duration,
    clients: Vec<Client>,
    /// The requests that have not ended, with their client, and those of them that a client repeats for ever.
    requests: BTreeMap<RequestKey, (usize, bool)>,
    ends: BTreeSet<(Duration, RequestKey, u32)>,
    arrivals: BTreeSet<(Duration, u64, usize, bool)>,
    outcomes: Vec<Outcome>,
    last: u64,
    random: u64,
}

impl Scene {
    fn new(fairness: Fairness, clients: Vec<Client>) -> Self {
        Self::with(Settings { fairness, ..settings() }, clients)
    }

    fn with(settings: Settings, clients: Vec<Client>) -> Self {
        let mut scene = Self {
            core: Dispatch::new(settings),
            start: Instant::now(),
            now: Duration::ZERO,
            requests: BTreeMap::new(),
            ends: BTreeSet::new(),
            arrivals: BTreeSet::new(),
            outcomes: clients.iter().map(|_| Outcome::default()).collect(),
            clients,
            last: 0,
            random: 1,
        };
        scene.handle(Event::WorkerJoined(worker(1, &["m"], SLOTS, false)));
        scene
    }

    /// Returns a number from 0 to 1.
    fn unit(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 40) as f64 / f64::from(1 << 24)
    }

    /// A client will send a request, and repeat it or not.
    fn arrive(&mut self, at: Duration, client: usize, repeats: bool) {
        self.last += 1;
        self.arrivals.insert((at, self.last, client, repeats));
    }

    fn submit(&mut self, client: usize, repeats: bool) {
        self.last += 1;
        let Client { owner, bytes, .. } = self.clients[client].clone();
        let mut new = request(self.last, "m");
        (new.owner, new.bytes) = (Some(owner), bytes);
        self.requests.insert(new.key, (client, repeats));
        self.handle(Event::Submit(new));
    }

    fn handle(&mut self, event: Event) {
        let mut out = Vec::new();
        self.core.handle(event, self.start + self.now, &mut out);
        for effect in out {
            match effect {
                Effect::Send { request, attempt, waited, .. } => {
                    let (client, _) = self.requests[&request];
                    self.outcomes[client].waits.push(waited);
                    let time = self.clients[client].time.mul_f64(0.75 + self.unit() / 2.0);
                    self.ends.insert((self.now + time, request, attempt));
                }
                Effect::Finished { request, .. } | Effect::Fail { request, .. } => {
                    let (client, repeats) = self.requests.remove(&request).unwrap();
                    let outcome = &mut self.outcomes[client];
                    let count = if matches!(effect, Effect::Finished { .. }) {
                        &mut outcome.completed
                    } else {
                        &mut outcome.failed
                    };
                    *count += 1;
                    let pause = if matches!(effect, Effect::Finished { .. }) { 0.0 } else { 0.2 };
                    if repeats {
                        self.arrive(self.now + secs(pause), client, true);
                    }
                }
                Effect::CancelSent { .. }
                | Effect::Cancelled { .. }
                | Effect::Severed { .. }
                | Effect::Requeued { .. }
                | Effect::Demand { .. }
                | Effect::DrainedIdle { .. } => panic!("{effect:?}"),
            }
        }
    }

    /// Plays until the end.
    fn play(&mut self) {
        loop {
            let due = self.core.next_timeout().map(|due| due - self.start);
            let arrival = self.arrivals.first().map(|(at, ..)| *at);
            let end = self.ends.first().map(|(at, ..)| *at);
            let next = due.into_iter().chain(arrival).chain(end).min().expect("something goes on");
            if next > LENGTH {
                return;
            }
            self.now = next;
            if end == Some(next) {
                let (_, request, attempt) = self.ends.pop_first().unwrap();
                let usage = self.clients[self.requests[&request].0].usage;
                let worker = WorkerKey(1);
                self.handle(Event::Completed { worker, request, attempt, cached: None, usage: Some(usage) });
            } else if arrival == Some(next) {
                let (_, _, client, repeats) = self.arrivals.pop_first().unwrap();
                self.submit(client, repeats);
            } else {
                self.handle(Event::Tick);
            }
        }
    }
}

/// Five people send 212 requests while the batch job runs. Returns the chats' outcome and the batch job's.
fn chats_beside_batch(fairness: Fairness, in_flight: usize, (chat, batch): (Class, Class)) -> (Outcome, Outcome) {
    chats_beside(Client::batch(batch), Settings { fairness, ..settings() }, in_flight, chat)
}

fn chats_beside(batch: Client, settings: Settings, in_flight: usize, chat: Class) -> (Outcome, Outcome) {
    let mut clients = vec![batch];
    clients.extend(["ann", "ben", "cho", "dee", "eva"].map(|name| Client::chat(name, chat)));
    let mut scene = Scene::with(settings, clients);
    for _ in 0..212 {
        let (at, client) = (LENGTH.mul_f64(scene.unit() * 0.95), 1 + (scene.unit() * 5.0) as usize);
        scene.arrive(at, client, false);
    }
    (0..in_flight).for_each(|_| scene.arrive(Duration::ZERO, 0, true));
    scene.play();
    let mut outcomes = scene.outcomes.into_iter();
    let batch = outcomes.next().unwrap();
    let chats = outcomes.fold(Outcome::default(), |mut all, one| {
        (all.completed, all.failed) = (all.completed + one.completed, all.failed + one.failed);
        all.waits.extend(one.waits);
        all
    });
    (chats, batch)
}

/// Returns the requests that the batch job completes without others.
fn batch_alone() -> usize {
    let mut scene = Scene::new(SHARED, vec![Client::batch(Class::Batch)]);
    (0..64).for_each(|_| scene.arrive(Duration::ZERO, 0, true));
    scene.play();
    scene.outcomes[0].completed
}

/// Prints the figures of docs/how-to/share.md.
#[expect(clippy::print_stdout, reason = "a test's figures")]
fn show(order: &str, chats: &mut Outcome, batch: &Outcome, alone: usize) {
    let [median, late] = [50, 95].map(|percent| chats.percentile(percent).as_secs_f64());
    let share = 100.0 * batch.completed as f64 / alone as f64;
    println!("{order}: {} of 212 chats fail, wait {median:.1} s, p95 {late:.1} s, batch {share:.0} %", chats.failed);
}

#[test]
fn fifo_lets_batch_time_out_chats() {
    let (mut chats, batch) = chats_beside_batch(Fairness::Fifo, 64, (Class::Interactive, Class::Batch));
    show("fifo", &mut chats, &batch, batch_alone());
    assert!(chats.failed > 25, "the scenario is too easy: {} of 212 fail", chats.failed);
}

#[test]
fn shared_chats_wait_at_most_one_service_time() {
    let alone = batch_alone();
    for classes in [(Class::Normal, Class::Normal), (Class::Interactive, Class::Batch), (Class::Normal, Class::Batch)] {
        let (mut chats, batch) = chats_beside_batch(SHARED, 64, classes);
        show(&format!("shared, {classes:?}"), &mut chats, &batch, alone);
        assert_eq!((chats.completed, chats.failed), (212, 0), "{classes:?}");
        let (median, late) = (chats.percentile(50), chats.percentile(95));
        assert!(median < secs(2.0) && late <= BATCH_TIME, "{classes:?}: median {median:?}, p95 {late:?}");
        assert!(batch.completed * 10 >= alone * 9, "{classes:?}: {} of {alone}", batch.completed);
    }
}

/// Pictures: the bodies are a thousand times as long as the text that they are worth.
#[test]
fn chats_do_not_wait_for_overestimated_batch() {
    for bytes in [200_000, 4_000_000] {
        let batch = Client { bytes, ..Client::batch(Class::Normal) };
        let settings = Settings { fairness: SHARED, max_queue_bytes: u64::MAX, ..settings() };
        let (mut chats, _) = chats_beside(batch, settings, 64, Class::Normal);
        assert_eq!((chats.completed, chats.failed), (212, 0), "{bytes}");
        let late = chats.percentile(95);
        assert!(late <= BATCH_TIME, "{bytes}: p95 {late:?}");
    }
}

#[test]
fn chats_displace_batch_that_fills_queue() {
    let (chats, _) = chats_beside_batch(SHARED, 120, (Class::Interactive, Class::Batch));
    assert_eq!((chats.completed, chats.failed), (212, 0));
}

#[test]
fn batch_is_not_starved_by_busy_higher_class() {
    let people = ["ann", "ben", "cho"].map(|name| Client::chat(name, Class::Interactive));
    let mut scene = Scene::new(SHARED, [Client::batch(Class::Batch)].into_iter().chain(people).collect());
    (0..60).for_each(|number| scene.arrive(Duration::ZERO, 1 + number % 3, true));
    (0..4).for_each(|_| scene.arrive(Duration::ZERO, 0, true));
    scene.play();
    let batch = &mut scene.outcomes[0];
    let latest = batch.percentile(100);
    assert!(batch.failed == 0 && batch.completed > 100, "{} completed", batch.completed);
    assert!(latest < secs(20.0), "a request has waited {latest:?}");
}

#[test]
fn interactive_requests_that_fill_queue_admit_batch() {
    let people = ["ann", "ben", "cho"].map(|name| Client::chat(name, Class::Interactive));
    let mut scene = Scene::new(SHARED, [Client::batch(Class::Batch)].into_iter().chain(people).collect());
    // Half as many again as the queue holds, each repeated as soon as it is served or refused.
    (0..150).for_each(|number| scene.arrive(Duration::ZERO, 1 + number % 3, true));
    (0..4).for_each(|_| scene.arrive(secs(5.0), 0, true));
    scene.play();
    let [batch, chats @ ..] = &*scene.outcomes else { panic!("four clients") };
    assert!(chats.iter().all(|chat| chat.failed > 100), "the queue is full");
    assert!(batch.completed > 50, "{} completed, {} failed", batch.completed, batch.failed);
}

#[test]
fn service_follows_weights() {
    let mut clients = [100, 300, 50].map(|_| Client::batch(Class::Normal));
    for (client, hundredths) in clients.iter_mut().zip([100, 300, 50]) {
        client.owner = owner(&format!("key {hundredths}"), hundredths, Class::Normal);
    }
    let patient = Settings { fairness: SHARED, queue_timeout: LENGTH, ..settings() };
    let mut scene = Scene::with(patient, clients.to_vec());
    (0..30).for_each(|number| scene.arrive(Duration::ZERO, number % 3, true));
    scene.play();
    let completed: Vec<_> = scene.outcomes.iter().map(|outcome| outcome.completed as f64).collect();
    let (triple, half) = (completed[1] / completed[0], completed[2] / completed[0]);
    assert!((2.8..3.2).contains(&triple) && (0.45..0.55).contains(&half), "{completed:?}");
}
