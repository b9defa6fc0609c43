//! Limits and capabilities of models, as the connected workers and the settings state them.

use std::sync::Arc;

use modelrelay_protocol::model_details::{DetailsByModel, ModelDetails};

use super::Provider;
use crate::settings::config::ProviderConfig;

/// The details of a provider's models at one moment.
pub struct Details {
    /// The details from each worker that accepts requests.
    workers: Vec<Arc<DetailsByModel>>,
    config: Arc<ProviderConfig>,
}

impl Provider {
    /// Returns the details of all models.
    pub fn details(&self) -> Details {
        let links = self.links();
        let serving = links.iter().filter(|link| link.draining_since().is_none());
        let workers = serving.map(|link| link.details()).filter(|details| !details.is_empty()).collect();
        Details { workers, config: self.config() }
    }
}

impl Details {
    /// Returns the details that hold for every worker that serves the model `id`, by one of its names. The settings
    /// override the workers, and those of an alias override those of its model.
    pub fn of(&self, name: &str, id: &str) -> ModelDetails {
        let mut stated = self.workers.iter().filter_map(|worker| worker.of(id));
        let mut details = stated.next().cloned().unwrap_or_default();
        stated.for_each(|other| details.merge(other));
        for declared in [id, name].iter().filter_map(|name| self.config.model_details.get(*name)) {
            details.replace(declared);
        }
        details
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn worker(details: &Value) -> Arc<DetailsByModel> {
        Arc::new(serde_json::from_value(details.clone()).unwrap())
    }

    fn shown(details: &Details, name: &str, id: &str) -> Value {
        Value::Object(details.of(name, id).fields().clone())
    }

    #[test]
    fn smallest_figure_of_several_workers_is_shown() {
        let workers =
            [json!({"m": {"max_model_len": 9}}), json!({"n": {"n_ctx": 1}}), json!({"m": {"max_model_len": 7}})];
        let details =
            Details { workers: workers.iter().map(worker).collect(), config: ProviderConfig::new("p").into() };
        assert_eq!(shown(&details, "m", "m"), json!({"max_model_len": 7}));
        assert_eq!(shown(&details, "unknown", "unknown"), json!({}));
    }

    #[test]
    fn configured_details_override_those_of_workers() {
        let mut config = ProviderConfig::new("p");
        let declared = |fields| ModelDetails::listed(&fields);
        config.model_details.insert("m".into(), declared(json!({"n_ctx": 5})));
        config.model_details.insert("fast".into(), declared(json!({"context_length": 3})));
        let workers = vec![worker(&json!({"m": {"n_ctx": 9, "max_tokens": 2}, "fast": {"n_ctx": 1}}))];
        let details = Details { workers, config: config.into() };
        assert_eq!(shown(&details, "m", "m"), json!({"n_ctx": 5, "max_tokens": 2}));
        assert_eq!(shown(&details, "fast", "m"), json!({"n_ctx": 5, "max_tokens": 2, "context_length": 3}));
    }
}
