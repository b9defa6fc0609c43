//! The relay's configuration: `relay.yaml`, the worker secrets that it names, and the hash by which a relay reports
//! that it runs it.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use modelrelay_protocol::config_hash::config_hash;
use modelrelay_protocol::secret::Secret;
use serde::Serialize;
use serde_json::json;

use super::Manifest;
use super::secrets::{WORKER_SECRET, data, secret};
use crate::crd::common::DurationText;
use crate::resources::names;
use crate::spec::provider::ValidatedProvider;
use crate::spec::rotation::{MAX_PREVIOUS, Plan, Previous};
use shared::SharedEntry;

pub mod shared;

/// Key of the configuration in its Secret.
pub const RELAY_YAML: &str = "relay.yaml";
/// Keys of the previous secrets in the configuration Secret, newest first. Older operators know only the first.
pub const PREVIOUS_WORKER_SECRETS: [&str; MAX_PREVIOUS] = [
    "worker-secret-previous",
    "worker-secret-previous-2",
    "worker-secret-previous-3",
    "worker-secret-previous-4",
    "worker-secret-previous-5",
    "worker-secret-previous-6",
    "worker-secret-previous-7",
    "worker-secret-previous-8",
];

/// The prefix of the line of `relay.yaml` that keeps its hash from revealing anything. The hash appears in annotations
/// and in `/admin/state`, and except for the worker secrets, everything it covers could be known or guessed. Without
/// the salt, a reader of the hash could test weak secrets against it offline. The line is a comment, because relays
/// reject unknown fields.
const SALT: &str = "# salt: ";
/// 32 bytes are 43 characters; the operator never writes a shorter salt.
const MIN_SALT_CHARS: usize = 43;

/// The configuration that is mounted into relays.
pub struct RelayConfig {
    /// The Secret.
    pub manifest: Manifest,
    /// The hash that relays report once they run it.
    pub hash: String,
}

/// Returns the configuration Secret and its hash. `sharers` are the other Providers that the relay serves.
pub fn relay_config(provider: &ValidatedProvider, plan: &Plan, salt: &Secret, sharers: &[SharedEntry]) -> RelayConfig {
    let yaml = format!("{SALT}{}\n{}", salt.expose(), relay_yaml(provider, plan, sharers));
    let mut entries = vec![(RELAY_YAML.to_owned(), yaml)];
    entries.extend(secret_entries(&plan.current, &plan.previous));
    for sharer in sharers {
        entries.extend(sharer.secrets.iter().map(|(file, value)| (file.clone(), value.expose().to_owned())));
    }
    let entries = || entries.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let hash = hash_of(entries());
    RelayConfig { manifest: secret(secret_metadata(provider, plan), data(entries())), hash }
}

/// Returns the Secret with the worker secrets of a Provider that another one's relay serves. That Provider's
/// configuration contains copies, and this one is what a rotation continues from.
pub fn sharer_secrets(provider: &ValidatedProvider, plan: &Plan) -> Manifest {
    let entries = secret_entries(&plan.current, &plan.previous);
    let entries = entries.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    secret(secret_metadata(provider, plan), data(entries))
}

/// Returns the worker secrets by key, the current one first, then the previous ones, newest first.
fn secret_entries(current: &Secret, previous: &[Previous]) -> Vec<(String, String)> {
    let previous = PREVIOUS_WORKER_SECRETS.into_iter().zip(previous).map(|(key, previous)| (key, &previous.value));
    let all = [(WORKER_SECRET, current)].into_iter().chain(previous);
    all.map(|(key, value)| (key.to_owned(), value.expose().to_owned())).collect()
}

fn secret_metadata(provider: &ValidatedProvider, plan: &Plan) -> serde_json::Map<String, serde_json::Value> {
    let mut annotations = serde_json::Map::new();
    for (age, previous) in plan.previous.iter().enumerate().take(MAX_PREVIOUS) {
        if let Some(until) = previous.until {
            annotations.insert(names::previous_until_annotation(age), json!(until.to_string()));
        }
    }
    if let Some(acted_on) = &plan.acted_on {
        annotations.insert(names::ROTATE_ANNOTATION.to_owned(), json!(acted_on));
    }
    let mut metadata = provider.metadata(&names::relay(&provider.name));
    if !annotations.is_empty() {
        metadata.insert("annotations".to_owned(), annotations.into());
    }
    metadata
}

/// Returns the salt of a `relay.yaml`. It must be kept, because another salt is another configuration.
pub fn salt_of(relay_yaml: &str) -> Option<&str> {
    let salt = relay_yaml.lines().next()?.strip_prefix(SALT)?;
    (salt.len() >= MIN_SALT_CHARS).then_some(salt)
}

/// Returns the hash that relays report for a configuration Secret with these entries, in this order: `relay.yaml` names
/// first the current worker secret, then the previous ones, newest first.
pub fn hash_of<'a>(entries: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> String {
    let yaml = entries.clone().find(|(key, _)| *key == RELAY_YAML).map_or("", |(_, yaml)| yaml);
    config_hash(yaml.as_bytes(), entries.filter(|(key, _)| *key != RELAY_YAML))
}

fn text(duration: Option<&DurationText>) -> Option<&str> {
    duration.map(|duration| duration.0.as_str())
}

fn relay_yaml(provider: &ValidatedProvider, plan: &Plan, sharers: &[SharedEntry]) -> String {
    let spec = &provider.spec;
    let own = provider_yaml(provider, &provider.name, "", &plan.previous);
    let own = serde_yaml::to_value(own).unwrap_or_default();
    let file = RelayYaml {
        require_api_keys: spec.relay.require_api_keys,
        relay_count: spec.relay.replicas.max(1),
        expect_workers: spec.relay.expect_workers && !provider.scales_from_zero,
        unready_when_saturated: spec.relay.unready_when_saturated,
        tenants: &spec.relay.tenants,
        providers: std::iter::once(&own).chain(sharers.iter().map(|sharer| &sharer.yaml)).collect(),
    };
    serde_yaml::to_string(&file).unwrap_or_default()
}

/// Returns the part of `relay.yaml` for one Provider; the keys of its secrets begin with `prefix`.
fn provider_yaml<'a>(
    provider: &'a ValidatedProvider,
    name: &'a str,
    prefix: &str,
    previous: &[Previous],
) -> Provider<'a> {
    let spec = &provider.spec;
    let mut worker_secrets = vec![SecretFile { file: format!("{prefix}{WORKER_SECRET}"), not_after: None }];
    worker_secrets.extend(
        PREVIOUS_WORKER_SECRETS
            .into_iter()
            .zip(previous)
            .map(|(key, previous)| SecretFile { file: format!("{prefix}{key}"), not_after: previous.until }),
    );
    Provider {
        name,
        enabled: spec.enabled,
        cold_models: &provider.cold_models,
        worker_secrets,
        worker_service_accounts: provider.worker_accounts(),
        models: spec.models.iter().map(|model| Model { id: &model.id, aliases: &model.aliases }).collect(),
        aliases: &spec.aliases,
        default_model: spec.default_model.as_deref(),
        fallback_model: spec.fallback_model.as_deref(),
        queue: QueueYaml {
            max_length: spec.queue.max_length,
            max_bytes: &spec.queue.max_bytes,
            timeout: text(spec.queue.timeout.as_ref()),
            cold_timeout: text(spec.queue.cold_timeout.as_ref()),
        },
        request_timeout: text(spec.request_timeout.as_ref()),
        stream_idle_timeout: text(spec.stream_idle_timeout.as_ref()),
        placement: spec.placement.as_ref(),
        fairness: spec.fairness.as_ref(),
        first_byte_timeout: text(spec.first_byte_timeout.as_ref()),
        max_models_per_worker: spec.max_models_per_worker,
        require_protocol_version: spec.require_protocol_version,
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RelayYaml<'a> {
    require_api_keys: bool,
    relay_count: i32,
    expect_workers: bool,
    unready_when_saturated: bool,
    /// Only if configured: an older relay rejects fields that it does not know.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tenants: &'a [crate::crd::tenants::Tenant],
    providers: Vec<&'a serde_yaml::Value>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Provider<'a> {
    name: &'a str,
    enabled: bool,
    cold_models: &'a [String],
    worker_secrets: Vec<SecretFile>,
    /// Only if configured: an older relay rejects fields that it does not know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    worker_service_accounts: Vec<String>,
    models: Vec<Model<'a>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    aliases: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default_model: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fallback_model: Option<&'a str>,
    queue: QueueYaml<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_timeout: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_idle_timeout: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_byte_timeout: Option<&'a str>,
    /// Only if configured: an older relay rejects fields that it does not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    placement: Option<&'a crate::crd::placement::Placement>,
    /// Only if configured: an older relay rejects fields that it does not know.
    #[serde(skip_serializing_if = "Option::is_none")]
    fairness: Option<&'a crate::crd::fairness::Fairness>,
    max_models_per_worker: i32,
    require_protocol_version: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SecretFile {
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_after: Option<Timestamp>,
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    aliases: &'a [String],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct QueueYaml<'a> {
    max_length: i32,
    max_bytes: &'a crate::crd::common::SizeText,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cold_timeout: Option<&'a str>,
}
