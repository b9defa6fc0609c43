//! Read-only queries of the core.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Dispatch;
use super::model::clock::duration;
use super::model::event::{Gate, Grant, Model, Now, RequestKey, WorkerKey};
use super::model::models::Group;
use super::model::owner::Class;
use super::model::registry::Worker;
use super::model::request::RequestState;

/// The state of one worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerSnapshot {
    /// Its connection.
    pub key: WorkerKey,
    /// The models that it advertises, sorted.
    pub models: Vec<Model>,
    /// The models of those whose requests its backend fails, sorted.
    pub failing: Vec<Model>,
    /// The models of those that it serves now: all, without a multiplexer.
    pub open: Vec<Model>,
    /// The acknowledged number of requests at a time.
    pub max_concurrent: u32,
    /// True if it speaks `core1`.
    pub core1: bool,
    /// Its total load, as far as it is known.
    pub load: u32,
    /// Its last load report.
    pub reported_load: u32,
    /// This relay's requests on it, oldest first.
    pub in_flight: Vec<RequestKey>,
    /// True if it gets no new requests.
    pub draining: bool,
    /// The bytes sent to it whose first response byte has not come, also by other relays as far as they are reported.
    pub backlog: u64,
    /// The share of the cache believed to be there that was there, in permille.
    pub trust: u16,
    /// Its last grant, less its refusals since; for a multiplexer, sums.
    pub grant: Option<Grant>,
    /// The gates of a multiplexer, by model id, sorted, less its refusals since; `None` without one.
    pub gates: Option<Vec<(Model, Gate)>>,
}

/// The state of one model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelSnapshot {
    /// Its name.
    pub model: Model,
    /// The model that requests by this name are counted as.
    pub counted_as: Model,
    /// The number of waiting requests for it.
    pub waiting: u32,
    /// The age of the oldest of them.
    pub oldest: Option<Duration>,
    /// The number of workers that are not draining and serve it, or could if they loaded it.
    pub workers: usize,
    /// The number of those that serve it now.
    pub open_workers: usize,
    /// The multiplexer that was assigned to load it.
    pub assigned: Option<WorkerKey>,
}

/// The place of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestPlace {
    /// In the queue.
    Queued,
    /// On a worker.
    Running {
        /// The worker.
        worker: WorkerKey,
        /// The attempt.
        attempt: u32,
    },
}

impl Dispatch {
    /// The number of waiting requests.
    pub fn queue_len(&self) -> usize {
        self.queue.totals.len(Class::Batch)
    }

    /// The number of keys with a share that have waiting requests.
    #[cfg(test)]
    pub(super) fn keys_waiting(&self) -> usize {
        self.queue.shares.len()
    }

    /// The number of keys whose service is remembered.
    #[cfg(test)]
    pub(super) fn keys_known(&self) -> usize {
        self.queue.flows.len()
    }

    /// The number of conversations with a home.
    pub fn homes_len(&self) -> usize {
        self.homes.len()
    }

    /// The number of waiting body bytes.
    pub fn queue_bytes(&self) -> u64 {
        self.queue.totals.bytes(Class::Batch)
    }

    /// The number of requests on workers.
    pub fn in_flight(&self) -> usize {
        self.running.len()
    }

    /// True if no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// The age of the oldest waiting request.
    pub fn oldest_age(&self, now: Now) -> Option<Duration> {
        let oldest = self.requests.get(&self.queue.oldest()?)?;
        Some(duration(self.clock.moment(now).since(oldest.arrived)))
    }

    /// Returns when a place in the queue is likely free, in whole seconds, 1 to 60.
    pub fn retry_after(&self, now: Now) -> u32 {
        self.retry_after_secs(self.clock.moment(now))
    }

    /// Returns the place of a request; `None` once it has ended.
    pub fn place_of(&self, request: RequestKey) -> Option<RequestPlace> {
        self.requests.get(&request).map(|request| match request.state {
            RequestState::Queued { .. } => RequestPlace::Queued,
            RequestState::Running { worker, .. } => RequestPlace::Running { worker, attempt: request.attempts },
        })
    }

    /// The waiting requests, oldest first.
    pub fn queued(&self) -> impl Iterator<Item = RequestKey> {
        let lanes = self.models.iter().flat_map(|group| group.queue.lanes());
        let mut queued: Vec<_> = lanes.flat_map(|(_, _, lane)| lane.keys()).collect();
        queued.sort_unstable();
        queued.into_iter()
    }

    /// Every model that a worker serves or a request names, sorted by name.
    pub fn models(&self, now: Now) -> Vec<ModelSnapshot> {
        let now = self.clock.moment(now);
        let mut models: Vec<_> = self
            .models
            .iter()
            .map(|group| {
                let waiting = group.queue.waiting();
                ModelSnapshot {
                    model: group.name.clone(),
                    counted_as: self.counted_as(&group.name),
                    waiting: waiting.count,
                    oldest: waiting.oldest.map(|oldest| duration(now.since(oldest))),
                    workers: group.serving.len(),
                    open_workers: group.open.len(),
                    assigned: group.assignment.map(|assignment| assignment.worker),
                }
            })
            .collect();
        models.sort_unstable_by(|a, b| a.model.cmp(&b.model));
        models
    }

    /// Every connected worker, in the order in which they joined.
    pub fn workers(&self) -> impl Iterator<Item = WorkerSnapshot> {
        self.worker_keys().into_iter().filter_map(|key| self.worker(key))
    }

    /// Returns one worker; `None` once it is lost.
    pub fn worker(&self, worker: WorkerKey) -> Option<WorkerSnapshot> {
        self.workers.get(&worker).map(|worker| self.snapshot(worker))
    }

    /// True if any connected worker advertises the model, including a draining one.
    pub fn worker_serves(&self, model: &str) -> bool {
        self.models.find(model).is_some_and(|group| !group.serving.is_empty() || !group.leaving.is_empty())
    }

    /// True if a worker that accepts new requests serves the model now; for a multiplexer, if its gate is open.
    pub fn is_warm(&self, model: &str) -> bool {
        self.models.find(model).is_some_and(|group| !group.open.is_empty())
    }

    /// True if a connected worker with `core1` serves the model, including a draining one.
    pub fn has_core1_worker_for(&self, model: &str) -> bool {
        let any = |group: &Group| !group.serving.core1.is_empty() || !group.leaving.core1.is_empty();
        self.models.find(model).is_some_and(any)
    }

    /// Returns the worker that accepts new requests for the model, if it is the only one.
    pub fn sole_worker_for(&self, model: &str) -> Option<WorkerKey> {
        let serving = &self.models.find(model)?.serving;
        serving.iter().next().filter(|_| serving.len() == 1)
    }

    /// Returns the distinct models that workers mean by a name: the ids of models that have it as an alias, or the name
    /// itself. Empty if no worker serves it.
    pub fn ids_of(&self, name: &str) -> BTreeSet<Model> {
        self.models.find(name).map(Group::ids).unwrap_or_default()
    }

    /// Returns the model that requests by this name are counted as: the id that all workers mean by it, if clients may
    /// request that id too.
    pub fn counted_as(&self, name: &str) -> Model {
        let ids = self.ids_of(name);
        let id = ids.first().filter(|id| ids.len() == 1 && self.worker_serves(id));
        id.cloned().unwrap_or_else(|| name.into())
    }

    fn snapshot(&self, worker: &Worker) -> WorkerSnapshot {
        let mut models: Vec<_> = worker.models.iter().map(|model| self.models[*model].name.clone()).collect();
        models.sort_unstable();
        let is_failing = |name: &&Model| self.models.id(name).is_some_and(|model| worker.is_failing(model));
        WorkerSnapshot {
            key: worker.key,
            failing: models.iter().filter(is_failing).cloned().collect(),
            open: models.iter().filter(|model| worker.is_open_for(model)).cloned().collect(),
            models,
            max_concurrent: worker.max_concurrent,
            core1: worker.core1,
            load: worker.load(),
            reported_load: worker.reported_load,
            in_flight: worker.in_flight.iter().copied().collect(),
            draining: worker.draining,
            backlog: worker.cache.backlog(),
            trust: worker.cache.trust(),
            grant: worker.grant,
            gates: worker
                .multiplexer
                .as_ref()
                .map(|multiplexer| multiplexer.gates().map(|(model, gate)| (model.clone(), *gate)).collect()),
        }
    }
}
