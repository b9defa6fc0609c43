//! Checks what the API server cannot check: contradictions, and values that the relay would reject.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use kube::ResourceExt;
use modelrelay_protocol::limits::MAX_MODEL_CHARS;
use modelrelay_protocol::names::{is_model_name, is_unprintable};
use serde_json::{Map, Value, json};
use tracing_subscriber::EnvFilter;

use super::worker_pool::wakeable_models;
use crate::crd::common::{DurationText, SizeText};
use crate::crd::provider::{SecretsPolicy, ServiceType};
use crate::crd::{Provider, ProviderSpec, WorkerPool};
use crate::resources::names::{self, Component, RESERVED_ENV, RESERVED_PATH, RESERVED_VOLUMES};

#[cfg(test)]
mod tests;

/// The relay's own limit.
const MAX_COLD_MODELS: usize = 1024;

/// A valid spec.
#[derive(Clone, Debug)]
pub struct ValidatedProvider {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its uid, for owner references.
    pub uid: String,
    /// Its spec.
    pub spec: ProviderSpec,
    /// The time that a stopping relay waits for running requests.
    pub drain_secs: u64,
    /// Models of pools that may be at zero.
    pub cold_models: Vec<String>,
    /// True if such a pool exists, here or of a Provider that the relay serves too.
    pub scales_from_zero: bool,
    /// True if the relay has tokens reviewed.
    pub reviews_tokens: bool,
    /// Other namespaces with Providers that the relay serves.
    pub guests: BTreeSet<String>,
}

/// The problems, each with its field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("; "))]
pub(crate) struct InvalidSpec(pub(crate) Vec<String>);

/// Checks a Provider and its pools.
pub(crate) fn validate(provider: &Provider, pools: &[Arc<WorkerPool>]) -> Result<ValidatedProvider, InvalidSpec> {
    let spec = &provider.spec;
    let mut problems = Vec::new();
    catalogue(spec, &mut problems);
    queue(spec, &mut problems);
    let drain_secs = seconds("relay.drainTimeout", &spec.relay.drain_timeout, &mut problems);
    relay(&provider.name_any(), spec, &mut problems);
    tenants(spec, &mut problems);
    pod_template(spec, &mut problems);
    if !problems.is_empty() {
        return Err(InvalidSpec(problems));
    }
    Ok(ValidatedProvider {
        name: provider.name_any(),
        namespace: provider.namespace().unwrap_or_default(),
        uid: provider.uid().unwrap_or_default(),
        spec: spec.clone(),
        drain_secs,
        cold_models: cold_models(pools),
        scales_from_zero: pools.iter().any(|pool| may_be_at_zero(pool)),
        reviews_tokens: spec.reviews_tokens(),
        guests: BTreeSet::new(),
    })
}

/// Returns the models for which a pool would be woken: the listed ones, otherwise those it last advertised.
pub(crate) fn cold_models(pools: &[Arc<WorkerPool>]) -> Vec<String> {
    let mut models = BTreeSet::new();
    for pool in pools.iter().filter(|pool| may_be_at_zero(pool)) {
        models.extend(wakeable_models(pool).cloned());
    }
    // A name that the relay would reject must not invalidate the whole configuration.
    models.into_iter().filter(|model| is_model_name(model)).take(MAX_COLD_MODELS).collect()
}

fn may_be_at_zero(pool: &WorkerPool) -> bool {
    pool.metadata.deletion_timestamp.is_none()
        && (pool.spec.replicas == Some(0)
            || pool.spec.scaling.as_ref().is_some_and(|scaling| scaling.min_replicas == 0))
}

impl ValidatedProvider {
    /// Includes a Provider that refers to this one, with its pools, in what the relay needs.
    pub(crate) fn serve_too(&mut self, sharer: &Provider, pools: &[Arc<WorkerPool>]) {
        let namespace = sharer.namespace().unwrap_or_default();
        if namespace != self.namespace {
            self.guests.insert(namespace);
        }
        self.reviews_tokens |= !sharer.spec.worker_service_accounts.is_empty();
        self.scales_from_zero |= pools.iter().any(|pool| may_be_at_zero(pool));
    }

    /// Returns the ServiceAccounts of its workers, each with its namespace.
    pub fn worker_accounts(&self) -> Vec<String> {
        let whole = |account: &String| match account.split_once('/') {
            Some(_) => account.clone(),
            None => format!("{}/{account}", self.namespace),
        };
        self.spec.worker_service_accounts.iter().map(whole).collect()
    }

    /// Returns the metadata of an object that is deleted with the Provider.
    pub fn metadata(&self, name: &str) -> Map<String, Value> {
        let mut metadata = self.unowned_metadata(name, &names::provider_labels(Component::Relay, &self.name));
        metadata.insert("ownerReferences".to_owned(), self.owner_references());
        metadata
    }

    /// Returns the metadata of a Secret that outlives the Provider, unless the spec sets another policy.
    ///
    /// Without the label that contains the Provider's name: Argo CD may be configured to track objects by it, as it did
    /// by default before 3.0. An Application with the Provider's name would then prune the Secret, because it is not
    /// among its manifests and, unlike the other objects, has no owner.
    pub fn retained_metadata(&self, name: &str) -> Map<String, Value> {
        match self.spec.secrets_policy {
            SecretsPolicy::Retain => {
                let mut labels = names::provider_labels(Component::Relay, &self.name);
                labels.remove(names::INSTANCE_LABEL);
                self.unowned_metadata(name, &labels)
            }
            SecretsPolicy::Delete => self.metadata(name),
        }
    }

    fn unowned_metadata(&self, name: &str, labels: &BTreeMap<String, String>) -> Map<String, Value> {
        Map::from_iter([
            ("name".to_owned(), json!(name)),
            ("namespace".to_owned(), json!(self.namespace)),
            ("labels".to_owned(), json!(labels)),
        ])
    }

    /// Without `blockOwnerDeletion`, which requires rights on finalizers where that is enforced.
    fn owner_references(&self) -> Value {
        json!([{
            "apiVersion": format!("{}/{}", crate::crd::GROUP, crate::crd::VERSION), "kind": "Provider",
            "name": self.name, "uid": self.uid, "controller": true,
        }])
    }
}

fn catalogue(spec: &ProviderSpec, problems: &mut Vec<String>) {
    let mut seen = HashSet::new();
    for (index, model) in spec.models.iter().enumerate() {
        model_name(&format!("models[{index}].id"), &model.id, &mut seen, problems);
        for (alias_index, alias) in model.aliases.iter().enumerate() {
            model_name(&format!("models[{index}].aliases[{alias_index}]"), alias, &mut seen, problems);
        }
    }
    let catalogue = (!seen.is_empty()).then(|| seen.clone());
    for (alias, model) in &spec.aliases {
        model_name("aliases", alias, &mut seen, problems);
        let place = format!("aliases.{alias}");
        if spec.aliases.contains_key(model) {
            problems.push(format!("spec.{place}: {model:?} is itself an alias: use the id of a model"));
        } else {
            meant(&place, model, catalogue.as_ref(), problems);
        }
    }
    for (place, model) in [("defaultModel", &spec.default_model), ("fallbackModel", &spec.fallback_model)] {
        if let Some(model) = model.as_ref().filter(|model| !spec.aliases.contains_key(*model)) {
            meant(place, model, catalogue.as_ref(), problems);
        }
    }
}

/// Checks the target of an alias, a default or a fallback: it must be in the catalogue, if there is one.
fn meant(place: &str, model: &str, catalogue: Option<&HashSet<&str>>, problems: &mut Vec<String>) {
    model_name(place, model, &mut HashSet::new(), problems);
    if catalogue.is_some_and(|catalogue| !catalogue.contains(model)) {
        problems.push(format!("spec.{place}: {model:?} is not in spec.models"));
    }
}

fn model_name<'a>(place: &str, name: &'a str, seen: &mut HashSet<&'a str>, problems: &mut Vec<String>) {
    if !is_model_name(name) {
        problems.push(format!(
            "spec.{place}: {name:?} is not allowed: use 1 to {MAX_MODEL_CHARS} characters, without invisible characters, leading or \
             trailing spaces"
        ));
    } else if !seen.insert(name) {
        problems.push(format!("spec.{place}: {name:?} is a duplicate: use each id and alias once"));
    }
}

fn queue(spec: &ProviderSpec, problems: &mut Vec<String>) {
    let durations = [
        ("queue.timeout", spec.queue.timeout.as_ref()),
        ("queue.coldTimeout", spec.queue.cold_timeout.as_ref()),
        ("requestTimeout", spec.request_timeout.as_ref()),
        ("streamIdleTimeout", spec.stream_idle_timeout.as_ref()),
        ("firstByteTimeout", spec.first_byte_timeout.as_ref()),
    ];
    for (place, duration) in durations {
        if let Some(Err(error)) = duration.map(DurationText::parse) {
            problems.push(format!("spec.{place}: {error}"));
        }
    }
    if let Err(error) = spec.queue.max_bytes.parse() {
        problems.push(format!("spec.queue.maxBytes: {error}"));
    }
    let spill_bytes = spec.placement.as_ref().and_then(|placement| placement.spill_bytes.as_ref());
    if let Some(Err(error)) = spill_bytes.map(SizeText::parse) {
        problems.push(format!("spec.placement.spillBytes: {error}"));
    }
}

/// Returns whole seconds, rounded up: the relay accepts no other unit.
fn seconds(place: &str, duration: &DurationText, problems: &mut Vec<String>) -> u64 {
    match duration.parse() {
        Ok(duration) => duration.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX),
        Err(error) => {
            problems.push(format!("spec.{place}: {error}"));
            0
        }
    }
}

fn relay(name: &str, spec: &ProviderSpec, problems: &mut Vec<String>) {
    let relay = &spec.relay;
    if !relay.service.load_balancer_class.is_empty() && relay.service.type_ != ServiceType::LoadBalancer {
        problems.push("spec.relay.service.loadBalancerClass: requires type LoadBalancer".to_owned());
    }
    if relay.service.workers && relay.client_port() == names::WORKER_PORT {
        let port = names::WORKER_PORT;
        problems
            .push(format!("spec.relay.service.port: {port} is the port for workers; use another one or unset workers"));
    }
    if let Some(level) = relay.log_level.as_deref().filter(|level| !is_log_filter(level)) {
        problems.push(format!(
            "spec.relay.logLevel: {level:?} is not allowed: use error, warn, info, debug, trace, or directives such as \
             info,modelrelay_relay=debug"
        ));
    }
    let ours = [names::worker_secret(name), names::relay(name), names::api_keys_secret(name)];
    let references = [
        ("workerSecretRef.name", spec.worker_secret_ref.as_ref().map(|reference| &reference.name)),
        ("relay.adminTokenSecretRef.name", relay.admin_token_secret_ref.as_ref().map(|reference| &reference.name)),
        ("relay.tls.secretName", relay.tls.as_ref().map(|tls| &tls.secret_name)),
    ];
    for (place, name) in references {
        if let Some(taken) = name.filter(|name| ours.contains(name)) {
            problems.push(format!("spec.{place}: {taken} is reserved for a Secret of the operator; use another name"));
        }
    }
}

/// Checks what the schema cannot express. The relay rejects the same.
fn tenants(spec: &ProviderSpec, problems: &mut Vec<String>) {
    for (index, tenant) in spec.relay.tenants.iter().enumerate() {
        let place = format!("spec.relay.tenants[{index}]");
        if let Some(weight) = tenant.weight.filter(|weight| !is_weight(*weight)) {
            problems
                .push(format!("{place}.weight: {weight} is not allowed: use 0.01 to 100, with at most two decimals"));
        }
        let names = tenant.name.iter().chain(&tenant.models);
        for name in names.filter(|name| name.trim() != name.as_str() || name.contains(is_unprintable)) {
            problems.push(format!(
                "{place}: {name:?} is not allowed: use no control or invisible characters, and no space at either end"
            ));
        }
    }
}

/// Of whole numbers, the API server compares only the whole part of a limit with them, so that it accepts 0.
fn is_weight(weight: f64) -> bool {
    // A number this close to whole hundredths is meant as such.
    let has_two_decimals = (weight * 100.0 - (weight * 100.0).round()).abs() < 1e-6;
    (0.01..=100.0).contains(&weight) && has_two_decimals
}

/// The relay's own rule: a word that is not a level would be parsed as a target and silence everything else.
fn is_log_filter(text: &str) -> bool {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let known = |part: &str| part.contains('=') || LEVELS.contains(&part.trim().to_ascii_lowercase().as_str());
    !text.trim().is_empty() && text.split(',').any(known) && EnvFilter::try_new(text.trim()).is_ok()
}

fn pod_template(spec: &ProviderSpec, problems: &mut Vec<String>) {
    let template = &spec.relay.pod_template;
    let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    for (index, entry) in template.env.iter().enumerate() {
        let name = text(entry, "name");
        if RESERVED_ENV.contains(&name.as_str()) {
            problems.push(format!("spec.relay.podTemplate.env[{index}]: {name} is set by the operator"));
        }
    }
    for (index, volume) in template.volumes.iter().enumerate() {
        let name = text(volume, "name");
        if RESERVED_VOLUMES.contains(&name.as_str()) {
            problems
                .push(format!("spec.relay.podTemplate.volumes[{index}]: the name {name} is reserved for the operator"));
        }
    }
    for (index, mount) in template.volume_mounts.iter().enumerate() {
        let path = text(mount, "mountPath");
        if path == RESERVED_PATH || path.starts_with(&format!("{RESERVED_PATH}/")) {
            problems.push(format!("spec.relay.podTemplate.volumeMounts[{index}]: {path} is reserved for the operator"));
        }
    }
}
