//! A slot with a clock that the test advances and a driver that the test plays. Effects are returned as short lines, so
//! that a test reads as a scenario: `lease r1 g2` is a lease for request 1 of the second generation. Grants are
//! recorded as the relays would see them, news separately; tests that concern them query both.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use modelrelay_protocol::message::{Slot, SlotState};

use crate::Model;
use crate::config::{ModelConfig, SlotConfig};
use crate::effect::{Effect, LeaseEnd, SlotEvent, Swap};
use crate::error::LoadFailure;
use crate::event::{
    Arrival, Demand, DownCause, Event, Found, Left, LinkKind, OpId, Order, OrderId, Outcome, RelayKey, RequestClass,
    RequestKey,
};
use crate::machine::{Jitter, Machine};
use crate::memory::Reading;

pub(super) const NOTHING: [&str; 0] = [];

/// A relay without a queue: its requests wait in the slot.
pub(super) const OLD: RelayKey = RelayKey(0);

/// A relay that reports demand.
pub(super) const NEW: RelayKey = RelayKey(1);

pub(super) fn secs(secs: f64) -> Duration {
    Duration::from_secs_f64(secs)
}

/// A slot for these models, each with four requests at once.
pub(super) fn config(models: &[&str]) -> SlotConfig {
    let mut config = SlotConfig::new("gpu0", models.iter().map(|id| ModelConfig::new(*id, 4)).collect());
    config.knobs.drain_timeout = Duration::from_secs(30);
    config
}

/// The latest driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Preflight,
    Evict,
    Force,
    Memory,
    Load,
}

pub(super) struct Stage {
    pub(super) machine: Machine,
    start: Instant,
    pub(super) now: Duration,
    pub(super) call: Option<(Call, OpId)>,
    probe: Option<OpId>,
    /// The result of probes; `None` leaves them without one.
    pub(super) finds: Option<Found>,
    /// The number of requests that each relay may send, from its latest grant.
    pub(super) grants: BTreeMap<(RelayKey, String), u32>,
    pub(super) news: Vec<SlotEvent>,
    pub(super) changes: u32,
}

impl Stage {
    /// Creates an empty, started slot with both kinds of relays.
    pub(super) fn new(models: &[&str]) -> Self {
        Self::with(config(models))
    }

    pub(super) fn with(config: SlotConfig) -> Self {
        Self::with_jitter(config, Jitter::None)
    }

    pub(super) fn with_jitter(config: SlotConfig, jitter: Jitter) -> Self {
        let mut stage = Self::unstarted_with(config, jitter);
        stage.handle(Event::Started);
        stage.answer_probe(Found::Nothing);
        stage
    }

    pub(super) fn unstarted(config: SlotConfig) -> Self {
        Self::unstarted_with(config, Jitter::None)
    }

    fn unstarted_with(config: SlotConfig, jitter: Jitter) -> Self {
        let start = Instant::now();
        let mut stage = Self {
            machine: Machine::new(config, jitter, start),
            start,
            now: Duration::ZERO,
            call: None,
            probe: None,
            finds: None,
            grants: BTreeMap::new(),
            news: Vec::new(),
            changes: 0,
        };
        stage.handle(Event::RelayJoined { relay: OLD, kind: LinkKind::Held });
        stage.handle(Event::RelayJoined { relay: NEW, kind: LinkKind::Granted });
        stage
    }

    /// Creates a slot with this model resident and idle, ten seconds after it was loaded in two: its quantum is 16 s,
    /// and six of it are left.
    pub(super) fn serving(model: &str, models: &[&str]) -> Self {
        Self::serving_with(model, config(models))
    }

    pub(super) fn serving_with(model: &str, config: SlotConfig) -> Self {
        let mut stage = Self::with(config);
        stage.order(1, Order::Load(model.into()));
        stage.finish_swap(2.0);
        assert_eq!(stage.resident(), Some(model.to_owned()));
        stage.pass(10.0);
        stage.news.clear();
        stage
    }

    pub(super) fn at(&self, now: Duration) -> Instant {
        self.start + now
    }

    /// Passes an event on, without any ticks before.
    pub(super) fn handle(&mut self, event: Event) -> Vec<String> {
        let effects = self.machine.handle(event, self.at(self.now));
        let mut lines = Vec::new();
        for effect in effects {
            self.note(&effect);
            lines.extend(show(&effect));
        }
        self.check();
        if let (Some(found), true) = (self.finds.clone(), self.probe.is_some()) {
            lines.extend(self.answer_probe(found));
        }
        lines
    }

    fn note(&mut self, effect: &Effect) {
        match effect {
            Effect::Preflight { op, .. } => self.call = Some((Call::Preflight, *op)),
            Effect::Evict { op, .. } => self.call = Some((Call::Evict, *op)),
            Effect::ForceEvict { op, .. } => self.call = Some((Call::Force, *op)),
            Effect::CheckMemory { op, .. } => self.call = Some((Call::Memory, *op)),
            Effect::Load { op, .. } => self.call = Some((Call::Load, *op)),
            Effect::Probe { op, .. } => self.probe = Some(*op),
            Effect::Grant { relay, model, values } => {
                self.grants.insert((*relay, model.to_string()), values.slots);
            }
            Effect::CloseGate { model } => self.grants.retain(|(_, granted), _| **granted != **model),
            Effect::SlotEvent(news) => self.news.push(news.clone()),
            Effect::Changed => self.changes += 1,
            Effect::Lease { .. }
            | Effect::Fail { .. }
            | Effect::CancelLease { .. }
            | Effect::OpenGate { .. }
            | Effect::StillServes { .. }
            | Effect::Discard { .. }
            | Effect::Forget { .. }
            | Effect::OrderDone { .. }
            | Effect::Stopped => {}
        }
    }

    fn check(&self) {
        let due = self.machine.next_timeout();
        assert!(due.is_none_or(|due| due > self.at(self.now)), "something due was left over");
    }

    /// Advances time, with a tick exactly when one is due. Probes of the backend find the resident, unless the test
    /// sets a result.
    pub(super) fn pass(&mut self, seconds: f64) -> Vec<String> {
        let until = self.now + secs(seconds);
        let mut lines = Vec::new();
        while let Some(due) = self.machine.next_timeout().map(|due| due - self.start).filter(|due| *due <= until) {
            self.now = due;
            lines.extend(self.handle(Event::Tick));
            if self.finds.is_none()
                && self.probe.is_some()
                && let Some(resident) = self.resident()
            {
                lines.extend(self.answer_probe(Found::Serving(resident.into())));
            }
        }
        self.now = until;
        lines
    }

    /// Advances time without a tick: the timer is late.
    pub(super) fn oversleep(&mut self, seconds: f64) {
        self.now += secs(seconds);
    }

    /// A request of the old relay.
    pub(super) fn arrive(&mut self, request: u64, model: &str) -> Vec<String> {
        self.arrive_from(OLD, request, model)
    }

    pub(super) fn arrive_from(&mut self, relay: RelayKey, request: u64, model: &str) -> Vec<String> {
        self.arrive_of(RequestClass::Normal, relay, request, model)
    }

    pub(super) fn arrive_of(&mut self, class: RequestClass, relay: RelayKey, request: u64, model: &str) -> Vec<String> {
        let at = self.at(self.now);
        self.handle(Event::Arrived(Arrival { relay, request: RequestKey(request), model: model.into(), at, class }))
    }

    /// Sets the requests that wait at the new relay: model, number, age of all of them.
    pub(super) fn demand(&mut self, models: &[(&str, u32, f64)]) -> Vec<String> {
        let all: Vec<_> = models.iter().map(|demand| (*demand, RequestClass::Normal, 0)).collect();
        self.demand_of(NEW, &all)
    }

    /// The same with the class and rank of each model, at this relay.
    pub(super) fn demand_of(
        &mut self,
        relay: RelayKey,
        models: &[((&str, u32, f64), RequestClass, u32)],
    ) -> Vec<String> {
        let models = models.iter().map(|((model, waiting, age), class, rank)| Demand {
            model: Model::from(*model),
            waiting: *waiting,
            oldest: secs(*age),
            sum: secs(*age) * *waiting,
            class: *class,
            rank: *rank,
        });
        self.handle(Event::Demand { relay, models: models.collect() })
    }

    pub(super) fn cancel(&mut self, request: u64) -> Vec<String> {
        self.handle(Event::Cancelled { request: RequestKey(request) })
    }

    /// The backend responded to the request completely.
    pub(super) fn finish(&mut self, request: u64) -> Vec<String> {
        self.handle(Event::Released { request: RequestKey(request), answered: true })
    }

    /// The request's holder dropped the lease.
    pub(super) fn drop_lease(&mut self, request: u64) -> Vec<String> {
        self.handle(Event::Released { request: RequestKey(request), answered: false })
    }

    pub(super) fn order(&mut self, id: u64, order: Order) -> Vec<String> {
        self.handle(Event::Ordered { id: OrderId(id), order })
    }

    pub(super) fn down(&mut self, generation: u64, cause: DownCause) -> Vec<String> {
        self.handle(Event::BackendDown { generation, cause })
    }

    /// The result of the latest driver call, which must be this one.
    pub(super) fn answer(&mut self, call: Call, outcome: Outcome) -> Vec<String> {
        let (pending, op) = self.call.take().unwrap_or_else(|| panic!("no call is pending, not even {call:?}"));
        assert_eq!(pending, call);
        self.handle(Event::Done { op, outcome })
    }

    pub(super) fn answer_probe(&mut self, found: Found) -> Vec<String> {
        let op = self.probe.take().expect("a look");
        self.handle(Event::Done { op, outcome: Outcome::Probed(found) })
    }

    pub(super) fn fits(&mut self) -> Vec<String> {
        self.measured(Reading::default())
    }

    pub(super) fn measured(&mut self, reading: Reading) -> Vec<String> {
        self.answer(Call::Preflight, Outcome::Preflight(Ok(reading)))
    }

    pub(super) fn evicted(&mut self) -> Vec<String> {
        self.answer(Call::Evict, Outcome::Evicted(Ok(Left::Nothing)))
    }

    pub(super) fn put_to_sleep(&mut self) -> Vec<String> {
        self.answer(Call::Evict, Outcome::Evicted(Ok(Left::Asleep)))
    }

    pub(super) fn put_to_deep_sleep(&mut self) -> Vec<String> {
        self.answer(Call::Evict, Outcome::Evicted(Ok(Left::Emptied)))
    }

    pub(super) fn not_evicted(&mut self) -> Vec<String> {
        self.answer(Call::Evict, Outcome::Evicted(Err("no".into())))
    }

    pub(super) fn killed(&mut self) -> Vec<String> {
        self.answer(Call::Force, Outcome::ForceEvicted(Ok(())))
    }

    pub(super) fn not_killed(&mut self) -> Vec<String> {
        self.answer(Call::Force, Outcome::ForceEvicted(Err("no".into())))
    }

    pub(super) fn freed(&mut self, freed: bool) -> Vec<String> {
        self.answer(Call::Memory, Outcome::MemoryChecked { freed })
    }

    pub(super) fn loaded(&mut self) -> Vec<String> {
        self.answer(Call::Load, Outcome::Loaded(Ok(())))
    }

    pub(super) fn not_loaded(&mut self) -> Vec<String> {
        self.not_loaded_for(LoadFailure::Exited("boom".into()))
    }

    pub(super) fn not_loaded_for(&mut self, failure: LoadFailure) -> Vec<String> {
        self.answer(Call::Load, Outcome::Loaded(Err(failure)))
    }

    /// The result of a call that was superseded long ago.
    pub(super) fn late(&mut self, op: OpId, outcome: Outcome) -> Vec<String> {
        self.handle(Event::Done { op, outcome })
    }

    pub(super) fn op(&self) -> OpId {
        self.call.expect("a call").1
    }

    /// The driver succeeds in every call; a load takes `load` seconds, everything else no time.
    pub(super) fn finish_swap(&mut self, load: f64) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some((call, _)) = self.call {
            let next = match call {
                Call::Preflight => self.fits(),
                Call::Evict => self.evicted(),
                Call::Force => self.killed(),
                Call::Memory => self.freed(true),
                Call::Load => {
                    let mut next = self.pass(load);
                    next.extend(self.loaded());
                    next
                }
            };
            lines.extend(next);
        }
        lines
    }

    pub(super) fn slot(&self) -> Slot {
        self.machine.snapshot(self.at(self.now))
    }

    pub(super) fn state(&self) -> SlotState {
        self.slot().state
    }

    pub(super) fn resident(&self) -> Option<String> {
        self.slot().resident
    }

    /// The number of a model's requests that the new relay may send.
    pub(super) fn granted(&self, model: &str) -> Option<u32> {
        self.grants.get(&(NEW, model.to_owned())).copied()
    }

    /// Swaps that have ended.
    pub(super) fn swaps(&self) -> Vec<&Swap> {
        let ended =
            self.news.iter().filter_map(|news| if let SlotEvent::SwapEnded(swap) = news { Some(swap) } else { None });
        ended.collect()
    }
}

/// Formats an effect as a line, if it is one that scenarios show.
fn show(effect: &Effect) -> Option<String> {
    Some(match effect {
        Effect::Lease { request, generation, .. } => format!("lease r{} g{generation}", request.0),
        Effect::Fail { request, error } => format!("fail r{}: {}", request.0, error.code()),
        Effect::CancelLease { request, why: LeaseEnd::Swap } => format!("sever r{}", request.0),
        Effect::CancelLease { request, why } => format!("cancel r{}: {why:?}", request.0),
        Effect::OpenGate { model } => format!("open {model}"),
        Effect::CloseGate { model } => format!("close {model}"),
        Effect::Preflight { model, .. } => format!("preflight {model}"),
        Effect::Evict { model, .. } => format!("evict {model}"),
        Effect::ForceEvict { model, .. } => format!("kill {model}"),
        Effect::CheckMemory { model, .. } => format!("memory of {model}"),
        Effect::Load { model, kind, .. } => format!("load {model} {kind:?}"),
        Effect::Probe { .. } | Effect::Grant { .. } | Effect::Changed | Effect::SlotEvent(_) => return None,
        Effect::StillServes { model } => format!("{model} still serves"),
        Effect::Discard { model } => format!("discard {model}"),
        Effect::Forget { model } => format!("forget {model}"),
        Effect::OrderDone { id, result: Ok(()) } => format!("order {} done", id.0),
        Effect::OrderDone { id, result: Err(error) } => format!("order {} failed: {error}", id.0),
        Effect::Stopped => "stopped".to_owned(),
    })
}
