//! Random histories of a Provider's secret, checked against its guarantees: rotations, revocations, a user who changes
//! their own Secret, relays that read late, an operator that stops after any write, and a clock that jumps.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const DAY: i64 = 86_400;

#[derive(Clone, Debug)]
enum Op {
    /// The annotation gets a new value.
    Rotate,
    /// The annotation requests a revocation.
    Revoke,
    /// The annotation is removed.
    Unannotate,
    /// The user's own Secret gets a new value, and the Provider names it.
    Own,
    /// The user's own Secret returns to an earlier value.
    OwnBack(usize),
    /// The Provider no longer names it.
    Disown,
    /// A relay reads the newest configuration.
    Read(usize),
    /// The operator runs, and stops after this number of writes.
    Look { writes: usize },
    /// Time passes.
    Wait(i64),
    /// The clock moves, but no time passes.
    Jump(i64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::Rotate),
        1 => Just(Op::Revoke),
        1 => Just(Op::Unannotate),
        2 => Just(Op::Own),
        1 => (0_usize..4).prop_map(Op::OwnBack),
        1 => Just(Op::Disown),
        10 => (0..RELAYS).prop_map(Op::Read),
        10 => (0_usize..=2).prop_map(|writes| Op::Look { writes }),
        4 => prop_oneof![Just(1), Just(91), 0..7200_i64, 0..DAY].prop_map(Op::Wait),
        1 => (-2 * DAY..2 * DAY).prop_map(Op::Jump),
    ]
}

const RELAYS: usize = 2;

/// The secrets that a relay accepts.
#[derive(Clone, Debug, Default)]
struct Configuration {
    number: usize,
    current: String,
    previous: Vec<(String, Option<Timestamp>)>,
}

impl Configuration {
    fn admits(&self, value: &str, now: Timestamp) -> bool {
        let is_good = |until: &Option<Timestamp>| until.is_none_or(|until| now < until);
        self.current == value || self.previous.iter().any(|(old, until)| old == value && is_good(until))
    }

    fn values(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.current).chain(self.previous.iter().map(|(value, _)| value))
    }
}

#[derive(Default)]
struct World {
    known: Known,
    clock: i64,
    counter: usize,
    newest: Configuration,
    relays: [Configuration; RELAYS],
    owned: Vec<String>,
    /// The seconds for which a value that workers had must still admit them.
    promised: BTreeMap<String, i64>,
    revoked: BTreeSet<String>,
    /// A revocation whose second write is pending.
    is_half_revoked: bool,
}

impl World {
    fn fresh(&mut self, kind: &str) -> String {
        self.counter += 1;
        format!("{kind}{}", self.counter)
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Rotate => self.known.annotation = Some(self.fresh("wish")),
            Op::Revoke => self.known.annotation = Some(self.fresh("revoke-")),
            Op::Unannotate => self.known.annotation = None,
            Op::Own => {
                let value = self.fresh("own");
                self.owned.push(value.clone());
                self.known.own = Some(secret(&value));
            }
            // Writing a revoked value into one's own Secret requests it back, which is not tested here.
            Op::OwnBack(back) => {
                let good = self.owned.iter().rev().filter(|value| !self.revoked.contains(*value)).nth(*back);
                self.known.own = good.map(|value| secret(value)).or(self.known.own.take());
            }
            Op::Disown => self.known.own = None,
            Op::Read(relay) => self.relays[*relay] = self.newest.clone(),
            Op::Look { writes } => self.reconcile(*writes),
            Op::Wait(seconds) => self.pass(*seconds, *seconds),
            // A value that expired by the clock may be removed before the clock is corrected.
            Op::Jump(seconds) => self.pass(*seconds, (*seconds).max(0)),
        }
    }

    fn pass(&mut self, clock: i64, promised: i64) {
        self.clock += clock;
        self.promised.values_mut().for_each(|left| *left -= promised);
        self.promised.retain(|_, left| *left > 0);
    }

    fn reconcile(&mut self, writes: usize) {
        self.known.confirmed = self.relays.iter().all(|relay| relay.number == self.newest.number);
        let fresh = self.fresh("made");
        let plan = plan(at(self.clock), &self.known, &secret(&fresh));
        let order: [fn(&mut Self, &Plan); 2] = match plan.updates_workers_first() {
            true => [Self::write_worker, Self::write_relay],
            false => [Self::write_relay, Self::write_worker],
        };
        for write in &order[..writes] {
            write(self, &plan);
        }
    }

    fn write_worker(&mut self, plan: &Plan) {
        let before = self.known.worker.as_ref().map(|worker| worker.value.expose().to_owned());
        if let Some(replaced) = before.filter(|before| before != plan.worker.expose() && !self.revoked.contains(before))
        {
            self.promised.insert(replaced, DAY);
        }
        self.known.worker = Some(WorkerSide { value: plan.worker.clone(), changed_at: Some(plan.worker_changed_at) });
        self.is_half_revoked = false;
    }

    fn write_relay(&mut self, plan: &Plan) {
        let acted_on = self.known.relay.as_ref().map(|relay| relay.acted_on.clone());
        let asked = acted_on.is_some_and(|acted_on| acted_on != self.known.annotation);
        if asked && self.known.annotation.as_deref().is_some_and(|wish| wish.starts_with("revoke")) {
            let ended = self.newest.values().filter(|value| *value != plan.current.expose()).cloned();
            self.revoked.extend(ended);
            self.promised.retain(|value, _| !self.revoked.contains(value));
            let mounted = self.known.worker.as_ref().map(|worker| worker.value.expose());
            self.is_half_revoked = mounted.is_some_and(|mounted| mounted != plan.worker.expose());
        }
        let number = self.newest.number + 1;
        let now = at(self.clock);
        let previous = plan.previous.iter().map(|previous| (previous.value.expose().to_owned(), previous.until));
        let next = Configuration { number, current: plan.current.expose().to_owned(), previous: previous.collect() };
        if plan.events.contains(&RotationEvent::Crowded) {
            assert_eq!(next.previous.len(), MAX_PREVIOUS);
            self.promised.retain(|value, _| next.admits(value, now));
        }
        let same = next.current == self.newest.current && next.previous == self.newest.previous;
        if !same {
            self.newest = next;
        }
        self.known.relay = Some(RelaySide {
            current: plan.current.clone(),
            previous: plan.previous.clone(),
            acted_on: plan.acted_on.clone(),
        });
    }

    fn check(&self) {
        let now = at(self.clock);
        let Some(worker) = &self.known.worker else { return };
        let mounted = worker.value.expose();
        assert!(self.newest.previous.len() <= MAX_PREVIOUS);
        let presented = self.newest.previous.iter().skip(1).find(|(_, until)| until.is_none());
        assert_eq!(presented, None, "only the newest old value may be without an end");
        let confirmed = self.relays.iter().filter(|relay| relay.number == self.newest.number);
        for relay in confirmed.chain([&self.newest]) {
            assert!(self.is_half_revoked || relay.admits(mounted, now), "workers mount {mounted}: {relay:?}");
            for value in self.promised.keys() {
                assert!(relay.admits(value, now), "{value} was promised: {relay:?}");
            }
            for value in &self.revoked {
                assert!(!relay.admits(value, now), "{value} was revoked: {relay:?}");
            }
        }
        // Without a revocation, even a relay that is behind knows the workers' value, once it has started.
        for relay in self.relays.iter().filter(|relay| relay.number > 0 && self.revoked.is_empty()) {
            assert!(relay.admits(mounted, now), "workers mount {mounted}: {relay:?} is late");
        }
    }

    /// Ends the history: every relay reads, and the operator runs.
    fn settle(&mut self) {
        for _ in 0..4 {
            self.apply(&Op::Wait(100));
            self.apply(&Op::Look { writes: 2 });
            (0..RELAYS).for_each(|relay| self.apply(&Op::Read(relay)));
            self.check();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn promises_hold_through_any_history(ops in prop::collection::vec(op(), 0..80)) {
        let mut world = World::default();
        world.reconcile(2);
        (0..RELAYS).for_each(|relay| world.apply(&Op::Read(relay)));
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.settle();
        let mounted = world.known.worker.as_ref().map(|worker| worker.value.expose().to_owned());
        prop_assert_eq!(mounted.as_ref(), Some(&world.newest.current), "workers get the newest value in the end");
        prop_assert!(world.known.own.is_none_or(|own| own.expose() == world.newest.current));

        world.known.own = None;
        world.pass(DAY + 3600, DAY + 3600);
        world.reconcile(2);
        prop_assert_eq!(world.newest.previous, [], "every old value ends");
    }
}
