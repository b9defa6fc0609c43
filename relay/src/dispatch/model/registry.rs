//! The relay's view of one worker: its capacity, and its requests.

use std::collections::BTreeSet;

use super::cache::Cache;
use super::clock::Moment;
use super::demand::DemandState;
use super::distance::Distance;
use super::event::{Grant, Model, NewWorker, Placement, RequestKey, WorkerKey};
use super::homes::InstanceKey;
use super::models::ModelId;
use super::residency::{LoadEligibility, Multiplexer};
use super::select::Rank;

#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) key: WorkerKey,
    /// Its process, the same after it reconnects.
    pub(crate) instance: InstanceKey,
    pub(crate) distance: Distance,
    pub(crate) core1: bool,
    pub(crate) max_concurrent: u32,
    /// The models that it advertises, sorted, without duplicates.
    pub(crate) models: Vec<ModelId>,
    /// The models of those whose requests its backend fails.
    failing: BTreeSet<ModelId>,
    /// Counts its announcements of models: it advertised them all, or changed the gates of some.
    announcements: u64,
    /// The last announcement of each of its models, in their order: failures before it are forgiven.
    announced: Vec<u64>,
    pub(crate) in_flight: BTreeSet<RequestKey>,
    pub(crate) draining: bool,
    /// True if the shell knows that a draining worker is idle.
    pub(crate) is_idle_reported: bool,
    /// Always `None` without `core1`.
    pub(crate) grant: Option<Grant>,
    /// The number of the last dispatch to any worker before the grant was read.
    pub(crate) granted_at: u64,
    /// The number of the last dispatch to this worker.
    pub(crate) turn: u64,
    /// Its rank among the available workers of each of its models, in their order; `None` without room.
    pub(crate) ranks: Vec<Option<Rank>>,
    pub(crate) demand: DemandState,
    /// Its multiplexer, if it has one: then it has separate room for each model.
    pub(crate) multiplexer: Option<Multiplexer>,
    /// Its last load report, unchanged.
    pub(crate) reported_load: u32,
    /// The number of requests that it runs for others, as of its last report.
    foreign: u32,
    /// Requests revoked since its last report. The next report may have been written before the worker read the
    /// cancels.
    revoked: u32,
    pub(crate) cache: Cache,
}

impl Worker {
    /// Homes there that were recorded before the dispatch `void_before` are void.
    pub(crate) fn new(new: &NewWorker, models: Vec<ModelId>, now: Moment, void_before: u64) -> Self {
        Self {
            key: new.key,
            instance: InstanceKey::new(new.instance.as_deref(), new.key),
            distance: new.distance,
            core1: new.core1 || new.multiplexer.is_some(),
            max_concurrent: new.max_concurrent,
            ranks: vec![None; models.len()],
            announced: vec![0; models.len()],
            models,
            failing: BTreeSet::new(),
            announcements: 0,
            in_flight: BTreeSet::new(),
            draining: false,
            is_idle_reported: false,
            grant: None,
            granted_at: 0,
            turn: 0,
            demand: DemandState::default(),
            multiplexer: new.multiplexer.as_ref().map(|multiplexer| Multiplexer::new(multiplexer, now)),
            reported_load: new.load,
            foreign: new.load,
            revoked: 0,
            cache: Cache::new(void_before),
        }
    }

    pub(crate) fn serves(&self, model: ModelId) -> bool {
        self.models.binary_search(&model).is_ok()
    }

    /// True if its backend fails the requests for a model.
    pub(crate) fn is_failing(&self, model: ModelId) -> bool {
        self.failing.contains(&model)
    }

    /// Replaces the models whose requests its backend fails.
    pub(crate) fn set_failing(&mut self, failing: BTreeSet<ModelId>) {
        self.failing = failing;
    }

    /// Replaces the advertised models, which must be sorted, and returns the previous ones.
    pub(crate) fn handle_models(&mut self, models: Vec<ModelId>) -> Vec<ModelId> {
        self.announcements += 1;
        self.announced = vec![self.announcements; models.len()];
        self.ranks = vec![None; models.len()];
        std::mem::replace(&mut self.models, models)
    }

    /// Announces models that are ready again, or will be before they receive requests.
    pub(crate) fn handle_toggled(&mut self, toggled: &[ModelId]) {
        self.announcements += 1;
        for (model, announced) in self.models.iter().zip(&mut self.announced) {
            if toggled.contains(model) {
                *announced = self.announcements;
            }
        }
    }

    /// Returns the number of its last announcement of the model.
    pub(crate) fn announcement(&self, model: ModelId) -> u64 {
        self.models.binary_search(&model).map_or(self.announcements, |place| self.announced[place])
    }

    /// The number of this relay's requests that it runs.
    pub(crate) fn own(&self) -> u32 {
        u32::try_from(self.in_flight.len()).unwrap_or(u32::MAX)
    }

    /// Returns its total load, as far as the relay knows it. This relay's part is exact, so a completion takes effect
    /// at once.
    pub(crate) fn load(&self) -> u32 {
        let others = self.grant.map_or(self.foreign, |grant| grant.others);
        self.own().saturating_add(others)
    }

    /// True if it serves a model that it advertises: always, without a multiplexer.
    pub(crate) fn is_open_for(&self, name: &Model) -> bool {
        self.multiplexer.as_ref().is_none_or(|multiplexer| multiplexer.gate(name).is_some())
    }

    /// Returns the id of the model that the worker means by a name.
    pub(crate) fn id<'a>(&'a self, name: &'a Model) -> &'a Model {
        self.multiplexer.as_ref().map_or(name, |multiplexer| multiplexer.id(name))
    }

    /// True if it has no room for any request. A multiplexer has separate room for each model.
    pub(crate) fn is_full(&self) -> bool {
        self.multiplexer.is_none() && !self.has_shared_room()
    }

    /// True if a worker without a multiplexer may be sent another request, for any of its models.
    fn has_shared_room(&self) -> bool {
        if self.core1 {
            self.grant.is_some_and(|grant| self.own() < grant.slots)
        } else {
            self.load() < self.max_concurrent
        }
    }

    /// True if it may be sent another request for a model. A `core1` worker's grant is its only limit, and a
    /// multiplexer's grant for the model; without one no request is sent.
    pub(crate) fn has_room_for(&self, model: &Model) -> bool {
        if self.draining {
            false
        } else if let Some(multiplexer) = &self.multiplexer {
            multiplexer.gate(model).is_some_and(|gate| multiplexer.own(model) < gate.slots)
        } else {
            self.has_shared_room()
        }
    }

    /// Returns the rank of a worker without a multiplexer, if it has room. Its models share its slots, so its rank is
    /// the same for each of them.
    ///
    /// For a model that its backend fails, its rank is behind all others.
    pub(crate) fn shared_rank(&self, placement: Placement) -> Option<Rank> {
        (!self.draining && self.has_shared_room()).then(|| self.rank(self.load(), placement))
    }

    /// Returns the rank of a multiplexer for a model, if it has room. Its models do not share their capacity, and each
    /// has a load of its own.
    pub(crate) fn rank_for(&self, model: &Model, multiplexer: &Multiplexer, placement: Placement) -> Option<Rank> {
        let others = multiplexer.gate(model).map_or(0, |gate| gate.others);
        self.has_room_for(model).then(|| self.rank(multiplexer.own(model).saturating_add(others), placement))
    }

    fn rank(&self, load: u32, placement: Placement) -> Rank {
        let backlog = (placement == Placement::Cache).then(|| self.cache.backlog());
        Rank { is_failing: false, load, turn: self.turn, worker: self.key, backlog, distance: self.distance }
    }

    /// Returns its rank among the workers with room for a model.
    pub(crate) fn rank_of(&self, model: ModelId) -> Option<Rank> {
        self.ranks[self.models.binary_search(&model).ok()?]
    }

    /// True if it must receive demand reports: other relays want its slots too, or it loads models by them.
    pub(crate) fn wants_demand(&self) -> bool {
        let shared = || self.grant.is_some_and(|grant| grant.links > 1);
        self.core1 && !self.draining && (self.multiplexer.is_some() || shared())
    }

    /// Returns whether it can be assigned to load a model; `None` without a multiplexer.
    pub(crate) fn eligibility(&self, name: &Model, now: Moment) -> Option<LoadEligibility<'_>> {
        self.multiplexer.as_ref().map(|multiplexer| multiplexer.eligibility(name, now))
    }

    pub(crate) fn handle_load(&mut self, load: u32) {
        self.reported_load = load;
        self.foreign = load.saturating_sub(self.own()).saturating_sub(self.revoked);
        self.revoked = 0;
    }

    /// Records that one of its requests was cancelled, which frees its slot at once.
    pub(crate) fn handle_revoked(&mut self) {
        self.revoked = self.revoked.saturating_add(1);
    }

    /// Records that it refused this attempt because it has no slot. If a `core1` worker has sent a grant since the
    /// attempt, that grant stands: it may already include a new free slot, and is not sent twice. Otherwise, and for a
    /// worker without grants, the refusal means that it is full until its next report, or the same request would be
    /// sent back and forth.
    pub(crate) fn handle_refusal(&mut self, sent: u64, model: &Model) {
        let has_granted_since = self.granted_at >= sent;
        if let Some(multiplexer) = &mut self.multiplexer {
            if !has_granted_since {
                multiplexer.handle_refusal(model);
            }
            return;
        }
        let own = self.own();
        match &mut self.grant {
            Some(_) if has_granted_since => {}
            Some(grant) => grant.slots = grant.slots.min(own),
            None => self.foreign = self.foreign.max(self.max_concurrent.saturating_sub(own)),
        }
    }
}
