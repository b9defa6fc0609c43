//! Workers: joining, changing their models, draining, leaving.

use std::collections::{BTreeSet, HashSet};

use crate::dispatch::model::effect::{Effect, Failure, RequeueReason};
use crate::dispatch::model::event::{Grant, LossCause, Model, NewWorker, RequestKey, WorkerKey};
use crate::dispatch::model::models::ModelId;
use crate::dispatch::model::queue::QueueLane;
use crate::dispatch::model::registry::Worker;
use crate::dispatch::{Dispatch, ProviderPhase};

impl Dispatch {
    pub(in super::super) fn handle_joined(&mut self, new: &NewWorker) {
        // A key identifies one connection; if it came twice, the first one would keep it.
        if self.workers.contains_key(&new.key) {
            return;
        }
        let models = self.intern_all(&new.models);
        let mut worker = Worker::new(new, models, self.clock.now, self.homes_void_before(new));
        worker.set_failing(self.failing_ids(&worker.models, &new.failing));
        let (key, models) = (worker.key, worker.models.clone());
        self.instances.insert(worker.instance, key);
        self.workers.insert(key, worker);
        for model in models {
            self.begin_serving(key, model);
            self.fail_unservable(model);
        }
        if self.phase == ProviderPhase::Deleted {
            self.begin_drain(key);
        }
        // A multiplexer listens from the beginning.
        self.mark(key);
    }

    pub(in super::super) fn handle_models(
        &mut self,
        key: WorkerKey,
        (models, failing): (&[Model], &[Model]),
        load: Option<u32>,
    ) {
        if !self.workers.contains_key(&key) {
            return;
        }
        let new = self.intern_all(models);
        let failing = self.failing_ids(&new, failing);
        self.forget_demand(key);
        self.clear_rank(key);
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if let Some(load) = load {
            worker.handle_load(load);
        }
        let old = worker.handle_models(new.clone());
        worker.set_failing(failing);
        // A model that failed here before may work now, so the existing models are treated as new, too.
        for model in &new {
            self.begin_serving(key, *model);
        }
        let gone: Vec<_> = old.iter().filter(|model| new.binary_search(model).is_err()).copied().collect();
        for model in &gone {
            self.end_serving(key, *model);
        }
        if !gone.is_empty() {
            // A backend that withdraws a model has stopped, and its cache is lost.
            self.forget_all_homes(key);
        }
        self.mark(key);
    }

    pub(in super::super) fn handle_load(&mut self, key: WorkerKey, load: u32) {
        if let Some(worker) = self.workers.get_mut(&key) {
            worker.handle_load(load);
            self.note_freed(key);
        }
    }

    pub(in super::super) fn handle_grant(&mut self, key: WorkerKey, grant: Grant) {
        let Some(worker) = self.workers.get_mut(&key).filter(|worker| worker.core1) else {
            return;
        };
        let wanted = worker.wants_demand();
        worker.grant = Some(grant);
        worker.granted_at = self.turn;
        match (wanted, worker.wants_demand()) {
            (false, true) => self.mark(key),
            (true, false) => self.forget_demand(key),
            (true, true) | (false, false) => {}
        }
        self.note_freed(key);
        self.settle();
        self.answer_grant(key);
    }

    pub(in super::super) fn handle_lost(&mut self, key: WorkerKey, started: &HashSet<RequestKey>, cause: LossCause) {
        if !self.workers.contains_key(&key) {
            return;
        }
        self.forget_demand(key);
        self.clear_rank(key);
        let Some(worker) = self.workers.remove(&key) else {
            return;
        };
        self.note_left(&worker);
        for model in &worker.models {
            self.models[*model].remove(&worker);
            self.note_servers(*model);
        }
        let reason = match cause {
            LossCause::Disconnected => RequeueReason::WorkerLost,
            LossCause::HeartbeatTimeout => RequeueReason::HeartbeatTimeout,
        };
        let mut waiting = Vec::new();
        for request in worker.in_flight.iter().copied() {
            self.take_from_worker(request);
            if started.contains(&request) {
                self.end(request);
                self.out.push(Effect::Severed { request, worker: key });
            } else if self.requeue_lost(request, reason) {
                waiting.push(request);
            }
        }
        self.fail_pinned(key);
        self.place_if_servers_changed();
        self.place_all(waiting.clone());
        // The lost worker may have withdrawn the model of a request that it was running.
        for request in waiting {
            if let Some(request) = self.requests.get(&request) {
                self.fail_unservable(request.model);
            }
        }
    }

    pub(in super::super) fn handle_succeeded(&mut self, older: WorkerKey, newer: WorkerKey) {
        if !self.workers.get(&newer).is_some_and(|worker| worker.core1 && !worker.draining) {
            return;
        }
        let all = (older, RequestKey(0))..=(older, RequestKey(u64::MAX));
        let pinned: Vec<_> = self.pinned.range(all).copied().collect();
        for (_, request) in pinned {
            self.pinned.remove(&(older, request));
            self.pinned.insert((newer, request));
            self.pin_to(request, newer);
        }
        self.note_freed(newer);
    }

    /// Sends the worker no new requests from now on. Its models become cold if it was the last to serve them.
    pub(in super::super) fn begin_drain(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get(&key).filter(|worker| !worker.draining) else {
            return;
        };
        let models = worker.models.clone();
        self.forget_demand(key);
        for model in &models {
            self.end_serving(key, *model);
        }
        if let Some(worker) = self.workers.get_mut(&key) {
            worker.draining = true;
        }
        self.note_freed(key);
        for model in &models {
            self.begin_serving(key, *model);
        }
        self.fail_pinned(key);
        // At once: they end before other requests are sent.
        for model in models {
            self.fail_unservable(model);
        }
    }

    /// Fails the requests that only this worker may serve.
    fn fail_pinned(&mut self, worker: WorkerKey) {
        let lanes =
            self.queue.firsts_pinned_to(worker).filter_map(|(_, (model, lane))| self.models[model].queue.lane(lane));
        let failures = lanes.flat_map(QueueLane::keys).map(|request| (request, Failure::AffinityLost)).collect();
        self.fail_waiting(failures);
    }

    fn intern_all(&mut self, names: &[Model]) -> Vec<ModelId> {
        let mut models: Vec<_> = names.iter().map(|name| self.models.intern(name)).collect();
        models.sort_unstable();
        models.dedup();
        models
    }

    /// Returns the worker's models that are named as failing.
    fn failing_ids(&self, models: &[ModelId], failing: &[Model]) -> BTreeSet<ModelId> {
        let ids = failing.iter().filter_map(|name| self.models.id(name));
        ids.filter(|model| models.binary_search(model).is_ok()).collect()
    }

    fn clear_rank(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        for (model, rank) in worker.models.iter().zip(&mut worker.ranks) {
            if let Some(rank) = rank.take() {
                self.models[*model].available.remove(&rank, worker.core1);
            }
        }
    }

    /// Updates the model after a worker that advertises it joined, drained, or opened or closed its gate.
    pub(super) fn begin_serving(&mut self, key: WorkerKey, model: ModelId) {
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        self.models[model].insert(worker, worker.is_failing(model));
        self.note_freed(key);
        self.note_servers(model);
    }

    fn end_serving(&mut self, key: WorkerKey, model: ModelId) {
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        self.models[model].remove(worker);
        self.note_servers(model);
    }

    /// Records that the servers of a model have changed. Switches the clocks of the requests that wait for it, if its
    /// first worker joined or opened, or its last one closed or left.
    fn note_servers(&mut self, model: ModelId) {
        self.models.touch(model);
        self.note_suspect(model);
        self.mark_failing(model);
        let group = &self.models[model];
        let switched = group.queue.lanes().filter_map(|(number, id, lane)| {
            let cold = self.is_cold(group, id.pin, &id.key);
            (cold != lane.is_cold()).then_some((number, cold))
        });
        let switched: Vec<_> = switched.collect();
        for (lane, cold) in switched {
            self.models[model].queue.set_cold(lane, cold, self.clock.now);
            self.refresh_lane(model, lane);
        }
    }
}
