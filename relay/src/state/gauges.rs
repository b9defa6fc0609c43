//! The relay's state for its gauges, read at each scrape.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Relay;
use crate::dispatch::ModelSnapshot;
use crate::provider::{self, Provider};
use crate::settings::config::ProviderConfig;
use crate::telemetry::metrics::{ModelGauges, ProviderGauges, RelayGauges, StateSource, WorkerGauges};

impl StateSource for Relay {
    fn state(&self) -> RelayGauges {
        RelayGauges {
            providers: self.providers.all().iter().map(|provider| provider_state(self, provider)).collect(),
            buffered_bytes: self.shared.budget.used(),
            buffered_bytes_limit: self.shared.budget.limit(),
            are_keys_broken: self.keys.error().is_some(),
        }
    }
}

fn provider_state(relay: &Relay, provider: &Provider) -> ProviderGauges {
    let (state, config) = (provider.snapshot(), provider.config());
    let known = |model: &str| relay.providers.knows(provider, model);
    let models = models(&state, &config)
        .map(|model| ModelGauges {
            known: known(&model.model),
            // The workers of an alias are those of its model.
            workers: if model.counted_as == model.model { model.workers as u64 } else { 0 },
            queued: u64::from(model.waiting),
            in_flight: state.in_flight_by_model.get(&model.model).copied().unwrap_or(0),
            name: model.counted_as.to_string(),
        })
        .collect();
    ProviderGauges {
        name: provider.name.to_string(),
        queue_capacity: config.max_queue_len as u64,
        queue_oldest_age: state.oldest_age,
        queued_bytes: state.queue_bytes,
        homes: state.homes as u64,
        models,
        workers: state.workers.iter().map(worker_state).collect(),
    }
}

/// Every model that a worker serves, a request names, or the configuration declares. A declared one without workers
/// shows as 0, on which alerts and scalers depend.
pub(crate) fn models(state: &provider::ProviderState, config: &ProviderConfig) -> impl Iterator<Item = ModelSnapshot> {
    let live: BTreeMap<Arc<str>, ModelSnapshot> =
        state.models.iter().map(|model| (Arc::clone(&model.model), model.clone())).collect();
    let declared = config.models.iter().flatten().map(|model| &model.id).chain(&config.cold_models);
    let mut all: BTreeMap<Arc<str>, ModelSnapshot> = declared
        .map(|name| {
            let model: Arc<str> = name.as_str().into();
            let unserved = ModelSnapshot {
                counted_as: Arc::clone(&model),
                model: Arc::clone(&model),
                waiting: 0,
                oldest: None,
                workers: 0,
                open_workers: 0,
                assigned: None,
            };
            (model, unserved)
        })
        .collect();
    all.extend(live);
    all.into_values()
}

fn worker_state(worker: &provider::WorkerState) -> WorkerGauges {
    let core = &worker.core;
    let used = core.in_flight.len() as u64;
    let granted = core.grant.map_or(0, |grant| u64::from(grant.slots));
    let free = u64::from(core.max_concurrent.saturating_sub(core.load));
    WorkerGauges {
        id: worker.link.info.id.to_string(),
        location: worker.link.info.location.clone(),
        is_draining: core.draining,
        used,
        slots: if core.core1 { granted.max(used) } else { used + free },
        granted,
        backlog_bytes: core.backlog,
        last_heartbeat: worker.link.heard_at(),
    }
}
