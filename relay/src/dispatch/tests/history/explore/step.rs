//! The steps of a small world: which are possible, and what each does.

use super::Small;
use super::node::{IN_SLOT, SlotPhase};
use super::scenario::{Failing, Kind};
use crate::dispatch::{CancelReason, Event, Grant, LossCause, TokenUsage};

/// A step. Requests and workers are counted, because their keys differ between equal states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The next request arrives.
    Arrive,
    /// A process connects to a relay.
    Join {
        relay: usize,
        node: usize,
    },
    Lose {
        relay: usize,
        node: usize,
    },
    Drain {
        node: usize,
    },
    Grant {
        relay: usize,
        node: usize,
        slots: u32,
    },
    Report {
        relay: usize,
        node: usize,
        load: u32,
    },
    /// It withdraws a model, or advertises it again.
    Withdraw {
        node: usize,
    },
    /// Its backend begins or stops to fail a model.
    Fail {
        node: usize,
    },
    /// Its slot loads a model; a request that runs there is severed.
    Swap {
        node: usize,
        model: usize,
    },
    Loaded {
        node: usize,
        fails: bool,
    },
    /// The first byte of a response goes to the client.
    Begin {
        relay: usize,
        request: usize,
    },
    Complete {
        relay: usize,
        request: usize,
    },
    FailAttempt {
        relay: usize,
        request: usize,
        failure: Failing,
    },
    Silent {
        relay: usize,
        request: usize,
    },
    Cancel {
        relay: usize,
        request: usize,
        reason: CancelReason,
    },
    /// The reply on an attempt that is over.
    Late {
        relay: usize,
        attempt: usize,
    },
    DrainBegun {
        relay: usize,
    },
    DrainDeadline {
        relay: usize,
    },
    Delete {
        relay: usize,
    },
    Disable {
        relay: usize,
    },
    /// Time passes to the next deadline, and the timer ticks at every relay that has one then.
    Pass,
    /// Time passes beyond the next deadline, without a tick.
    Oversleep,
}

impl Small {
    pub(super) fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.arrived < self.scenario.requests.len() {
            steps.push(Step::Arrive);
        }
        for relay in 0..self.relays.len() {
            self.of_requests(relay, &mut steps);
            self.of_links(relay, &mut steps);
            self.of_provider(relay, &mut steps);
        }
        for node in 0..self.nodes.len() {
            self.of_node(node, &mut steps);
        }
        if self.next_due().is_some() {
            steps.push(Step::Pass);
            if self.scenario.oversleeps && !self.is_late() {
                steps.push(Step::Oversleep);
            }
        }
        steps
    }

    fn of_requests(&self, relay: usize, steps: &mut Vec<Step>) {
        let (left, known) = (&self.left, &self.relays[relay]);
        for (request, (_, key, _)) in known.play.all_running().into_iter().enumerate() {
            steps.push(Step::Complete { relay, request });
            let has_begun = known.watch.started.contains(&key);
            if self.scenario.begins && !has_begun {
                steps.push(Step::Begin { relay, request });
            }
            if left.failures > 0 && !has_begun {
                let failures = self.scenario.failures.iter();
                steps.extend(failures.map(|failure| Step::FailAttempt { relay, request, failure: *failure }));
            }
            if left.silences > 0 && !has_begun {
                steps.push(Step::Silent { relay, request });
            }
        }
        if left.cancels > 0 {
            for request in 0..known.play.live().len() {
                let reasons = [CancelReason::ClientDisconnect, CancelReason::Admin];
                steps.extend(reasons.map(|reason| Step::Cancel { relay, request, reason }));
            }
        }
        if left.late > 0 {
            steps.extend((0..known.watch.over.len()).map(|attempt| Step::Late { relay, attempt }));
        }
    }

    fn of_links(&self, relay: usize, steps: &mut Vec<Step>) {
        for (number, node) in self.nodes.iter().enumerate() {
            if node.links[relay].is_none() {
                steps.push(Step::Join { relay, node: number });
                continue;
            }
            if self.left.losses > 0 || node.draining && self.own(relay, number) == 0 {
                steps.push(Step::Lose { relay, node: number });
            }
            match node.kind {
                Kind::Granting(capacity) => {
                    let grants = (0..=capacity).filter(|slots| self.may_grant(relay, number, capacity, *slots));
                    steps.extend(grants.map(|slots| Step::Grant { relay, node: number, slots }));
                }
                Kind::Seed(capacity) if self.left.grants > 0 => {
                    steps.extend((0..=capacity).map(|load| Step::Report { relay, node: number, load }));
                }
                Kind::Seed(_) | Kind::Swapping => {}
            }
        }
    }

    /// A worker of several relays divides its capacity as it likes. One of a single relay grants all of it again after
    /// a refusal, and less sometimes.
    fn may_grant(&self, relay: usize, node: usize, capacity: u32, slots: u32) -> bool {
        let (worker, is_shared) = (&self.nodes[node], self.relays.len() > 1);
        let Some(key) = worker.links[relay] else { return false };
        let known = self.relays[relay].play.core.worker(key).and_then(|worker| worker.grant);
        let is_new = known.is_none_or(|known| known.slots != slots);
        let others = (0..self.relays.len()).filter(|other| *other != relay);
        let others: u32 = others.map(|other| self.own(other, node).max(worker.grants[other])).sum();
        let is_free = is_shared || slots == capacity || self.left.grants > 0;
        is_new && is_free && slots + others <= capacity
    }

    /// The number of a relay's requests on a worker.
    pub(super) fn own(&self, relay: usize, node: usize) -> u32 {
        let running =
            self.nodes[node].links[relay].map(|key| self.relays[relay].play.reference.running_on(key).count());
        u32::try_from(running.unwrap_or(0)).unwrap()
    }

    /// The number of all relays' requests on a worker.
    pub(super) fn own_of_all(&self, node: usize) -> u32 {
        (0..self.relays.len()).map(|relay| self.own(relay, node)).sum()
    }

    fn of_node(&self, node: usize, steps: &mut Vec<Step>) {
        let (left, worker) = (&self.left, &self.nodes[node]);
        if worker.links.iter().all(Option::is_none) {
            return;
        }
        if left.drains > 0 && !worker.draining {
            steps.push(Step::Drain { node });
        }
        if left.updates > 0 {
            steps.extend([Step::Withdraw { node }, Step::Fail { node }]);
        }
        if worker.kind != Kind::Swapping {
            return;
        }
        if matches!(worker.slot, SlotPhase::Loading(_)) {
            steps.push(Step::Loaded { node, fails: false });
            steps.extend((left.failures > 0).then_some(Step::Loaded { node, fails: true }));
            return;
        }
        let may_swap = self.own_of_all(node) == 0 || left.failures > 0;
        for model in 0..IN_SLOT.len() {
            if worker.slot != SlotPhase::Ready(model) && self.is_wanted(node, model) && may_swap {
                steps.push(Step::Swap { node, model });
            }
        }
    }

    /// True if a relay has reported demand for a model to a worker.
    fn is_wanted(&self, node: usize, model: usize) -> bool {
        let links = self.nodes[node].links.iter().zip(&self.relays);
        let mut accounts = links.filter_map(|(key, relay)| relay.play.ledger.workers.get(&(*key)?));
        accounts.any(|account| IN_SLOT[model].iter().any(|name| account.believed.contains_key(*name)))
    }

    fn of_provider(&self, relay: usize, steps: &mut Vec<Step>) {
        if self.left.stops > 0 {
            steps.extend([
                Step::DrainBegun { relay },
                Step::DrainDeadline { relay },
                Step::Delete { relay },
                Step::Disable { relay },
            ]);
        }
    }

    pub(super) fn spend(&mut self, step: Step) {
        let is_single = self.relays.len() == 1;
        let left = &mut self.left;
        match step {
            Step::FailAttempt { .. } | Step::Loaded { fails: true, .. } => left.failures -= 1,
            Step::Silent { .. } => left.silences -= 1,
            Step::Late { .. } => left.late -= 1,
            Step::Cancel { .. } => left.cancels -= 1,
            Step::Lose { .. } => left.losses = left.losses.saturating_sub(1),
            Step::Drain { .. } => left.drains -= 1,
            Step::Grant { node, slots, .. } => {
                let is_less = self.nodes[node].kind != Kind::Granting(slots);
                left.grants -= u8::from(is_single && is_less);
            }
            Step::Report { .. } => left.grants -= 1,
            Step::Withdraw { .. } | Step::Fail { .. } => left.updates -= 1,
            Step::DrainBegun { .. } | Step::DrainDeadline { .. } | Step::Delete { .. } | Step::Disable { .. } => {
                left.stops -= 1;
            }
            Step::Arrive
            | Step::Join { .. }
            | Step::Swap { .. }
            | Step::Loaded { fails: false, .. }
            | Step::Begin { .. }
            | Step::Complete { .. }
            | Step::Pass
            | Step::Oversleep => {}
        }
    }

    pub(super) fn take(&mut self, step: Step) {
        match step {
            Step::Arrive => self.arrive(),
            Step::Join { relay, node } => self.join(relay, node),
            Step::Lose { relay, node } => self.lose(relay, node),
            Step::Grant { relay, node, slots } => {
                self.nodes[node].grants[relay] = slots;
                self.grant(relay, node);
            }
            Step::Report { relay, node, load } => {
                self.send(relay, node, |worker, _| Event::LoadReported { worker, load });
            }
            Step::Drain { node } => {
                self.nodes[node].draining = true;
                self.send_to_all(node, |worker, _| Event::WorkerDraining { worker });
            }
            Step::Withdraw { node } => {
                self.nodes[node].withdrawn ^= true;
                self.announce(node);
            }
            Step::Fail { node } => {
                self.nodes[node].failing ^= true;
                self.announce(node);
            }
            Step::Swap { node, model } => self.swap(node, model),
            Step::Loaded { node, fails } => {
                let SlotPhase::Loading(model) = self.nodes[node].slot else { return };
                self.nodes[node].slot = if fails { SlotPhase::Failed(model) } else { SlotPhase::Ready(model) };
                self.report_slot(node);
            }
            Step::Pass => self.pass(),
            Step::Oversleep => self.oversleep(),
            Step::DrainBegun { relay } => self.handle(relay, &Event::DrainBegun),
            Step::DrainDeadline { relay } => self.handle(relay, &Event::DrainDeadline),
            Step::Delete { relay } => self.handle(relay, &Event::Deleted),
            Step::Disable { relay } => {
                let settings = crate::dispatch::Settings { enabled: false, ..self.scenario.settings() };
                self.handle(relay, &Event::SettingsChanged(settings));
            }
            Step::Begin { relay, request } => {
                let (worker, request, attempt) = self.relays[relay].play.all_running()[request];
                self.relays[relay].watch.started.insert(request);
                self.handle(relay, &Event::Begun { worker, request, attempt });
            }
            Step::Complete { relay, request } => {
                let (worker, request, attempt) = self.relays[relay].play.all_running()[request];
                let cached = Some(1_000);
                self.handle(relay, &Event::Completed { worker, request, attempt, cached, usage: None });
            }
            Step::Silent { relay, request } => {
                let (_, request, _) = self.relays[relay].play.all_running()[request];
                self.handle(relay, &Event::Silent { request });
            }
            Step::FailAttempt { relay, request, failure } => {
                let (worker, request, attempt) = self.relays[relay].play.all_running()[request];
                let failure = failure.failure();
                self.handle(relay, &Event::AttemptFailed { worker, request, attempt, failure });
            }
            Step::Cancel { relay, request, reason } => {
                let request = self.relays[relay].play.live()[request];
                self.handle(relay, &Event::Cancel { request, reason });
            }
            Step::Late { relay, attempt } => {
                let (worker, request, attempt) = self.relays[relay].watch.over.remove(attempt);
                let usage = Some(TokenUsage { input: 1, output: 1 });
                self.handle(relay, &Event::Completed { worker, request, attempt, cached: None, usage });
            }
        }
    }

    fn lose(&mut self, relay: usize, node: usize) {
        let worker = self.nodes[node].links[relay].take().expect("a connection");
        let known = &mut self.relays[relay];
        let running: Vec<_> = known.play.all_running().into_iter().filter(|(on, ..)| *on == worker).collect();
        let started = running.iter().map(|(_, key, _)| *key).filter(|key| known.watch.started.contains(key)).collect();
        known.watch.over.extend(running);
        self.handle(relay, &Event::WorkerLost { worker, started, cause: LossCause::Disconnected });
        if self.nodes[node].links.iter().all(Option::is_none) {
            self.nodes[node].draining = false;
        }
    }

    fn swap(&mut self, node: usize, model: usize) {
        for relay in 0..self.relays.len() {
            let Some(key) = self.nodes[node].links[relay] else { continue };
            for (worker, request, attempt) in self.relays[relay].play.all_running() {
                if worker == key && !self.relays[relay].watch.started.contains(&request) {
                    self.left.failures = self.left.failures.saturating_sub(1);
                    let failure = Failing::SeveredBySwap.failure();
                    self.close_gates(relay, node);
                    self.handle(relay, &Event::AttemptFailed { worker, request, attempt, failure });
                }
            }
        }
        self.nodes[node].slot = SlotPhase::Loading(model);
        self.report_slot(node);
    }

    fn close_gates(&mut self, relay: usize, node: usize) {
        self.send(relay, node, |worker, node| {
            let sums = Grant { slots: 0, ..node.gates().0 };
            Event::GatesSet { worker, sums, gates: vec![] }
        });
    }
}
