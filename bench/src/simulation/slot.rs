//! A slot of a worker: the slot machine that the worker runs, with a simulated driver.
//!
//! A preflight, an eviction and a memory check complete at once, a load after its time.

use std::time::{Duration, Instant};

use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::config::{Knobs, ModelConfig, SlotConfig};
use modelrelay_multiplexer::effect::{Effect, LeaseEnd};
use modelrelay_multiplexer::error::LoadFailure;
use modelrelay_multiplexer::estimate::LoadKind;
use modelrelay_multiplexer::event::{Event, Found, Left, LinkKind, OpId, Outcome, RelayKey, RequestKey};
use modelrelay_multiplexer::machine::{Jitter, Machine};
use modelrelay_multiplexer::memory::Reading;
use modelrelay_protocol::grants::GrantValues;
use modelrelay_protocol::message::Slot as SlotReport;

use super::{ModelId, PLACES, Time};

/// The simulated surroundings of the machine.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The slot's settings.
    pub config: SlotConfig,
    /// The duration of a cold load.
    pub load: Duration,
    /// The duration of a load from sleep; `Some` if the driver puts models with even numbers to sleep.
    pub wake: Option<Duration>,
    /// A model whose loads fail.
    pub broken: Option<ModelId>,
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
        Self { config, load, wake: None, broken: None, relay: LinkKind::Granted }
    }

    /// Sets how long running requests may take once their model has to be unloaded.
    pub fn drain_timeout(mut self, timeout: Duration) -> Self {
        self.config.knobs.drain_timeout = timeout;
        self
    }
}

/// An effect of the machine on others than its driver.
#[derive(Debug)]
pub(super) enum SlotEffect {
    Lease {
        request: RequestKey,
        model: Model,
    },
    Fail {
        request: RequestKey,
    },
    CancelLease {
        request: RequestKey,
        why: LeaseEnd,
    },
    Grant {
        relay: RelayKey,
        model: Model,
        values: GrantValues,
    },
    CloseGate {
        model: Model,
    },
    Changed,
    /// The driver has carried out a call, and this is its result.
    Done(Box<Event>),
}

/// The machine and its driver.
#[derive(Debug)]
pub(super) struct Slot {
    machine: Machine,
    start: Instant,
    load: Duration,
    wake: Option<Duration>,
    broken: Option<Model>,
    loading: Option<(OpId, Time, Model)>,
    pub(super) loads: u32,
    pub(super) evictions: u32,
}

impl Slot {
    pub(super) fn new(setup: &Setup, start: Instant) -> Self {
        Self {
            machine: Machine::new(setup.config.clone(), Jitter::Seeded(1), start),
            start,
            load: setup.load,
            wake: setup.wake,
            broken: setup.broken.map(name),
            loading: None,
            loads: 0,
            evictions: 0,
        }
    }

    pub(super) fn handle(&mut self, event: Event, now: Time) -> Vec<SlotEffect> {
        let effects = self.machine.handle(event, self.start + now);
        effects.into_iter().filter_map(|effect| self.carry_out(effect, now)).collect()
    }

    fn carry_out(&mut self, effect: Effect, now: Time) -> Option<SlotEffect> {
        let (op, outcome) = match effect {
            Effect::Preflight { op, .. } => (op, Outcome::Preflight(Ok(Reading::default()))),
            Effect::Evict { op, model } => {
                self.evictions += 1;
                let sleeps = self.wake.is_some() && number(&model).is_multiple_of(2);
                (op, Outcome::Evicted(Ok(if sleeps { Left::Asleep } else { Left::Nothing })))
            }
            Effect::ForceEvict { op, .. } => (op, Outcome::ForceEvicted(Ok(()))),
            Effect::CheckMemory { op, .. } => (op, Outcome::MemoryChecked { freed: true }),
            Effect::Probe { op, model } => (op, Outcome::Probed(model.map_or(Found::Nothing, Found::Serving))),
            Effect::Load { op, model, kind } => {
                self.loads += 1;
                let takes = self.wake.filter(|_| kind == LoadKind::Wake).unwrap_or(self.load);
                self.loading = Some((op, now + takes, model));
                return None;
            }
            Effect::Lease { request, model, .. } => return Some(SlotEffect::Lease { request, model }),
            Effect::Fail { request, .. } => return Some(SlotEffect::Fail { request }),
            Effect::CancelLease { request, why } => return Some(SlotEffect::CancelLease { request, why }),
            Effect::Grant { relay, model, values } => return Some(SlotEffect::Grant { relay, model, values }),
            Effect::CloseGate { model } => return Some(SlotEffect::CloseGate { model }),
            Effect::Changed => return Some(SlotEffect::Changed),
            Effect::OpenGate { .. }
            | Effect::StillServes { .. }
            | Effect::Discard { .. }
            | Effect::Forget { .. }
            | Effect::OrderDone { .. }
            | Effect::SlotEvent(_)
            | Effect::Stopped => return None,
        };
        Some(SlotEffect::Done(Box::new(Event::Done { op, outcome })))
    }

    /// Returns the event of a load that has ended by now.
    pub(super) fn take_loaded(&mut self, now: Time) -> Option<Event> {
        let (op, _, model) = self.loading.take_if(|(_, due, _)| *due <= now)?;
        let is_broken = self.broken.as_ref() == Some(&model);
        let outcome = Outcome::Loaded(if is_broken { Err(LoadFailure::DiedAtOnce) } else { Ok(()) });
        Some(Event::Done { op, outcome })
    }

    /// The next time at which a load ends or the machine has a timeout.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let machine = self.machine.next_timeout().map(|due| due.saturating_duration_since(self.start));
        self.loading.as_ref().map(|(_, due, _)| *due).into_iter().chain(machine).min()
    }

    pub(super) fn report(&self, now: Time) -> SlotReport {
        self.machine.snapshot(self.start + now)
    }
}

pub(super) fn name(model: ModelId) -> Model {
    Model::from(format!("model-{model}"))
}

pub(super) fn number(model: &Model) -> ModelId {
    let number = model.strip_prefix("model-").and_then(|number| number.parse().ok());
    number.expect("a model of ours")
}
