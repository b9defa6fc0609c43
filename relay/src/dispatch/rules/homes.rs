//! Placement by cache: a conversation goes back to its home, the worker that computed its last prompt.
//!
//! With [`Placement::LeastLoad`] only among equally loaded workers. With [`Placement::Cache`] a worker costs the bytes
//! that it has yet to compute, its backlog, and those of the request that it does not have in its cache. The home is
//! compared with the worker of the smallest backlog; the cheaper one gets the request. So a conversation moves when
//! waiting at its home costs more than moving, which is [more](MOVE_COST) than computing its prompt again. A farther
//! worker costs the bytes of the [spill](crate::dispatch::Spill) in addition. With least load, a home wins only among
//! workers of its own distance.
//!
//! How much of a prompt a home still has is learned from the cached tokens that backends report: a worker whose cache
//! often lacks what was believed is trusted less, and its homes count for less.
//!
//! Workers report to each relay the conversations of the others, so relays that share workers find the same homes, and
//! one that has restarted learns them.
//!
//! A request without a conversation, and one that is pinned, follows the contract.

use crate::dispatch::Dispatch;
use crate::dispatch::model::distance::Distance;
use crate::dispatch::model::effect::{Decision, MoveReason};
use crate::dispatch::model::event::{Conversation, NewWorker, Placement, RequestKey, WorkerKey};
use crate::dispatch::model::homes::{Home, InstanceKey};
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::registry::Worker;
use crate::dispatch::model::request::{Request, RequestState};
use crate::dispatch::model::select::Rank;

/// The cost of a move, as a multiple of the prompt that is computed again. Computing it is not all: the second copy
/// displaces other conversations from the new worker's cache. On recorded requests with full caches, 3 gives a third
/// more hits than 1, and half the time to the first token; 8 makes conversations wait longer for homes that are busy.
const MOVE_COST: u64 = 3;

/// Returns the cost of moving a conversation to a worker with this backlog, which lacks the saved bytes.
fn cost_of_move(backlog: u64, saved: u64) -> u64 {
    backlog.saturating_add(MOVE_COST.saturating_mul(saved))
}

/// A slot that is free looks for a request at home among this number of the first in a lane.
const LOOK_AHEAD: usize = 16;

/// No request is overtaken more often.
const MAX_OVERTAKEN: u8 = 8;

impl Dispatch {
    pub(super) fn places_by_cache(&self) -> bool {
        self.settings.placement == Placement::Cache
    }

    /// Returns the worker at which a request's conversation is at home, and the bytes of the prompt that are believed
    /// to be in its cache. `None` if it has none, or that worker has left or forgotten it.
    fn home_of(&self, request: &Request) -> Option<(&Worker, u64)> {
        let home = self.homes.get(request.conversation()?)?;
        let worker = self.workers.get(self.instances.get(&home.instance)?)?;
        worker.cache.holds(request.model, home.turn).then(|| (worker, home.bytes.min(request.new.bytes)))
    }

    /// Returns the request's home if it is a better choice than the `best` of the workers with room.
    pub(super) fn home_before(
        &self,
        best: Rank,
        request: &Request,
        suits: impl Fn(&Worker) -> bool,
    ) -> Option<WorkerKey> {
        let (home, believed) = self.home_of(request)?;
        let rank = home.rank_of(request.model)?;
        let is_able = (home.core1 || !request.new.needs_core1) && rank.is_failing == best.is_failing && suits(home);
        let is_better = match self.settings.placement {
            Placement::LeastLoad => rank.load == best.load && rank.distance == best.distance,
            Placement::Cache => self.is_worth_waiting(home, best.worker, home.cache.expected(believed)),
        };
        (is_able && is_better).then_some(home.key)
    }

    /// True if waiting at the home costs at most as much as moving to another worker, which lacks these bytes.
    fn is_worth_waiting(&self, home: &Worker, other: WorkerKey, saved: u64) -> bool {
        let other = self.workers.get(&other);
        let (backlog, distance) = other.map_or((0, home.distance), |other| (other.cache.backlog(), other.distance));
        let farther = |one: Distance, than| if one > than { self.settings.spill.bytes } else { 0 };
        home.cache.backlog().saturating_add(farther(home.distance, distance))
            <= cost_of_move(backlog, saved).saturating_add(farther(distance, home.distance))
    }

    /// True if another worker is nearer than the home, which would be kept without regard to distances.
    fn moves_for_distance(&self, home: &Worker, to: WorkerKey, believed: u64, model: ModelId) -> bool {
        let Some(to) = self.workers.get(&to).filter(|to| to.distance < home.distance) else { return false };
        match self.settings.placement {
            Placement::Cache => home.cache.backlog() <= cost_of_move(to.cache.backlog(), believed),
            Placement::LeastLoad => {
                let load = |worker: &Worker| worker.rank_of(model).map(|rank| rank.load);
                load(home) <= load(to)
            }
        }
    }

    /// Returns why a request goes to a worker, and the bytes of its prompt that are believed to be in the cache there.
    pub(super) fn decision(&self, request: &Request, to: WorkerKey) -> (Decision, u64) {
        let Some(conversation) = request.conversation() else {
            return (Decision::LeastLoad, 0);
        };
        if self.homes.get(conversation).is_none() {
            return (Decision::New, 0);
        }
        let Some((home, believed)) = self.home_of(request) else {
            return (Decision::Moved(MoveReason::Gone), 0);
        };
        if home.key == to {
            return (Decision::Home, believed);
        }
        let group = &self.models[request.model];
        let needs_core1 = request.new.needs_core1;
        let cannot_serve = home.draining
            || !home.serves(request.model)
            || needs_core1 && !home.core1
            || request.refuses(home)
            || request.silent.contains(&home.key)
            || self.is_passed_over(group, home.key, needs_core1, |worker| !request.refuses(worker));
        let reason = if cannot_serve {
            MoveReason::Gone
        } else if !home.has_room_for(&group.name) {
            MoveReason::Busy
        } else if self.places_by_cache() && self.is_worth_waiting(home, to, believed) {
            MoveReason::Distrust
        } else if self.moves_for_distance(home, to, believed, request.model) {
            MoveReason::Nearer
        } else if !self.places_by_cache() {
            MoveReason::Load
        } else {
            MoveReason::Backlog
        };
        (Decision::Moved(reason), 0)
    }

    /// Records that a conversation is at home at a worker from now on.
    pub(super) fn set_home(&mut self, conversation: Conversation, worker: WorkerKey, bytes: u64) {
        if let Some(worker) = self.workers.get(&worker) {
            let home = Home { instance: worker.instance, bytes, turn: self.turn };
            self.homes.set(conversation, home, self.settings.max_homes);
        }
    }

    /// Applies a worker's report on the conversations and the backlog of other relays.
    pub(in super::super) fn handle_homes(&mut self, key: WorkerKey, homes: &[(Conversation, u64)], backlog: u64) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let is_current = worker.cache.handle_reported(homes.len(), backlog);
        for (conversation, bytes) in homes {
            if is_current || self.is_newer_home(*conversation, key, *bytes) {
                self.set_home(*conversation, key, *bytes);
            }
        }
        self.note_load(key);
    }

    /// True if a home that a worker remembers is newer than the known one. The conversation may have moved since;
    /// because it grows, the longer body is the newer one.
    fn is_newer_home(&self, conversation: Conversation, worker: WorkerKey, bytes: u64) -> bool {
        let instance = self.workers.get(&worker).map(|worker| worker.instance);
        let known = self.homes.get(conversation).filter(|known| self.instances.contains_key(&known.instance));
        known.is_none_or(|known| Some(known.instance) == instance || known.bytes < bytes)
    }

    /// The prompt of a running request is computed: it counts as backlog no more.
    pub(in super::super) fn handle_begun(&mut self, worker: WorkerKey, key: RequestKey, attempt: u32) {
        if self.is_current(worker, key, attempt) {
            self.end_backlog(key);
        }
    }

    /// Takes a running request out of its worker's backlog.
    pub(super) fn end_backlog(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        let RequestState::Running { worker, .. } = request.state else {
            return;
        };
        let cost = std::mem::take(&mut request.cost);
        if cost == 0 {
            return;
        }
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.cache.handle_computed(cost);
            let key = worker.key;
            self.note_load(key);
        }
    }

    /// Voids the homes of models whose gate at a worker has opened or closed: it may have unloaded them.
    ///
    /// The first gate of a model on a connection voids nothing. Homes of earlier connections are void already, and a
    /// relay that has restarted may read a report on homes before it.
    pub(super) fn forget_homes(&mut self, key: WorkerKey, toggled: &[ModelId]) {
        self.turn += 1;
        let turn = self.turn;
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        let is_opened = |model: &ModelId| worker.is_open_for(&self.models[*model].name);
        let opened: Vec<_> = toggled.iter().copied().filter(is_opened).collect();
        let Some(newest) = self.newest_link(key) else {
            self.voided = turn;
            return;
        };
        for model in toggled {
            let is_first = opened.contains(model) && !newest.cache.has_forgotten(*model);
            if !is_first {
                newest.cache.forget_model(*model, turn);
            }
        }
    }

    /// Voids all homes at a worker whose backend has restarted.
    pub(super) fn forget_all_homes(&mut self, key: WorkerKey) {
        self.turn += 1;
        let turn = self.turn;
        if let Some(worker) = self.newest_link(key) {
            worker.cache.forget(turn);
        } else {
            self.voided = turn;
        }
    }

    /// Returns the newest connection of a worker's process, unless it was lost before an older one.
    fn newest_link(&mut self, key: WorkerKey) -> Option<&mut Worker> {
        let newest = *self.instances.get(&self.workers.get(&key)?.instance)?;
        self.workers.get_mut(&newest)
    }

    /// Returns the dispatch before which the homes at a worker that joins are void: its process may have lost its cache
    /// before it reconnected.
    pub(super) fn homes_void_before(&mut self, new: &NewWorker) -> u64 {
        self.turn += 1;
        if new.multiplexer.is_some() {
            // While its connection was down, it may have swapped models.
            return self.turn;
        }
        let older = self.instances.get(&InstanceKey::new(new.instance.as_deref(), new.key));
        let older = older.and_then(|older| self.workers.get(older)).map_or(0, |older| older.cache.voided());
        self.voided.max(older)
    }

    /// Records that a connection was lost. The process may come back, without the homes that were void.
    pub(super) fn note_left(&mut self, worker: &Worker) {
        if self.instances.get(&worker.instance) == Some(&worker.key) {
            self.instances.remove(&worker.instance);
            if worker.multiplexer.is_none() {
                self.voided = self.voided.max(worker.cache.voided());
            }
        }
    }

    /// Returns a request that this worker should be sent before the `oldest` of its key and class that it can serve:
    /// one of the next in the same lane that is at home there. Records that those before it are overtaken.
    pub(super) fn overtake(&mut self, oldest: RequestKey, limit: RequestKey, worker: WorkerKey) -> Option<RequestKey> {
        if !self.places_by_cache() {
            return None;
        }
        let request = self.requests.get(&oldest).filter(|request| request.new.pin.is_none())?;
        let RequestState::Queued { place: Some(place), .. } = request.state else { return None };
        let limit = limit.min(self.oldest_in_other_lanes(request, (request.model, place.lane), worker));
        let lane = self.models[request.model].queue.lane(place.lane)?;
        let mut first: Vec<_> = lane.oldest(LOOK_AHEAD).filter(|key| *key < limit).collect();
        first.sort_unstable();
        first.truncate(LOOK_AHEAD);
        let is_home = |key: &RequestKey| {
            let home = self.requests.get(key).and_then(|request| self.home_of(request));
            home.is_some_and(|(home, believed)| home.key == worker && home.cache.expected(believed) > 0)
        };
        let at_home = first.iter().position(is_home).filter(|position| *position > 0)?;
        let overtaken = &first[..at_home];
        let is_patient = |key: &RequestKey| self.requests.get(key).is_some_and(|it| it.overtaken < MAX_OVERTAKEN);
        if !overtaken.iter().all(is_patient) {
            return None;
        }
        for key in overtaken {
            if let Some(request) = self.requests.get_mut(key) {
                request.overtaken += 1;
            }
        }
        Some(first[at_home])
    }
}
