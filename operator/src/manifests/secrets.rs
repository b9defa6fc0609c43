//! The Secrets that may outlive their Provider: the worker secret, the admin token and the API keys.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::core::ApiResource;
use modelrelay_protocol::secret::Secret as SecretText;
use serde_json::{Map, Value, json};

use super::{Manifest, object};
use crate::resources::names;
use crate::spec::provider::ValidatedProvider;
use crate::spec::rotation::Plan;

/// Key of the secret that workers should present, in the configuration Secret and in the Secret that workers mount.
pub const WORKER_SECRET: &str = "worker-secret";
/// Key of the admin token in its Secret.
pub const ADMIN_TOKEN: &str = "token";

/// Key of the API keys in their Secret.
pub const API_KEYS: &str = "keys.json";

/// Returns the Secret that workers mount.
pub fn worker_secret(provider: &ValidatedProvider, plan: &Plan) -> Manifest {
    let mut metadata = provider.retained_metadata(&names::worker_secret(&provider.name));
    let changed_at = plan.worker_changed_at.to_string();
    metadata.insert("annotations".to_owned(), json!({names::SECRET_CHANGED_ANNOTATION: changed_at}));
    secret(metadata, data([(WORKER_SECRET, plan.worker.expose())]))
}

/// Returns the Secret with the token of the relay's admin API, if the user names none.
pub fn admin_secret(provider: &ValidatedProvider, token: &SecretText) -> Manifest {
    let metadata = provider.retained_metadata(&names::admin_secret(&provider.name));
    secret(metadata, data([(ADMIN_TOKEN, token.expose())]))
}

/// Returns the Secret of the API keys. Only the relays manage its content; this creates the object that they write to.
pub fn api_keys_secret(provider: &ValidatedProvider) -> Manifest {
    let metadata = provider.retained_metadata(&names::api_keys_secret(&provider.name));
    secret(metadata, Map::new())
}

/// Builds a Secret with these values.
pub(super) fn secret(metadata: Map<String, Value>, data: Map<String, Value>) -> Manifest {
    let mut manifest = object(ApiResource::erase::<Secret>(&()), metadata, "type", json!("Opaque"));
    if let (Some(secret), false) = (manifest.value.as_object_mut(), data.is_empty()) {
        secret.insert("data".to_owned(), Value::Object(data));
    }
    manifest
}

/// Encodes values as a Secret's `data`.
pub(super) fn data<'a>(entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> Map<String, Value> {
    let encode = |text: &str| json!(ByteString(text.as_bytes().to_vec()));
    entries.into_iter().map(|(key, text)| (key.to_owned(), encode(text))).collect()
}
