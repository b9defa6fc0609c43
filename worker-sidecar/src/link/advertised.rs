//! The models that a worker advertises, and their details.

use modelrelay_protocol::model_details::DetailsByModel;
use modelrelay_protocol::names::Naming;

use crate::settings::{BackendSettings, Declared, Engine, OLLAMA_PORT};

/// The models in `register` and `models_update`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advertised {
    /// The names, in order.
    pub models: Vec<String>,
    /// The details of the models, as far as they are known.
    pub details: DetailsByModel,
    /// How the backend matches names.
    pub naming: Naming,
    /// The models whose requests the backend fails, in order.
    pub failing: Vec<String>,
}

/// Returns how this backend matches names. Ollama is recognised by the settings or by its port.
pub fn naming(backend: &BackendSettings) -> Naming {
    match (backend.engine, backend.url.port_or_known_default()) {
        (Engine::Ollama, _) | (Engine::OpenAi, Some(OLLAMA_PORT)) => Naming::Ollama,
        (Engine::Vllm | Engine::Sglang | Engine::LlamaServer | Engine::OpenAi, _) => Naming::Exact,
    }
}

impl Advertised {
    /// Models with the details that their backend lists, in which declared fields replace listed ones.
    pub fn new(models: Vec<String>, listed: &Declared, declared: &Declared) -> Self {
        let details_of = |model: &String| {
            let mut details = listed.get(model).cloned().unwrap_or_default();
            if let Some(declared) = declared.get(model) {
                details.replace(declared);
            }
            (model.clone(), details)
        };
        let details = models.iter().map(details_of).collect();
        Self { models, details, naming: Naming::Exact, failing: Vec::new() }
    }

    /// Sets how the backend matches names.
    #[must_use]
    pub fn with_naming(self, naming: Naming) -> Self {
        Self { naming, ..self }
    }

    /// Sets the models that are failing.
    pub fn with_failing(mut self, is_failing: impl Fn(&str) -> bool) -> Self {
        self.failing = self.models.iter().filter(|model| is_failing(model)).cloned().collect();
        self
    }
}

#[cfg(test)]
mod tests {
    use modelrelay_protocol::model_details::ModelDetails;
    use serde_json::json;

    use super::*;

    #[test]
    fn declared_details_replace_listed_ones() {
        let details = |entry| ModelDetails::listed(&entry);
        let listed = [("a", json!({"max_model_len": 9, "context_length": 8})), ("gone", json!({"n_ctx": 7}))];
        let listed = listed.map(|(model, entry)| (model.to_owned(), details(entry))).into();
        let declared = [("a", json!({"context_length": 5})), ("b", json!({"n_ctx": 6}))];
        let declared = declared.map(|(model, entry)| (model.to_owned(), details(entry))).into();
        let advertised = Advertised::new(vec!["a".to_owned(), "b".to_owned(), "c".to_owned()], &listed, &declared);
        assert_eq!(advertised.details.of("a"), Some(&details(json!({"max_model_len": 9, "context_length": 5}))));
        assert_eq!(advertised.details.of("b"), Some(&details(json!({"n_ctx": 6}))));
        assert!(advertised.details.of("c").is_none() && advertised.details.of("gone").is_none());
    }
}
