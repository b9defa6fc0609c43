//! Chooses the multiplexer that loads a model which no worker serves: exactly one, so that one request makes one load.
//!
//! The relay only reports waiting requests to one worker; the worker decides. An assignment holds until the model is
//! open, the worker reports that it cannot load it, drains or disconnects, or a timeout expires. Re-evaluating it on
//! every slot report would make one request trigger a load on every worker in turn.
//!
//! Until then it moves only to a worker that is nearer and already has demand for the model, from another relay or for
//! any other reason: such a move triggers no load. In this way, relays that chose differently before they could learn
//! of each other converge. Otherwise each would trigger a load of its own, again with every swap.
//!
//! A slot with demand for one model is treated as busy for the next, until its worker reports more: models that are
//! requested at the same moment go to as many slots as are free.
//!
//! A model needs an assignment while a request waits for it that cannot be sent to any worker serving it: usually
//! because no worker serves it, but a worker that supports only the seed messages, or one that failed this request, is
//! no better than none. If every multiplexer that has the model reported that it cannot load it now, such requests end
//! at once.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::dispatch::Dispatch;
use crate::dispatch::model::assignment::LoadAssignment;
use crate::dispatch::model::clock::{Moment, Span, duration};
use crate::dispatch::model::effect::Failure;
use crate::dispatch::model::event::{Model, WorkerKey};
use crate::dispatch::model::models::{Group, ModelId};
use crate::dispatch::model::queue::LaneKey;
use crate::dispatch::model::registry::Worker;
use crate::dispatch::model::residency::{Failed, LoadEligibility, Multiplexer, Nearness};

impl Dispatch {
    /// Updates the assignments of all touched models. Runs last in every event, before demand is reported.
    pub(in super::super) fn update_assignments(&mut self) {
        while let Some((_, model)) =
            self.models.assignment_dues.first().copied().filter(|(due, _)| *due <= self.clock.now)
        {
            self.models.assignment_dues.pop_first();
            self.models.touch(model);
        }
        if self.models.touched.is_empty() {
            return;
        }
        // One assignment affects the next. All relays process models in order of their names.
        let moving = std::mem::take(&mut self.models.moving);
        let mut touched: Vec<_> = std::mem::take(&mut self.models.touched).into_iter().collect();
        touched.sort_by(|a, b| self.models[*a].name.cmp(&self.models[*b].name));
        touched.iter().for_each(|model| self.models.retain(*model));
        for model in touched {
            self.fail_unloadable(model);
            let assignment = self.next_assignment(model, moving.contains(&model));
            self.set_assignment(model, assignment);
            self.models.touched.remove(&model);
            self.models.release(model);
        }
    }

    /// Returns the failure of a request that would wait for a load, if no worker can load its model now.
    pub(super) fn refuses_to_load(&self, model: ModelId, lane: &LaneKey) -> Option<Failure> {
        let group = &self.models[model];
        if group.multiplexers.is_empty() || self.is_open_to(group, lane) {
            return None;
        }
        let mut first: Option<(WorkerKey, &Failed)> = None;
        for worker in self.multiplexers_for(group, lane) {
            match worker.eligibility(&group.name, self.clock.now)? {
                LoadEligibility::Able(_) => return None,
                LoadEligibility::Leaving => {}
                LoadEligibility::Failed(failed) => {
                    if first.is_none_or(|(_, sooner)| failed.sooner(sooner).is_lt()) {
                        first = Some((worker.key, failed));
                    }
                }
            }
        }
        first.map(|(worker, failed)| failure(worker, failed, self.clock.now))
    }

    /// The same for a request that only this worker may serve.
    pub(super) fn refuses_to_load_pinned(&self, model: ModelId, pin: WorkerKey) -> Option<Failure> {
        let (group, worker) = (&self.models[model], self.workers.get(&pin)?);
        if !group.must_load(pin) {
            return None;
        }
        match worker.eligibility(&group.name, self.clock.now)? {
            LoadEligibility::Failed(failed) => Some(failure(pin, failed, self.clock.now)),
            LoadEligibility::Able(_) | LoadEligibility::Leaving => None,
        }
    }

    /// True if requests in this lane cannot be sent to any worker that serves the model, and a multiplexer could serve
    /// them once it has loaded it.
    pub(super) fn waits_for_load(&self, group: &Group, pin: Option<WorkerKey>, lane: &LaneKey) -> bool {
        match pin {
            Some(pin) => group.must_load(pin),
            None => !self.is_open_to(group, lane) && self.multiplexers_for(group, lane).next().is_some(),
        }
    }

    /// True if the cold clock runs for requests in this lane: no worker serves the model, or none that could receive
    /// them until a multiplexer has loaded it.
    pub(super) fn is_cold(&self, group: &Group, pin: Option<WorkerKey>, lane: &LaneKey) -> bool {
        group.open.is_empty() || !group.multiplexers.is_empty() && self.waits_for_load(group, pin, lane)
    }

    /// Returns the time until the pinned or assigned worker has loaded the model, if it reported one.
    pub(super) fn eta(&self, model: ModelId, pin: Option<WorkerKey>) -> Option<Span> {
        let group = &self.models[model];
        let worker = pin.or(group.assignment.map(|assignment| assignment.worker))?;
        self.workers.get(&worker)?.multiplexer.as_ref()?.eta(&group.name, self.clock.now)
    }

    /// True if some worker that serves the model now could receive requests of this lane.
    fn is_open_to(&self, group: &Group, lane: &LaneKey) -> bool {
        let mut open = group.open.able(lane.needs_core1);
        open.any(|key| self.workers.get(&key).is_some_and(|worker| lane.admits(worker)))
    }

    /// Returns the multiplexers that could receive requests of this lane if they loaded the model.
    fn multiplexers_for<'a>(&'a self, group: &'a Group, lane: &'a LaneKey) -> impl Iterator<Item = &'a Worker> {
        group.multiplexers.iter().filter_map(|key| self.workers.get(key)).filter(|worker| lane.admits(worker))
    }

    /// Ends requests that wait for a load if no worker can load the model now.
    fn fail_unloadable(&mut self, model: ModelId) {
        let group = &self.models[model];
        if group.multiplexers.is_empty() {
            return;
        }
        let mut failures = Vec::new();
        for (lane, waiting) in group.queue.open_lanes() {
            if let Some(failure) = self.refuses_to_load(model, lane) {
                failures.extend(waiting.keys().map(|key| (key, failure.clone())));
            }
        }
        for pin in group.queue.pins() {
            if let Some(failure) = self.refuses_to_load_pinned(model, pin) {
                failures.extend(group.queue.pinned_to(pin).into_iter().map(|key| (key, failure.clone())));
            }
        }
        self.fail_waiting(failures);
    }

    /// `moving`: true if the previous assignment may move to a worker that already has demand for the model.
    fn next_assignment(&self, model: ModelId, moving: bool) -> Option<LoadAssignment> {
        let group = &self.models[model];
        if group.multiplexers.is_empty() {
            return None;
        }
        let lanes = group.queue.open_lanes().map(|(lane, _)| lane);
        let stranded: Vec<_> = lanes.filter(|lane| !self.is_open_to(group, lane)).collect();
        if stranded.is_empty() {
            return None;
        }
        let near = |key: WorkerKey| {
            let worker = self.workers.get(&key)?;
            let could = group.must_load(key) && stranded.iter().any(|lane| lane.admits(worker));
            match worker.eligibility(&group.name, self.clock.now).filter(|_| could)? {
                LoadEligibility::Able(nearness) => Some(nearness),
                LoadEligibility::Failed(_) | LoadEligibility::Leaving => None,
            }
        };
        let alongside = |key: WorkerKey| {
            let nearness = self.nearness_alongside(key, model, near(key)?);
            Some((!self.is_assigned_by_another_name(key, model), nearness))
        };
        let kept = group
            .assignment
            .filter(|assignment| self.clock.now < assignment.until && near(assignment.worker).is_some());
        let assignment = match kept {
            Some(kept) if !moving => kept,
            Some(kept) => {
                let candidates = group.with_demand.iter().copied().chain([kept.worker]);
                let nearest = self.nearest(candidates, group, alongside, group.timed_out)?;
                if nearest == kept.worker { kept } else { LoadAssignment::new(nearest, self.clock.now) }
            }
            None => {
                let overdue = group
                    .assignment
                    .filter(|assignment| self.clock.now >= assignment.until)
                    .map(|assignment| assignment.worker);
                let all = group.multiplexers.iter().copied();
                LoadAssignment::new(self.nearest(all, group, alongside, overdue.or(group.timed_out))?, self.clock.now)
            }
        };
        Some(assignment.handle_eta(self.eta(model, Some(assignment.worker))))
    }

    /// Returns how near a worker is that this relay has assigned other models too: their slots will not be free for
    /// long, although the worker has not reported so yet. If they were treated as free, one worker would be assigned
    /// all models requested before its next report, however many other workers are idle.
    fn nearness_alongside(&self, key: WorkerKey, model: ModelId, nearness: Nearness) -> Nearness {
        let Some((worker, multiplexer)) = self.workers.get(&key).and_then(|w| Some((w, w.multiplexer.as_ref()?)))
        else {
            return nearness;
        };
        let assigned = self.assigned_besides(worker, model);
        // By the worker's own ids: another name of the same model is not another model.
        let model = multiplexer.id(&self.models[model].name);
        let others = assigned.map(|group| multiplexer.id(&group.name));
        let others: BTreeSet<_> = others.filter(|other| *other != model && !multiplexer.is_coming(other)).collect();
        if others.is_empty() {
            return nearness;
        }
        multiplexer.nearness_alongside(&others, model, self.clock.now)
    }

    /// True if this relay has assigned the same model to a worker by another name, and so its load: whichever worker is
    /// nearer now, a second load is worse than none.
    fn is_assigned_by_another_name(&self, key: WorkerKey, model: ModelId) -> bool {
        let has_names = |worker: &&Worker| worker.multiplexer.as_ref().is_some_and(Multiplexer::has_aliases);
        let Some(worker) = self.workers.get(&key).filter(has_names) else {
            return false;
        };
        let id = worker.id(&self.models[model].name);
        self.assigned_besides(worker, model).any(|group| worker.id(&group.name) == id)
    }

    /// Returns the models other than this one that this relay has assigned to a worker.
    fn assigned_besides<'a>(&'a self, worker: &'a Worker, model: ModelId) -> impl Iterator<Item = &'a Group> {
        let groups = worker.models.iter().filter(move |other| **other != model).map(move |other| &self.models[*other]);
        groups.filter(move |group| group.assignment.is_some_and(|assignment| assignment.worker == worker.key))
    }

    /// Returns the nearest of these workers; `overdue`, whose time is over, comes last. All relays break ties in the
    /// same way.
    fn nearest(
        &self,
        workers: impl Iterator<Item = WorkerKey>,
        group: &Group,
        near: impl Fn(WorkerKey) -> Option<(bool, Nearness)>,
        overdue: Option<WorkerKey>,
    ) -> Option<WorkerKey> {
        let place = |key: WorkerKey| Some((Some(key) == overdue, near(key)?));
        let places: Vec<_> = workers.filter_map(|key| Some((place(key)?, key))).collect();
        let best = places.iter().map(|(place, _)| *place).min()?;
        let tied = places.into_iter().filter(|(place, _)| *place == best).map(|(_, key)| key);
        tied.min_by_key(|key| (Reverse(self.affinity(*key, &group.name)), *key))
    }

    fn affinity(&self, key: WorkerKey, model: &Model) -> u64 {
        let multiplexer = self.workers.get(&key).and_then(|worker| worker.multiplexer.as_ref());
        // By its id: all names of a model lead to the same worker.
        multiplexer.map_or(0, |multiplexer| affinity(&multiplexer.instance, multiplexer.id(model)))
    }

    fn set_assignment(&mut self, model: ModelId, assignment: Option<LoadAssignment>) {
        let group = &mut self.models[model];
        let old = std::mem::replace(&mut group.assignment, assignment);
        group.timed_out = match (old, assignment) {
            (_, None) => None,
            (Some(old), Some(new)) if old.worker != new.worker && self.clock.now >= old.until => Some(old.worker),
            (_, Some(_)) => group.timed_out,
        };
        if let Some(old) = old {
            self.models.assignment_dues.remove(&(old.until, model));
        }
        self.models.assignment_dues.extend(assignment.map(|assignment| (assignment.until, model)));
        let (before, after) = (old.map(|assignment| assignment.worker), assignment.map(|assignment| assignment.worker));
        if before != after {
            for worker in before.into_iter().chain(after) {
                self.mark(worker);
            }
        }
    }
}

/// The rendezvous hash: relays agree, each worker gets few models, and a worker that joins or leaves moves few.
pub(in super::super) fn affinity(instance: &str, model: &str) -> u64 {
    let hash = Sha256::new().chain_update(instance).chain_update([0]).chain_update(model).finalize();
    hash.first_chunk().map_or(0, |first| u64::from_be_bytes(*first))
}

fn failure(worker: WorkerKey, failed: &Failed, now: Moment) -> Failure {
    let retry_after = failed.until.map(|until| duration(until.since(now)));
    Failure::ModelFailed { worker, code: failed.code, retry_after, report: Arc::clone(&failed.report) }
}
