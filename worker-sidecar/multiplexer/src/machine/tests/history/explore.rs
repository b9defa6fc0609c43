//! Every history of a small world: one slot, three models and three requests, with all orders of arrivals, sends,
//! cancels, ends, results of driver calls, failures and time.
//!
//! The world is that of the random histories, with its checks after every event. What makes it finite:
//!
//! - There are three requests, and a budget of failures, orders, losses of links and so on.
//! - Driver calls take a fixed time, a second for a load and none for any other call, unless they hang. So measured
//!   costs do not vary.
//! - Time passes only to the next deadline, or to the end of a call. With [`Scenario::step`], also by a second. It does
//!   not pass while a relay may send a request, or while a probe is unanswered.
//! - A time that has passed is only as old as the rules can tell.
//!
//! In every state, or in a part of them, everything works from then on: all requests are served.

use std::time::Duration;

use modelrelay_explorer::canonical::Canonical;
use modelrelay_explorer::{explore_by_hand, explore_completely, find_bug, fingerprint};

use super::op::{Finds, MODELS, Op};
use super::world::bug::Bug;
use super::world::canonical::RULES;
use super::world::{Call, World};
use crate::config::{Knobs, Linger, ModelConfig, SlotConfig};
use crate::estimate::Priors;
use crate::event::{DownCause, Event, LinkKind, OpId, RelayKey, RequestClass};
use crate::machine::Jitter;

const LOAD: Duration = Duration::from_secs(1);

const NEVER: Duration = Duration::MAX;

/// A small world.
#[derive(Clone, Debug)]
struct Scenario {
    name: &'static str,
    links: &'static [LinkKind],
    /// The link and the class of each request. Each is for a model that was requested before, or for the next one:
    /// other orders of the models differ by their names.
    requests: &'static [(usize, RequestClass)],
    budget: Budget,
    /// True if unloaded models sleep.
    sleeps: bool,
    rollback: bool,
    default: Option<usize>,
    /// True if a second may pass too, not only the time to the next deadline.
    step: bool,
    /// Of this many states, one is examined for whether all its requests are served.
    sample: u128,
}

/// How often something may still happen.
#[derive(Clone, Copy, Debug, Default)]
struct Budget {
    /// A call or a probe fails, hangs or finds something else; the backend dies or cannot be reached.
    failures: u8,
    /// A superseded call returns.
    late: u8,
    /// A request is cancelled, waiting or running.
    cancels: u8,
    /// A link is lost, or its relay leaves.
    losses: u8,
    /// An operator orders a load or an unload, or pins a model.
    orders: u8,
    /// The worker stops.
    stops: u8,
}

/// A step of the small world.
#[derive(Clone, Debug)]
enum Step {
    /// One of the random histories' operations.
    Op(Op),
    /// The next request arrives, at its link or in its relay's queue.
    Request { model: usize },
    /// The driver never returns from its call.
    Hang,
}

#[derive(Clone)]
struct Slot {
    world: World,
    scenario: Scenario,
    left: Budget,
    /// The number of requests that have arrived.
    arrived: usize,
    /// The number of models that were requested.
    models: usize,
    /// The latest call, and when the driver returns from it: [`NEVER`] if it hangs.
    call: Option<(OpId, Duration)>,
}

impl Slot {
    fn new(scenario: &Scenario, bug: Option<Bug>) -> Self {
        let models = MODELS[..3].iter().map(|id| ModelConfig::new(*id, 1)).collect();
        let knobs = Knobs {
            drain_timeout: Duration::from_secs(2),
            load_timeout: Duration::from_secs(5),
            hold_budget: Duration::from_secs(8),
            max_wait: Some(Duration::from_secs(6)),
            min_residency: Duration::ZERO,
            // A history of gaps between requests would make each state unique.
            linger: Linger::Off,
            rollback: scenario.rollback,
        };
        let mut world = World::new(SlotConfig {
            knobs,
            priors: Priors { cold: LOAD, wake: LOAD },
            default: scenario.default.map(|index| MODELS[index].into()),
            return_to_default_after: scenario.default.map(|_| Duration::from_secs(4)),
            ..SlotConfig::new("gpu0", models)
        });
        world.machine.jitter = Jitter::None;
        world.bug = bug;
        for kind in scenario.links {
            world.act(Op::Join { kind: *kind });
        }
        world.handle(Event::Started);
        let mut slot =
            Self { world, scenario: scenario.clone(), left: scenario.budget, arrived: 0, models: 0, call: None };
        slot.note_call();
        slot
    }

    /// Determines when the driver returns from a new call.
    fn note_call(&mut self) {
        let Some((op, call)) = &self.world.call else {
            self.call = None;
            return;
        };
        if self.call.is_none_or(|(known, _)| known != *op) {
            let takes = if matches!(call, Call::Load(_)) { LOAD } else { Duration::ZERO };
            self.call = Some((*op, self.world.now + takes));
        }
    }

    fn of_requests(&self, steps: &mut Vec<Step>) {
        let world = &self.world;
        if self.arrived < self.scenario.requests.len() {
            steps.extend((0..=self.models.min(2)).map(|model| Step::Request { model }));
        }
        for relay in 0..world.relays.len() {
            if world.relay(relay).is_some_and(|key| world.sendable(key).is_some()) {
                steps.push(Step::Op(Op::Send { relay }));
            }
        }
        for (lease, running) in world.running.values().enumerate() {
            steps.push(Step::Op(Op::Finish { lease, answered: !running.abandoned }));
        }
        if self.left.cancels > 0 {
            steps.extend((0..world.waiting.len()).map(|request| Step::Op(Op::Cancel { request })));
            let wanted = world.running.values().filter(|running| !running.abandoned).count();
            steps.extend((0..wanted).map(|lease| Step::Op(Op::Abandon { lease })));
            let queues = world.relays.values().enumerate();
            let queues = queues.filter(|(_, (_, queue))| !queue.waiting.is_empty());
            steps.extend(queues.map(|(relay, _)| Step::Op(Op::Withdraw { relay })));
        }
        if self.left.losses > 0 {
            for relay in 0..world.relays.len() {
                steps.extend([Step::Op(Op::Lose { relay }), Step::Op(Op::Leave { relay })]);
            }
        }
    }

    fn of_driver(&self, steps: &mut Vec<Step>) {
        let (world, sleeps) = (&self.world, self.scenario.sleeps);
        let fails = self.left.failures > 0;
        if self.call.is_some_and(|(_, due)| due <= world.now) {
            steps.push(Step::Op(Op::Answer { fails: false, hopeless: false, sleeps }));
            if fails {
                steps.push(Step::Op(Op::Answer { fails: true, hopeless: true, sleeps }));
            }
        }
        if fails && self.call.is_some_and(|(_, due)| due != NEVER) {
            steps.push(Step::Hang);
        }
        if self.left.late > 0 {
            let late = |call| [false, true].map(|fails| Step::Op(Op::AnswerLate { call, fails }));
            steps.extend((0..world.old_calls.len()).flat_map(late));
        }
        if world.probe.is_some() {
            steps.push(Step::Op(Op::AnswerProbe { finds: Finds::Truth }));
            if fails {
                let others = [Finds::Nothing, Finds::Silence, Finds::Other(1)];
                steps.extend(others.map(|finds| Step::Op(Op::AnswerProbe { finds })));
            }
        }
        if fails && world.machine.resident().is_some() {
            let causes = [DownCause::Gone, DownCause::Unresponsive];
            steps.extend(causes.map(|cause| Step::Op(Op::Crash { cause, old: false })));
            steps.push(Step::Op(Op::ConnectFailed));
        }
    }

    fn of_people(&self, steps: &mut Vec<Step>) {
        if self.left.orders > 0 {
            for model in 0..2 {
                steps.push(Step::Op(Op::Load { model }));
                steps.extend([false, true].map(|now| Step::Op(Op::Unload { model, now })));
            }
        }
        if self.left.stops > 0 {
            steps.extend([0, 2_000].map(|millis| Step::Op(Op::Stop { millis })));
        }
    }

    fn of_time(&self, steps: &mut Vec<Step>) {
        let world = &self.world;
        let may_send = |relay: &RelayKey| world.sendable(*relay).is_some();
        if world.probe.is_some()
            || world.relays.keys().any(may_send)
            || self.call.is_some_and(|(_, due)| due <= world.now)
        {
            return;
        }
        let due = world.machine.next_timeout().map(|due| due.saturating_duration_since(world.instant()));
        let call = self.call.filter(|(_, due)| *due != NEVER).map(|(_, due)| due - world.now);
        let Some(next) = due.into_iter().chain(call).min() else { return };
        let second = Duration::from_secs(1);
        let times = [Some(next), (self.scenario.step && next > second).then_some(second)];
        let pass = |time: Duration| Step::Op(Op::Pass { millis: u64::try_from(time.as_millis()).unwrap() });
        steps.extend(times.into_iter().flatten().map(pass));
    }

    fn spend(&mut self, step: &Step) {
        let left = &mut self.left;
        match step {
            Step::Hang
            | Step::Op(
                Op::Answer { fails: true, .. }
                | Op::AnswerProbe { finds: Finds::Nothing | Finds::Silence | Finds::Other(_) }
                | Op::Crash { .. }
                | Op::ConnectFailed,
            ) => left.failures -= 1,
            Step::Op(Op::AnswerLate { .. }) => left.late -= 1,
            Step::Op(Op::Cancel { .. } | Op::Abandon { .. } | Op::Withdraw { .. }) => left.cancels -= 1,
            Step::Op(Op::Lose { .. } | Op::Leave { .. }) => left.losses -= 1,
            Step::Op(Op::Load { .. } | Op::Unload { .. } | Op::Pin { .. }) => left.orders -= 1,
            Step::Op(Op::Stop { .. }) => left.stops -= 1,
            Step::Request { .. } | Step::Op(_) => {}
        }
    }

    fn request(&mut self, model: usize) {
        let (link, class) = self.scenario.requests[self.arrived];
        self.arrived += 1;
        self.models = self.models.max(model + 1);
        // Links have the first keys. A request for one that is lost never comes.
        let key = RelayKey(link as u64 + 1);
        let Some(relay) = self.world.relays.keys().position(|relay| *relay == key) else { return };
        self.world.places.insert((key, MODELS[model].into()), (class, 0));
        self.world.act(match self.scenario.links[link] {
            LinkKind::Held => Op::Arrive { relay, model, waited: 0 },
            LinkKind::Granted => Op::Queue { relay, model, requests: 1 },
        });
    }
}

impl modelrelay_explorer::World for Slot {
    type Action = Step;

    fn actions(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        self.of_requests(&mut steps);
        self.of_driver(&mut steps);
        self.of_people(&mut steps);
        self.of_time(&mut steps);
        steps
    }

    fn act(&mut self, step: &Step) {
        self.spend(step);
        match step {
            Step::Op(op @ Op::Send { relay }) => {
                let relay = self.world.relay(*relay).unwrap();
                self.world.act(op.clone());
                // As relays do after a request that was waiting.
                self.world.state_demand(relay);
            }
            Step::Op(op) => self.world.act(op.clone()),
            Step::Request { model } => self.request(*model),
            // It is superseded by the next call.
            Step::Hang => self.call = self.call.map(|(op, _)| (op, NEVER)),
        }
        if self.left.late == 0 {
            self.world.old_calls.clear();
        }
        self.note_call();
    }

    fn fingerprint(&self) -> u128 {
        let due = self.call.map(|(_, due)| if due == NEVER { due } else { due.saturating_sub(self.world.now) });
        let rules = Canonical { fields: &RULES, types: &super::world::canonical::TYPES, scopes: &["SlotAllocator"] };
        let text = format!("{:?} {} {} {due:?} {}", self.left, self.arrived, self.models, self.world.text());
        fingerprint(rules.text(&text, self.world.instant(), 0).as_bytes())
    }

    /// Everything works from now on: all requests are served.
    fn inspect(mut self) {
        if self.fingerprint().is_multiple_of(self.scenario.sample) {
            self.world.call.take_if(|_| self.call.is_some_and(|(_, due)| due == NEVER));
            self.world.calm_down();
        }
    }
}

const NORMAL: RequestClass = RequestClass::Normal;

const PLAIN: Scenario = Scenario {
    name: "plain",
    links: &[LinkKind::Held, LinkKind::Granted],
    requests: &[(0, NORMAL), (1, NORMAL), (0, NORMAL)],
    budget: Budget { failures: 0, late: 0, cancels: 0, losses: 0, orders: 0, stops: 0 },
    sleeps: false,
    rollback: true,
    default: None,
    step: false,
    sample: 100,
};

/// Three requests of one link.
const THREE: Scenario = Scenario { links: HELD, requests: &[(0, NORMAL), (0, NORMAL), (0, NORMAL)], ..PLAIN };

const HELD: &[LinkKind] = &[LinkKind::Held];

/// Small enough to be explored completely with the tests.
fn scenarios() -> Vec<Scenario> {
    let classes: &[_] = &[(0, NORMAL), (0, RequestClass::Batch), (0, RequestClass::Interactive)];
    let one_and_one: &[_] = &[(0, NORMAL), (1, NORMAL)];
    let two: &[_] = &[(0, NORMAL), (0, NORMAL)];
    let none = PLAIN.budget;
    let of_two = |name, budget| Scenario { name, links: HELD, requests: two, budget, ..PLAIN };
    vec![
        Scenario { name: "two links", requests: one_and_one, ..PLAIN },
        Scenario { name: "classes", links: HELD, requests: classes, ..PLAIN },
        Scenario { name: "cancels", budget: Budget { cancels: 1, ..none }, ..THREE },
        of_two("failure", Budget { failures: 1, ..none }),
        of_two("lost link", Budget { losses: 1, ..none }),
        of_two("order", Budget { orders: 1, ..none }),
        of_two("stop", Budget { stops: 1, cancels: 1, ..none }),
    ]
}

/// Explored by hand, for minutes.
fn large_scenarios() -> Vec<Scenario> {
    let one_and_one: &[_] = &[(0, NORMAL), (1, NORMAL)];
    let none = PLAIN.budget;
    let all = Budget { failures: 1, late: 1, cancels: 1, losses: 1, orders: 1, stops: 1 };
    vec![
        Scenario { name: "three requests over two links", ..PLAIN },
        Scenario { name: "failure of three", budget: Budget { failures: 1, ..none }, ..THREE },
        Scenario { name: "sleeping models", sleeps: true, budget: Budget { failures: 1, ..none }, ..THREE },
        Scenario { name: "two failures", budget: Budget { failures: 2, late: 1, ..none }, ..THREE },
        Scenario {
            name: "default",
            default: Some(2),
            rollback: false,
            budget: Budget { failures: 1, ..none },
            ..THREE
        },
        Scenario { name: "every second", step: true, ..THREE },
        Scenario { name: "everything once", requests: one_and_one, budget: all, ..PLAIN },
    ]
}

fn named(scenario: &Scenario) -> (&'static str, Slot) {
    (scenario.name, Slot::new(scenario, None))
}

#[test]
fn every_history_of_small_worlds_keeps_invariants() {
    explore_completely(scenarios().iter().map(named));
}

/// Only by hand: `MODELRELAY_EXPLORE_MINUTES` sets the time for each world.
#[test]
fn every_history_of_larger_worlds_keeps_invariants() {
    explore_by_hand(large_scenarios().iter().map(named));
}

/// Returns the message of the violation that a bug causes, and the length of the shortest trace.
fn found(bug: Bug, budget: Budget) -> (String, usize) {
    let requests: &[_] = &[(1, NORMAL), (1, NORMAL), (1, NORMAL)];
    let granted = Scenario { requests, budget, sample: 1, ..PLAIN };
    let scenario = if bug == Bug::ForgetsGrant { granted } else { Scenario { budget, sample: 1, ..THREE } };
    find_bug(&bug, &Slot::new(&scenario, Some(bug)))
}

#[test]
fn load_into_occupied_memory_is_found() {
    let (message, steps) = found(Bug::TrustsMemory, Budget { failures: 1, ..PLAIN.budget });
    assert!(message.starts_with("I1: ") && steps <= 12, "{message} after {steps}");
}

#[test]
fn accepted_late_result_is_found() {
    let (message, steps) = found(Bug::AcceptsLateResult, Budget { failures: 1, late: 1, ..PLAIN.budget });
    assert!(message.contains("I9: ") && steps <= 14, "{message} after {steps}");
}

#[test]
fn forgotten_cancel_is_found() {
    let (message, steps) = found(Bug::ForgetsCancel, Budget { cancels: 1, ..PLAIN.budget });
    assert!(message.contains("I5: ") && steps <= 3, "{message} after {steps}");
}

#[test]
fn forgotten_grant_is_found_by_waiting_request() {
    let (message, steps) = found(Bug::ForgetsGrant, PLAIN.budget);
    assert!(message.starts_with("demand waits for ever") && steps <= 12, "{message} after {steps}");
}
