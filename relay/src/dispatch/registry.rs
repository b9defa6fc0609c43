//! One worker as the relay knows it: what it may be sent, and what it has.

use std::collections::BTreeSet;

use super::clock::Moment;
use super::demand::DemandState;
use super::event::{Grant, Model, NewWorker, RequestKey, WorkerKey};
use super::models::ModelId;
use super::residency::{Multiplexer, Standing};
use super::select::Rank;

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) key: WorkerKey,
    pub(super) core1: bool,
    pub(super) max_concurrent: u32,
    /// What it advertises, sorted, each once.
    pub(super) models: Vec<ModelId>,
    /// The models of those whose requests its backend fails.
    failing: BTreeSet<ModelId>,
    /// How often it said that models are there: it advertised them all, or opened the gates of some.
    announcements: u64,
    /// Which of those was the last for each of its models, in their order: a failure before it is forgiven.
    announced: Vec<u64>,
    pub(super) in_flight: BTreeSet<RequestKey>,
    pub(super) draining: bool,
    /// Whether the shell knows that a draining worker has nothing left.
    pub(super) idle_told: bool,
    /// Never without `core1`.
    pub(super) grant: Option<Grant>,
    /// The number of the last sending to anyone before the grant was read.
    pub(super) granted_at: u64,
    /// The number of the last sending to it.
    pub(super) turn: u64,
    /// Its entry among the available of each of its models, in their order; `None` without room.
    pub(super) ranks: Vec<Option<Rank>>,
    pub(super) demand: DemandState,
    /// What it holds and could hold, if it has a multiplexer: then it has room for each model apart.
    pub(super) multiplexer: Option<Multiplexer>,
    /// Its last word on its load, as it said it.
    pub(super) reported_load: u32,
    /// What it runs for others than us, as of its last report.
    foreign: u32,
    /// Requests taken back since its last report. The next report may have been written before it read of them.
    taken_back: u32,
}

impl Worker {
    pub(super) fn new(new: &NewWorker, models: Vec<ModelId>, now: Moment) -> Self {
        Self {
            key: new.key,
            core1: new.core1 || new.multiplexer.is_some(),
            max_concurrent: new.max_concurrent,
            ranks: vec![None; models.len()],
            announced: vec![0; models.len()],
            models,
            failing: BTreeSet::new(),
            announcements: 0,
            in_flight: BTreeSet::new(),
            draining: false,
            idle_told: false,
            grant: None,
            granted_at: 0,
            turn: 0,
            demand: DemandState::default(),
            multiplexer: new.multiplexer.as_ref().map(|multiplexer| Multiplexer::new(multiplexer, now)),
            reported_load: new.load,
            foreign: new.load,
            taken_back: 0,
        }
    }

    pub(super) fn serves(&self, model: ModelId) -> bool {
        self.models.binary_search(&model).is_ok()
    }

    /// True if its backend fails the requests for a model.
    pub(super) fn is_failing(&self, model: ModelId) -> bool {
        self.failing.contains(&model)
    }

    /// Replaces the models whose requests its backend fails.
    pub(super) fn set_failing(&mut self, failing: BTreeSet<ModelId>) {
        self.failing = failing;
    }

    /// It advertises these models, sorted, instead of those before, which come back.
    pub(super) fn handle_models(&mut self, models: Vec<ModelId>) -> Vec<ModelId> {
        self.announcements += 1;
        self.announced = vec![self.announcements; models.len()];
        self.ranks = vec![None; models.len()];
        std::mem::replace(&mut self.models, models)
    }

    /// These models, which it advertises, are ready anew, or will be before they are sent anything.
    pub(super) fn handle_turned(&mut self, turned: &[ModelId]) {
        self.announcements += 1;
        for (model, announced) in self.models.iter().zip(&mut self.announced) {
            if turned.contains(model) {
                *announced = self.announcements;
            }
        }
    }

    /// When it last said that the model is there.
    pub(super) fn announcement(&self, model: ModelId) -> u64 {
        self.models.binary_search(&model).map_or(self.announcements, |place| self.announced[place])
    }

    /// How many of our requests it has.
    pub(super) fn own(&self) -> u32 {
        u32::try_from(self.in_flight.len()).unwrap_or(u32::MAX)
    }

    /// Everything it runs, as far as we know. Our own part is exact, so that a completion counts at once.
    pub(super) fn load(&self) -> u32 {
        let others = self.grant.map_or(self.foreign, |grant| grant.others);
        self.own().saturating_add(others)
    }

    /// Whether it serves a model that it advertises: always, without a multiplexer.
    pub(super) fn is_open_for(&self, name: &Model) -> bool {
        self.multiplexer.as_ref().is_none_or(|multiplexer| multiplexer.gate(name).is_some())
    }

    /// What it means by a name.
    pub(super) fn id<'a>(&'a self, name: &'a Model) -> &'a Model {
        self.multiplexer.as_ref().map_or(name, |multiplexer| multiplexer.id(name))
    }

    /// Whether it has no room for anything, whatever it is asked for. A multiplexer has room for each model apart.
    pub(super) fn is_full(&self) -> bool {
        self.multiplexer.is_none() && !self.has_shared_room()
    }

    /// Whether a worker without a multiplexer may be sent one more, of any of its models.
    fn has_shared_room(&self) -> bool {
        if self.core1 {
            self.grant.is_some_and(|grant| self.own() < grant.slots)
        } else {
            self.load() < self.max_concurrent
        }
    }

    /// Whether it may be sent one more of a model. A `core1` worker's grant is the whole gate, a multiplexer's its grant for
    /// that model; without one it is shut.
    pub(super) fn has_room_for(&self, model: &Model) -> bool {
        if self.draining {
            false
        } else if let Some(multiplexer) = &self.multiplexer {
            multiplexer.gate(model).is_some_and(|gate| multiplexer.own(model) < gate.slots)
        } else {
            self.has_shared_room()
        }
    }

    /// Where a worker without a multiplexer stands among the available, if it does: its models share its slots, so it
    /// stands alike among those of each.
    ///
    /// Among those of a model that its backend fails it stands behind all others.
    pub(super) fn shared_rank(&self) -> Option<Rank> {
        (!self.draining && self.has_shared_room()).then(|| self.rank(self.load()))
    }

    /// Where one with a multiplexer stands among the available of a model, if it does. Its models do not share their
    /// capacity, and each has a load of its own.
    pub(super) fn rank_for(&self, model: &Model, multiplexer: &Multiplexer) -> Option<Rank> {
        let others = multiplexer.gate(model).map_or(0, |gate| gate.others);
        self.has_room_for(model).then(|| self.rank(multiplexer.own(model).saturating_add(others)))
    }

    fn rank(&self, load: u32) -> Rank {
        Rank { is_failing: false, load, turn: self.turn, worker: self.key }
    }

    /// Whether it must be told what waits here: other relays want its slots too, or it decides by it what to load.
    pub(super) fn wants_demand(&self) -> bool {
        let shared = || self.grant.is_some_and(|grant| grant.links > 1);
        self.core1 && !self.draining && (self.multiplexer.is_some() || shared())
    }

    /// Whether it may be asked to load a model; `None` without a multiplexer.
    pub(super) fn standing(&self, name: &Model, now: Moment) -> Option<Standing<'_>> {
        self.multiplexer.as_ref().map(|multiplexer| multiplexer.standing(name, now))
    }

    pub(super) fn handle_load(&mut self, load: u32) {
        self.reported_load = load;
        self.foreign = load.saturating_sub(self.own()).saturating_sub(self.taken_back);
        self.taken_back = 0;
    }

    /// One of its requests was cancelled: its slot counts as free from now on.
    pub(super) fn handle_taken_back(&mut self) {
        self.taken_back = self.taken_back.saturating_add(1);
    }

    /// It refused a request, of that sending, for want of a slot. A `core1` worker has said so in a grant since, and may
    /// have said in a still newer one that there is a slot again: what it says about slots stands, for it is not said
    /// twice. One that said nothing since it was sent the request, and one that knows no grants, is taken at this word
    /// until its next, or the same request would go back and forth.
    pub(super) fn handle_refusal(&mut self, sent: u64, model: &Model) {
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
