//! Reports demand to workers with several links, so that they divide their slots fairly, and to multiplexers, which
//! load models by it.
//!
//! The first change is reported at once, later ones at most every 50 ms per worker, and the last state is always
//! reported. A change in a model's queue marks the workers that listen to it. A marked worker stops listening until
//! its report is sent, so that a burst of changes costs each worker one message and no request pays for a walk over
//! all of them. A multiplexer also receives each model's highest class and its place in the fair order, by which it
//! swaps; a change of the class alone is reported, one of the place is not. A worker subtracts requests itself as they
//! reach it, so the core tracks the worker's current count, not the last report.

use std::collections::{BTreeMap, BTreeSet};

use crate::dispatch::Dispatch;
use crate::dispatch::model::clock::{Span, duration};
use crate::dispatch::model::effect::{Effect, ModelDemand};
use crate::dispatch::model::event::WorkerKey;
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::owner::{Class, Service};
use crate::dispatch::model::queue::{LaneKey, Waiting};
use crate::dispatch::model::registry::Worker;

/// The least time between two reports to one worker, in nanoseconds.
const PACE: Span = 50_000_000;

impl Dispatch {
    /// Marks the listening workers after the waiting requests of a model have changed, and the worker that these are
    /// pinned to, whether it listens or not.
    pub(super) fn mark_listeners(&mut self, model: ModelId, pin: Option<WorkerKey>) {
        if !self.models[model].listeners.is_empty() {
            for worker in std::mem::take(&mut self.models[model].listeners) {
                self.mark(worker);
            }
        }
        if let Some(pin) = pin {
            self.mark(pin);
        }
    }

    /// Schedules a report to this worker, as soon as its pace allows.
    pub(super) fn mark(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if worker.demand.marked.is_some() || !worker.wants_demand() {
            return;
        }
        let at = worker.demand.reported_at.map_or(self.clock.now, |reported| reported.plus(PACE).max(self.clock.now));
        worker.demand.marked = Some(at);
        self.marked.insert((at, key));
    }

    /// Reports at once, without regard to the pace: requests wait, but the multiplexer's count for the model is zero,
    /// so it would unload the model for another. This happens at most once per number of requests reported.
    pub(super) fn report_demand_now(&mut self, key: WorkerKey, model: ModelId) {
        let waits = |worker: &Worker| worker.multiplexer.is_some() && self.reported_demand(model, worker).count > 0;
        if !self.workers.get(&key).is_some_and(waits) {
            return;
        }
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if let Some(later) = worker.demand.marked.replace(self.clock.now) {
            self.marked.remove(&(later, key));
        }
        self.marked.insert((self.clock.now, key));
    }

    /// A worker refused a request: its count is one higher than reported, so the actual demand is reported.
    pub(super) fn note_refusal(&mut self, key: WorkerKey) {
        // The worker also counts while it has one link and receives no reports.
        if let Some(worker) = self.workers.get_mut(&key).filter(|worker| worker.core1) {
            worker.demand.doubtful = true;
            self.mark(key);
        }
    }

    /// Reports demand again after a grant if requests still wait. The worker may have reserved a slot for this relay
    /// while its messages were delayed, then given that slot to another relay, and treat this relay as silent until its
    /// next message.
    pub(super) fn answer_grant(&mut self, key: WorkerKey) {
        if let Some(worker) = self.workers.get_mut(&key).filter(|worker| !worker.demand.worker_counts.is_empty()) {
            worker.demand.doubtful = true;
            self.mark(key);
        }
    }

    /// Stops reporting to a worker.
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

    /// Reports to the marked workers that are due. Runs last in every event, so it describes the state after all
    /// requests sent.
    pub(in super::super) fn report_demand(&mut self) {
        while let Some((_, key)) = self.marked.first().copied().filter(|(at, _)| *at <= self.clock.now) {
            self.marked.pop_first();
            self.report_to(key);
        }
    }

    fn report_to(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        let entries = worker.models.iter().filter_map(|model| self.demand_of(*model, worker));
        let (mut demand, places): (Vec<_>, Vec<_>) = entries.unzip();
        let ranks: BTreeMap<_, _> = places.iter().copied().collect::<BTreeSet<_>>().into_iter().zip(0..).collect();
        for (entry, place) in demand.iter_mut().zip(places) {
            entry.rank = ranks.get(&place).copied().unwrap_or_default();
        }
        demand.sort_unstable_by(|a, b| a.model.cmp(&b.model));
        let count = |entry: &ModelDemand| (entry.model.clone(), (entry.waiting, entry.class));
        let real: BTreeMap<_, _> = demand.iter().map(count).collect();
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
        if doubtful || worker.demand.worker_counts != real {
            worker.demand.worker_counts = real;
            worker.demand.reported_at = Some(self.clock.now);
            self.out.push(Effect::Demand { worker: key, demand });
        }
    }

    /// Returns the waiting requests for a model that are reported to a worker.
    fn reported_demand(&self, model: ModelId, worker: &Worker) -> Waiting {
        let group = &self.models[model];
        group.reported_demand(worker, |lane| !self.passes_over(group, worker.key, lane))
    }

    /// Returns a worker's demand entry for one model, still without its rank, and the class and service of the request
    /// that goes first. Only multiplexers, which swap by them, receive these.
    fn demand_of(&self, model: ModelId, worker: &Worker) -> Option<(ModelDemand, (Class, Service))> {
        let waiting = self.reported_demand(model, worker);
        let oldest = waiting.oldest?;
        let sum = self.clock.now.nanos() * i128::from(waiting.count) - waiting.arrivals;
        let place = worker.multiplexer.as_ref().and_then(|_| self.fair_place(model, worker)).unwrap_or_default();
        let demand = ModelDemand {
            model: self.models[model].name.clone(),
            waiting: waiting.count,
            oldest: duration(self.clock.now.since(oldest)),
            sum: duration(Span::try_from(sum).unwrap_or(Span::MAX)),
            class: place.0,
            rank: 0,
        };
        Some((demand, place))
    }

    /// Returns the highest class of the requests that wait for a model of this worker, and the least service of their
    /// keys. Promotion does not change it: a model whose requests wait for long comes first by the multiplexer's own
    /// bound.
    fn fair_place(&self, model: ModelId, worker: &Worker) -> Option<(Class, Service)> {
        let group = &self.models[model];
        let is_due = |lane: &LaneKey| group.concerns(worker) && !self.passes_over(group, worker.key, lane);
        let shares = group.queue.shares_for(worker, is_due);
        shares.map(|(class, flow)| (class, self.queue.flows.service(flow))).min()
    }
}
