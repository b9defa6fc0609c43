//! A provider's state for the admin API, readiness and metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use modelrelay_protocol::queue_position::QueuePosition;

use super::{Provider, ProviderCore};
use crate::dispatch::{ModelSnapshot, RequestKey, RequestPlace, WorkerKey, WorkerSnapshot};
use crate::provider::request::RequestRecord;
use crate::provider::worker::link::WorkerLink;

/// A worker: its link, and the core's view of it.
pub struct WorkerState {
    /// The connection.
    pub link: Arc<WorkerLink>,
    /// The core's view.
    pub core: WorkerSnapshot,
}

/// A request that has not ended.
pub struct LiveRequest {
    /// The shell's view.
    pub record: Arc<RequestRecord>,
    /// Its place in the core.
    pub place: Option<RequestPlace>,
}

impl LiveRequest {
    /// The progress of the request, as the admin API names it.
    pub fn stage(&self) -> &'static str {
        match self.place {
            Some(RequestPlace::Queued) => "queued",
            Some(RequestPlace::Running { .. }) if self.record.response.has_head() => "streaming",
            Some(RequestPlace::Running { .. }) => "dispatched",
            None => "ending",
        }
    }
}

/// The state of a provider.
pub struct ProviderState {
    /// The number of waiting requests.
    pub queue_depth: usize,
    /// The size of their bodies in bytes.
    pub queue_bytes: u64,
    /// The number of conversations with a home.
    pub homes: usize,
    /// The age of the oldest one.
    pub oldest_age: Option<Duration>,
    /// The number of requests at workers.
    pub in_flight: usize,
    /// The number of requests at workers, by model.
    pub in_flight_by_model: BTreeMap<Arc<str>, u64>,
    /// Every model that a worker serves or a request names.
    pub models: Vec<ModelSnapshot>,
    /// Every worker, in the order in which they joined.
    pub workers: Vec<WorkerState>,
}

impl Provider {
    /// Returns the whole state, read under one lock.
    pub fn snapshot(&self) -> ProviderState {
        let now = Instant::now();
        let state = self.lock();
        let mut in_flight_by_model = BTreeMap::new();
        for record in state.requests.values() {
            if matches!(state.core.place_of(record.key), Some(RequestPlace::Running { .. })) {
                *in_flight_by_model.entry(Arc::clone(&record.model)).or_default() += 1;
            }
        }
        let workers = state.core.workers().filter_map(|core| {
            let link = Arc::clone(state.links.get(&core.key)?);
            Some(WorkerState { link, core })
        });
        ProviderState {
            queue_depth: state.core.queue_len(),
            queue_bytes: state.core.queue_bytes(),
            homes: state.core.homes_len(),
            oldest_age: state.core.oldest_age(now),
            in_flight: state.core.in_flight(),
            in_flight_by_model,
            models: state.core.models(now),
            workers: workers.collect(),
        }
    }

    /// Returns the place of each waiting request among those for its model, from 1.
    pub fn queue_positions(&self) -> BTreeMap<RequestKey, usize> {
        self.lock().core.positions()
    }

    /// Returns the position of a waiting request, which may be a second old.
    pub fn queue_position(&self, request: RequestKey) -> Option<QueuePosition> {
        self.lock().core.queue_position(request, Instant::now())
    }

    /// Returns the requests that have not ended, oldest first.
    pub fn live_requests(&self) -> Vec<LiveRequest> {
        let state = self.lock();
        let mut live: Vec<_> = state
            .requests
            .values()
            .map(|record| LiveRequest { record: Arc::clone(record), place: state.core.place_of(record.key) })
            .collect();
        live.sort_unstable_by_key(|request| request.record.key);
        live
    }

    /// Finds a request that has not ended, by the id that its client received.
    pub fn live_request(&self, id: &str) -> Option<RequestKey> {
        self.lock().requests.values().find(|record| record.id == id).map(|record| record.key)
    }

    /// The number of waiting requests.
    pub fn queue_depth(&self) -> usize {
        self.lock().core.queue_len()
    }

    /// The number of connected workers; a worker that is changing its link is counted once.
    pub fn worker_count(&self) -> usize {
        self.lock().workers().count()
    }

    /// True if no worker can serve the model, as far as that is known: no worker has ever listed it, and all connected
    /// workers list models. A worker that lists none has not read its backend's list yet.
    pub fn never_listed(&self, model: &str) -> bool {
        let state = self.lock();
        !state.listed.contains(model) && !state.links.is_empty() && state.links.values().all(|link| link.lists_models())
    }

    /// True if a worker has listed the model, even if none serves it now.
    pub fn has_listed(&self, model: &str) -> bool {
        self.lock().listed.contains(model)
    }

    /// Returns the listed name that a worker's backend resolves `name` to, if it is another one. A name that is served
    /// now is preferred.
    pub fn spelled(&self, name: &str) -> Option<Arc<str>> {
        let state = self.lock();
        let listed = state.listed.spelled(name);
        let served = listed.iter().find(|listed| state.core.worker_serves(listed));
        served.or(listed.first()).cloned()
    }

    /// True if a connected worker serves the model.
    pub fn serves(&self, model: &str) -> bool {
        self.lock().core.worker_serves(model)
    }

    /// Returns the models that workers mean by a name; empty if no worker serves it.
    pub fn ids_of(&self, name: &str) -> BTreeSet<Arc<str>> {
        self.lock().core.ids_of(name)
    }

    /// Returns the model that requests by this name are counted as.
    pub fn counted_as(&self, name: &str) -> Arc<str> {
        self.lock().core.counted_as(name)
    }

    /// Returns the worker that accepts requests for the model, if it is the only one.
    pub fn sole_worker_for(&self, model: &str) -> Option<WorkerKey> {
        self.lock().core.sole_worker_for(model)
    }

    /// Returns the only connected worker, if there is exactly one. If it is changing its link, the newer link is
    /// returned.
    pub fn sole_worker(&self) -> Option<WorkerKey> {
        let state = self.lock();
        let mut workers = state.workers();
        workers.next().filter(|_| workers.next().is_none())
    }

    /// Returns the models that a worker serves that is not draining.
    pub fn live_models(&self) -> Vec<Arc<str>> {
        let state = self.lock();
        state
            .core
            .models(Instant::now())
            .into_iter()
            .filter(|model| model.workers > 0)
            .map(|model| model.model)
            .collect()
    }
}

impl ProviderCore {
    /// Returns one link of each connected worker: the newest, if an older one only finishes its requests.
    fn workers(&self) -> impl Iterator<Item = WorkerKey> {
        let newest =
            |link: &WorkerLink| link.info.instance.as_ref().and_then(|instance| self.by_instance.get(instance));
        let is_newest = move |link: &&Arc<WorkerLink>| newest(link).is_none_or(|newest| *newest == link.info.key);
        self.links.values().filter(is_newest).map(|link| link.info.key)
    }
}
