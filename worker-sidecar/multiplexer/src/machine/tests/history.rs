//! Random histories of a slot, played to the machine and to a world that knows the true state: the models on the
//! device, the waiting requests, the leases. Whatever happens in whatever order, the invariants hold,
//! and once everything works again, every request is served.
//!
//! Each assertion names its invariant:
//!
//! - I1: a model is loaded only once the memory of the others is free.
//! - I2: each lease belongs to the current generation.
//! - I3: a lease requires an open gate.
//! - I4: every running request is counted, and each lease is released once.
//! - I5: each request is leased, failed or cancelled, exactly once.
//! - I7: a swap does not interrupt a model with work before its quantum is over.
//! - I8: a model past its bound comes next, unless another has waited longer.
//! - I9: a gate opens only for a model that was ready.
//! - I10: the number of held requests of each relay is bounded.
//! - I11: an eviction that has begun is not aborted.
//!
//! Not tested here: I6, that no driver call blocks the slot, which needs the actor
//! and is tested by `actor::tests::world`, as is I1 with a driver that lies; and I12, that a request is not sent again
//! once a byte of its response has been sent, which belongs to the forwarding.
//!
//! `MODELRELAY_HISTORY_TRANSITIONS` sets the least number of events to play. A history that fails is shrunk and
//! printed, and its seed is kept in `proptest-regressions`, from where it is played first the next time.

// Times have a text that can be read only on Unix.
#[cfg(unix)]
mod explore;
mod op;
mod world;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::time::Duration;

use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};

use self::op::{Finds, MODELS, Op, history};
use self::world::{Call, World};
use crate::Model;
use crate::error::LoadFailure;
use crate::event::{
    Arrival, Demand, Event, Found, Left, LinkKind, OpId, Order, OrderId, Outcome, RelayKey, RequestKey,
};
use crate::memory::Reading;

impl World {
    fn act(&mut self, op: Op) {
        match op {
            Op::Arrive { relay, model, waited } => {
                let Some(relay) = self.relay(relay) else { return };
                self.arrive(relay, MODELS[model].into(), Duration::from_millis(waited));
            }
            Op::Queue { relay, model, requests } => {
                let Some(relay) = self.relay(relay) else { return };
                let Some((LinkKind::Granted, queue)) = self.relays.get_mut(&relay) else { return };
                if !queue.leaving {
                    *queue.waiting.entry(MODELS[model].into()).or_default() += requests;
                    self.state_demand(relay);
                }
            }
            Op::Classify { relay, model, class, rank } => {
                let Some(relay) = self.relay(relay) else { return };
                self.places.insert((relay, MODELS[model].into()), (class, rank));
                if matches!(self.relays.get(&relay), Some((LinkKind::Granted, queue)) if !queue.leaving) {
                    self.state_demand(relay);
                }
            }
            Op::Send { relay } => {
                if let Some(relay) = self.relay(relay) {
                    self.send(relay);
                }
            }
            Op::Withdraw { relay } => {
                let Some(relay) = self.relay(relay) else { return };
                let Some((LinkKind::Granted, queue)) = self.relays.get_mut(&relay) else { return };
                queue.waiting.pop_first();
                self.state_demand(relay);
            }
            Op::Cancel { request } => {
                let waiting: Vec<_> = self.waiting.keys().copied().collect();
                let Some(request) = pick(&waiting, request) else { return };
                self.waiting.remove(&request);
                self.end(request);
                self.handle(Event::Cancelled { request });
            }
            Op::Abandon { lease } => {
                let wanted: Vec<_> = self.running.iter().filter(|(_, r)| !r.abandoned).map(|(key, _)| *key).collect();
                let Some(request) = pick(&wanted, lease) else { return };
                if let Some(running) = self.running.get_mut(&request) {
                    running.abandoned = true;
                }
                self.handle(Event::Cancelled { request });
            }
            Op::Finish { lease, answered } => {
                let running: Vec<_> = self.running.keys().copied().collect();
                let Some(request) = pick(&running, lease) else { return };
                self.running.remove(&request);
                self.handle(Event::Released { request, answered });
            }
            Op::Answer { fails, hopeless, sleeps } => {
                if let Some((op, call)) = self.call.take() {
                    let last_resort = matches!(call, Call::Force(_) | Call::Memory);
                    self.answer(op, call, fails && (hopeless || !last_resort), sleeps);
                }
            }
            Op::AnswerLate { call, fails } => self.answer_late(call, fails),
            Op::AnswerProbe { finds } => self.answer_probe(finds),
            Op::Crash { cause, old } => {
                let generation = self.machine.generation.saturating_sub(u64::from(old));
                self.handle(Event::BackendDown { generation, cause });
            }
            Op::ConnectFailed => self.handle(Event::ConnectFailed { generation: self.machine.generation }),
            Op::Join { kind } => {
                let relay = RelayKey(self.key());
                self.relays.insert(relay, (kind, world::Queue::default()));
                self.handle(Event::RelayJoined { relay, kind });
            }
            Op::Lose { relay } => {
                let Some(relay) = self.relay(relay) else { return };
                self.relays.remove(&relay);
                let gone: Vec<_> = self.waiting.iter().filter(|(_, (of, _))| *of == relay).map(|(r, _)| *r).collect();
                for request in gone {
                    self.waiting.remove(&request);
                    self.end(request);
                }
                self.grants.retain(|(of, _), _| *of != relay);
                self.handle(Event::RelayLost { relay });
            }
            Op::Leave { relay } => {
                let Some(relay) = self.relay(relay) else { return };
                if let Some((_, queue)) = self.relays.get_mut(&relay) {
                    queue.waiting.clear();
                    queue.leaving = true;
                }
                self.handle(Event::RelayLeaving { relay });
            }
            Op::Heard { relay } => {
                if let Some(relay) = self.relay(relay) {
                    self.handle(Event::Heard { relay });
                }
            }
            Op::Load { model } => self.order(Order::Load(MODELS[model].into())),
            Op::Unload { model, now } => self.order(Order::Unload { model: MODELS[model].into(), now }),
            Op::Pin { model, pinned: true } => self.order(Order::Pin(MODELS[model].into())),
            Op::Pin { model, pinned: false } => self.order(Order::Unpin(MODELS[model].into())),
            Op::Config(config) => self.handle(Event::ConfigChanged(config)),
            Op::Change { model } => self.handle(Event::ModelChanged { model: MODELS[model].into() }),
            Op::Stop { millis } => self.handle(Event::Stop { timeout: Duration::from_millis(millis) }),
            Op::Pass { millis } => self.pass(Duration::from_millis(millis)),
            Op::Oversleep { millis } => self.now += Duration::from_millis(millis),
        }
    }

    fn relay(&self, index: usize) -> Option<RelayKey> {
        pick(&self.relays.keys().copied().collect::<Vec<_>>(), index)
    }

    fn arrive(&mut self, relay: RelayKey, model: Model, waited: Duration) {
        let request = RequestKey(self.key());
        self.senders.insert(request, relay);
        if self.relays.get(&relay).is_some_and(|(kind, _)| *kind == LinkKind::Held) {
            self.waiting.insert(request, (relay, model.clone()));
        }
        let at = self.instant().checked_sub(waited).expect("the world is an hour old");
        let (class, _) = self.place(relay, &model);
        self.classes.insert(request, class);
        self.handle(Event::Arrived(Arrival { relay, request, model, at, class }));
        if self.waiting.contains_key(&request) {
            let of_it = self.waiting.values().filter(|(of, _)| *of == relay).count();
            let of_relay = self.machine.leases.values().filter(|lease| lease.relay == relay && !lease.unwanted);
            let running = of_relay.count();
            assert!(of_it + running <= self.machine.config.max_held_per_relay, "I10: {of_it} held, {running} run");
        }
    }

    /// Returns the first model of which a relay may send a request.
    fn sendable(&self, relay: RelayKey) -> Option<Model> {
        let (_, queue) = self.relays.get(&relay)?;
        let may = |model: &Model| {
            let granted = self.grants.get(&(relay, model.clone())).copied().unwrap_or(0);
            self.own(relay, model) < granted
        };
        queue.waiting.keys().find(|model| may(model)).cloned()
    }

    /// Sends as a relay with `slots1` does: only as many requests as were granted.
    fn send(&mut self, relay: RelayKey) {
        let Some(model) = self.sendable(relay) else { return };
        if let Some((_, queue)) = self.relays.get_mut(&relay) {
            queue.take(&model);
        }
        let (before, granted) = (self.running.len(), self.granted);
        self.arrive(relay, model.clone(), Duration::ZERO);
        if self.running.len() == before
            && let Some((_, queue)) = self.relays.get_mut(&relay)
        {
            // Rejected: it is queued again, and the relay sends no more than it has there until it receives a grant.
            *queue.waiting.entry(model.clone()).or_default() += 1;
            if self.granted == granted {
                let own = self.own(relay, &model);
                self.grants.insert((relay, model), own);
            }
        }
    }

    /// The number of requests that this relay counts as running here: without those that it has abandoned.
    fn own(&self, relay: RelayKey, model: &Model) -> u32 {
        let is_own =
            |running: &&world::Running| running.relay == relay && running.model == *model && !running.abandoned;
        self.running.values().filter(is_own).count() as u32
    }

    fn state_demand(&mut self, relay: RelayKey) {
        let Some((_, queue)) = self.relays.get(&relay) else { return };
        let age = Duration::from_millis(300);
        let models = queue.waiting.iter().map(|(model, waiting)| {
            let (class, rank) = self.place(relay, model);
            Demand { model: model.clone(), waiting: *waiting, oldest: age, sum: age * *waiting, class, rank }
        });
        let models = models.collect();
        self.handle(Event::Demand { relay, models });
    }

    fn answer(&mut self, op: OpId, call: Call, fails: bool, sleeps: bool) {
        let no = || "no".to_owned();
        let waited_for = self.machine.preflight.as_ref().is_some_and(|preflight| preflight.op == op);
        let answered = call.clone();
        let outcome = match call {
            Call::Preflight(_) if fails => Outcome::Preflight(Err(no())),
            Call::Preflight(_) => {
                Outcome::Preflight(Ok(Reading { free: Some(5), held: Some(30), ..Reading::default() }))
            }
            Call::Evict(_) if fails => Outcome::Evicted(Err(no())),
            Call::Evict(_) => Outcome::Evicted(Ok(if sleeps { Left::Asleep } else { Left::Nothing })),
            Call::Force(_) => Outcome::ForceEvicted(if fails { Err(no()) } else { Ok(()) }),
            Call::Memory => {
                if !fails {
                    self.note_freed();
                }
                Outcome::MemoryChecked { freed: !fails }
            }
            Call::Load(_) if fails => Outcome::Loaded(Err(LoadFailure::Driver("no".into()))),
            Call::Load(model) => {
                self.note_confirmed(model);
                Outcome::Loaded(Ok(()))
            }
        };
        self.handle(Event::Done { op, outcome });
        // Deadlines that have expired in the meantime may cause one more call, but not indefinitely many.
        let again = waited_for && self.call.as_ref().is_some_and(|(_, call)| *call == answered);
        assert!(!again || !self.requested_again, "requested repeatedly what was just answered: {answered:?}");
        if again && let Some((op, call)) = self.call.take() {
            self.requested_again = true;
            self.answer(op, call, false, false);
            self.requested_again = false;
        }
    }

    /// The result of a superseded call. Its statement about the device is false.
    fn answer_late(&mut self, call: usize, fails: bool) {
        if self.old_calls.is_empty() {
            return;
        }
        let index = call % self.old_calls.len();
        let (op, call) = self.old_calls.swap_remove(index);
        let outcome = match call {
            Call::Preflight(_) => Outcome::Preflight(Ok(Reading::default())),
            Call::Evict(_) => Outcome::Evicted(Ok(Left::Nothing)),
            Call::Force(_) => Outcome::ForceEvicted(Ok(())),
            Call::Memory => Outcome::MemoryChecked { freed: !fails },
            Call::Load(_) => Outcome::Loaded(if fails { Err(LoadFailure::DiedAtOnce) } else { Ok(()) }),
        };
        self.handle(Event::Done { op, outcome });
    }

    fn answer_probe(&mut self, finds: Finds) {
        let Some(op) = self.probe.take() else { return };
        let resident = self.machine.state.resident().map(|resident| resident.model.clone());
        let found = match finds {
            Finds::Truth => resident.clone().map_or(Found::Nothing, Found::Serving),
            Finds::Nothing => Found::Nothing,
            Finds::Other(model) => Found::Serving(MODELS[model].into()),
            Finds::Silence => Found::Silence,
        };
        if let Found::Serving(model) = &found
            && (self.machine.starting || self.machine.ready().is_some() || self.machine.is_looking_for_the_lost())
            && self.machine.models.get(model).is_some_and(|entry| !entry.removed)
            && self.machine.probe.is_some_and(|probe| probe.op == op)
        {
            self.note_confirmed(model.clone());
        }
        self.handle(Event::Done { op, outcome: Outcome::Probed(found) });
    }

    fn order(&mut self, order: Order) {
        let id = OrderId(self.key());
        self.orders.insert(id);
        self.handle(Event::Ordered { id, order });
    }

    /// Everything works: nothing fails, running requests end, relays send what they may. Then every request is served.
    fn calm_down(&mut self) {
        for model in &MODELS[..MODELS.len() - 1] {
            self.order(Order::Unpin((*model).into()));
        }
        self.order(Order::Unload { model: MODELS[0].into(), now: true });
        for _ in 0..400 {
            if self.is_calm() {
                return;
            }
            if let Some((op, call)) = self.call.take() {
                self.answer(op, call, false, false);
            }
            self.answer_probe(Finds::Truth);
            for relay in self.relays.keys().copied().collect::<Vec<_>>() {
                self.send(relay);
                self.state_demand(relay);
            }
            for request in self.running.keys().copied().collect::<Vec<_>>() {
                self.running.remove(&request);
                self.handle(Event::Released { request, answered: true });
            }
            self.pass(Duration::from_secs(2));
        }
        assert_eq!(self.waiting.len(), 0, "requests wait for ever in {:?}", self.machine.state);
        assert_eq!(
            self.orders.len(),
            0,
            "orders wait for ever in {:?}: {:?}",
            self.machine.state,
            self.machine.pending
        );
        panic!("demand waits for ever in {:?}", self.machine.state);
    }

    /// True if every request that can be served has been served.
    fn is_calm(&self) -> bool {
        let machine = &self.machine;
        let hopes = |model: &Model| machine.models.get(model).is_some_and(|entry| machine.can_hold(entry));
        let stopped = machine.refusal().is_some();
        let queued = self.relays.values().flat_map(|(_, queue)| queue.waiting.keys()).any(hopes);
        self.waiting.is_empty() && self.orders.is_empty() && (stopped || !queued)
    }
}

impl super::super::Machine {
    /// True if the model fits into the world's device.
    fn can_hold(&self, entry: &super::super::entry::Entry) -> bool {
        let declared = entry.config.memory.map(|size| size * 115 / 100);
        !entry.removed && declared.max(entry.measured).unwrap_or(0) <= 35.min(self.config.memory.unwrap_or(u64::MAX))
    }
}

impl world::Queue {
    fn take(&mut self, model: &Model) {
        if let Some(waiting) = self.waiting.get_mut(model) {
            *waiting -= 1;
        }
        self.waiting.retain(|_, waiting| *waiting > 0);
    }
}

fn pick<T: Copy>(from: &[T], index: usize) -> Option<T> {
    (!from.is_empty()).then(|| from[index % from.len()])
}

/// The number of states of a slot.
const STATES: usize = 10;

#[test]
fn random_histories_keep_invariants_and_serve_all_requests() {
    let wanted = std::env::var("MODELRELAY_HISTORY_TRANSITIONS")
        .map_or(5_000, |wanted| wanted.parse::<u64>().expect("a number of transitions"));
    let transitions = Cell::new(0);
    let visits = RefCell::new(HashMap::new());
    let turns = Cell::new([0; 3]);
    // Short runs may miss a rare state, so they go on for a while.
    while transitions.get() < wanted || (visits.borrow().len() < STATES && transitions.get() < 20 * wanted) {
        let mut runner = TestRunner::new(Config {
            cases: u32::try_from(wanted.div_ceil(200).min(100)).unwrap_or(100),
            failure_persistence: Some(Box::new(FileFailurePersistence::SourceParallel("proptest-regressions"))),
            source_file: Some(file!()),
            ..Config::default()
        });
        let outcome = runner.run(&history(), |(config, ops)| {
            let mut world = World::new(config);
            for kind in [LinkKind::Held, LinkKind::Granted, LinkKind::Granted] {
                world.act(Op::Join { kind });
            }
            world.handle(Event::Started);
            for op in ops {
                world.act(op);
            }
            // The calm end is easy to pass, and not counted.
            transitions.set(transitions.get() + world.transitions);
            #[expect(clippy::iter_over_hash_type, reason = "a sum has no order")]
            for (state, count) in &world.visits {
                *visits.borrow_mut().entry(*state).or_insert(0) += count;
            }
            let sum = turns.get();
            turns.set(std::array::from_fn(|kind| sum[kind] + world.turns[kind]));
            world.calm_down();
            Ok(())
        });
        if let Err(failure) = outcome {
            panic!("{failure}");
        }
    }
    #[expect(clippy::print_stdout, reason = "the number is the result of this test")]
    {
        println!("after events in {:?}", visits.borrow());
        println!("turns that ended whole, early by class, early by service: {:?}", turns.get());
        println!("{} transitions", transitions.get());
    }
    assert_eq!(visits.borrow().len(), STATES, "some state was never seen");
}
