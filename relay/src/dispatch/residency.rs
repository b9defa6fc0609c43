//! What a multiplexer serves now, and how near it is to each of its other models.
//!
//! The gates say what it may be sent; what its slots are doing only informs the choice of whom to ask for a model that
//! nobody serves. The worker alone decides what it loads, so nothing here is ever assumed: what it said last counts.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState, WorkerError};

use super::clock::{Moment, Span, span};
use super::event::{Gate, LoadFailure, Model, NewMultiplexer};
use super::models::ModelId;

/// How often its own swap cost a slot must have been idle before a model that sleeps there goes before an empty slot.
const IDLE_SWAPS: Span = 3;

/// Idle times are compared in whole seconds: relays that hear of the same slots some milliseconds apart shall agree, and
/// leave the rest to the tie-break that is the same for all.
const IDLE_UNIT: Span = 1_000_000_000;

/// One worker's multiplexer.
#[derive(Debug)]
pub(super) struct Multiplexer {
    /// The worker's name at every relay.
    pub(super) instance: Arc<str>,
    /// What may be sent, by model. A model that is not here is not served.
    gates: BTreeMap<Model, Gate>,
    /// What each slot that can hold a model says about it.
    offers: BTreeMap<Model, Vec<Offer>>,
    /// How many of our requests it has, by model.
    running: BTreeMap<ModelId, u32>,
}

/// What one slot says about one model that it can hold.
#[derive(Debug)]
struct Offer {
    way: Way,
    asleep: bool,
    swap_cost: Span,
    wanted: u32,
    failed: Option<Failed>,
    /// Whether the worker said that it has forgotten who waits for the model, which it says by its failure.
    forgot: bool,
}

/// What stands between a slot and a model.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The slot is on its way to the model, or there.
    Coming { ready: Option<Moment> },
    /// It holds nothing.
    Empty,
    /// It holds another model, which has had nothing to do since then.
    Idle { since: Moment },
    /// It holds another model, or is on its way to one.
    Busy,
    /// It holds a model that it must keep.
    Pinned,
    /// It takes nothing: its worker is ending, or a person must look at it.
    Closed,
}

/// Why a slot cannot load a model now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Failed {
    pub(super) code: LoadFailure,
    /// When it may be asked again; `None`: when it says something else.
    pub(super) until: Option<Moment>,
    /// What it said to people.
    pub(super) message: String,
}

/// Whether a worker may be asked to load a model.
#[derive(Debug)]
pub(super) enum Standing<'a> {
    /// It may; how near it is.
    Able(Nearness),
    /// Every slot of it that can hold the model said that it cannot now.
    Failed(&'a Failed),
    /// It is about to leave.
    Leaving,
}

/// How near a worker is to a model, nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Nearness {
    /// A slot drains, or loads, or is ready for it.
    Coming,
    /// It sleeps in a slot that has long had nothing to do.
    Asleep,
    /// A slot holds nothing.
    Empty,
    /// A slot has had nothing to do for so many seconds.
    Idle(Reverse<Span>),
    /// All are busy; so many other models are wanted there.
    Busy { wanted: u32 },
    /// Nothing is known, or what the slot holds is pinned there.
    Far,
}

impl Multiplexer {
    pub(super) fn new(new: &NewMultiplexer, now: Moment) -> Self {
        Self {
            instance: Arc::clone(&new.instance),
            gates: BTreeMap::new(),
            offers: offers(&new.slots, now),
            running: BTreeMap::new(),
        }
    }

    /// The model's gate; `None` while it is shut.
    pub(super) fn gate(&self, model: &Model) -> Option<Gate> {
        self.gates.get(model).copied()
    }

    /// All that it serves now.
    pub(super) fn gates(&self) -> impl Iterator<Item = (&Model, &Gate)> {
        self.gates.iter()
    }

    /// Takes in the gates of now, all of them, and returns whether one opened.
    pub(super) fn set_gates(&mut self, gates: &[(Model, Gate)]) -> bool {
        let new: BTreeMap<_, _> = gates.iter().cloned().collect();
        let old = std::mem::replace(&mut self.gates, new);
        self.gates.keys().any(|model| !old.contains_key(model))
    }

    /// It refused a request for want of a slot: until its next word it has none beyond those in use.
    pub(super) fn handle_refusal(&mut self, model: ModelId, name: &Model) {
        let own = self.own(model);
        if let Some(gate) = self.gates.get_mut(name) {
            gate.slots = gate.slots.min(own);
        }
    }

    /// How many of our requests for the model it has.
    pub(super) fn own(&self, model: ModelId) -> u32 {
        self.running.get(&model).copied().unwrap_or(0)
    }

    pub(super) fn handle_sent(&mut self, model: ModelId) {
        *self.running.entry(model).or_default() += 1;
    }

    pub(super) fn handle_taken(&mut self, model: ModelId) {
        if let Some(running) = self.running.get_mut(&model) {
            *running -= 1;
            if *running == 0 {
                self.running.remove(&model);
            }
        }
    }

    pub(super) fn set_slots(&mut self, slots: &[Slot], now: Moment) {
        self.offers = offers(slots, now);
    }

    /// Whether it may be asked for a model, and how near it is. A worker whose slots say nothing of a model that it
    /// advertises is asked when nobody else can be.
    pub(super) fn standing(&self, model: &Model, now: Moment) -> Standing<'_> {
        let offers = self.offers.get(model).map_or(&[][..], Vec::as_slice);
        if offers.is_empty() {
            return Standing::Able(Nearness::Far);
        }
        if let Some(nearest) = offers.iter().filter_map(|offer| offer.nearness(now)).min() {
            return Standing::Able(nearest);
        }
        let failed = offers.iter().filter_map(|offer| offer.failed.as_ref());
        failed.min_by(|a, b| a.sooner(b)).map_or(Standing::Leaving, Standing::Failed)
    }

    /// Whether it said that a load of the model failed, and with that forgot what waits for it.
    pub(super) fn has_forgotten(&self, model: &Model) -> bool {
        self.offers.get(model).is_some_and(|offers| offers.iter().any(|offer| offer.forgot))
    }

    /// How long until a slot that is on its way to the model is there, if it said.
    pub(super) fn eta(&self, model: &Model, now: Moment) -> Option<Span> {
        let offers = self.offers.get(model)?;
        let ready = |offer: &Offer| match offer.way {
            Way::Coming { ready } => ready,
            Way::Empty | Way::Idle { .. } | Way::Busy | Way::Pinned | Way::Closed => None,
        };
        offers.iter().filter_map(ready).min().map(|ready| ready.since(now).max(0))
    }
}

impl Failed {
    /// Orders by when there will be another try; never comes last.
    pub(super) fn sooner(&self, other: &Self) -> std::cmp::Ordering {
        (self.until.is_none(), self.until).cmp(&(other.until.is_none(), other.until))
    }

    fn is_over(&self, now: Moment) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

impl Offer {
    fn new(slot: &Slot, model: &SlotModel, now: Moment) -> Self {
        Self {
            way: Way::new(slot, &model.id, now),
            asleep: model.status == SlotModelStatus::Sleeping,
            swap_cost: millis(model.swap_cost_ms),
            wanted: slot.wanted,
            failed: failed(slot, model, now),
            forgot: model.status == SlotModelStatus::Failed,
        }
    }

    fn nearness(&self, now: Moment) -> Option<Nearness> {
        if self.failed.as_ref().is_some_and(|failed| !failed.is_over(now)) {
            return None;
        }
        let long_idle = |since: Moment| now.since(since) >= self.swap_cost.saturating_mul(IDLE_SWAPS);
        match self.way {
            Way::Coming { .. } => Some(Nearness::Coming),
            Way::Empty if self.asleep => Some(Nearness::Asleep),
            Way::Empty => Some(Nearness::Empty),
            Way::Idle { since } if self.asleep && long_idle(since) => Some(Nearness::Asleep),
            Way::Idle { since } => Some(Nearness::Idle(Reverse(now.since(since) / IDLE_UNIT))),
            Way::Busy => Some(Nearness::Busy { wanted: self.wanted }),
            Way::Pinned => Some(Nearness::Far),
            Way::Closed => None,
        }
    }
}

impl Way {
    fn new(slot: &Slot, model: &str, now: Moment) -> Self {
        let is_target = slot.target.as_deref() == Some(model);
        let coming = Self::Coming { ready: slot.eta_ms.map(|eta| now.plus(millis(eta))) };
        match slot.state {
            SlotState::Stopping | SlotState::Quarantined => Self::Closed,
            SlotState::Draining
            | SlotState::Severing
            | SlotState::Evicting
            | SlotState::Loading
            | SlotState::RollingBack
                if is_target =>
            {
                coming
            }
            SlotState::Empty | SlotState::Backoff => Self::Empty,
            // Its gate will open, or is closing and the slot's next state will say so.
            SlotState::Ready if slot.resident.as_deref() == Some(model) => Self::Coming { ready: None },
            SlotState::Ready if holds_pinned(slot) => Self::Pinned,
            SlotState::Ready if slot.idle_ms > 0 => Self::Idle { since: now.plus(-millis(slot.idle_ms)) },
            SlotState::Ready
            | SlotState::Draining
            | SlotState::Severing
            | SlotState::Evicting
            | SlotState::Loading
            | SlotState::RollingBack => Self::Busy,
        }
    }
}

fn holds_pinned(slot: &Slot) -> bool {
    slot.models.iter().any(|model| model.pinned && slot.resident.as_ref() == Some(&model.id))
}

fn failed(slot: &Slot, model: &SlotModel, now: Moment) -> Option<Failed> {
    if slot.state == SlotState::Quarantined {
        let why = || format!("slot {} is quarantined until a person has looked at it", slot.id);
        let message = model.message.clone().unwrap_or_else(why);
        return Some(Failed { code: LoadFailure::SlotQuarantined, until: None, message });
    }
    (model.status == SlotModelStatus::Failed).then(|| {
        let code = match model.code.as_deref() {
            Some(WorkerError::INSUFFICIENT_MEMORY) => LoadFailure::InsufficientMemory,
            Some(WorkerError::SLOT_QUARANTINED) => LoadFailure::SlotQuarantined,
            Some(_) | None => LoadFailure::BackendUnavailable,
        };
        let until = model.retry_ms.map(|retry| now.plus(millis(retry)));
        Failed { code, until, message: model.message.clone().unwrap_or_default() }
    })
}

fn offers(slots: &[Slot], now: Moment) -> BTreeMap<Model, Vec<Offer>> {
    let mut offers: BTreeMap<Model, Vec<Offer>> = BTreeMap::new();
    for slot in slots {
        for model in &slot.models {
            offers.entry(model.id.as_str().into()).or_default().push(Offer::new(slot, model, now));
        }
    }
    offers
}

fn millis(millis: u64) -> Span {
    span(Duration::from_millis(millis))
}
