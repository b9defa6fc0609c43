//! The relay's state as its gauges show it, asked for at each scrape.

use crate::metrics::{ModelState, ProviderState, State, StateSource, WorkerState};
use crate::provider::{self, Provider};

use super::Relay;

impl StateSource for Relay {
    fn state(&self) -> State {
        State {
            providers: self.providers.all().iter().map(|provider| provider_state(self, provider)).collect(),
            buffered_bytes: self.shared.budget.used(),
            buffered_bytes_limit: self.shared.budget.limit(),
            are_keys_broken: self.keys.error().is_some(),
        }
    }
}

fn provider_state(relay: &Relay, provider: &Provider) -> ProviderState {
    let (state, config) = (provider.snapshot(), provider.config());
    let mut models: Vec<ModelState> = state
        .models
        .iter()
        .map(|model| ModelState {
            name: model.model.to_string(),
            known: relay.providers.knows(provider, &model.model),
            workers: model.workers as u64,
            queued: u64::from(model.waiting),
            in_flight: state.in_flight_by_model.get(&model.model).copied().unwrap_or(0),
        })
        .collect();
    // A declared model that nobody serves shows as 0, which is what an alert waits for.
    let declared = config.models.iter().flatten().map(|model| &model.id).chain(&config.cold_models);
    for name in declared {
        if !models.iter().any(|model| model.name == *name) {
            models.push(ModelState { name: name.clone(), known: true, ..ModelState::default() });
        }
    }
    ProviderState {
        name: provider.name.to_string(),
        queue_capacity: config.max_queue_len as u64,
        queue_oldest_age: state.oldest_age,
        queued_bytes: state.queue_bytes,
        models,
        workers: state.workers.iter().map(worker_state).collect(),
    }
}

fn worker_state(worker: &provider::WorkerState) -> WorkerState {
    let core = &worker.core;
    let used = core.in_flight.len() as u64;
    let granted = core.grant.map_or(0, |grant| u64::from(grant.slots));
    let free = u64::from(core.max_concurrent.saturating_sub(core.load));
    WorkerState {
        id: worker.link.info.id.to_string(),
        is_draining: core.draining,
        used,
        slots: if core.core1 { granted.max(used) } else { used + free },
        granted,
        last_heartbeat: worker.link.heard_at(),
    }
}
