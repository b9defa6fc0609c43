//! Random histories of a provider, played to the core and to a plain reference model, which must agree on every effect
//! and every timeout. In addition, a ledger that knows no rules checks the invariants that hold under any rules.
//!
//! `MODELRELAY_HISTORY_TRANSITIONS` sets the minimum number of events, `MODELRELAY_HISTORY_SEED` the seed; every run
//! prints its own seed.

mod bound;
mod bug;
mod comparable;
// Times have a text that can be read only on Unix.
#[cfg(unix)]
mod explore;
mod ledger;
mod op;
mod placements;
mod reference;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_protocol::message::Slot;
use proptest::test_runner::{Config, FileFailurePersistence, RngAlgorithm, TestRng, TestRunner};
use sha2::{Digest, Sha256};

use self::bound::Bound;
use self::bug::Bug;
use self::comparable::{check_position, digest_text, in_order};
use self::ledger::Ledger;
use self::op::{Kind, MODELS, Op, OwnerOp, history, models};
use self::placements::Placements;
use self::reference::Reference;
use crate::dispatch::{
    Class, Dispatch, Effect, Event, Failure, Gate, Grant, Model, NewMultiplexer, NewRequest, NewWorker, Owner,
    QueueShare, RequestKey, RequeueReason, Settings, TokenUsage, Weight, WorkerKey,
};

/// The core, the reference and the ledger, in parallel.
#[derive(Clone)]
struct Play {
    core: Dispatch,
    reference: Reference,
    ledger: Ledger,
    placements: Placements,
    /// Only in histories to which it applies.
    bound: Option<Bound>,
    start: Instant,
    next_key: u64,
    started: HashSet<RequestKey>,
    transitions: u64,
    /// The digest of all effects, in their order.
    digest: Sha256,
    /// The rare occurrences.
    seen: BTreeSet<&'static str>,
    /// A bug that core and reference are given, to test that it is found.
    bug: Option<Bug>,
}

/// The occurrences required in a run; without them its agreement proves nothing about multiplexers.
const MUST_BE_SEEN: [&str; 10] = [
    "assigned",
    "passed over",
    "sent through a gate",
    "sent by an alias",
    "model failed",
    "model loading",
    "share full",
    "waits beside a failing worker",
    "sent to a failing worker",
    "moved from a silent worker",
];

/// The same for a run with conversations.
const MUST_BE_SEEN_OF_PLACEMENT: [&str; 10] = [
    "home",
    "new",
    "moved: backlog",
    "moved: busy",
    "moved: distrust",
    "moved: gone",
    "moved: load",
    "homes at their limit",
    "overtaken",
    "sent before others at home",
];

/// The same for a run with near and far workers.
const MUST_BE_SEEN_OF_ZONES: [&str; 6] =
    ["home", "moved: nearer", "kept near", "spilled", "sent far without near room", "stayed far at home"];

/// The same for a run with owners.
const MUST_BE_SEEN_OF_SHARES: [&str; 12] = [
    "ranked by service or class",
    "demand of another class",
    "promoted",
    "refused for a lower class",
    "lifted",
    "displaced",
    "displaced in its share",
    "sent before an older one of its class",
    "charge returned",
    "home",
    "overtaken",
    "sent through a gate",
];

/// The same for a run in which keys compete.
const MUST_BE_SEEN_OF_BOUND: [&str; 4] =
    ["kept the bound", "lifted", "charge returned", "sent before an older one of its class"];

/// The effects of the histories in [`effects_keep_their_order`], without the class and rank that all requests have
/// there.
const DIGEST: &str = "afbd7c7ee033e487cf4ac3e3a39e0b7495b327c44044ad32925f7dd19331f85d";

impl Play {
    fn new(kind: Kind, settings: Settings) -> Self {
        Self {
            bound: (kind == Kind::Crowded).then(Bound::default),
            core: Dispatch::new(settings.clone()),
            reference: Reference::new(settings),
            ledger: Ledger::default(),
            placements: Placements::default(),
            start: Instant::now(),
            next_key: 0,
            started: HashSet::new(),
            transitions: 0,
            digest: Sha256::new(),
            seen: BTreeSet::new(),
            bug: None,
        }
    }

    fn act(&mut self, op: Op) {
        if let Some(event) = self.event(op) {
            self.handle(&event);
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.reference.now + time;
        while let Some(due) = self.next_due().filter(|due| *due <= until) {
            self.reference.pass(due.saturating_sub(self.reference.now));
            self.handle(&Event::Tick);
        }
        self.reference.pass(until.saturating_sub(self.reference.now));
    }

    /// The next deadline of the core.
    fn next_due(&self) -> Option<Duration> {
        self.core.next_timeout().map(|due| due - self.start)
    }

    /// Returns the effects, without positions.
    fn handle(&mut self, event: &Event) -> Vec<Effect> {
        self.transitions += 1;
        let now = self.reference.now;
        let understood = bug::understood(self.bug, event);
        let mut actual = Vec::new();
        self.core.handle(understood.clone(), self.start + now, &mut actual);
        actual.iter_mut().for_each(check_position);
        self.placements.before(&self.reference);
        let (mut expected, after) = self.reference.handle(understood, &actual);
        // Due effects come first, before the event has changed anything.
        let (due, rest) = actual.split_at(expected.len().min(actual.len()));
        due.iter().for_each(|effect| self.ledger.record(effect, now));
        due.iter().for_each(|effect| self.placements.record(effect));
        self.ledger.before(event);
        self.placements.apply(event);
        rest.iter().for_each(|effect| self.ledger.record(effect, now));
        rest.iter().for_each(|effect| self.placements.record(effect));
        expected.extend(after);
        self.note_effects(&actual);
        self.digest.update(digest_text(&actual));
        assert_eq!(in_order(actual.clone()), in_order(expected), "the effects of {event:?} at {now:?}");
        let core = &self.core;
        self.ledger.check_demand(&self.reference, now, self.next_due());
        assert_eq!(core.queue_len(), self.reference.queued().count());
        assert_eq!(core.queue_len() + core.in_flight(), self.reference.requests.len());
        let known = core.models(self.start + now);
        assert_eq!(core.queue_bytes(), self.reference.queued_bytes());
        assert_eq!(core.keys_waiting(), self.reference.keys_waiting());
        assert_eq!(known.len(), self.reference.models().len(), "a model was kept or lost");
        let assigned = known.into_iter().filter_map(|model| Some((model.model, model.assigned?)));
        assert!(assigned.eq(self.reference.assignments()), "another multiplexer was assigned");
        self.ledger.check_alive(self.reference.requests.keys().copied());
        self.placements.check(&self.reference, core, &actual);
        self.seen.append(&mut self.placements.seen);
        self.check_shares(event, &actual);
        self.check_ranks(&actual);
        actual
    }

    /// Checks the places in the queue, and the bound on the service of two keys.
    fn check_shares(&mut self, event: &Event, effects: &[Effect]) {
        self.seen.extend(self.reference.occurrences());
        assert_eq!(self.core.positions(), self.reference.positions(), "places in the queue");
        if let Some(bound) = &mut self.bound {
            bound.apply(event);
            effects.iter().for_each(|effect| bound.record(effect));
            bound.check(&self.reference);
            self.seen.extend(bound.is_proved.then_some("kept the bound"));
        }
    }

    /// Checks that a multiplexer's demand is in the fair order, and that no other worker receives one.
    fn check_ranks(&mut self, effects: &[Effect]) {
        for effect in effects {
            let Effect::Demand { worker, demand } = effect else { continue };
            let ranks = if self.reference.has_multiplexer(*worker) {
                self.reference.ranks(*worker)
            } else {
                demand.iter().map(|entry| (entry.model.clone(), 0)).collect()
            };
            assert_eq!(demand.iter().map(|entry| (entry.model.clone(), entry.rank)).collect::<BTreeMap<_, _>>(), ranks);
            self.seen.extend(demand.iter().any(|entry| entry.rank > 0).then_some("ranked by service or class"));
            let has_class = demand.iter().any(|entry| entry.class != Class::Normal);
            self.seen.extend(has_class.then_some("demand of another class"));
        }
    }

    fn note_effects(&mut self, effects: &[Effect]) {
        for effect in effects {
            if let Effect::Send { worker, request, .. } = effect
                && self.reference.has_multiplexer(*worker)
            {
                self.seen.insert("sent through a gate");
                self.seen.extend(self.reference.is_by_alias(*request, *worker).then_some("sent by an alias"));
            }
            if let Effect::Send { worker, request, .. } = effect
                && self.reference.fails(*worker, *request)
            {
                self.seen.insert("sent to a failing worker");
            }
            if let Effect::Requeued { reason: RequeueReason::FirstByteTimeout, .. } = effect {
                self.seen.insert("moved from a silent worker");
            }
            if let Effect::Fail { failure, .. } = effect {
                let failed = matches!(failure, Failure::ModelFailed { .. }).then_some("model failed");
                let late = matches!(failure, Failure::ModelLoading { .. }).then_some("model loading");
                let share = matches!(failure, Failure::QueueShareFull { .. }).then_some("share full");
                self.seen.extend(failed.into_iter().chain(late).chain(share));
            }
        }
        self.seen.extend(self.reference.assignments().next().map(|_| "assigned"));
        self.seen.extend(self.reference.has_passed_over().then_some("passed over"));
        self.seen.extend(self.reference.waits_with_failing_worker().then_some("waits beside a failing worker"));
    }

    /// Translates an op to an event in the current state. One arm each, so it is long.
    fn event(&mut self, op: Op) -> Option<Event> {
        Some(match op {
            Op::Submit { model, bytes, pin, needs_core1, allowed, share, conversation, owner } => {
                let key = RequestKey(self.key());
                let conversation = conversation.map(|number| placements::conversation(model, number));
                let model = Model::from(MODELS[model]);
                let pin = pin.map(|index| self.worker(index).unwrap_or(WorkerKey(0)));
                let allowed = allowed.map(|mask| Arc::new(models(mask).into_iter().collect()));
                let share = share.map(|(key, percent)| QueueShare { key: key.to_string().into(), percent });
                let owner = owner.map(|OwnerOp { key, weight, class }| {
                    let weight = Weight::from_hundredths(weight).expect("a weight");
                    Owner { key: (key > 0).then(|| format!("key {key}").into()), weight, class }
                });
                Event::Submit(NewRequest { key, model, bytes, pin, needs_core1, allowed, share, conversation, owner })
            }
            Op::Cancel { request, reason } => Event::Cancel { request: pick(&self.live(), request)?, reason },
            Op::Join { models: mask, max_concurrent, load, core1, failing, slots, process, distance } => {
                let key = WorkerKey(self.key());
                let (models, failing) = (models(mask), models(failing));
                let kind = if slots.is_some() { "multiplexer" } else { "plain" };
                let instance = process.map(|number| format!("{kind} {number}").into());
                let (multiplexer, distance) = (None, distance.unwrap_or_default());
                let new =
                    NewWorker { key, models, failing, max_concurrent, load, core1, multiplexer, instance, distance };
                join(new, slots)
            }
            Op::Lose { worker, cause } => {
                let worker = self.worker(worker)?;
                let running = self.reference.running_on(worker);
                let started = running.filter(|key| self.started.contains(key)).collect();
                Event::WorkerLost { worker, started, cause }
            }
            Op::Models { worker, models: mask, failing, load } => {
                let (models, failing) = (models(mask), models(failing));
                Event::ModelsUpdated { worker: self.worker(worker)?, models, failing, load }
            }
            Op::Load { worker, load } => Event::LoadReported { worker: self.worker(worker)?, load },
            Op::Grant { worker, grant } => {
                let worker = self.worker(worker)?;
                // A multiplexer never sends a grant without its gates.
                (!self.reference.has_multiplexer(worker)).then_some(Event::Granted { worker, grant })?
            }
            Op::Gates { worker, models: mask, gate } => gates(self.multiplexer(worker)?, mask, gate),
            Op::Slots { worker, slots } => Event::SlotsReported { worker: self.multiplexer(worker)?, slots },
            Op::Start { request } => {
                let (_, key, _) = self.running(request)?;
                self.started.insert(key);
                return None;
            }
            Op::Complete { request, cached, used } => {
                let (worker, request, attempt) = self.running(request)?;
                let usage = used.map(|(input, output)| TokenUsage { input, output });
                Event::Completed { worker, request, attempt, cached, usage }
            }
            Op::Begin { request } => {
                let (worker, request, attempt) = self.running(request)?;
                Event::Begun { worker, request, attempt }
            }
            Op::Use { request, input, output } => {
                let (_, request, _) = self.running(request)?;
                Event::Used { request, usage: TokenUsage { input, output } }
            }
            Op::Homes { worker, homes, backlog } => {
                let home = |(model, number, bytes)| (placements::conversation(model, number), bytes);
                let homes = homes.into_iter().map(home).collect();
                Event::HomesReported { worker: self.worker(worker)?, homes, backlog }
            }
            Op::Silent { request } => {
                let (_, request, _) = self.running(request)?;
                (!self.started.contains(&request)).then_some(Event::Silent { request })?
            }
            Op::Fail { request, failure } => {
                let (worker, request, attempt) = self.running(request)?;
                if self.started.contains(&request) {
                    return None;
                }
                Event::AttemptFailed { worker, request, attempt, failure }
            }
            Op::Stray { worker, request, attempt, failure } => {
                let (worker, request) = (self.worker(worker)?, RequestKey(request));
                if self.all_running().contains(&(worker, request, attempt)) {
                    return None;
                }
                match failure {
                    Some(failure) => Event::AttemptFailed { worker, request, attempt, failure },
                    None => Event::Completed { worker, request, attempt, cached: None, usage: None },
                }
            }
            Op::Succeed { older, newer } => {
                Event::WorkerSucceeded { older: self.worker(older)?, newer: self.worker(newer)? }
            }
            Op::Drain { worker } => Event::WorkerDraining { worker: self.worker(worker)? },
            Op::Settings(settings) => Event::SettingsChanged(settings),
            Op::Deleted => Event::Deleted,
            Op::DrainBegun => Event::DrainBegun,
            Op::DrainDeadline => Event::DrainDeadline,
            Op::Pass { millis } => {
                self.pass(Duration::from_millis(millis));
                return None;
            }
            Op::Oversleep { millis } => {
                self.reference.pass(Duration::from_millis(millis));
                return None;
            }
        })
    }

    fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    fn multiplexer(&self, index: usize) -> Option<WorkerKey> {
        let all: Vec<_> = self.reference.workers.keys().copied().collect();
        let all: Vec<_> = all.into_iter().filter(|worker| self.reference.has_multiplexer(*worker)).collect();
        pick(&all, index)
    }

    fn worker(&self, index: usize) -> Option<WorkerKey> {
        let workers: Vec<_> = self.reference.workers.keys().copied().collect();
        pick(&workers, index)
    }

    fn live(&self) -> Vec<RequestKey> {
        self.reference.requests.keys().copied().collect()
    }

    /// The running requests, in the order of their keys.
    fn all_running(&self) -> Vec<(WorkerKey, RequestKey, u32)> {
        let requests = self.reference.requests.iter();
        requests.filter_map(|(key, request)| Some((request.worker?, *key, request.attempts))).collect()
    }

    fn running(&self, index: usize) -> Option<(WorkerKey, RequestKey, u32)> {
        pick(&self.all_running(), index)
    }
}

fn join(mut new: NewWorker, slots: Option<Vec<Slot>>) -> Event {
    let instance = format!("instance {}", new.key.0).into();
    new.multiplexer = slots.map(|slots| NewMultiplexer { instance, slots });
    new.core1 |= new.multiplexer.is_some();
    Event::WorkerJoined(new)
}

fn gates(worker: WorkerKey, mask: usize, gate: Gate) -> Event {
    let gates: Vec<_> = models(mask).into_iter().map(|model| (model, gate)).collect();
    let sum = |part: u32| part * gates.len() as u32;
    let sums = Grant { slots: sum(gate.slots), others: sum(gate.others), capacity: sum(gate.capacity), links: 1 };
    Event::GatesSet { worker, sums, gates }
}

fn pick<T: Copy>(from: &[T], index: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[index % from.len()])
}

#[test]
fn random_histories_agree_with_reference() {
    run(Kind::Plain, &MUST_BE_SEEN);
}

#[test]
fn random_placements_agree_with_reference() {
    run(Kind::Placed, &MUST_BE_SEEN_OF_PLACEMENT);
}

#[test]
fn random_distances_agree_with_reference() {
    run(Kind::Zoned, &MUST_BE_SEEN_OF_ZONES);
}

#[test]
fn random_shares_agree_with_reference() {
    run(Kind::Shared, &MUST_BE_SEEN_OF_SHARES);
}

#[test]
fn service_of_waiting_keys_differs_by_constant() {
    run(Kind::Crowded, &MUST_BE_SEEN_OF_BOUND);
}

/// Plays histories until they have enough events, and everything that must be seen was.
fn run(kind: Kind, must_be_seen: &[&'static str]) {
    // Half of the events for each kind.
    let wanted = std::env::var("MODELRELAY_HISTORY_TRANSITIONS")
        .map_or(5_000, |wanted| wanted.parse::<u32>().expect("a number of transitions"))
        / 2;
    let mut seed = std::env::var("MODELRELAY_HISTORY_SEED")
        .map_or_else(|_| RandomState::new().hash_one(()), |seed| seed.parse().expect("a number"));
    print_line(&format!("seed {seed}"));
    let transitions = Cell::new(0);
    let seen = RefCell::new(BTreeSet::new());
    // A short run may happen to have only plain workers; it continues until it has others.
    let has_seen_all = || must_be_seen.iter().all(|what| seen.borrow().contains(what));
    let patience = u64::from(wanted.max(20_000)) * 10;
    while transitions.get() < u64::from(wanted) || !has_seen_all() && transitions.get() < patience {
        let config = Config {
            cases: wanted.div_ceil(200).min(500),
            failure_persistence: Some(Box::new(FileFailurePersistence::SourceParallel("proptest-regressions"))),
            source_file: Some(file!()),
            ..Config::default()
        };
        let mut runner = TestRunner::new_with_rng(config, rng(seed));
        seed = seed.wrapping_add(1);
        let outcome = runner.run(&history(kind), |(limits, ops)| {
            let mut play = Play::new(kind, limits);
            ops.into_iter().for_each(|op| play.act(op));
            transitions.set(transitions.get() + play.transitions);
            seen.borrow_mut().append(&mut play.seen);
            Ok(())
        });
        if let Err(failure) = outcome {
            panic!("{failure}");
        }
    }
    let unseen: Vec<_> = must_be_seen.iter().filter(|what| !seen.borrow().contains(*what)).collect();
    assert_eq!(unseen, Vec::<&&str>::new(), "what did not happen in all of it");
    print_line(&format!("{} transitions", transitions.get()));
}

/// The reference does not check the order of the effects of one event, nor the demand. A change of either changes this
/// digest, and so does a new release of proptest, which draws other histories: then take the digest of the core as it
/// was before.
#[test]
fn effects_keep_their_order() {
    let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
    let digest = RefCell::new(Sha256::new());
    let outcome = TestRunner::new_with_rng(config, rng(1)).run(&history(Kind::Plain), |(limits, ops)| {
        let mut play = Play::new(Kind::Plain, limits);
        ops.into_iter().for_each(|op| play.act(op));
        digest.borrow_mut().update(play.digest.finalize());
        Ok(())
    });
    outcome.expect("the core agrees with the reference");
    let digest: String = digest.into_inner().finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(digest, DIGEST);
}

fn rng(seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

#[expect(clippy::print_stdout, reason = "the numbers are the output of this test")]
fn print_line(line: &str) {
    println!("{line}");
}
