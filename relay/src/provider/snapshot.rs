//! What a provider looks like from outside: for the admin API, readiness and metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Provider, State};
use crate::dispatch::{ModelSnapshot, RequestKey, RequestPlace, WorkerKey, WorkerSnapshot};
use crate::request::RequestRecord;
use crate::socket::link::WorkerLink;

/// A worker: its link, and what the core knows of it.
pub struct WorkerState {
    /// The connection.
    pub link: Arc<WorkerLink>,
    /// What the core knows.
    pub core: WorkerSnapshot,
}

/// A request that has not ended.
pub struct LiveRequest {
    /// What the shell knows.
    pub record: Arc<RequestRecord>,
    /// Where it is.
    pub place: Option<RequestPlace>,
}

impl LiveRequest {
    /// How far it has come, in a word for the admin API.
    pub fn stage(&self) -> &'static str {
        match self.place {
            Some(RequestPlace::Queued) => "queued",
            Some(RequestPlace::Running { .. }) if self.record.exchange.has_head() => "streaming",
            Some(RequestPlace::Running { .. }) => "dispatched",
            None => "ending",
        }
    }
}

/// A provider, as it stands.
pub struct ProviderState {
    /// Requests that wait.
    pub queue_depth: usize,
    /// Bytes of their bodies.
    pub queue_bytes: u64,
    /// The age of the oldest.
    pub oldest_age: Option<Duration>,
    /// Requests at workers.
    pub in_flight: usize,
    /// Requests at workers, by model.
    pub in_flight_by_model: BTreeMap<Arc<str>, u64>,
    /// Every model that a worker serves or a request asks for.
    pub models: Vec<ModelSnapshot>,
    /// Every worker, in the order in which they came.
    pub workers: Vec<WorkerState>,
}

impl Provider {
    /// Everything at once, under one lock.
    pub fn snapshot(&self) -> ProviderState {
        let now = Instant::now();
        let state = self.lock();
        let mut in_flight_by_model = BTreeMap::new();
        for record in state.requests.values() {
            if matches!(state.core.place_of(record.key), Some(RequestPlace::Running { .. })) {
                *in_flight_by_model.entry(Arc::clone(&record.outline.model)).or_default() += 1;
            }
        }
        let workers = state.core.workers().filter_map(|core| {
            let link = Arc::clone(state.links.get(&core.key)?);
            Some(WorkerState { link, core })
        });
        ProviderState {
            queue_depth: state.core.queue_len(),
            queue_bytes: state.core.queue_bytes(),
            oldest_age: state.core.oldest_age(now),
            in_flight: state.core.in_flight(),
            in_flight_by_model,
            models: state.core.models(now),
            workers: workers.collect(),
        }
    }

    /// Requests that have not ended, oldest first.
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

    /// A request that has not ended, by the id that its client was told.
    pub fn live_request(&self, id: &str) -> Option<RequestKey> {
        self.lock().requests.values().find(|record| record.outline.id == id).map(|record| record.key)
    }

    /// Requests that wait.
    pub fn queue_depth(&self) -> usize {
        self.lock().core.queue_len()
    }

    /// Connected workers; one that moves to another link is one.
    pub fn worker_count(&self) -> usize {
        self.lock().workers().count()
    }

    /// Whether nobody can serve the model, as far as that is known: no worker has ever listed it, and there are workers, all of
    /// which list models. One that lists none is asking its backend yet.
    pub fn never_listed(&self, model: &str) -> bool {
        let state = self.lock();
        !state.listed.contains(model) && !state.links.is_empty() && state.links.values().all(|link| link.lists_models())
    }

    /// Whether a worker has listed the model, though none may serve it now.
    pub fn has_listed(&self, model: &str) -> bool {
        self.lock().listed.contains(model)
    }

    /// Returns the listed name that a worker's backend takes `name` for, where that is another one. Of several, one that is
    /// served now comes first.
    pub fn spelled(&self, name: &str) -> Option<Arc<str>> {
        let state = self.lock();
        let listed = state.listed.spelled(name);
        let served = listed.iter().find(|listed| state.core.worker_serves(listed));
        served.or(listed.first()).cloned()
    }

    /// Whether a connected worker serves the model.
    pub fn serves(&self, model: &str) -> bool {
        self.lock().core.worker_serves(model)
    }

    /// What workers mean by a model's name; nothing where nobody serves it.
    pub fn ids_of(&self, name: &str) -> BTreeSet<Arc<str>> {
        self.lock().core.ids_of(name)
    }

    /// The model that requests by this name count for.
    pub fn counted_as(&self, name: &str) -> Arc<str> {
        self.lock().core.counted_as(name)
    }

    /// The one worker that takes requests for the model, if it is the only one.
    pub fn sole_worker_for(&self, model: &str) -> Option<WorkerKey> {
        self.lock().core.sole_worker_for(model)
    }

    /// The one connected worker, if it is the only one. One that moves to another link is asked over the newer.
    pub fn sole_worker(&self) -> Option<WorkerKey> {
        let state = self.lock();
        let mut workers = state.workers();
        workers.next().filter(|_| workers.next().is_none())
    }

    /// Models that a worker serves and is not about to leave.
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

impl State {
    /// A link of each connected worker: the newest, where an older one only finishes what it has.
    fn workers(&self) -> impl Iterator<Item = WorkerKey> {
        let newest =
            |link: &WorkerLink| link.info.instance.as_ref().and_then(|instance| self.by_instance.get(instance));
        let is_newest = move |link: &&Arc<WorkerLink>| newest(link).is_none_or(|newest| *newest == link.info.key);
        self.links.values().filter(is_newest).map(|link| link.info.key)
    }
}
