//! Which provider a request belongs to, and what its backend calls the model.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::limits::MAX_MODEL_CHARS;

use crate::config::ProviderConfig;
use crate::provider::Provider;

/// All providers, in the order of the file, which decides between two that both serve a model.
#[derive(Default)]
pub struct Providers {
    table: ArcSwap<Table>,
}

#[derive(Default)]
struct Table {
    entries: Vec<Entry>,
    /// Removed ones whose requests or workers have not ended yet.
    leaving: Vec<Arc<Provider>>,
}

struct Entry {
    provider: Arc<Provider>,
    /// From every name that a client may write to the backend's; empty without a catalogue.
    catalogue: HashMap<Arc<str>, Arc<str>>,
    cold: Vec<Arc<str>>,
    is_open: bool,
}

/// Where a request goes.
pub struct Route {
    /// The provider.
    pub provider: Arc<Provider>,
    /// The backend's name of the model.
    pub model: Arc<str>,
}

impl Providers {
    /// Replaces the whole set and returns those that are no part of it any more. In the same step they become leaving
    /// ones: whoever looks for what a provider still runs finds it at any moment.
    pub fn replace(&self, providers: &[Arc<Provider>]) -> Vec<Arc<Provider>> {
        let mut gone = self.all();
        gone.retain(|old| !providers.iter().any(|kept| Arc::ptr_eq(kept, old)));
        let mut leaving = self.table.load().leaving.clone();
        leaving.extend(gone.iter().cloned());
        self.store(providers, leaving);
        gone
    }

    /// Lets go of the leaving ones that have nothing left to finish.
    pub fn forget_finished(&self) {
        let mut leaving = self.table.load().leaving.clone();
        leaving.retain(|provider| !provider.is_idle() || provider.worker_count() > 0);
        self.store(&self.all(), leaving);
    }

    fn store(&self, providers: &[Arc<Provider>], leaving: Vec<Arc<Provider>>) {
        let entry = |provider: &Arc<Provider>| Entry::new(&provider.config(), Arc::clone(provider));
        self.table.store(Arc::new(Table { entries: providers.iter().map(entry).collect(), leaving }));
    }

    /// All of them, in order.
    pub fn all(&self) -> Vec<Arc<Provider>> {
        self.table.load().entries.iter().map(|entry| Arc::clone(&entry.provider)).collect()
    }

    /// All of them, and behind them those that were removed and still have something to finish.
    pub fn all_with_leaving(&self) -> Vec<Arc<Provider>> {
        let table = self.table.load();
        table.entries.iter().map(|entry| &entry.provider).chain(&table.leaving).cloned().collect()
    }

    /// The provider of this name.
    pub fn named(&self, name: &str) -> Option<Arc<Provider>> {
        let table = self.table.load();
        table.entries.iter().find(|entry| &*entry.provider.name == name).map(|entry| Arc::clone(&entry.provider))
    }

    /// Where a request for `model` goes: to the provider that it names, else to the first whose catalogue has the model,
    /// else to the first with a worker that serves it, else to the first with a worker that did. A sole provider without a
    /// catalogue gets every request while it has no worker.
    pub fn route(&self, named: Option<&str>, model: &str) -> Result<Route, ApiError> {
        // Nobody can serve it, because no worker, catalogue or alias may have such a name. It must not wait either: what waits
        // is logged and listed by its name.
        if model.chars().nth(MAX_MODEL_CHARS).is_some() {
            return Err(model_not_found(model));
        }
        let table = self.table.load();
        let candidates: Vec<&Entry> = match named {
            None => table.entries.iter().collect(),
            Some(name) => {
                let entry = table.entries.iter().find(|entry| &*entry.provider.name == name);
                vec![entry.ok_or_else(|| provider_not_found(name))?]
            }
        };
        if let Some(route) = candidates.iter().find_map(|entry| entry.declared(model)) {
            return Ok(route);
        }
        if let [entry] = &*table.entries
            && entry.is_open
            && !entry.provider.never_listed(model)
        {
            return Ok(Route { provider: Arc::clone(&entry.provider), model: model.into() });
        }
        let open = || candidates.iter().filter(|entry| entry.is_open);
        let serving = open().find(|entry| entry.provider.serves(model));
        let served = || open().find(|entry| entry.provider.has_listed(model));
        let entry = serving.or_else(served).ok_or_else(|| model_not_found(model))?;
        Ok(Route { provider: Arc::clone(&entry.provider), model: model.into() })
    }

    /// Whether a worker that comes may bring models that nobody has heard of.
    pub fn may_get_models(&self, named: Option<&str>) -> bool {
        let table = self.table.load();
        table.entries.iter().any(|entry| entry.is_open && named.is_none_or(|name| *entry.provider.name == *name))
    }

    /// Every name that a client may write, with its provider: what workers serve, catalogues, aliases, cold models.
    pub fn names(&self) -> Vec<(Arc<str>, Arc<Provider>)> {
        let table = self.table.load();
        let mut names = Vec::new();
        for entry in table.entries.iter().filter(|entry| entry.provider.config().enabled) {
            let live = entry.provider.live_models();
            let all = entry.catalogue.keys().chain(&entry.cold).chain(&live);
            names.extend(all.map(|name| (Arc::clone(name), Arc::clone(&entry.provider))));
        }
        // Stable, so that of two providers with the same name the first in the file stays first.
        names.sort_by(|a, b| a.0.cmp(&b.0));
        names.dedup_by(|later, first| later.0 == first.0);
        names
    }

    /// Whether some worker, catalogue or setting names the model; only such names may become metric labels.
    pub fn knows(&self, provider: &Provider, model: &str) -> bool {
        let table = self.table.load();
        let entry = table.entries.iter().find(|entry| entry.provider.name == provider.name);
        entry.is_some_and(|entry| entry.declared(model).is_some()) || provider.serves(model)
    }
}

impl Entry {
    fn new(config: &ProviderConfig, provider: Arc<Provider>) -> Self {
        let mut catalogue: HashMap<Arc<str>, Arc<str>> = HashMap::new();
        for model in config.models.iter().flatten() {
            let id: Arc<str> = model.id.as_str().into();
            for alias in &model.aliases {
                catalogue.insert(alias.as_str().into(), Arc::clone(&id));
            }
            catalogue.insert(Arc::clone(&id), id);
        }
        let cold = config.cold_models.iter().map(|model| model.as_str().into()).collect();
        Self { provider, catalogue, cold, is_open: config.models.is_none() }
    }

    fn declared(&self, model: &str) -> Option<Route> {
        let cold = || self.is_open.then(|| self.cold.iter().find(|cold| &***cold == model)).flatten();
        let id = self.catalogue.get(model).or_else(cold)?;
        Some(Route { provider: Arc::clone(&self.provider), model: Arc::clone(id) })
    }
}

fn model_not_found(model: &str) -> ApiError {
    let shown: String = model.chars().take(MAX_MODEL_CHARS).collect();
    ApiError::new(ErrorKind::ModelNotFound, format!("no provider for model {shown}"))
}

fn provider_not_found(name: &str) -> ApiError {
    let shown: String = name.chars().take(128).collect();
    ApiError::new(ErrorKind::ProviderNotFound, format!("no provider is named {shown}"))
}
