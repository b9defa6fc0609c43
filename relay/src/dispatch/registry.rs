//! One worker as the relay knows it: what it may be sent, and what it has.

use std::collections::BTreeSet;

use super::demand::DemandState;
use super::event::{Grant, NewWorker, RequestKey, WorkerKey};
use super::models::ModelId;
use super::select::Rank;

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) key: WorkerKey,
    pub(super) core1: bool,
    pub(super) max_concurrent: u32,
    /// What it advertises, sorted, each once.
    pub(super) models: Vec<ModelId>,
    /// How often it advertised its models: a failure before the last time is forgiven.
    pub(super) announcements: u64,
    pub(super) in_flight: BTreeSet<RequestKey>,
    pub(super) draining: bool,
    /// Whether the shell knows that a draining worker has nothing left.
    pub(super) idle_told: bool,
    pub(super) grant: Option<Grant>,
    /// The number of the last sending to anyone before the grant was read.
    pub(super) granted_at: u64,
    /// The number of the last sending to it.
    pub(super) turn: u64,
    /// Its entry among the available of each of its models; `None` without room.
    pub(super) rank: Option<Rank>,
    pub(super) demand: DemandState,
    /// Its last word on its load, as it said it.
    pub(super) reported_load: u32,
    /// What it runs for others than us, as of its last report.
    foreign: u32,
    /// Requests taken back since its last report. The next report may have been written before it read of them.
    taken_back: u32,
}

impl Worker {
    pub(super) fn new(new: &NewWorker, models: Vec<ModelId>) -> Self {
        Self {
            key: new.key,
            core1: new.core1,
            max_concurrent: new.max_concurrent,
            models,
            announcements: 0,
            in_flight: BTreeSet::new(),
            draining: false,
            idle_told: false,
            grant: None,
            granted_at: 0,
            turn: 0,
            rank: None,
            demand: DemandState::default(),
            reported_load: new.load,
            foreign: new.load,
            taken_back: 0,
        }
    }

    pub(super) fn serves(&self, model: ModelId) -> bool {
        self.models.binary_search(&model).is_ok()
    }

    /// How many of our requests it has.
    pub(super) fn own(&self) -> u32 {
        u32::try_from(self.in_flight.len()).unwrap_or(u32::MAX)
    }

    /// Everything it runs, as far as we know. Our own part is exact, so that a completion counts at once.
    pub(super) fn load(&self) -> u32 {
        let others = match self.grant {
            Some(grant) if self.core1 => grant.others,
            Some(_) | None => self.foreign,
        };
        self.own().saturating_add(others)
    }

    /// Whether it may be sent one more. A `core1` worker's grant is the whole gate; without one it is shut.
    pub(super) fn has_room(&self) -> bool {
        !self.draining
            && if self.core1 {
                self.grant.is_some_and(|grant| self.own() < grant.slots)
            } else {
                self.load() < self.max_concurrent
            }
    }

    /// Where it stands among the available, if it is.
    pub(super) fn next_rank(&self) -> Option<Rank> {
        self.has_room().then(|| Rank { load: self.load(), turn: self.turn, worker: self.key })
    }

    /// Whether it must be told what waits here: other relays want its slots too.
    pub(super) fn wants_demand(&self) -> bool {
        self.core1 && !self.draining && self.grant.is_some_and(|grant| grant.links > 1)
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
    pub(super) fn handle_refusal(&mut self, sent: u64) {
        let own = self.own();
        match &mut self.grant {
            Some(_) if self.core1 && self.granted_at >= sent => {}
            Some(grant) if self.core1 => grant.slots = grant.slots.min(own),
            Some(_) | None => {
                self.foreign = self.foreign.max(self.max_concurrent.saturating_sub(own));
            }
        }
    }
}
