//! Every history of a small world: one or two relays, two workers and three requests, with all orders of arrivals,
//! ends, failures, losses, grants, swaps and time.
//!
//! The core is that of the random histories, with all of its checks after every event: it agrees with the plain
//! reference on every effect and timeout, and the ledger finds no contradiction. In addition, [`watch`] checks the
//! invariants of the core's documentation by their names, D1 to D11. What makes the world finite:
//!
//! - There are three requests, and a budget of failures, losses, cancels and so on.
//! - Time passes only to the next deadline; with [`Scenario::oversleeps`], also beyond it.
//! - A time that has passed is only as old as the rules can tell.
//! - Messages between relays and workers arrive at once. A late reply on an attempt that is over is a step of its own,
//!   and a worker may refuse a request that it granted.
//!
//! In every state, or in a part of them, nothing happens from then on, and all requests end in time.

mod canonical;
mod node;
mod scenario;
mod step;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_explorer::{World, explore_by_hand, explore_completely, find_bug, fingerprint};

use self::node::Node;
use self::scenario::{Budget, Kind, NONE, Scenario, THREE, large, small};
use self::step::Step;
use self::watch::Watch;
use super::Play;
use super::bug::Bug;
use super::op;
use super::placements::conversation;
use crate::dispatch::{Event, NewRequest, Owner, RequestKey, Weight, WorkerKey};

/// The number of small worlds that `cargo test` alone explores.
const QUICK: usize = 6;

/// A relay with what its environment knows.
#[derive(Clone)]
struct Relay {
    play: Play,
    watch: Watch,
}

#[derive(Clone)]
struct Small {
    scenario: &'static Scenario,
    relays: Vec<Relay>,
    nodes: Vec<Node>,
    left: Budget,
    /// The number of requests that have arrived.
    arrived: usize,
}

impl Small {
    fn new(scenario: Scenario, bug: Option<Bug>) -> Self {
        let scenario: &'static Scenario = Box::leak(Box::new(scenario));
        let start = Instant::now();
        let play = || Play { start, bug, ..Play::new(op::Kind::Placed, scenario.settings()) };
        let nodes = scenario.workers.iter().enumerate();
        let mut small = Self {
            scenario,
            relays: (0..scenario.relays).map(|_| Relay { play: play(), watch: Watch::default() }).collect(),
            nodes: nodes.map(|(number, kind)| Node::new(*kind, number, scenario.relays)).collect(),
            left: scenario.budget,
            arrived: 0,
        };
        for node in 0..scenario.up {
            (0..scenario.relays).for_each(|relay| small.join(relay, node));
        }
        small
    }

    fn now(&self) -> Duration {
        self.relays[0].play.reference.now
    }

    fn handle(&mut self, relay: usize, event: &Event) {
        let Relay { play, watch } = &mut self.relays[relay];
        watch.before(play);
        let effects = play.handle(event);
        watch.check(play, event, &effects);
        if self.left.late == 0 {
            watch.over.clear();
        }
        for (number, node) in self.nodes.iter().enumerate() {
            if let Kind::Granting(capacity) = node.kind {
                let own = self.own_of_all(number);
                assert!(own <= capacity, "D4: {} has {own} requests of all relays", node.name);
            }
        }
    }

    /// Sends an event of a worker to a relay that it is connected to.
    fn send(&mut self, relay: usize, node: usize, event: impl FnOnce(WorkerKey, &Node) -> Event) {
        if let Some(key) = self.nodes[node].links[relay] {
            let event = event(key, &self.nodes[node]);
            self.handle(relay, &event);
        }
    }

    fn send_to_all(&mut self, node: usize, event: impl Fn(WorkerKey, &Node) -> Event) {
        (0..self.relays.len()).for_each(|relay| self.send(relay, node, &event));
    }

    fn arrive(&mut self) {
        let template = &self.scenario.requests[self.arrived];
        self.arrived += 1;
        let play = &mut self.relays[template.relay].play;
        let key = RequestKey(play.key());
        let owner = Owner {
            key: (template.key > 0).then(|| format!("key {}", template.key).into()),
            weight: Weight::default(),
            class: template.class,
        };
        let pin = template.pin.map(|node| self.nodes[node].links[template.relay].unwrap_or(WorkerKey(0)));
        let allowed = template.allowed.map(|mask| Arc::new(op::models(mask).into_iter().collect()));
        let new = NewRequest {
            pin,
            needs_core1: template.needs_core1,
            allowed,
            conversation: template.conversation.map(|number| conversation(template.model, number)),
            owner: Some(owner),
            ..NewRequest::new(key, node::MODELS[template.model].into(), 40)
        };
        self.handle(template.relay, &Event::Submit(new));
    }

    fn join(&mut self, relay: usize, node: usize) {
        let key = WorkerKey(self.relays[relay].play.key());
        self.nodes[node].links[relay] = Some(key);
        self.send(relay, node, |key, node| Event::WorkerJoined(node.registration(key)));
        self.grant(relay, node);
        if self.nodes[node].kind == Kind::Swapping {
            self.report_gates(relay, node);
        }
    }

    fn grant(&mut self, relay: usize, node: usize) {
        if matches!(self.nodes[node].kind, Kind::Granting(_)) {
            self.send(relay, node, |worker, node| Event::Granted { worker, grant: node.grant(relay) });
        }
    }

    fn announce(&mut self, node: usize) {
        self.send_to_all(node, |worker, node| Event::ModelsUpdated {
            worker,
            models: node.models(),
            failing: node.failing_models(),
            load: None,
        });
    }

    fn report_gates(&mut self, relay: usize, node: usize) {
        self.send(relay, node, |worker, node| {
            let (sums, gates) = node.gates();
            Event::GatesSet { worker, sums, gates }
        });
    }

    fn report_slot(&mut self, node: usize) {
        (0..self.relays.len()).for_each(|relay| self.report_gates(relay, node));
        let is_idle = self.own_of_all(node) == 0;
        self.send_to_all(node, |worker, node| Event::SlotsReported { worker, slots: vec![node.slot_report(is_idle)] });
    }

    /// The next deadline of any relay.
    fn next_due(&self) -> Option<Duration> {
        self.relays.iter().filter_map(|relay| relay.play.next_due()).min()
    }

    /// True if a deadline has passed without a tick.
    fn is_late(&self) -> bool {
        self.next_due().is_some_and(|due| due <= self.now())
    }

    /// Lets time pass to the next deadline.
    fn pass(&mut self) {
        let Some(due) = self.next_due() else { return };
        let time = due.saturating_sub(self.now());
        if time > Duration::from_nanos(1) {
            self.wait(time - Duration::from_nanos(1));
            // Nothing changes before.
            (0..self.relays.len()).for_each(|relay| self.handle(relay, &Event::Tick));
            self.wait(Duration::from_nanos(1));
        } else {
            self.wait(time);
        }
        for relay in 0..self.relays.len() {
            if self.relays[relay].play.next_due().is_some_and(|due| due <= self.now()) {
                self.handle(relay, &Event::Tick);
            }
        }
    }

    /// Lets time pass beyond the next deadline, without a tick.
    fn oversleep(&mut self) {
        let Some(due) = self.next_due() else { return };
        self.wait(due - self.now() + Duration::from_millis(1));
    }

    fn wait(&mut self, time: Duration) {
        self.relays.iter_mut().for_each(|relay| relay.play.reference.pass(time));
    }
}

impl World for Small {
    type Action = Step;

    fn actions(&self) -> Vec<Step> {
        self.steps()
    }

    fn act(&mut self, step: &Step) {
        self.spend(*step);
        self.take(*step);
    }

    fn fingerprint(&self) -> u128 {
        let nodes = self.nodes.iter().map(|node| {
            let Node { kind: _, name: _, links, draining, grants, withdrawn, failing, slot } = node;
            let links: Vec<_> = links.iter().map(Option::is_some).collect();
            (links, draining, grants, withdrawn, failing, slot)
        });
        let mut text = format!("{:?} {} {:?}", self.left, self.arrived, nodes.collect::<Vec<_>>());
        for (number, Relay { play, watch }) in self.relays.iter().enumerate() {
            let links: Vec<_> = self.nodes.iter().map(|node| node.links[number]).collect();
            text.push_str(&canonical::text(play, &format!("known: {links:?} {}", watch.text())));
        }
        fingerprint(text.as_bytes())
    }

    /// Nothing happens from now on: all requests end in time.
    fn inspect(mut self) {
        if !self.fingerprint().is_multiple_of(self.scenario.sample) {
            return;
        }
        let settings = self.scenario.settings();
        let last = self.now() + settings.request_timeout + self.scenario.cold;
        while let Some(due) = self.next_due() {
            let is_idle = self.relays.iter().all(|relay| relay.play.core.is_idle());
            assert!(is_idle || due <= last, "D1: a request goes on at {due:?}, after {last:?}");
            self.pass();
        }
        for relay in &self.relays {
            assert!(relay.play.core.is_idle(), "D1: a request never ends");
            relay.watch.check_idle(&relay.play.core);
        }
    }
}

fn named(scenario: Scenario) -> (&'static str, Small) {
    (scenario.name, Small::new(scenario, None))
}

#[test]
fn every_history_of_small_worlds_keeps_invariants() {
    // All of them in the suite of histories; by `cargo test` alone the quickest.
    let is_suite = std::env::var_os("MODELRELAY_HISTORY_TRANSITIONS").is_some();
    let count = if is_suite { usize::MAX } else { QUICK };
    explore_completely(small().into_iter().take(count).map(named));
}

/// Only by hand: `MODELRELAY_EXPLORE_MINUTES` sets the time for each world.
#[test]
fn every_history_of_larger_worlds_keeps_invariants() {
    explore_by_hand(large().into_iter().map(named));
}

/// Returns the message of the violation that a bug causes, and the length of the shortest trace.
fn found(bug: Bug, scenario: Scenario) -> (String, usize) {
    find_bug(&bug, &Small::new(scenario, Some(bug)))
}

fn with(budget: Budget) -> Scenario {
    Scenario { budget, ..THREE }
}

#[test]
fn response_sent_twice_is_found() {
    let scenario = Scenario { begins: true, ..with(Budget { losses: 1, ..NONE }) };
    let (message, steps) = found(Bug::ForgetsResponse, scenario);
    assert!(message.starts_with("D8: ") && steps <= 3, "{message} after {steps}");
}

#[test]
fn request_to_draining_worker_is_found() {
    let (message, steps) = found(Bug::IgnoresDrain, with(Budget { drains: 1, ..NONE }));
    assert!(message.starts_with("D4: ") && steps <= 2, "{message} after {steps}");
}

#[test]
fn request_beyond_grant_is_found() {
    let (message, steps) = found(Bug::KeepsGrant, with(Budget { grants: 1, ..NONE }));
    assert!(message.starts_with("D4: ") && steps <= 2, "{message} after {steps}");
}

#[test]
fn forgotten_cancel_is_found() {
    let (message, steps) = found(Bug::IgnoresCancel, with(Budget { cancels: 1, ..NONE }));
    assert!(message.starts_with("D1: ") && steps <= 2, "{message} after {steps}");
}

#[test]
fn fifth_attempt_is_found() {
    let failures = Budget { failures: 5, ..NONE };
    let scenario = Scenario { failures: &[scenario::Failing::BackendReset], ..with(failures) };
    let (message, steps) = found(Bug::ForgivesLoss, scenario);
    assert!(message.starts_with("D8: ") && steps <= 12, "{message} after {steps}");
}
