//! The environment of a slot: relays with their own queues, a driver with a device, requests with clients. It knows the
//! true state, and checks the machine against it.

pub(super) mod bug;
#[cfg(unix)]
pub(super) mod canonical;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use modelrelay_protocol::message::SlotState;

use crate::Model;
use crate::effect::{Effect, Reason, SlotEvent};
use crate::event::{Event, LinkKind, OpId, OrderId, RelayKey, RequestClass, RequestKey};
use crate::machine::{Jitter, Machine};
use crate::{
    config::SlotConfig,
    policy::{self, Candidate},
};

/// A call that the driver received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Preflight(Model),
    Evict(Model),
    Force(Model),
    Memory,
    Load(Model),
}

/// A relay that keeps its requests until its grant lets it send them.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub(super) waiting: BTreeMap<Model, u32>,
    pub(super) leaving: bool,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) machine: Machine,
    pub(super) start: Instant,
    pub(super) now: Duration,
    pub(super) transitions: u64,
    pub(super) relays: BTreeMap<RelayKey, (LinkKind, Queue)>,
    pub(super) next_key: u64,
    /// Requests of relays without queues, which wait in the slot.
    pub(super) waiting: BTreeMap<RequestKey, (RelayKey, Model)>,
    /// The relay that sent each request.
    pub(super) senders: BTreeMap<RequestKey, RelayKey>,
    /// The class of each request.
    pub(super) classes: BTreeMap<RequestKey, RequestClass>,
    /// The class of the last request that each model served.
    last_classes: BTreeMap<Model, RequestClass>,
    /// The class and rank of each relay's next requests.
    pub(super) places: BTreeMap<(RelayKey, Model), (RequestClass, u32)>,
    /// The models that the last load put behind although their keys had attained less service.
    owed: BTreeSet<Model>,
    /// The number of turns that ended at their quantum, early for a higher class, and early for keys with less service.
    pub(super) turns: [u64; 3],
    /// Leases that their holders have not released.
    pub(super) running: BTreeMap<RequestKey, Running>,
    ended: BTreeSet<RequestKey>,
    /// The number of requests that each relay may send.
    pub(super) grants: BTreeMap<(RelayKey, Model), u32>,
    /// The number of grants that were sent.
    pub(super) granted: u64,
    open: Option<Model>,
    pub(super) call: Option<(OpId, Call)>,
    pub(super) old_calls: Vec<(OpId, Call)>,
    pub(super) probe: Option<OpId>,
    /// The models on the device, from the start of their load until their memory was measured to be free.
    occupied: BTreeSet<Model>,
    /// The model that the driver last reported as ready and the right one.
    confirmed: Option<Model>,
    /// True if an eviction has begun since the last load was confirmed.
    committed: bool,
    pub(super) orders: BTreeSet<OrderId>,
    stopped: bool,
    pub(super) requested_again: bool,
    /// How often the slot was in each state after an event.
    pub(super) visits: HashMap<SlotState, u64>,
    /// The last generation whose gate was opened, and the time of that.
    generation: u64,
    residency: Instant,
    /// The quantum for each target, and the cost of the swap, before the event.
    quanta: BTreeMap<Model, Duration>,
    costs: BTreeMap<Model, Duration>,
    /// A bug that the machine is given, to test that it is found.
    pub(super) bug: Option<bug::Bug>,
}

#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) model: Model,
    pub(super) relay: RelayKey,
    generation: u64,
    told_to_end: bool,
    /// True if its client is gone, and its holder has not released it yet.
    pub(super) abandoned: bool,
}

impl World {
    pub(super) fn new(config: SlotConfig) -> Self {
        let start = Instant::now();
        Self {
            machine: Machine::new(config, Jitter::Seeded(7), start),
            // Some requests are older than the worker.
            start: start + Duration::from_secs(3600),
            now: Duration::ZERO,
            transitions: 0,
            relays: BTreeMap::new(),
            next_key: 0,
            waiting: BTreeMap::new(),
            senders: BTreeMap::new(),
            classes: BTreeMap::new(),
            last_classes: BTreeMap::new(),
            places: BTreeMap::new(),
            owed: BTreeSet::new(),
            turns: [0; 3],
            running: BTreeMap::new(),
            ended: BTreeSet::new(),
            grants: BTreeMap::new(),
            granted: 0,
            open: None,
            call: None,
            old_calls: Vec::new(),
            probe: None,
            occupied: BTreeSet::new(),
            confirmed: None,
            committed: false,
            orders: BTreeSet::new(),
            stopped: false,
            requested_again: false,
            visits: HashMap::new(),
            generation: 0,
            residency: start,
            quanta: BTreeMap::new(),
            costs: BTreeMap::new(),
            bug: None,
        }
    }

    pub(super) fn instant(&self) -> Instant {
        self.start + self.now
    }

    pub(super) fn key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }

    pub(super) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.machine.next_timeout().map(|due| due.saturating_duration_since(self.start))
            && due <= until
        {
            self.now = self.now.max(due);
            self.handle(Event::Tick);
        }
        self.now = until;
    }

    pub(super) fn handle(&mut self, event: Event) {
        self.transitions += 1;
        let (machine, knobs) = (&self.machine, &self.machine.config.knobs);
        let quanta = machine.models.keys().map(|to| (to.clone(), policy::quantum(knobs, machine.swap_cost(to))));
        self.quanta = quanta.collect();
        self.costs = machine.models.keys().map(|to| (to.clone(), machine.swap_cost(to))).collect();
        if let Some(event) = self.misunderstood(event) {
            let effects = self.machine.handle(event, self.instant());
            for effect in &self.remembered(effects) {
                self.record(effect);
            }
        }
        self.check();
        let again = self.machine.handle(Event::Tick, self.instant());
        assert!(again.is_empty(), "something was left to be done: {again:?}");
    }

    /// The driver reported that memory is free, or that this model serves.
    pub(super) fn note_freed(&mut self) {
        self.occupied.clear();
    }

    pub(super) fn note_confirmed(&mut self, model: Model) {
        self.occupied = BTreeSet::from([model.clone()]);
        self.confirmed = Some(model);
        self.committed = false;
    }

    fn start_call(&mut self, op: OpId, call: Call) {
        if let Some(old) = self.call.replace((op, call)) {
            self.old_calls.push(old);
        }
    }

    fn record(&mut self, effect: &Effect) {
        match effect {
            Effect::Lease { request, model, generation } => self.record_lease(*request, model, *generation),
            Effect::Fail { request, .. } => {
                self.waiting.remove(request);
                self.end(*request);
            }
            Effect::CancelLease { request, .. } => {
                let running = self.running.get_mut(request).expect("a lease to be ended");
                assert!(!running.told_to_end, "{request:?} was cancelled twice");
                running.told_to_end = true;
            }
            Effect::OpenGate { model } => {
                assert_eq!(self.open.replace(model.clone()), None, "two gates are open");
                assert_eq!(self.confirmed.as_ref(), Some(model), "I9: it was never ready");
                assert!(!self.committed, "I11: there is no way back from an eviction");
                // A gate that is opened again after an aborted drain begins no new residency.
                if self.generation != self.machine.generation {
                    self.generation = self.machine.generation;
                    self.residency = self.instant();
                    self.owed = self.owed_by(model);
                }
            }
            Effect::CloseGate { model } => {
                assert_eq!(self.open.take().as_ref(), Some(model));
                self.grants.clear();
            }
            Effect::Grant { relay, model, values } => {
                assert_eq!(self.open.as_ref(), Some(model), "a closed gate grants nothing");
                self.grants.insert((*relay, model.clone()), values.slots);
                self.granted += 1;
            }
            Effect::Preflight { op, model } => {
                self.check_turn(*op, model);
                self.start_call(*op, Call::Preflight(model.clone()));
            }
            Effect::Evict { op, model } => {
                self.committed = true;
                self.check_nothing_runs();
                self.start_call(*op, Call::Evict(model.clone()));
            }
            Effect::ForceEvict { op, model } => {
                self.committed = true;
                self.check_nothing_runs();
                self.start_call(*op, Call::Force(model.clone()));
            }
            Effect::CheckMemory { op, .. } => self.start_call(*op, Call::Memory),
            Effect::Load { op, model, .. } => {
                assert!(self.occupied.is_empty(), "I1: {model} is loaded beside {:?}", self.occupied);
                self.occupied.insert(model.clone());
                self.check_nothing_runs();
                self.start_call(*op, Call::Load(model.clone()));
            }
            Effect::Probe { op, .. } => self.probe = Some(*op),
            Effect::OrderDone { id, .. } => assert!(self.orders.remove(id), "an order is answered once"),
            Effect::SlotEvent(news) => self.record_news(news),
            Effect::Stopped => assert!(!std::mem::replace(&mut self.stopped, true)),
            Effect::StillServes { model } => {
                assert_eq!(self.open.as_ref(), Some(model), "requests do not come back in vain");
            }
            Effect::Forget { model } => {
                assert!(!self.occupied.contains(model), "{model} is forgotten while the slot may hold it");
                assert!(!self.machine.models.contains_key(model), "{model} is forgotten, and the slot still has it");
                self.last_classes.remove(model);
            }
            Effect::Changed | Effect::Discard { .. } => {}
        }
    }

    fn record_lease(&mut self, request: RequestKey, model: &Model, generation: u64) {
        assert_eq!(self.open.as_ref(), Some(model), "I3: its gate is closed");
        assert_eq!(self.confirmed.as_ref(), Some(model), "I9");
        let relay = self.senders[&request];
        self.waiting.remove(&request);
        self.end(request);
        let running = Running { model: model.clone(), relay, generation, told_to_end: false, abandoned: false };
        self.running.insert(request, running);
        self.last_classes.insert(model.clone(), self.classes[&request]);
    }

    /// I5: leased, failed or cancelled, exactly once.
    pub(super) fn end(&mut self, request: RequestKey) {
        assert!(self.ended.insert(request), "{request:?} ended twice");
    }

    fn record_news(&mut self, news: &SlotEvent) {
        let SlotEvent::SwapBegun { from: Some(from), to: Some(to), reason } = news else { return };
        match reason {
            Reason::Idle => {
                let busy = self.running.values().any(|running| running.model == *from && !running.told_to_end);
                let wanted = self.waiting.values().any(|(_, model)| model == from);
                assert!(!busy && !wanted, "I7: {from} had work");
            }
            Reason::Quantum => {
                let age = self.instant().saturating_duration_since(self.residency);
                let (models, candidates) = self.machine.candidates();
                let early = self.ends_early(from, &models, &candidates);
                let floor = self.machine.config.knobs.min_residency.max(3 * self.costs[to]);
                let least = if early.is_some() { floor } else { self.quanta[to] };
                assert!(age >= least, "I7: {age:?} of {least:?}");
                let is_owed = early == Some(true);
                self.turns[if age >= self.quanta[to] { 0 } else { 1 + usize::from(is_owed) }] += 1;
            }
            Reason::Wanted | Reason::Order | Reason::Default | Reason::Ttl | Reason::Removed => {}
        }
        assert!(!self.machine.is_pinned(from), "a pinned model is left");
    }

    /// I8: a model past the policy's bound comes next, unless another has waited longer. Together with I7, and the
    /// quantum at which `check` sees a turn end, this makes up the longest wait.
    fn check_turn(&self, op: OpId, next: &Model) {
        let preflight = self.machine.preflight.as_ref().filter(|preflight| preflight.op == op);
        let is_policys = |reason| matches!(reason, Reason::Idle | Reason::Quantum | Reason::Wanted);
        if !preflight.is_some_and(|preflight| is_policys(preflight.reason)) {
            return;
        }
        let (models, candidates) = self.machine.candidates();
        let index = models.iter().position(|model| model == next).expect("a request waits for it");
        let resident = self.machine.state.resident();
        let draining = self.machine.state.name() == SlotState::Draining;
        let busy = resident.is_some_and(|resident| draining || resident.idle_since.is_none());
        for (other, candidate) in candidates.iter().enumerate() {
            let bound = policy::bound(&self.machine.config.knobs, busy, &candidates, other);
            let passed_over = candidate.age > bound && candidate.age > candidates[index].age;
            assert!(!passed_over, "I8: {next} comes before {}, which has waited {:?}", models[other], candidate.age);
        }
        let place = |candidate: &Candidate| (candidate.class, candidate.rank);
        let is_late = candidates[index].age > policy::bound(&self.machine.config.knobs, busy, &candidates, index);
        let is_first = candidates.iter().all(|other| place(&candidates[index]) <= place(other));
        assert!(is_first || is_late, "{next} comes before others of a higher class, or of keys with less service");
    }

    /// I8: a busy resident whose quantum is over does not keep out a model with waiting requests.
    fn check_quantum(&self) {
        let machine = &self.machine;
        let (Some(resident), None) = (machine.ready(), machine.preflight.as_ref()) else { return };
        let (models, candidates) = machine.candidates();
        let knobs = &machine.config.knobs;
        if let (None, Some(next)) = (resident.idle_since, policy::pick(knobs, true, &candidates)) {
            let stayed = self.instant().saturating_duration_since(resident.since);
            let early = self.ends_early(&resident.model, &models, &candidates);
            let cost = candidates[next].cost;
            let turn = if early.is_some() { knobs.min_residency.max(3 * cost) } else { policy::quantum(knobs, cost) };
            assert!(stayed < turn, "I8: {stayed:?} with others waiting");
        }
    }

    /// Returns the class and rank of a relay's requests for a model.
    pub(super) fn place(&self, relay: RelayKey, model: &Model) -> (RequestClass, u32) {
        self.places.get(&(relay, model.clone())).copied().unwrap_or_default()
    }

    /// Returns the models whose waiting requests are of the same class as those for this one, and first at a relay.
    fn owed_by(&self, model: &Model) -> BTreeSet<Model> {
        let entry = |model| self.machine.models.get(model);
        let class = |model| Some(entry(model)?.waiting(self.instant()).place?.class);
        let precedes =
            |other| entry(other).zip(entry(model)).is_some_and(|(other, own)| other.precedes_at_a_relay(own));
        let models = self.machine.models.keys();
        models.filter(|other| class(other) == class(model) && precedes(other)).cloned().collect()
    }

    /// Returns `None` if no candidate ends the resident's turn early, and `Some(true)` if each that does is owed
    /// service.
    fn ends_early(&self, resident: &Model, models: &[Model], candidates: &[Candidate]) -> Option<bool> {
        let running = self.running.iter().filter(|(_, running)| running.model == *resident && !running.abandoned);
        let running = running.filter(|(request, _)| self.machine.leases.contains_key(request));
        let running = running.map(|(request, _)| self.classes[request]);
        let waiting = self.machine.models.get(resident).and_then(|entry| entry.waiting(self.instant()).place);
        // A resident whose last clients are all gone has neither, and is not idle before their requests have ended.
        let last = || self.last_classes.get(resident).copied().unwrap_or_default();
        let class = running.chain(waiting.map(|place| place.class)).min().unwrap_or_else(last);
        let early = models.iter().zip(candidates).filter_map(|(model, candidate)| {
            let is_owed = candidate.class == class && self.owed.contains(model);
            (candidate.class < class || is_owed).then_some(is_owed)
        });
        early.reduce(|all, is_owed| all && is_owed)
    }

    fn check_nothing_runs(&self) {
        assert!(self.machine.leases.is_empty(), "unloaded under its requests");
        assert_eq!(self.open, None, "an open gate before nothing");
    }

    fn check(&mut self) {
        let machine = &self.machine;
        let due = machine.next_timeout();
        assert!(due.is_none_or(|due| due > self.instant()), "a timeout in the past");
        for (request, lease) in &machine.leases {
            let running = self.running.get(request).expect("I4: a lease that was released");
            assert_eq!(running.model, lease.model);
            assert_eq!(running.generation, machine.generation, "I2: a lease of a generation that is gone");
        }
        for (request, running) in &self.running {
            let gone = !machine.leases.contains_key(request);
            assert!(!gone || running.told_to_end, "I4: {request:?} runs and is not counted");
        }
        let held = machine.models.values().flat_map(|entry| {
            let model = entry.model();
            entry.held.iter().map(move |waiter| (waiter.request, (waiter.relay, model.clone())))
        });
        let held: BTreeMap<_, _> = held.collect();
        assert_eq!(held, self.waiting, "I5: a waiting request was lost or kept");
        for entry in machine.models.values() {
            let counted = machine.leases.values().filter(|lease| {
                lease.model == *entry.model() && self.relays.contains_key(&lease.relay) && !lease.unwanted
            });
            assert_eq!(entry.allocator.running() as usize, counted.count(), "I4: {} counts wrongly", entry.model());
            let open = self.open.as_ref() == Some(entry.model());
            assert_eq!(entry.gate_open, open);
            assert_eq!(entry.allocator.capacity(), if open { entry.config.capacity } else { 0 });
        }
        self.check_quantum();
        let slot = machine.snapshot(self.instant());
        *self.visits.entry(slot.state).or_default() += 1;
        assert_eq!(
            slot.state == SlotState::Ready && !machine.is_leaving(),
            self.open.is_some(),
            "the gate of {slot:?}"
        );
        assert_eq!(machine.models.values().filter(|entry| entry.removed && !entry.held.is_empty()).count(), 0);
        assert!(self.machine.pending.len() == self.orders.len());
    }
}

impl Machine {
    pub(super) fn is_looking_for_the_lost(&self) -> bool {
        self.is_bereft && matches!(self.state.name(), SlotState::Empty | SlotState::Backoff)
    }

    /// True if the resident may accept no more requests.
    fn is_leaving(&self) -> bool {
        self.ready().is_some_and(|resident| self.models.get(&resident.model).is_none_or(|entry| entry.removed))
    }
}
