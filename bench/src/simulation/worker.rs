//! The worker's multiplexer: its own slot machine, with a simulated driver.
//!
//! A preflight, an eviction and a memory check complete at once, a load after its time. Requests wait where they do in
//! practice:
//! at a relay, which reports its demand and sends requests within its grant, or in the worker, if the relay has no
//! queue.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::config::{Knobs, ModelConfig, SlotConfig};
use modelrelay_multiplexer::effect::Effect;
use modelrelay_multiplexer::event::{
    Arrival, Demand, Event, Found, Left, LinkKind, OpId, Outcome, RelayKey, RequestClass, RequestKey,
};
use modelrelay_multiplexer::machine::{Jitter, Machine};
use modelrelay_multiplexer::memory::Reading;

use super::{JobId, ModelId, PLACES, Scheduler, Time};

const RELAY: RelayKey = RelayKey(1);

/// The simulated surroundings of the machine.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The slot's settings.
    pub config: SlotConfig,
    /// The duration of a load.
    pub load: Duration,
    /// The kind of link, which decides where requests wait.
    pub relay: LinkKind,
}

impl Setup {
    /// Creates `models` models with four places each, and the worker's default settings. No request is held too long.
    pub fn new(models: usize, load: Duration) -> Self {
        let models = (0..models).map(|model| ModelConfig::new(name(model), PLACES)).collect();
        let mut config = SlotConfig::new("gpu0", models);
        let forever = Duration::from_secs(24 * 3600);
        config.knobs = Knobs { hold_budget: forever, ..config.knobs };
        config.max_held_per_relay = usize::MAX;
        Self { config, load, relay: LinkKind::Granted }
    }

    /// Sets how long running requests may take once their model has to be unloaded.
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.config.knobs.drain_timeout = timeout;
        self
    }

    /// Starts the machine.
    pub fn start(self) -> WorkerSimulation {
        let start = Instant::now();
        let mut ours = WorkerSimulation {
            machine: Machine::new(self.config, Jitter::Seeded(1), start),
            start,
            relay: self.relay,
            load: self.load,
            loading: None,
            queues: BTreeMap::new(),
            granted: BTreeMap::new(),
            running: BTreeMap::new(),
            loads: 0,
            evictions: 0,
            severed: 0,
            refused: 0,
        };
        let mut begin = Vec::new();
        ours.handle(Event::RelayJoined { relay: RELAY, kind: self.relay }, Duration::ZERO, &mut begin);
        ours.handle(Event::Started, Duration::ZERO, &mut begin);
        ours
    }
}

/// The machine and its surroundings.
#[derive(Debug)]
pub struct WorkerSimulation {
    machine: Machine,
    start: Instant,
    relay: LinkKind,
    load: Duration,
    loading: Option<(OpId, Time)>,
    /// The requests that wait at the relay.
    queues: BTreeMap<ModelId, VecDeque<(JobId, Time)>>,
    granted: BTreeMap<ModelId, u32>,
    running: BTreeMap<JobId, ModelId>,
    loads: u32,
    evictions: u32,
    severed: u32,
    refused: u32,
}

impl WorkerSimulation {
    /// Models that were unloaded.
    pub fn evictions(&self) -> u32 {
        self.evictions
    }

    /// Requests that a swap has ended.
    pub fn severed(&self) -> u32 {
        self.severed
    }

    /// Requests that were not served.
    pub fn refused(&self) -> u32 {
        self.refused
    }

    /// Disconnects a client whose request waits.
    pub fn cancel(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) {
        match self.relay {
            LinkKind::Held => self.handle(Event::Cancelled { request: RequestKey(id as u64) }, now, begin),
            LinkKind::Granted => {
                for queue in self.queues.values_mut() {
                    queue.retain(|(queued, _)| *queued != id);
                }
                self.state_demand(now, begin);
            }
        }
    }

    fn handle(&mut self, event: Event, now: Time, begin: &mut Vec<JobId>) {
        let effects = self.machine.handle(event, self.start + now);
        for effect in effects {
            self.carry_out(effect, now, begin);
        }
    }

    fn carry_out(&mut self, effect: Effect, now: Time, begin: &mut Vec<JobId>) {
        let done = match effect {
            Effect::Preflight { op, .. } => (op, Outcome::Preflight(Ok(Reading::default()))),
            Effect::Evict { op, .. } => {
                self.evictions += 1;
                (op, Outcome::Evicted(Ok(Left::Nothing)))
            }
            Effect::ForceEvict { op, .. } => (op, Outcome::ForceEvicted(Ok(()))),
            Effect::CheckMemory { op, .. } => (op, Outcome::MemoryChecked { freed: true }),
            Effect::Probe { op, model } => (op, Outcome::Probed(model.map_or(Found::Nothing, Found::Serving))),
            Effect::Load { op, .. } => {
                self.loads += 1;
                self.loading = Some((op, now + self.load));
                return;
            }
            Effect::Lease { request, model, .. } => {
                let id = usize::try_from(request.0).expect("a request of ours");
                self.running.insert(id, number(&model));
                begin.push(id);
                return;
            }
            Effect::Grant { model, values, .. } => {
                self.granted.insert(number(&model), values.slots);
                return;
            }
            Effect::CloseGate { .. } => {
                self.granted.clear();
                return;
            }
            Effect::CancelLease { .. } => {
                self.severed += 1;
                return;
            }
            // A relay would try another worker, and then respond to its client.
            Effect::Fail { .. } => {
                self.refused += 1;
                return;
            }
            Effect::OpenGate { .. }
            | Effect::StillServes { .. }
            | Effect::Discard { .. }
            | Effect::Forget { .. }
            | Effect::OrderDone { .. }
            | Effect::Changed
            | Effect::SlotEvent(_)
            | Effect::Stopped => return,
        };
        self.handle(Event::Done { op: done.0, outcome: done.1 }, now, begin);
    }

    /// Acts as the relay: sends what it may, oldest first, and then reports the remaining demand.
    fn send(&mut self, now: Time, begin: &mut Vec<JobId>) {
        let may = |ours: &Self, model: ModelId| {
            let own = ours.running.values().filter(|running| **running == model).count();
            own < ours.granted.get(&model).copied().unwrap_or(0) as usize
        };
        loop {
            let sendable = self.queues.iter().filter(|(model, queue)| !queue.is_empty() && may(self, **model));
            let Some(model) = sendable.map(|(model, _)| *model).next() else { return };
            let Some((id, at)) = self.queues.get_mut(&model).and_then(VecDeque::pop_front) else { return };
            self.arrived(id, model, at, now, begin);
        }
    }

    fn arrived(&mut self, id: JobId, model: ModelId, at: Time, now: Time, begin: &mut Vec<JobId>) {
        let (request, class) = (RequestKey(id as u64), RequestClass::Normal);
        let arrival = Arrival { relay: RELAY, request, model: name(model), at: self.start + at, class };
        self.handle(Event::Arrived(arrival), now, begin);
    }

    fn state_demand(&mut self, now: Time, begin: &mut Vec<JobId>) {
        let waiting = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        let models = waiting.map(|(model, queue)| {
            let ages = queue.iter().map(|(_, at)| now - *at);
            Demand {
                model: name(*model),
                waiting: u32::try_from(queue.len()).unwrap_or(u32::MAX),
                oldest: ages.clone().max().unwrap_or_default(),
                sum: ages.sum(),
                class: RequestClass::Normal,
                rank: 0,
            }
        });
        let models = models.collect();
        self.handle(Event::Demand { relay: RELAY, models }, now, begin);
        self.send(now, begin);
    }
}

impl Scheduler for WorkerSimulation {
    fn arrive(&mut self, id: JobId, model: ModelId, now: Time, begin: &mut Vec<JobId>) {
        match self.relay {
            LinkKind::Held => self.arrived(id, model, now, now, begin),
            LinkKind::Granted => {
                self.queues.entry(model).or_default().push_back((id, now));
                self.send(now, begin);
                self.state_demand(now, begin);
            }
        }
    }

    fn finish(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) {
        self.running.remove(&id);
        self.handle(Event::Released { request: RequestKey(id as u64), answered: true }, now, begin);
        self.send(now, begin);
    }

    fn tick(&mut self, now: Time, begin: &mut Vec<JobId>) {
        match self.loading.take_if(|(_, due)| *due <= now) {
            Some((op, _)) => self.handle(Event::Done { op, outcome: Outcome::Loaded(Ok(())) }, now, begin),
            None => self.handle(Event::Tick, now, begin),
        }
        self.send(now, begin);
    }

    fn next_timeout(&self) -> Option<Time> {
        let machine = self.machine.next_timeout().map(|due| due.saturating_duration_since(self.start));
        self.loading.map(|(_, due)| due).into_iter().chain(machine).min()
    }

    fn loads(&self) -> u32 {
        self.loads
    }
}

fn name(model: ModelId) -> Model {
    Model::from(format!("model-{model}"))
}

fn number(model: &Model) -> ModelId {
    let number = model.strip_prefix("model-").and_then(|number| number.parse().ok());
    number.expect("a model of ours")
}
