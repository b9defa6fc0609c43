//! The provider of a request, and its backend's name of the model.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::limits::MAX_MODEL_CHARS;

use crate::provider::Provider;
use crate::settings::config::ProviderConfig;

/// All providers, in the order of the file, which decides between two that both serve a model.
#[derive(Default)]
pub struct Providers {
    table: ArcSwap<Table>,
}

#[derive(Default)]
struct Table {
    entries: Vec<ProviderRoutes>,
    /// Removed ones whose requests or workers have not ended yet.
    leaving: Vec<Arc<Provider>>,
}

struct ProviderRoutes {
    provider: Arc<Provider>,
    /// Maps every name that a client may use to the backend's; empty without a catalogue.
    catalogue: HashMap<Arc<str>, Arc<str>>,
    /// Maps names to models. A model of the same name takes precedence.
    aliases: HashMap<Arc<str>, Arc<str>>,
    default_model: Option<Arc<str>>,
    fallback_model: Option<Arc<str>>,
    cold: Vec<Arc<str>>,
    is_open: bool,
}

/// The destination of a request.
pub struct Route {
    /// The provider.
    pub provider: Arc<Provider>,
    /// The backend's name of the model.
    pub model: Arc<str>,
}

/// A name that a client may use, and its meaning.
pub struct Named {
    /// The client's name.
    pub name: Arc<str>,
    /// The name that workers serve.
    pub model: Arc<str>,
    /// The provider of the model.
    pub provider: Arc<Provider>,
}

impl Providers {
    /// Replaces the whole set and returns the removed providers. In the same step they become leaving ones, so that
    /// their running requests can be found at any moment.
    pub fn replace(&self, providers: &[Arc<Provider>]) -> Vec<Arc<Provider>> {
        let mut gone = self.all();
        gone.retain(|old| !providers.iter().any(|kept| Arc::ptr_eq(kept, old)));
        let mut leaving = self.table.load().leaving.clone();
        leaving.extend(gone.iter().cloned());
        self.store(providers, leaving);
        gone
    }

    /// Releases leaving providers without unfinished requests or workers.
    pub fn forget_finished(&self) {
        let mut leaving = self.table.load().leaving.clone();
        leaving.retain(|provider| !provider.is_idle() || provider.worker_count() > 0);
        self.store(&self.all(), leaving);
    }

    fn store(&self, providers: &[Arc<Provider>], leaving: Vec<Arc<Provider>>) {
        let entry = |provider: &Arc<Provider>| ProviderRoutes::new(&provider.config(), Arc::clone(provider));
        self.table.store(Arc::new(Table { entries: providers.iter().map(entry).collect(), leaving }));
    }

    /// All of them, in order.
    pub fn all(&self) -> Vec<Arc<Provider>> {
        self.table.load().entries.iter().map(|entry| Arc::clone(&entry.provider)).collect()
    }

    /// All of them, followed by removed ones with unfinished work.
    pub fn all_with_leaving(&self) -> Vec<Arc<Provider>> {
        let table = self.table.load();
        table.entries.iter().map(|entry| &entry.provider).chain(&table.leaving).cloned().collect()
    }

    /// The provider of this name.
    pub fn named(&self, name: &str) -> Option<Arc<Provider>> {
        self.table.load().candidates(Some(name)).next().map(|entry| Arc::clone(&entry.provider))
    }

    /// The route of a request for `model`: to the provider that it names, else to the first whose catalogue has the
    /// model, else to the first with a worker that serves it, else to the first that may wake one, else to the first
    /// that has it as an alias, else to the first whose workers map the name to one of their models, else to the first
    /// with a worker that served it. A sole provider without a catalogue gets every request while it has no worker.
    pub fn route(&self, named: Option<&str>, model: &str) -> Result<Route, ApiError> {
        // It cannot be served, because no worker, catalogue or alias may have such a name. It must not wait either:
        // waiting requests are logged and listed by model.
        if model.chars().nth(MAX_MODEL_CHARS).is_some() {
            return Err(model_not_found(model));
        }
        let table = self.table.load();
        let candidates = || table.candidates(named);
        if let Some(name) = named
            && candidates().next().is_none()
        {
            return Err(provider_not_found(name));
        }
        if let Some(route) = now_served(candidates, model) {
            return Ok(route);
        }
        let aliased = || candidates().filter_map(|entry| Some((entry, entry.aliases.get(model)?)));
        let served = aliased().find_map(|(entry, id)| now_served(|| std::iter::once(entry), id));
        match (served, aliased().next()) {
            (Some(route), _) => Ok(route),
            (None, None) => {
                let spelled = candidates().find_map(|entry| Some((entry, entry.provider.spelled(model)?)));
                let route = match spelled {
                    Some((entry, listed)) => {
                        let only = || std::iter::once(entry);
                        now_served(only, &listed).or_else(|| table.expected(only(), &listed))
                    }
                    None => table.expected(candidates(), model),
                };
                route.ok_or_else(|| model_not_found(model))
            }
            (None, Some((entry, id))) => {
                table.expected(std::iter::once(entry), id).ok_or_else(|| alias_of_nothing(model, id))
            }
        }
    }

    /// Returns the route of a request for an unknown model, if a fallback is configured.
    pub fn fallback(&self, named: Option<&str>) -> Option<Route> {
        let table = self.table.load();
        table
            .candidates(named)
            .find_map(|entry| self.route(Some(&entry.provider.name), entry.fallback_model.as_deref()?).ok())
    }

    /// Returns the provider and the model of a request that names no model, if a default is configured.
    pub fn default_model(&self, named: Option<&str>) -> Option<(Arc<str>, Arc<str>)> {
        let table = self.table.load();
        table
            .candidates(named)
            .find_map(|entry| Some((Arc::clone(&entry.provider.name), Arc::clone(entry.default_model.as_ref()?))))
    }

    /// True if a new worker may add models that no provider knows yet.
    pub fn may_get_models(&self, named: Option<&str>) -> bool {
        let table = self.table.load();
        table.entries.iter().any(|entry| entry.is_open && named.is_none_or(|name| *entry.provider.name == *name))
    }

    /// Every name that a client may use: models of workers, catalogues, cold models, and aliases of any of these.
    pub fn names(&self) -> Vec<Named> {
        let table = self.table.load();
        // In the order in which requests are routed.
        let (mut names, mut live, mut cold, mut aliases) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for entry in table.entries.iter().filter(|entry| entry.provider.config().enabled) {
            let named = |(name, model): (&Arc<str>, &Arc<str>)| Named {
                name: Arc::clone(name),
                model: Arc::clone(model),
                provider: Arc::clone(&entry.provider),
            };
            let served = entry.provider.live_models();
            names.extend(entry.catalogue.iter().map(named));
            live.extend(served.iter().map(|name| named((name, name))));
            cold.extend(entry.cold.iter().map(|name| named((name, name))));
            let is_there = |model: &Arc<str>| {
                entry.catalogue.contains_key(model) || served.contains(model) || entry.cold.contains(model)
            };
            aliases.extend(entry.aliases.iter().filter(|(_, model)| is_there(model)).map(|(alias, model)| {
                let model = entry.catalogue.get(model).unwrap_or(model);
                named((alias, model))
            }));
        }
        // Stable, so that of two providers with the same name the first in the file stays first.
        names.extend(live.into_iter().chain(cold).chain(aliases));
        names.sort_by(|a, b| a.name.cmp(&b.name));
        names.dedup_by(|later, first| later.name == first.name);
        names
    }

    /// True if some worker, catalogue or setting names the model; only such names may become metric labels.
    pub fn knows(&self, provider: &Provider, model: &str) -> bool {
        let table = self.table.load();
        let entry = table.entries.iter().find(|entry| entry.provider.name == provider.name);
        entry.is_some_and(|entry| entry.declares(model)) || provider.serves(model)
    }
}

impl Table {
    fn candidates<'a>(&'a self, named: Option<&'a str>) -> impl Iterator<Item = &'a ProviderRoutes> {
        self.entries.iter().filter(move |entry| named.is_none_or(|name| *entry.provider.name == *name))
    }

    /// Returns the route on which a request waits for a model that no worker serves now.
    fn expected<'a>(&self, candidates: impl Iterator<Item = &'a ProviderRoutes>, model: &str) -> Option<Route> {
        if let [entry] = &*self.entries
            && entry.is_open
            && !entry.provider.never_listed(model)
        {
            return Some(entry.route(model.into()));
        }
        let mut open = candidates.filter(|entry| entry.is_open);
        open.find(|entry| entry.provider.has_listed(model)).map(|entry| entry.route(model.into()))
    }
}

/// Returns the first candidate whose catalogue has the model, else the first with a worker that serves it, else the
/// first that may wake one.
fn now_served<'a, I: Iterator<Item = &'a ProviderRoutes>>(candidates: impl Fn() -> I, model: &str) -> Option<Route> {
    let open = || candidates().filter(|entry| entry.is_open);
    let listed = candidates().find_map(|entry| entry.listed(model));
    let served = || open().find(|entry| entry.provider.serves(model)).map(|entry| entry.route(model.into()));
    listed.or_else(served).or_else(|| open().find_map(|entry| entry.cold(model)))
}

impl ProviderRoutes {
    fn new(config: &ProviderConfig, provider: Arc<Provider>) -> Self {
        let mut catalogue: HashMap<Arc<str>, Arc<str>> = HashMap::new();
        for model in config.models.iter().flatten() {
            let id: Arc<str> = model.id.as_str().into();
            for alias in &model.aliases {
                catalogue.insert(alias.as_str().into(), Arc::clone(&id));
            }
            catalogue.insert(Arc::clone(&id), id);
        }
        let names = &config.names;
        Self {
            provider,
            catalogue,
            aliases: names
                .aliases
                .iter()
                .map(|(alias, model)| (alias.as_str().into(), model.as_str().into()))
                .collect(),
            default_model: names.default_model.as_deref().map(Arc::from),
            fallback_model: names.fallback_model.as_deref().map(Arc::from),
            cold: config.cold_models.iter().map(|model| model.as_str().into()).collect(),
            is_open: config.models.is_none(),
        }
    }

    fn declares(&self, model: &str) -> bool {
        self.listed(model).is_some() || (self.is_open && self.cold(model).is_some())
    }

    fn listed(&self, model: &str) -> Option<Route> {
        Some(self.route(Arc::clone(self.catalogue.get(model)?)))
    }

    fn cold(&self, model: &str) -> Option<Route> {
        let id = self.cold.iter().find(|cold| &***cold == model)?;
        Some(self.route(Arc::clone(id)))
    }

    fn route(&self, model: Arc<str>) -> Route {
        Route { provider: Arc::clone(&self.provider), model }
    }
}

fn alias_of_nothing(alias: &str, model: &str) -> ApiError {
    let message = format!("{alias} is an alias of {model}, but no provider has that model");
    ApiError::new(ErrorKind::ModelNotFound, message)
}

fn model_not_found(model: &str) -> ApiError {
    let shown: String = model.chars().take(MAX_MODEL_CHARS).collect();
    ApiError::new(ErrorKind::ModelNotFound, format!("no provider for model {shown}"))
}

fn provider_not_found(name: &str) -> ApiError {
    let shown: String = name.chars().take(128).collect();
    ApiError::new(ErrorKind::ProviderNotFound, format!("no provider is named {shown}"))
}
