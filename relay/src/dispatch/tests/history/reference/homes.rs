//! Placement by cache again, as plainly as possible: each loss of a cache is listed, sums are taken over all requests.

use std::collections::{BTreeMap, BTreeSet};

use super::{Reference, Request, Worker};
use crate::dispatch::{
    AttemptFailure, Conversation, Decision, Distance, Event, Model, MoveReason, NewRequest, NewWorker, Placement,
    RequestKey, WorkerKey,
};

/// The homes of conversations, and the caches that were lost.
#[derive(Clone, Default)]
pub(super) struct Homes {
    /// Those recorded since the older ones were complete, and the older ones.
    young: Vec<Home>,
    old: Vec<Home>,
    /// The newest connection of each process.
    newest: BTreeMap<String, WorkerKey>,
    losses: Vec<Loss>,
    /// Homes before it are void at processes that join.
    lost: u64,
}

#[derive(Clone)]
struct Home {
    conversation: Conversation,
    process: String,
    bytes: u64,
    turn: u64,
}

/// A process lost its cache, of one model or of all.
#[derive(Clone)]
struct Loss {
    process: String,
    model: Option<Model>,
    turn: u64,
}

impl Homes {
    fn find(&self, conversation: Conversation) -> Option<&Home> {
        self.young.iter().chain(&self.old).find(|home| home.conversation == conversation)
    }

    fn set(&mut self, home: Home, max: usize) {
        if max == 0 {
            return;
        }
        for generation in [&mut self.young, &mut self.old] {
            generation.retain(|old| old.conversation != home.conversation);
        }
        self.young.push(home);
        self.limit(max);
    }

    /// Each generation has at most half of the limit, rounded up.
    pub(super) fn limit(&mut self, max: usize) {
        let half = max.div_ceil(2);
        for generation in [&mut self.young, &mut self.old] {
            if generation.len() > half {
                generation.clear();
            }
        }
        if self.young.len() == half {
            self.old = std::mem::take(&mut self.young);
        }
    }

    fn last_loss(&self, process: &str) -> u64 {
        let losses = self.losses.iter().filter(|loss| loss.process == process);
        losses.map(|loss| loss.turn).max().unwrap_or(0)
    }
}

/// The process of a connection; one that is not named has only this connection.
pub(in super::super) fn process(new: &NewWorker) -> String {
    new.instance.as_ref().map_or_else(|| format!("connection {}", new.key.0), ToString::to_string)
}

impl Reference {
    fn places_by_cache(&self) -> bool {
        self.settings.placement == Placement::Cache
    }

    pub(in super::super) fn homes_len(&self) -> usize {
        self.homes.young.len() + self.homes.old.len()
    }

    /// Returns the bytes that a worker has yet to compute.
    pub(in super::super) fn backlog(&self, key: WorkerKey) -> u64 {
        let own: u64 = self.running_on(key).map(|request| self.requests[&request].cost).sum();
        own + self.workers[&key].backlog_of_others
    }

    fn expected(&self, key: WorkerKey, believed: u64) -> u64 {
        believed * self.workers[&key].trust / 1000
    }

    /// Returns the connection to the process of a request's home, and the bytes believed to be there.
    fn home_of(&self, new: &NewRequest) -> Option<(WorkerKey, u64)> {
        let home = self.homes.find(new.conversation.filter(|_| new.pin.is_none())?)?;
        let worker = *self.homes.newest.get(&home.process)?;
        let voids = |loss: &Loss| {
            loss.process == home.process
                && loss.turn > home.turn
                && loss.model.as_ref().is_none_or(|model| *model == new.model)
        };
        (!self.homes.losses.iter().any(voids)).then(|| (worker, home.bytes.min(new.bytes)))
    }

    /// Returns the best of the workers that may be sent a request.
    pub(super) fn best_of(&self, request: RequestKey, able: &[WorkerKey]) -> Option<WorkerKey> {
        let new = &self.requests[&request].new;
        let by_cache = self.places_by_cache() && new.conversation.is_some();
        let spill = self.settings.spill;
        let backlog = |key: &WorkerKey| if by_cache { self.backlog(*key) } else { 0 };
        let load = |key: &WorkerKey| self.load(*key, &new.model);
        let rank = |key: &WorkerKey| (backlog(key), load(key), self.workers[key].turn, *key);
        let best_at = |distance| able.iter().copied().filter(|key| self.distance(*key) == distance).min_by_key(rank);
        let bests: Vec<_> = Distance::ALL.into_iter().filter_map(best_at).collect();
        let most_load = bests.iter().map(load).min()?.saturating_add(spill.requests);
        let most_backlog = bests.iter().map(backlog).min()?.saturating_add(spill.bytes);
        let is_near_enough = |key: &WorkerKey| load(key) <= most_load && backlog(key) <= most_backlog;
        let near_enough = bests.iter().copied().find(is_near_enough);
        let best = near_enough.or_else(|| bests.iter().copied().min_by_key(rank))?;
        let Some((home, believed)) = self.home_of(new).filter(|(home, _)| able.contains(home)) else {
            return Some(best);
        };
        let stays = if self.places_by_cache() {
            self.is_worth_waiting(home, best, self.expected(home, believed))
        } else {
            self.load(home, &new.model) == self.load(best, &new.model) && self.distance(home) == self.distance(best)
        };
        Some(if stays { home } else { best })
    }

    /// Records how distances have affected the choice of a worker.
    pub(super) fn note_distance(&mut self, request: RequestKey, chosen: WorkerKey) {
        let new = &self.requests[&request].new;
        if new.pin.is_some() {
            return;
        }
        let able = |key: &WorkerKey| self.could_serve(*key, request) && !self.passes_over(*key, request);
        let others = self.workers.keys().copied().filter(|key| able(key) && *key != chosen);
        let (free, full): (Vec<_>, Vec<_>) = others.partition(|key| self.has_room(*key, &new.model));
        let (place, load) = (self.distance(chosen), self.load(chosen, &new.model));
        let is_nearer = |key: &WorkerKey| self.distance(*key) < place;
        let is_home = self.home_of(new).is_some_and(|(home, _)| home == chosen);
        let kept = free.iter().any(|key| self.distance(*key) > place && self.load(*key, &new.model) < load);
        let seen = [
            ("kept near", kept),
            ("spilled", free.iter().any(is_nearer) && !is_home),
            ("sent far without near room", full.iter().any(is_nearer) && !free.iter().any(is_nearer)),
            ("stayed far at home", free.iter().any(is_nearer) && is_home && self.places_by_cache()),
        ];
        self.accounts.seen.extend(seen.into_iter().filter(|(_, is_seen)| *is_seen).map(|(name, _)| name));
    }

    pub(in super::super) fn distance(&self, worker: WorkerKey) -> Distance {
        self.workers[&worker].new.distance
    }

    /// True if the home costs at most what the other one costs: its backlog, what it lacks three times, and its
    /// distance.
    fn is_worth_waiting(&self, home: WorkerKey, other: WorkerKey, saved: u64) -> bool {
        let nearest = self.distance(home).min(self.distance(other));
        let spill = self.settings.spill.bytes;
        let cost = |key| self.backlog(key) + if self.distance(key) > nearest { spill } else { 0 };
        cost(home) <= cost(other) + 3 * saved
    }

    /// True if the home would be kept without regard to distances.
    fn is_as_good(&self, home: WorkerKey, other: WorkerKey, believed: u64, model: &Model) -> bool {
        if self.places_by_cache() {
            self.backlog(home) <= self.backlog(other) + 3 * believed
        } else {
            self.load(home, model) <= self.load(other, model)
        }
    }

    fn decision(&self, key: RequestKey, to: WorkerKey) -> (Decision, u64) {
        let request = &self.requests[&key];
        let new = &request.new;
        let Some(conversation) = new.conversation.filter(|_| new.pin.is_none()) else {
            return (Decision::LeastLoad, 0);
        };
        if self.homes.find(conversation).is_none() {
            return (Decision::New, 0);
        }
        let Some((home, believed)) = self.home_of(new) else {
            return (Decision::Moved(MoveReason::Gone), 0);
        };
        if home == to {
            return (Decision::Home, believed);
        }
        let can_serve = self.could_serve(home, key) && !request.silent.contains(&home) && !self.passes_over(home, key);
        let reason = if !can_serve {
            MoveReason::Gone
        } else if !self.has_room(home, &new.model) {
            MoveReason::Busy
        } else if self.places_by_cache() && self.is_worth_waiting(home, to, believed) {
            MoveReason::Distrust
        } else if self.distance(to) < self.distance(home) && self.is_as_good(home, to, believed, &new.model) {
            MoveReason::Nearer
        } else if !self.places_by_cache() {
            MoveReason::Load
        } else {
            MoveReason::Backlog
        };
        (Decision::Moved(reason), 0)
    }

    /// Decides and records where a conversation is from now on.
    pub(super) fn note_send(&mut self, key: RequestKey, to: WorkerKey) -> Decision {
        let (decision, believed) = self.decision(key, to);
        let by_cache = self.places_by_cache();
        let expected = self.expected(to, believed);
        let request = self.request(key);
        request.believed = if by_cache { believed } else { 0 };
        request.cost = if by_cache { request.new.bytes - expected } else { 0 };
        let (conversation, bytes) = (request.new.conversation.filter(|_| request.new.pin.is_none()), request.new.bytes);
        if let Some(conversation) = conversation {
            self.set_home(conversation, to, bytes);
        }
        decision
    }

    fn set_home(&mut self, conversation: Conversation, worker: WorkerKey, bytes: u64) {
        let process = process(&self.workers[&worker].new);
        let home = Home { conversation, process, bytes, turn: self.turn };
        self.homes.set(home, self.settings.max_homes);
    }

    pub(super) fn report_homes(&mut self, worker: WorkerKey, homes: &[(Conversation, u64)], backlog: u64) {
        let reporter = self.workers.get_mut(&worker).unwrap();
        reporter.backlog_of_others = backlog;
        // The first report has what the worker remembers; no history fills one.
        let is_current = std::mem::replace(&mut reporter.has_reported, true);
        for (conversation, bytes) in homes {
            let known = self.homes.find(*conversation).filter(|home| self.homes.newest.contains_key(&home.process));
            let is_same = |home: &Home| home.process == process(&self.workers[&worker].new);
            if is_current || known.is_none_or(|home| is_same(home) || home.bytes < *bytes) {
                self.set_home(*conversation, worker, *bytes);
            }
        }
    }

    pub(super) fn note_cached(&mut self, worker: WorkerKey, request: RequestKey, cached: Option<u16>) {
        let Request { believed, new, .. } = &self.requests[&request];
        if let Some(cached) = cached.filter(|_| *believed > 0) {
            let found = (new.bytes * u64::from(cached) / believed).min(1000);
            let worker = self.workers.get_mut(&worker).unwrap();
            worker.trust = (7 * worker.trust + found).div_ceil(8);
        }
    }

    pub(super) fn note_joined(&mut self, new: &NewWorker) {
        self.turn += 1;
        let process = process(new);
        // While its connection was down, a multiplexer may have swapped models.
        let turn = if new.multiplexer.is_some() { self.turn } else { self.homes.lost };
        self.homes.losses.push(Loss { process: process.clone(), model: None, turn });
        self.homes.newest.insert(process, new.key);
    }

    pub(super) fn note_left(&mut self, worker: &Worker) {
        let process = process(&worker.new);
        if self.homes.newest.get(&process) == Some(&worker.new.key) {
            self.homes.newest.remove(&process);
            if worker.multiplexer.is_none() {
                self.homes.lost = self.homes.lost.max(self.homes.last_loss(&process));
            }
        }
    }

    /// Gates of models have opened or closed. The first that opens on a connection voids nothing.
    pub(super) fn turn_gates(&mut self, worker: WorkerKey, mut models: BTreeSet<Model>) {
        let multiplexer = self.workers[&worker].multiplexer.as_ref().unwrap();
        let is_open = |model: &Model| multiplexer.gates.contains_key(&multiplexer.id(model));
        let process = process(&self.workers[&worker].new);
        let has_lost = |model: &Model| {
            let mut losses = self.homes.losses.iter().rev().filter(|loss| loss.process == process);
            let last = losses.find(|loss| loss.model.as_ref().is_none_or(|lost| lost == model));
            last.is_some_and(|loss| loss.model.is_some())
        };
        models.retain(|model| !is_open(model) || has_lost(model));
        self.lose_caches(worker, Some(models));
    }

    /// The caches of models are lost, or of all.
    pub(super) fn lose_caches(&mut self, worker: WorkerKey, models: Option<BTreeSet<Model>>) {
        self.turn += 1;
        let process = process(&self.workers[&worker].new);
        if !self.homes.newest.contains_key(&process) {
            self.homes.lost = self.turn;
        }
        let models = models.map_or_else(|| vec![None], |models| models.into_iter().map(Some).collect());
        let loss = |model| Loss { process: process.clone(), model, turn: self.turn };
        self.homes.losses.extend(models.into_iter().map(loss).collect::<Vec<_>>());
    }

    /// Returns the request that goes to a worker instead of the oldest that it can serve, and those before it.
    pub(super) fn overtaker(&self, oldest: RequestKey, worker: WorkerKey) -> Option<(RequestKey, Vec<RequestKey>)> {
        let new = &self.requests[&oldest].new;
        // A request that was just requeued is placed before the slot that it left.
        if !self.places_by_cache() || new.pin.is_some() || self.requeued.contains(&oldest) {
            return None;
        }
        // A request that the event has made unservable fails before others are sent.
        let concerns = |key: &RequestKey| {
            if !self.is_like(oldest, *key) || self.unservable(*key).is_some() {
                return false;
            }
            let new = &self.requests[key].new;
            new.pin.map_or_else(|| self.workers[&worker].models.contains(&new.model), |pin| pin == worker)
        };
        let (lane, others): (Vec<_>, Vec<_>) = self.queued().partition(|key| self.is_same_lane(oldest, *key));
        let beside = others.into_iter().filter(concerns);
        let requeued = self.requeued.iter().copied().filter(|key| *key > oldest && self.is_like(oldest, *key));
        let limit = beside.chain(requeued).min();
        let lane = lane.into_iter().take(16).filter(|key| limit.is_none_or(|limit| *key < limit));
        let (mut before, mut at_home) = (Vec::new(), None);
        for key in lane {
            let home = self.home_of(&self.requests[&key].new);
            if home.is_some_and(|(home, believed)| home == worker && self.expected(home, believed) > 0) {
                at_home = Some(key);
                break;
            }
            before.push(key);
        }
        let is_patient = before.iter().all(|key| self.requests[key].overtaken < 8);
        at_home.filter(|_| is_patient && !before.is_empty()).map(|key| (key, before))
    }

    fn is_same_lane(&self, one: RequestKey, other: RequestKey) -> bool {
        let lane = |key| {
            let Request { new, failures, .. } = &self.requests[&key];
            (&new.model, new.pin, new.needs_core1, &new.allowed, failures)
        };
        lane(one) == lane(other) && self.is_like(one, other)
    }

    /// Records that a worker failed a request; failures before its last announcement of the model are dropped.
    pub(super) fn note_failure(&mut self, worker: WorkerKey, request: RequestKey) {
        let model = self.requests[&request].new.model.clone();
        let announced = |key: &WorkerKey| {
            let worker = self.workers.get(key)?;
            Some(*worker.announced.get(&model).unwrap_or(&worker.announcements))
        };
        let failures = self.requests[&request].failures.iter().copied();
        let known = failures.filter(|(key, at)| announced(key) == Some(*at));
        let new = announced(&worker).map(|at| (worker, at));
        let failures = known.chain(new).collect();
        self.request(request).failures = failures;
    }

    pub(super) fn has_failing(&self) -> bool {
        self.workers.values().any(|worker| !worker.failing.is_empty())
    }
}

/// True for an event that may change which workers serve a model. If one of them fails it, all waiting requests may be
/// placed by age, before any slot is filled.
pub(super) fn changes_servers(event: &Event) -> bool {
    matches!(
        event,
        Event::WorkerJoined(_)
            | Event::WorkerLost { .. }
            | Event::ModelsUpdated { .. }
            | Event::GatesSet { .. }
            | Event::SlotsReported { .. }
            | Event::WorkerDraining { .. }
            | Event::AttemptFailed { failure: AttemptFailure::Draining, .. }
            | Event::Deleted
    )
}

impl Worker {
    /// Announces these models again, and forgives what failed there before.
    pub(super) fn announce(&mut self, models: BTreeSet<Model>) {
        self.announcements += 1;
        self.announced.extend(models.into_iter().map(|model| (model, self.announcements)));
    }
}
