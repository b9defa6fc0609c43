//! Telling workers with several links what waits here, so that they divide their slots fairly; and multiplexers, which
//! load by it.
//!
//! The first change goes at once, later ones at most every 50 ms per worker, and the last state always gets out. A
//! change in a model's queue marks the workers that listen to it; a marked worker stops listening until it was told,
//! so that a burst of changes costs each worker one message and no request pays for a walk over all of them.
//! A worker counts down by itself as requests reach it, so what it believes is tracked, not what was last said.

use std::collections::{BTreeMap, BTreeSet};

use super::Dispatch;
use super::clock::{Moment, Span, duration};
use super::effect::{Effect, ModelDemand};
use super::event::{Model, WorkerKey};
use super::models::ModelId;
use super::queue::Waiting;
use super::registry::Worker;

/// The least time between two messages to one worker.
const PACE: Span = 50_000_000;

/// What one worker was told.
#[derive(Debug, Default)]
pub(super) struct DemandState {
    /// What it takes to be waiting; models with nothing waiting are absent.
    believed: BTreeMap<Model, u32>,
    /// Whether it is to be told even what it should believe already: it adds its refusals to a count that may have been
    /// zero or below, and subtracts what it was sent.
    doubtful: bool,
    told_at: Option<Moment>,
    /// When it will be looked at, if it is marked.
    marked: Option<Moment>,
}

impl DemandState {
    /// Whether it was told that something waits for such a model.
    pub(super) fn believes_in(&self, is_such: impl Fn(&Model) -> bool) -> bool {
        self.believed.keys().any(is_such)
    }

    /// The worker could not load such models, and has forgotten that anything waits for them, whether it serves them now or not.
    pub(super) fn handle_forgotten(&mut self, is_such: impl Fn(&Model) -> bool) {
        let before = self.believed.len();
        self.believed.retain(|model, _| !is_such(model));
        self.doubtful |= self.believed.len() < before;
    }

    /// The worker was sent a request, and counts one less. Returns whether it now takes nothing to be waiting for the model
    /// of which it was told before.
    pub(super) fn handle_sent(&mut self, model: &Model) -> bool {
        // The last state is always told, also to a worker that counts for itself; and one that adds its models up counts
        // down whatever it is sent.
        self.doubtful |= !self.believed.is_empty();
        let Some(count) = self.believed.get_mut(model) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.believed.remove(model);
        }
        is_last
    }
}

/// The workers that will be looked at, and when.
pub(super) type Marked = BTreeSet<(Moment, WorkerKey)>;

impl Dispatch {
    /// What waits for a model has changed: those who listen will be told.
    pub(super) fn mark_listeners(&mut self, model: ModelId, now: Moment) {
        if self.models[model].listeners.is_empty() {
            return;
        }
        for worker in std::mem::take(&mut self.models[model].listeners) {
            self.mark(worker, now);
        }
    }

    /// What waits for one worker alone has changed: it is told, whether it listens or not.
    pub(super) fn mark_pin(&mut self, pin: Option<WorkerKey>, now: Moment) {
        if let Some(pin) = pin {
            self.mark(pin, now);
        }
    }

    /// Looks at what this worker should be told, as soon as its pace allows.
    pub(super) fn mark(&mut self, key: WorkerKey, now: Moment) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if worker.demand.marked.is_some() || !worker.wants_demand() {
            return;
        }
        let at = worker.demand.told_at.map_or(now, |told| told.plus(PACE).max(now));
        worker.demand.marked = Some(at);
        self.marked.insert((at, key));
    }

    /// A multiplexer takes nothing to be waiting for the model any more, and something is: it is told without regard to its
    /// pace, or it would unload the model for another. That happens once per so many requests as it was told of.
    pub(super) fn hurry(&mut self, key: WorkerKey, model: ModelId, now: Moment) {
        let waits = |worker: &Worker| worker.multiplexer.is_some() && self.told(model, worker).count > 0;
        if !self.workers.get(&key).is_some_and(waits) {
            return;
        }
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if let Some(later) = worker.demand.marked.replace(now) {
            self.marked.remove(&(later, key));
        }
        self.marked.insert((now, key));
    }

    /// A worker refused a request: it counts one more than it was told, and is told what is so.
    pub(super) fn note_refusal(&mut self, key: WorkerKey, now: Moment) {
        // It counts also while it has one link and is told nothing.
        if let Some(worker) = self.workers.get_mut(&key).filter(|worker| worker.core1) {
            worker.demand.doubtful = true;
            self.mark(key, now);
        }
    }

    /// A worker's grant is obeyed, and something waits still: it is told so again. It may have kept a slot for us while its
    /// words were held up, given that slot to another relay, and count us as silent until it hears of us.
    pub(super) fn answer_grant(&mut self, key: WorkerKey, now: Moment) {
        if let Some(worker) = self.workers.get_mut(&key).filter(|worker| !worker.demand.believed.is_empty()) {
            worker.demand.doubtful = true;
            self.mark(key, now);
        }
    }

    /// Stops telling a worker.
    pub(super) fn forget_demand(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if let Some(at) = worker.demand.marked.take() {
            self.marked.remove(&(at, key));
        }
        for model in &worker.models {
            self.models[*model].listeners.remove(&key);
        }
    }

    /// Tells the marked workers whose time has come. Last in every event: the state after all that was sent.
    pub(super) fn tell_demand(&mut self, now: Moment, out: &mut Vec<Effect>) {
        while let Some((_, key)) = self.marked.first().copied().filter(|(at, _)| *at <= now) {
            self.marked.pop_first();
            self.tell(key, now, out);
        }
    }

    fn tell(&mut self, key: WorkerKey, now: Moment, out: &mut Vec<Effect>) {
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        let mut demand: Vec<_> = worker.models.iter().filter_map(|model| self.demand_of(*model, key, now)).collect();
        demand.sort_unstable_by(|a, b| a.model.cmp(&b.model));
        let real: BTreeMap<_, _> = demand.iter().map(|entry| (entry.model.clone(), entry.waiting)).collect();
        for model in &worker.models {
            let group = &mut self.models[*model];
            if group.concerns(worker) {
                group.listeners.insert(key);
            } else {
                group.listeners.remove(&key);
            }
        }
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        worker.demand.marked = None;
        let doubtful = std::mem::take(&mut worker.demand.doubtful);
        if doubtful || worker.demand.believed != real {
            worker.demand.believed = real;
            worker.demand.told_at = Some(now);
            out.push(Effect::Demand { worker: key, demand });
        }
    }

    /// What waits for a model and is told to a worker.
    fn told(&self, model: ModelId, worker: &Worker) -> Waiting {
        let group = &self.models[model];
        group.told(worker, |lane| !self.passes_over(group, worker.key, lane))
    }

    /// What is told of one model to a worker.
    fn demand_of(&self, model: ModelId, worker: WorkerKey, now: Moment) -> Option<ModelDemand> {
        let waiting = self.told(model, self.workers.get(&worker)?);
        let oldest = waiting.oldest?;
        let sum = now.nanos() * i128::from(waiting.count) - waiting.arrivals;
        Some(ModelDemand {
            model: self.models[model].name.clone(),
            waiting: waiting.count,
            oldest: duration(now.since(oldest)),
            sum: duration(Span::try_from(sum).unwrap_or(Span::MAX)),
        })
    }
}
