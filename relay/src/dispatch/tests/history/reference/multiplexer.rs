//! The rules for multiplexers again, as plainly as possible: only a slot's last report is stored, and every query scans
//! all of it again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState};
use sha2::{Digest, Sha256};

use super::{Reference, Worker};
use crate::dispatch::{Failure, Gate, Grant, LoadFailure, Model, NewMultiplexer, RequestKey, WorkerKey};

#[derive(Clone)]
pub(super) struct Multiplexer {
    pub(super) gates: BTreeMap<Model, Gate>,
    slots: Vec<Slot>,
    reported_at: Duration,
    instance: Arc<str>,
}

#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) worker: WorkerKey,
    since: Duration,
    pub(super) until: Duration,
    has_eta: bool,
}

/// A worker's slot reports on a model.
#[derive(Clone, Copy, PartialEq)]
enum Word {
    /// Its nearness: a group of the order, and a number within it.
    Near(u8, i128),
    Failed {
        code: LoadFailure,
        left: Option<Duration>,
    },
    Leaving,
}

impl Worker {
    pub(in super::super) fn id(&self, name: &Model) -> Model {
        self.multiplexer.as_ref().map_or_else(|| name.clone(), |multiplexer| multiplexer.id(name))
    }

    pub(super) fn is_open_for(&self, model: &Model) -> bool {
        self.multiplexer.as_ref().is_none_or(|multiplexer| multiplexer.gate(model).is_some())
    }
}

impl Multiplexer {
    pub(super) fn new(new: NewMultiplexer, now: Duration) -> Self {
        Self { gates: BTreeMap::new(), slots: new.slots, reported_at: now, instance: new.instance }
    }

    fn all_entries(&self) -> impl Iterator<Item = (&Slot, &SlotModel)> {
        self.slots.iter().flat_map(|slot| slot.models.iter().map(move |entry| (slot, entry)))
    }

    /// Returns the id that the worker means by a name: a model of that id, otherwise the first with it as an alias.
    pub(super) fn id(&self, name: &Model) -> Model {
        let is_id = self.all_entries().any(|(_, entry)| *entry.id == **name);
        let has_alias = |entry: &SlotModel| entry.aliases.iter().any(|alias| **alias == **name);
        let meant = self.all_entries().find(|(_, entry)| !is_id && has_alias(entry));
        meant.map_or_else(|| name.clone(), |(_, entry)| entry.id.as_str().into())
    }

    pub(super) fn gate(&self, name: &Model) -> Option<Gate> {
        self.gates.get(&self.id(name)).copied()
    }

    fn entries<'a>(&'a self, name: &'a Model) -> impl Iterator<Item = (&'a Slot, &'a SlotModel)> {
        let id = self.id(name);
        self.all_entries().filter(move |(_, entry)| *entry.id == *id)
    }

    fn word(&self, model: &Model, now: Duration) -> Word {
        let age = now - self.reported_at;
        if self.entries(model).next().is_none() {
            return Word::Near(5, 0);
        }
        let near = self.entries(model).filter(|(slot, entry)| failure(slot, entry, age).is_none());
        let near = near.filter_map(|(slot, entry)| nearness(slot, entry, age)).min();
        let failed = self.entries(model).filter(|(slot, _)| slot.state != SlotState::Stopping);
        let failed = failed.filter_map(|(slot, entry)| {
            if slot.state == SlotState::Quarantined {
                return Some((LoadFailure::SlotQuarantined, None));
            }
            let left = entry.retry_ms.map(|retry| Duration::from_millis(retry).saturating_sub(age));
            (entry.status == SlotModelStatus::Failed).then(|| (code(entry), left))
        });
        let failed = failed.min_by_key(|(_, left)| (left.is_none(), *left));
        match (near, failed) {
            (Some((group, within)), _) => Word::Near(group, within),
            (None, Some((code, left))) => Word::Failed { code, left },
            (None, None) => Word::Leaving,
        }
    }

    fn eta(&self, model: &Model, now: Duration) -> Option<Duration> {
        let age = now - self.reported_at;
        let coming = self.entries(model).filter(|(slot, entry)| is_on_its_way(slot, &entry.id));
        let etas = coming.filter_map(|(slot, _)| slot.eta_ms);
        etas.min().map(|eta| Duration::from_millis(eta).saturating_sub(age))
    }
}

fn is_on_its_way(slot: &Slot, model: &str) -> bool {
    use SlotState::{Draining, Evicting, Loading, RollingBack, Severing};
    slot.target.as_deref() == Some(model) && [Draining, Severing, Evicting, Loading, RollingBack].contains(&slot.state)
}

fn is_there_or_coming(slot: &Slot, model: &str) -> bool {
    is_on_its_way(slot, model) || slot.state == SlotState::Ready && slot.resident.as_deref() == Some(model)
}

fn others_wanted(slot: &Slot, entry: &SlotModel) -> i128 {
    i128::from(slot.wanted.saturating_sub(u32::from(entry.wanted)))
}

fn code(entry: &SlotModel) -> LoadFailure {
    match entry.code.as_deref() {
        Some("insufficient_memory") => LoadFailure::InsufficientMemory,
        Some("slot_quarantined") => LoadFailure::SlotQuarantined,
        _ => LoadFailure::BackendUnavailable,
    }
}

fn failure(slot: &Slot, entry: &SlotModel, age: Duration) -> Option<()> {
    let in_back_off = entry.retry_ms.is_none_or(|retry| age < Duration::from_millis(retry));
    (slot.state == SlotState::Quarantined || entry.status == SlotModelStatus::Failed && in_back_off).then_some(())
}

/// "already draining or loading towards it > asleep and idle ≥ 3 × swap cost > empty slot > idle slot, longest first >
/// fewest wanted".
fn nearness(slot: &Slot, entry: &SlotModel, age: Duration) -> Option<(u8, i128)> {
    let (sleeps, idle) = (entry.status == SlotModelStatus::Sleeping, Duration::from_millis(slot.idle_ms) + age);
    let is_ready = slot.state == SlotState::Ready;
    let resident = slot.resident.as_deref();
    let is_idle = is_ready && slot.idle_ms > 0;
    let is_pinned = || slot.models.iter().any(|other| other.pinned && Some(&*other.id) == resident);
    Some(if slot.state == SlotState::Stopping {
        return None;
    } else if is_on_its_way(slot, &entry.id) || is_ready && resident == Some(&entry.id) {
        (0, 0)
    } else if matches!(slot.state, SlotState::Empty | SlotState::Backoff) {
        (if sleeps { 1 } else { 2 }, 0)
    } else if is_ready && is_pinned() {
        (5, 0)
    } else if is_idle && sleeps && idle >= Duration::from_millis(entry.swap_cost_ms) * 3 {
        (1, 0)
    } else if is_idle {
        (3, -i128::from(idle.as_secs()))
    } else {
        (4, others_wanted(slot, entry))
    })
}

impl Reference {
    pub(in super::super) fn has_multiplexer(&self, worker: WorkerKey) -> bool {
        self.workers.get(&worker).is_some_and(|worker| worker.multiplexer.is_some())
    }

    pub(in super::super) fn is_open(&self, worker: WorkerKey, model: &Model) -> bool {
        self.workers.get(&worker).is_some_and(|worker| worker.is_open_for(model))
    }

    /// True if a request uses another name of a model than its worker's own.
    pub(in super::super) fn is_by_alias(&self, request: RequestKey, worker: WorkerKey) -> bool {
        let multiplexer = self.workers.get(&worker).and_then(|worker| worker.multiplexer.as_ref());
        let name = self.requests.get(&request).map(|request| &request.new.model);
        multiplexer.zip(name).is_some_and(|(multiplexer, name)| multiplexer.id(name) != *name)
    }

    /// Returns the assigned worker of each model.
    pub(in super::super) fn assignments(&self) -> impl Iterator<Item = (Model, WorkerKey)> {
        self.choices.iter().map(|(model, choice)| (model.clone(), choice.worker))
    }

    pub(in super::super) fn has_passed_over(&self) -> bool {
        !self.passed_over.is_empty()
    }

    pub(super) fn set_gates(&mut self, worker: WorkerKey, sums: Grant, gates: Vec<(Model, Gate)>) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some(multiplexer) = &mut known.multiplexer else {
            return;
        };
        known.grant = Some(sums);
        let running = self.requests.values_mut().filter(|request| request.worker == Some(worker));
        running.for_each(|request| request.granted_since = true);
        let before = std::mem::replace(&mut multiplexer.gates, gates.into_iter().collect());
        let turned = |name: &Model| {
            let id = multiplexer.id(name);
            multiplexer.gates.contains_key(&id) != before.contains_key(&id)
        };
        for request in self.requests.values_mut().filter(|request| turned(&request.new.model)) {
            request.failed_on.remove(&worker);
        }
        let turned: BTreeSet<_> = known.models.iter().filter(|model| turned(model)).cloned().collect();
        if !turned.is_empty() {
            known.announce(turned.clone());
            self.turn_gates(worker, turned);
        }
    }

    pub(super) fn set_slots(&mut self, worker: WorkerKey, slots: Vec<Slot>) {
        let now = self.now;
        if let Some(multiplexer) = self.workers.get_mut(&worker).and_then(|worker| worker.multiplexer.as_mut()) {
            (multiplexer.slots, multiplexer.reported_at) = (slots, now);
            self.just_notified = Some(worker);
        }
    }

    /// Returns the multiplexers that may be sent requests for the model, at least after a swap.
    pub(super) fn multiplexers(&self, model: &Model) -> impl Iterator<Item = WorkerKey> {
        let may = |worker: &Worker| worker.multiplexer.is_some() && !worker.draining && worker.models.contains(model);
        self.workers.iter().filter(move |(_, worker)| may(worker)).map(|(key, _)| *key)
    }

    pub(super) fn own_of_model(&self, worker: WorkerKey, model: &Model) -> u32 {
        let id = |name: &Model| self.workers[&worker].multiplexer.as_ref().map(|multiplexer| multiplexer.id(name));
        let is_of_it = |key: &RequestKey| id(&self.requests[key].new.model) == id(model);
        u32::try_from(self.running_on(worker).filter(is_of_it).count()).unwrap()
    }

    pub(super) fn load_of_model(&self, key: WorkerKey, model: &Model) -> Option<u32> {
        let multiplexer = self.workers[&key].multiplexer.as_ref()?;
        let others = multiplexer.gate(model).map_or(0, |gate| gate.others);
        Some(self.own_of_model(key, model) + others)
    }

    pub(in super::super) fn is_to_be_loaded(&self, request: RequestKey) -> bool {
        let new = &self.requests[&request].new;
        let is_open = |key: &WorkerKey| self.workers[key].is_open_for(&new.model);
        let mut multiplexers = self.multiplexers(&new.model);
        match new.pin {
            Some(pin) => multiplexers.any(|key| key == pin) && !is_open(&pin),
            None => {
                multiplexers.any(|key| self.could_serve(key, request))
                    && !self.workers.keys().any(|key| self.could_serve(*key, request) && is_open(key))
            }
        }
    }

    /// True if a worker that could serve a request receives it as demand.
    pub(super) fn reports_demand(&self, worker: WorkerKey, request: RequestKey) -> bool {
        let new = &self.requests[&request].new;
        self.workers[&worker].is_open_for(&new.model)
            || new.pin == Some(worker)
            || self.choices.get(&new.model).is_some_and(|choice| choice.worker == worker)
    }

    pub(super) fn max_demand(&self, worker: WorkerKey, model: &Model) -> u32 {
        let multiplexer = self.workers[&worker].multiplexer.as_ref();
        let capacity = multiplexer.and_then(|multiplexer| multiplexer.gate(model)).map_or(0, |gate| gate.capacity);
        if capacity == 0 { u32::MAX } else { 2 * capacity }
    }

    fn word(&self, worker: WorkerKey, model: &Model) -> Option<Word> {
        self.workers.get(&worker)?.multiplexer.as_ref().map(|multiplexer| multiplexer.word(model, self.now))
    }

    fn is_stranded(&self, request: RequestKey) -> bool {
        let new = &self.requests[&request].new;
        !self.workers.iter().any(|(key, worker)| {
            // A pinned request has only its own worker, which may always serve it.
            let is_pin = new.pin == Some(*key) && !worker.draining && worker.models.contains(&new.model);
            worker.is_open_for(&new.model) && (is_pin || self.could_serve(*key, request))
        })
    }

    /// Returns how a request that waits for a load ends, if no worker can load its model now.
    pub(super) fn no_load(&self, request: RequestKey) -> Option<Failure> {
        let new = &self.requests[&request].new;
        let able = |worker: &WorkerKey| match new.pin {
            Some(pin) => pin == *worker,
            None => self.could_serve(*worker, request),
        };
        if !self.is_stranded(request) {
            return None;
        }
        let candidates: Vec<_> = self.multiplexers(&new.model).filter(able).collect();
        if candidates.iter().any(|worker| matches!(self.word(*worker, &new.model), Some(Word::Near(..)))) {
            return None;
        }
        let failed = candidates.into_iter().filter_map(|worker| match self.word(worker, &new.model)? {
            Word::Failed { code, left } => Some((worker, code, left)),
            Word::Near(..) | Word::Leaving => None,
        });
        let (worker, code, retry_after) = failed.min_by_key(|(_, _, left)| (left.is_none(), *left))?;
        Some(Failure::ModelFailed { worker, code, retry_after, report: Arc::default() })
    }

    /// Ends requests whose model no worker can load, and assigns a worker for all others that wait for a load.
    pub(super) fn choose(&mut self) {
        for key in self.queued().collect::<Vec<_>>() {
            if let Some(failure) = self.no_load(key) {
                self.fail(key, failure);
            }
        }
        let models = self.models();
        self.choices.retain(|model, _| models.contains(model));
        for model in models {
            let stranded = self.queued().filter(|key| {
                let new = &self.requests[key].new;
                new.model == model && new.pin.is_none() && self.is_stranded(*key)
            });
            let stranded: Vec<_> = stranded.collect();
            let choice = self.choice_for(&model, &stranded);
            let before = self.choices.remove(&model);
            if let Some(choice) = choice {
                if let Some(before) = before.filter(|old| old.until <= self.now && old.worker != choice.worker) {
                    self.passed_over.insert(model.clone(), before.worker);
                }
                self.choices.insert(model, choice);
            }
        }
        self.passed_over.retain(|model, _| self.choices.contains_key(model));
        self.just_notified = None;
    }

    /// Slots with demand for other models are treated as busy. Those models use the best free slots, in the order of
    /// their names.
    fn best_free_slot(&self, worker: WorkerKey, model: &Model) -> Option<(u8, i128)> {
        let known = &self.workers[&worker];
        let multiplexer = known.multiplexer.as_ref()?;
        let age = self.now - multiplexer.reported_at;
        let mut near: Vec<_> = multiplexer
            .entries(model)
            .filter(|(slot, entry)| failure(slot, entry, age).is_none())
            .filter_map(|(slot, entry)| Some((nearness(slot, entry, age)?, slot)))
            .collect();
        near.sort_by_key(|(near, _)| *near);
        let assigned =
            self.choices.iter().filter(|(name, choice)| choice.worker == worker && known.models.contains(*name));
        let others: BTreeSet<_> = assigned.map(|(name, _)| multiplexer.id(name)).collect();
        for other in others {
            let has_begun = || multiplexer.entries(&other).any(|(slot, _)| is_there_or_coming(slot, &other));
            if other == multiplexer.id(model) || has_begun() {
                continue;
            }
            let holds = |slot: &Slot| slot.models.iter().any(|entry| *entry.id == *other);
            if let Some((near, slot)) = near.iter_mut().find(|(near, slot)| (1..=3).contains(&near.0) && holds(slot)) {
                let entry = slot.models.iter().find(|entry| *entry.id == *multiplexer.id(model)).unwrap();
                *near = (4, others_wanted(slot, entry) + 1);
            }
        }
        near.into_iter().map(|(near, _)| near).min()
    }

    fn is_assigned_under_other_name(&self, worker: WorkerKey, model: &Model) -> bool {
        let known = &self.workers[&worker];
        let id = |name: &Model| known.multiplexer.as_ref().map(|multiplexer| multiplexer.id(name));
        let is_another = |name: &Model| name != model && known.models.contains(name) && id(name) == id(model);
        self.choices.iter().any(|(name, choice)| choice.worker == worker && is_another(name))
    }

    /// True if a slot there has demand for the model, or is loading it anyway.
    fn has_demand(&self, worker: WorkerKey, model: &Model) -> bool {
        let Some(multiplexer) = &self.workers[&worker].multiplexer else { return false };
        multiplexer.entries(model).any(|(slot, entry)| entry.wanted || is_there_or_coming(slot, &entry.id))
    }

    fn choice_for(&self, model: &Model, stranded: &[RequestKey]) -> Option<Choice> {
        let candidates = self.multiplexers(model).filter_map(|key| {
            let is_open = self.workers[&key].is_open_for(model);
            let could = !is_open && stranded.iter().any(|request| self.could_serve(key, *request));
            match self.word(key, model).filter(|_| could)? {
                Word::Near(group, within) => Some((key, self.best_free_slot(key, model).unwrap_or((group, within)))),
                Word::Failed { .. } | Word::Leaving => None,
            }
        });
        let candidates: Vec<_> = candidates.collect();
        let before = self.choices.get(model).copied();
        let is_candidate = |choice: &Choice| candidates.iter().any(|(key, _)| *key == choice.worker);
        let kept = before.filter(|choice| self.now < choice.until).filter(is_candidate);
        let overdue = before.filter(|choice| self.now >= choice.until).map(|choice| choice.worker);
        let overdue = overdue.or_else(|| self.passed_over.get(model).copied());
        let nearest = |among: &dyn Fn(WorkerKey) -> bool, overdue: Option<WorkerKey>| {
            let place = |(key, near): &(WorkerKey, (u8, i128))| {
                let hash = self.workers[key].multiplexer.as_ref().unwrap().hash(model);
                (
                    Some(*key) == overdue,
                    !self.is_assigned_under_other_name(*key, model),
                    *near,
                    std::cmp::Reverse(hash),
                    *key,
                )
            };
            candidates
                .iter()
                .filter(|(key, _)| among(*key))
                .min_by_key(|candidate| place(candidate))
                .map(|(key, _)| *key)
        };
        let worker = match kept {
            // It moves only to a worker that already has demand for the model.
            Some(kept) if self.just_notified.is_none_or(|worker| !self.workers[&worker].models.contains(model)) => {
                kept.worker
            }
            Some(kept) => {
                let passed_over = self.passed_over.get(model).copied();
                nearest(&|key| key == kept.worker || self.has_demand(key, model), passed_over)?
            }
            None => nearest(&|_| true, overdue)?,
        };
        let new = Choice { worker, since: self.now, until: self.now + Duration::from_secs(60), has_eta: false };
        let mut choice = kept.filter(|kept| kept.worker == worker).unwrap_or(new);
        let eta = self.workers[&choice.worker].multiplexer.as_ref().unwrap().eta(model, self.now);
        if let Some(eta) = eta.filter(|_| !choice.has_eta) {
            choice.has_eta = true;
            choice.until = choice.since + (eta * 2).max(Duration::from_secs(60));
        }
        Some(choice)
    }
}

impl Multiplexer {
    fn hash(&self, name: &Model) -> u64 {
        let hash = Sha256::digest([self.instance.as_bytes(), &[0], self.id(name).as_bytes()].concat());
        u64::from_be_bytes(hash[..8].try_into().unwrap())
    }
}
