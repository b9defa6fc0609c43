//! The models that a multiplexer serves now, and how near it is to each of its other models.
//!
//! The gates determine the requests that it may be sent. The slot states only influence which worker is assigned to
//! load an unserved model. The worker alone decides what it loads, so the relay assumes nothing and uses the last
//! report.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState, WorkerError};
pub(crate) use modelrelay_protocol::nearness::Nearness;
use modelrelay_protocol::nearness::{self, Way};

use super::clock::{Moment, Span, duration, span};
use super::event::{FailureReport, Gate, LoadFailure, Model, NewMultiplexer};

/// One worker's multiplexer.
#[derive(Clone, Debug)]
pub(crate) struct Multiplexer {
    /// The worker's name at every relay.
    pub(crate) instance: Arc<str>,
    /// The requests that may be sent, by the model's id. A model without an entry is not served.
    gates: BTreeMap<Model, Gate>,
    /// The reports of each slot that can hold a model, by the model's id.
    offers: BTreeMap<Model, Vec<Offer>>,
    /// From each alias to the id of its model.
    aliases: BTreeMap<Model, Model>,
    /// The number of this relay's requests on it, by the requested names, because their meaning may change.
    running: BTreeMap<Model, u32>,
}

/// One slot's report on one model that it can hold.
#[derive(Clone, Debug)]
struct Offer {
    /// The slot's index.
    slot: usize,
    /// The report as of `at`.
    report: nearness::Offer,
    at: Moment,
    /// When a slot that is loading the model will be ready, if it reported an ETA.
    ready: Option<Moment>,
    failed: Option<Failed>,
    /// True if the worker has discarded the demand for the model, which its failure implies.
    forgot: bool,
}

/// The reason why a slot cannot load a model now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    pub(crate) code: LoadFailure,
    /// When the load may be tried again; `None`: not before the next report.
    pub(crate) until: Option<Moment>,
    /// The worker's report.
    pub(crate) report: Arc<FailureReport>,
}

/// A worker's eligibility to load a model.
#[derive(Debug)]
pub(crate) enum LoadEligibility<'a> {
    /// It can; how near it is.
    Able(Nearness),
    /// Every slot that can hold the model reported that it cannot load it now.
    Failed(&'a Failed),
    /// The worker is about to leave.
    Leaving,
}

impl Multiplexer {
    pub(crate) fn new(new: &NewMultiplexer, now: Moment) -> Self {
        Self {
            instance: Arc::clone(&new.instance),
            gates: BTreeMap::new(),
            offers: offers(&new.slots, now),
            aliases: aliases(&new.slots),
            running: BTreeMap::new(),
        }
    }

    /// Returns the id of the model that the worker means by a name. All names of one model share its gate, slots and
    /// count.
    pub(crate) fn id<'a>(&'a self, name: &'a Model) -> &'a Model {
        self.aliases.get(name).unwrap_or(name)
    }

    /// True if any of its models has an alias.
    pub(crate) fn has_aliases(&self) -> bool {
        !self.aliases.is_empty()
    }

    /// Returns the model's gate; `None` while it is closed.
    pub(crate) fn gate(&self, model: &Model) -> Option<Gate> {
        self.gates.get(self.id(model)).copied()
    }

    /// All models that it serves now.
    pub(crate) fn gates(&self) -> impl Iterator<Item = (&Model, &Gate)> {
        self.gates.iter()
    }

    /// Replaces all gates, and returns the models whose gate opened or closed.
    pub(crate) fn set_gates(&mut self, gates: &[(Model, Gate)]) -> BTreeSet<Model> {
        let new: BTreeMap<_, _> = gates.iter().cloned().collect();
        let old = std::mem::replace(&mut self.gates, new);
        let (old, new): (BTreeSet<_>, BTreeSet<_>) = (old.into_keys().collect(), self.gates.keys().cloned().collect());
        old.symmetric_difference(&new).cloned().collect()
    }

    /// Records that it refused a request because it has no slot: until its next report it has none beyond those in use.
    pub(crate) fn handle_refusal(&mut self, model: &Model) {
        let own = self.own(model);
        let id = Model::clone(self.id(model));
        if let Some(gate) = self.gates.get_mut(&id) {
            gate.slots = gate.slots.min(own);
        }
    }

    /// Returns the number of this relay's requests for the model on it, by all names.
    pub(crate) fn own(&self, model: &Model) -> u32 {
        let id = self.id(model);
        self.running.iter().filter(|(name, _)| self.id(name) == id).map(|(_, running)| *running).sum()
    }

    pub(crate) fn handle_sent(&mut self, name: &Model) {
        *self.running.entry(Model::clone(name)).or_default() += 1;
    }

    pub(crate) fn handle_taken(&mut self, name: &Model) {
        if let Some(running) = self.running.get_mut(name) {
            *running -= 1;
            if *running == 0 {
                self.running.remove(name);
            }
        }
    }

    /// Replaces the slot reports; returns true if a name means another model now.
    pub(crate) fn set_slots(&mut self, slots: &[Slot], now: Moment) -> bool {
        self.offers = offers(slots, now);
        let new = aliases(slots);
        std::mem::replace(&mut self.aliases, new) != self.aliases
    }

    /// Returns whether it can be assigned to load a model, and how near it is. A worker whose slots report nothing on a
    /// model that it advertises is assigned only if no other worker can be.
    pub(crate) fn eligibility(&self, model: &Model, now: Moment) -> LoadEligibility<'_> {
        let offers = self.offers.get(self.id(model)).map_or(&[][..], Vec::as_slice);
        if offers.is_empty() {
            return LoadEligibility::Able(Nearness::Far);
        }
        if let Some(nearest) = offers.iter().filter_map(|offer| offer.nearness(now)).min() {
            return LoadEligibility::Able(nearest);
        }
        let failed = offers.iter().filter_map(|offer| offer.failed.as_ref());
        failed.min_by(|a, b| a.sooner(b)).map_or(LoadEligibility::Leaving, LoadEligibility::Failed)
    }

    /// Returns how near it is to a model if it has already been assigned `others` and has not begun to load them: each
    /// of them uses the nearest slot that is free, can hold it, and is not used by another. All models are given by id.
    pub(crate) fn nearness_alongside(&self, others: &BTreeSet<&Model>, model: &Model, now: Moment) -> Nearness {
        let offers = self.offers.get(model).map_or(&[][..], Vec::as_slice);
        let mut near: Vec<_> = offers.iter().filter_map(|offer| Some((offer.nearness(now)?, offer))).collect();
        near.sort_by_key(|(nearness, offer)| (*nearness, offer.slot));
        for other in others {
            let can_hold = |slot: usize| self.offers.get(*other).is_some_and(|all| all.iter().any(|o| o.slot == slot));
            let taken = near.iter_mut().find(|(nearness, offer)| nearness.is_free() && can_hold(offer.slot));
            if let Some((nearness, offer)) = taken {
                *nearness = offer.report.nearness_behind_another();
            }
        }
        near.into_iter().map(|(nearness, _)| nearness).min().unwrap_or(Nearness::Far)
    }

    /// True if a slot is loading the model of this id, or holds it.
    pub(crate) fn is_coming(&self, model: &Model) -> bool {
        let is_coming = |offer: &Offer| offer.report.way == Way::Coming;
        self.offers.get(model).is_some_and(|offers| offers.iter().any(is_coming))
    }

    /// True if one of its slots has demand for the model, or is loading it for another reason.
    pub(crate) fn has_demand(&self, model: &Model) -> bool {
        self.offers.get(self.id(model)).is_some_and(|offers| offers.iter().any(|offer| offer.report.is_requested()))
    }

    /// True if it reported that a load of the model failed, and so discarded its demand.
    pub(crate) fn has_forgotten(&self, model: &Model) -> bool {
        self.offers.get(self.id(model)).is_some_and(|offers| offers.iter().any(|offer| offer.forgot))
    }

    /// Returns the time until a slot that is loading the model is ready, if it reported an ETA.
    pub(crate) fn eta(&self, model: &Model, now: Moment) -> Option<Span> {
        let offers = self.offers.get(self.id(model))?;
        offers.iter().filter_map(|offer| offer.ready).min().map(|ready| ready.since(now).max(0))
    }
}

impl Failed {
    /// Orders by the time of the next try; never comes last.
    pub(crate) fn sooner(&self, other: &Self) -> std::cmp::Ordering {
        (self.until.is_none(), self.until).cmp(&(other.until.is_none(), other.until))
    }
}

impl Offer {
    fn new(place: usize, slot: &Slot, model: &SlotModel, now: Moment) -> Self {
        let report = nearness::Offer::new(slot, model);
        let eta = slot.eta_ms.filter(|_| report.way == Way::Coming && slot.state != SlotState::Ready);
        Self {
            slot: place,
            report,
            at: now,
            ready: eta.map(|eta| now.plus(millis(eta))),
            failed: failed(slot, model, now),
            forgot: model.status == SlotModelStatus::Failed,
        }
    }

    fn nearness(&self, now: Moment) -> Option<Nearness> {
        self.report.nearness(duration(now.since(self.at)))
    }
}

fn failed(slot: &Slot, model: &SlotModel, now: Moment) -> Option<Failed> {
    if slot.state == SlotState::Stopping {
        // The slot will load nothing any more, whatever failed before.
        return None;
    }
    let report = |message| Arc::new(FailureReport { code: model.code.clone().unwrap_or_default(), message });
    if slot.state == SlotState::Quarantined {
        let why = || format!("slot {} is quarantined and needs manual inspection", slot.id);
        let report = report(model.message.clone().unwrap_or_else(why));
        return Some(Failed { code: LoadFailure::SlotQuarantined, until: None, report });
    }
    (model.status == SlotModelStatus::Failed).then(|| {
        let code = match model.code.as_deref() {
            Some(WorkerError::INSUFFICIENT_MEMORY) => LoadFailure::InsufficientMemory,
            Some(WorkerError::SLOT_QUARANTINED) => LoadFailure::SlotQuarantined,
            Some(_) | None => LoadFailure::BackendUnavailable,
        };
        let until = model.retry_ms.map(|retry| now.plus(millis(retry)));
        Failed { code, until, report: report(model.message.clone().unwrap_or_default()) }
    })
}

fn offers(slots: &[Slot], now: Moment) -> BTreeMap<Model, Vec<Offer>> {
    let mut offers: BTreeMap<Model, Vec<Offer>> = BTreeMap::new();
    for (place, slot) in slots.iter().enumerate() {
        for model in &slot.models {
            offers.entry(model.id.as_str().into()).or_default().push(Offer::new(place, slot, model, now));
        }
    }
    offers
}

/// An id is never an alias. If two models have the same alias, the first model wins.
fn aliases(slots: &[Slot]) -> BTreeMap<Model, Model> {
    let models = || slots.iter().flat_map(|slot| &slot.models);
    let ids: BTreeSet<&str> = models().map(|model| model.id.as_str()).collect();
    let mut aliases = BTreeMap::new();
    for model in models() {
        for alias in model.aliases.iter().filter(|alias| !ids.contains(alias.as_str())) {
            aliases.entry(Model::from(alias.as_str())).or_insert_with(|| Model::from(model.id.as_str()));
        }
    }
    aliases
}

fn millis(millis: u64) -> Span {
    span(Duration::from_millis(millis))
}
