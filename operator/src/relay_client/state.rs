//! The part of a relay's `/admin/state` that the operator reads. Fields that it does not know are no error: relays of other
//! versions answer too.

use std::collections::HashSet;

use serde::Deserialize;

use crate::relay_state::{RelayReport, RelaySnapshot};

/// One relay's answer.
#[derive(Debug, Deserialize)]
pub(super) struct RelayState {
    #[serde(default)]
    version: String,
    config_hash: Option<String>,
    config_error: Option<String>,
    #[serde(default)]
    phase: String,
    #[serde(default)]
    providers: Vec<ProviderState>,
}

#[derive(Debug, Deserialize)]
struct ProviderState {
    name: String,
    #[serde(default)]
    queue_depth: u64,
    #[serde(default)]
    in_flight: u64,
    #[serde(default)]
    models: Vec<ModelState>,
    #[serde(default)]
    workers: Vec<WorkerState>,
}

#[derive(Debug, Deserialize)]
struct ModelState {
    id: String,
    #[serde(default)]
    waiting: u64,
    #[serde(default)]
    in_flight: u64,
}

#[derive(Debug, Deserialize)]
struct WorkerState {
    worker_id: String,
    #[serde(default)]
    worker_name: String,
    #[serde(default)]
    models: Vec<String>,
    #[serde(default)]
    max_concurrent: u64,
    #[serde(default)]
    in_flight_count: u64,
    #[serde(default)]
    is_draining: bool,
    instance_id: Option<String>,
    pool: Option<String>,
}

impl RelayState {
    /// What concerns the relay itself.
    pub(super) fn report(&self) -> RelayReport {
        RelayReport {
            config_hash: self.config_hash.clone(),
            config_error: self.config_error.clone(),
            phase: self.phase.clone(),
            version: self.version.clone(),
        }
    }

    /// Adds what concerns the provider. `staying` collects the workers that one relay at least may still give work to.
    pub(super) fn add_to(self, provider: &str, snapshot: &mut RelaySnapshot, staying: &mut HashSet<String>) {
        for state in self.providers.into_iter().filter(|state| state.name == provider) {
            snapshot.queue_depth += state.queue_depth;
            snapshot.in_flight += state.in_flight;
            for model in state.models {
                let sum = snapshot.models.entry(model.id).or_default();
                sum.waiting += model.waiting;
                sum.in_flight += model.in_flight;
            }
            for worker in state.workers {
                worker.add_to(snapshot, staying);
            }
        }
    }
}

impl WorkerState {
    /// Workers of other programs state no instance; there each connection counts as a worker.
    fn add_to(self, snapshot: &mut RelaySnapshot, staying: &mut HashSet<String>) {
        let instance = self.instance_id.unwrap_or(self.worker_id);
        if !self.is_draining {
            staying.insert(instance.clone());
        }
        let is_new = !snapshot.workers.contains_key(&instance);
        let sum = snapshot.workers.entry(instance).or_default();
        for model in self.models {
            if sum.models.insert(model.clone()) {
                snapshot.models.entry(model).or_default().workers += 1;
            }
        }
        if is_new {
            sum.name = self.worker_name;
            sum.pool = self.pool;
        }
        sum.max_concurrent = sum.max_concurrent.max(self.max_concurrent);
        sum.in_flight += self.in_flight_count;
        sum.links += 1;
    }
}
