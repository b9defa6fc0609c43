//! A relay with API keys before the worker's multiplexer: the relay's dispatch core and the worker's slot machine, with
//! a simulated driver. Messages between them take no time.
//!
//! The model of a job also names its key: the key is its tens, the model its units.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::config::{Knobs, ModelConfig, SlotConfig};
use modelrelay_multiplexer::effect::Effect as SlotEffect;
use modelrelay_multiplexer::event::{Arrival, Demand, Event as SlotEvent, Found, Left, LinkKind, OpId, Outcome};
use modelrelay_multiplexer::event::{RelayKey, RequestKey as LeaseKey};
use modelrelay_multiplexer::machine::{Jitter, Machine};
use modelrelay_multiplexer::memory::Reading;
use modelrelay_protocol::grants::GrantValues;
use modelrelay_relay::dispatch::{
    AttemptFailure, Class, Dispatch, Distance, Effect, Event, Gate, Grant, NewMultiplexer, NewRequest, NewWorker,
    Owner, RequestKey, TokenUsage, Weight, WorkerKey,
};

use super::{JobId, ModelId, PLACES, Scheduler, Time};
use crate::dispatch_core::unlimited;

const RELAY: RelayKey = RelayKey(1);
const WORKER: WorkerKey = WorkerKey(1);

/// The tokens of a response for each second that it takes.
const TOKENS_PER_SECOND: f64 = 50.0;

/// The bytes of each request.
const BYTES: u64 = 4_000;

/// The part of a job's model that names its key.
pub const KEY: ModelId = 10;

#[derive(Debug)]
enum Message {
    ToRelay(Box<Event>),
    ToSlot(Box<SlotEvent>),
}

/// The relay and the worker.
#[derive(Debug)]
pub struct SharedSimulation {
    relay: Dispatch,
    slot: Machine,
    start: Instant,
    load: Duration,
    /// The class of each key; `None` for requests without keys.
    classes: Option<Vec<Class>>,
    loading: Option<(OpId, Time)>,
    messages: VecDeque<Message>,
    gates: BTreeMap<Model, GrantValues>,
    running: BTreeMap<JobId, (u32, Time)>,
    models: BTreeMap<JobId, Model>,
    loads: u32,
}

impl SharedSimulation {
    /// Starts a worker with one slot for these models, and a relay whose keys have these classes, or that has no keys.
    pub fn start(models: usize, load: Duration, drain_timeout: Duration, classes: Option<Vec<Class>>) -> Self {
        let start = Instant::now();
        let names: Vec<_> = (0..models).map(name).collect();
        let configs = names.iter().map(|name| ModelConfig::new(Model::clone(name), PLACES)).collect();
        let mut config = SlotConfig::new("gpu0", configs);
        config.knobs = Knobs { drain_timeout, ..config.knobs };
        let slot = Machine::new(config, Jitter::Seeded(1), start);
        let multiplexer = NewMultiplexer { instance: "worker".into(), slots: vec![slot.snapshot(start)] };
        let worker = NewWorker {
            key: WORKER,
            models: names,
            failing: Vec::new(),
            max_concurrent: PLACES,
            load: 0,
            core1: true,
            multiplexer: Some(multiplexer),
            instance: None,
            distance: Distance::default(),
        };
        let mut simulation = Self {
            relay: Dispatch::new(unlimited()),
            slot,
            start,
            load,
            classes,
            loading: None,
            messages: VecDeque::new(),
            gates: BTreeMap::new(),
            running: BTreeMap::new(),
            models: BTreeMap::new(),
            loads: 0,
        };
        simulation.send_to_slot(SlotEvent::RelayJoined { relay: RELAY, kind: LinkKind::Granted });
        simulation.send_to_slot(SlotEvent::Started);
        simulation.send_to_relay(Event::WorkerJoined(worker));
        simulation.settle(Time::ZERO, &mut Vec::new());
        simulation
    }

    fn send_to_relay(&mut self, event: Event) {
        self.messages.push_back(Message::ToRelay(Box::new(event)));
    }

    fn send_to_slot(&mut self, event: SlotEvent) {
        self.messages.push_back(Message::ToSlot(Box::new(event)));
    }

    /// Passes messages until nothing happens any more at this time.
    fn settle(&mut self, now: Time, begin: &mut Vec<JobId>) {
        let at = self.start + now;
        while let Some(message) = self.messages.pop_front() {
            match message {
                Message::ToRelay(event) => {
                    let mut effects = Vec::new();
                    self.relay.handle(*event, at, &mut effects);
                    effects.into_iter().for_each(|effect| self.apply(effect, at));
                }
                Message::ToSlot(event) => {
                    for effect in self.slot.handle(*event, at) {
                        self.carry_out(effect, now, begin);
                    }
                }
            }
        }
    }

    fn apply(&mut self, effect: Effect, at: Instant) {
        match effect {
            Effect::Send { request, attempt, class, .. } => {
                let (id, class) = (request.0 as usize, class.into());
                self.running.insert(id, (attempt, at - self.start));
                let (request, model) = (LeaseKey(request.0), Model::clone(&self.models[&id]));
                self.send_to_slot(SlotEvent::Arrived(Arrival { relay: RELAY, request, model, at, class }));
            }
            Effect::Demand { demand, .. } => {
                let models = demand.into_iter().map(|entry| Demand {
                    model: entry.model,
                    waiting: entry.waiting,
                    oldest: entry.oldest,
                    sum: entry.sum,
                    class: entry.class.into(),
                    rank: entry.rank,
                });
                let models = models.collect();
                self.send_to_slot(SlotEvent::Demand { relay: RELAY, models });
            }
            Effect::Finished { .. } | Effect::Requeued { .. } => {}
            Effect::CancelSent { .. }
            | Effect::Fail { .. }
            | Effect::Cancelled { .. }
            | Effect::Severed { .. }
            | Effect::DrainedIdle { .. } => panic!("every request is served: {effect:?}"),
        }
    }

    fn carry_out(&mut self, effect: SlotEffect, now: Time, begin: &mut Vec<JobId>) {
        let (op, outcome) = match effect {
            SlotEffect::Preflight { op, .. } => (op, Outcome::Preflight(Ok(Reading::default()))),
            SlotEffect::Evict { op, .. } => (op, Outcome::Evicted(Ok(Left::Nothing))),
            SlotEffect::ForceEvict { op, .. } => (op, Outcome::ForceEvicted(Ok(()))),
            SlotEffect::CheckMemory { op, .. } => (op, Outcome::MemoryChecked { freed: true }),
            SlotEffect::Probe { op, model } => (op, Outcome::Probed(model.map_or(Found::Nothing, Found::Serving))),
            SlotEffect::Load { op, .. } => {
                self.loads += 1;
                self.loading = Some((op, now + self.load));
                return;
            }
            SlotEffect::Lease { request, .. } => {
                begin.push(usize::try_from(request.0).expect("a request of ours"));
                return;
            }
            SlotEffect::Grant { model, values, .. } => {
                self.gates.insert(model, values);
                return self.report_gates();
            }
            SlotEffect::CloseGate { .. } => {
                self.gates.clear();
                return self.report_gates();
            }
            SlotEffect::Fail { request, .. } => {
                let (request, failure) = (RequestKey(request.0), AttemptFailure::AtCapacity);
                let (attempt, _) = self.running.remove(&(request.0 as usize)).expect("it was sent");
                return self.send_to_relay(Event::AttemptFailed { worker: WORKER, request, attempt, failure });
            }
            SlotEffect::Changed => {
                let slots = vec![self.slot.snapshot(self.start + now)];
                return self.send_to_relay(Event::SlotsReported { worker: WORKER, slots });
            }
            SlotEffect::CancelLease { .. } => panic!("no response is cut off"),
            SlotEffect::OpenGate { .. }
            | SlotEffect::StillServes { .. }
            | SlotEffect::Discard { .. }
            | SlotEffect::Forget { .. }
            | SlotEffect::OrderDone { .. }
            | SlotEffect::SlotEvent(_)
            | SlotEffect::Stopped => return,
        };
        self.send_to_slot(SlotEvent::Done { op, outcome });
    }

    fn report_gates(&mut self) {
        let gate =
            |values: &GrantValues| Gate { slots: values.slots, others: values.others, capacity: values.capacity };
        let gates = self.gates.iter().map(|(model, values)| (Model::clone(model), gate(values))).collect();
        let sums = Grant { slots: PLACES, others: 0, capacity: PLACES, links: 1 };
        self.send_to_relay(Event::GatesSet { worker: WORKER, sums, gates });
    }
}

impl Scheduler for SharedSimulation {
    fn arrive(&mut self, id: JobId, model: ModelId, now: Time, begin: &mut Vec<JobId>) {
        let mut new = NewRequest::new(RequestKey(id as u64), name(model % KEY), BYTES);
        self.models.insert(id, Model::clone(&new.model));
        new.owner = self.classes.as_ref().map(|classes| {
            let key = model / KEY;
            Owner { key: Some(format!("key {key}").into()), weight: Weight::default(), class: classes[key] }
        });
        self.send_to_relay(Event::Submit(new));
        self.settle(now, begin);
    }

    fn finish(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) {
        let (attempt, since) = self.running.remove(&id).expect("it runs");
        let output = ((now - since).as_secs_f64() * TOKENS_PER_SECOND) as u64;
        let (worker, request) = (WORKER, RequestKey(id as u64));
        let usage = Some(TokenUsage { input: BYTES / 4, output });
        self.send_to_slot(SlotEvent::Released { request: LeaseKey(id as u64), answered: true });
        self.send_to_relay(Event::Completed { worker, request, attempt, cached: None, usage });
        self.settle(now, begin);
    }

    fn tick(&mut self, now: Time, begin: &mut Vec<JobId>) {
        match self.loading.take_if(|(_, due)| *due <= now) {
            Some((op, _)) => self.send_to_slot(SlotEvent::Done { op, outcome: Outcome::Loaded(Ok(())) }),
            None => {
                self.send_to_slot(SlotEvent::Tick);
                self.send_to_relay(Event::Tick);
            }
        }
        self.settle(now, begin);
    }

    fn next_timeout(&self) -> Option<Time> {
        let both = self.slot.next_timeout().into_iter().chain(self.relay.next_timeout());
        let both = both.map(|due| due.saturating_duration_since(self.start));
        self.loading.map(|(_, due)| due).into_iter().chain(both).min()
    }

    fn loads(&self) -> u32 {
        self.loads
    }
}

fn name(model: ModelId) -> Model {
    format!("model-{model}").into()
}
