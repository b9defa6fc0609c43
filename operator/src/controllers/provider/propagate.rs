//! Speeds up the refresh of mounted Secrets: a kubelet refreshes a Pod's Secrets within a minute, but at once when the
//! Pod itself changes. Pods therefore get an annotation with the expected version.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::Patch;
use kube::{Api, ResourceExt};
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::cluster_view::ClusterView;
use super::memory::ProviderMemory;
use super::outcome::{ProviderOutcome, WorkerSecret};
use crate::cluster::apply::patch_params;
use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::manifests::sidecar;
use crate::resources::names;

/// The number of Pods that are patched at once.
const AT_ONCE: usize = 8;
/// The delay after which a kubelet that saw the annotation before the Secret is nudged again.
const LATE_AFTER: Duration = Duration::from_secs(5);
/// The clocks of the API server and of the operator may differ.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(60);

/// Annotates the Pods that need it.
pub(super) async fn propagate(
    ctx: &Context,
    caches: &Caches,
    namespace: &str,
    view: &ClusterView,
    outcome: &ProviderOutcome,
    memory: &mut ProviderMemory,
) -> Result<(), kube::Error> {
    let mut patches = relay_patches(view, outcome, memory);
    if let Some(secret) = &outcome.worker_secret {
        patches.extend(worker_patches(caches, namespace, view, secret));
    }
    let api: Api<Pod> = Api::namespaced(ctx.client.clone(), namespace);
    let results: Vec<Result<(), kube::Error>> = stream::iter(patches)
        .map(|(pod, annotations)| annotate(&api, pod, annotations))
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    results.into_iter().collect()
}

type PodPatch = (String, Map<String, Value>);

pub(super) async fn annotate(api: &Api<Pod>, pod: String, annotations: Map<String, Value>) -> Result<(), kube::Error> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
    match api.patch_metadata(&pod, &patch_params(), &patch).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error),
    }
}

fn relay_patches(view: &ClusterView, outcome: &ProviderOutcome, memory: &mut ProviderMemory) -> Vec<PodPatch> {
    // The Pods of a shared relay are left to its owner.
    let Some(hash) = outcome.config_hash.as_ref().filter(|_| view.relay == Ok(None)) else { return Vec::new() };
    let nudge = is_nudge_due(view, hash, memory);
    let mut patches = Vec::new();
    for pod in &view.relay_pods {
        let mut wanted = Map::new();
        want(pod, names::CONFIG_HASH_ANNOTATION, Some(hash), &mut wanted);
        want(pod, names::API_KEYS_VERSION_ANNOTATION, outcome.api_keys_version.as_ref(), &mut wanted);
        want(pod, names::TLS_VERSION_ANNOTATION, outcome.tls_version.as_ref(), &mut wanted);
        if nudge && runs_another(view, pod, hash) {
            wanted.insert(names::NUDGE_ANNOTATION.to_owned(), json!(Timestamp::now().to_string()));
        }
        if !wanted.is_empty() {
            patches.push((pod.name_any(), wanted));
        }
    }
    patches
}

fn want(pod: &Pod, annotation: &str, value: Option<&String>, wanted: &mut Map<String, Value>) {
    if let Some(value) = value.filter(|value| pod.annotations().get(annotation) != Some(value)) {
        wanted.insert(annotation.to_owned(), json!(value));
    }
}

fn runs_another(view: &ClusterView, pod: &Pod, hash: &str) -> bool {
    let report = view.reported.as_ref().and_then(|reported| reported.relays.get(&pod.name_any())?.as_ref().ok());
    report.is_some_and(|report| report.config_hash.as_deref() != Some(hash) && report.config_error.is_none())
}

fn is_nudge_due(view: &ClusterView, hash: &str, memory: &mut ProviderMemory) -> bool {
    if !view.relay_pods.iter().any(|pod| runs_another(view, pod, hash)) {
        memory.unconfirmed_since = None;
        return false;
    }
    let since = *memory.unconfirmed_since.get_or_insert_with(Instant::now);
    let due = since.elapsed() >= LATE_AFTER && memory.nudged_at.is_none_or(|at| at.elapsed() >= LATE_AFTER);
    if due {
        memory.nudged_at = Some(Instant::now());
    }
    due
}

/// Patches for workers created before the secret got its value; younger ones have mounted the new value.
fn worker_patches(caches: &Caches, namespace: &str, view: &ClusterView, secret: &WorkerSecret) -> Vec<PodPatch> {
    let Some(version) = &secret.version else { return Vec::new() };
    let pools: Vec<String> = view.pools.iter().map(|pool| pool.name_any()).collect();
    if pools.is_empty() {
        return Vec::new();
    }
    let newest = secret.changed_at + CLOCK_SKEW;
    let mut patches = Vec::new();
    for pod in caches.pool_pods.state() {
        let in_pool = pod.labels().get(names::POOL_LABEL).is_some_and(|pool| pools.contains(pool));
        let is_older = pod.creation_timestamp().is_none_or(|created| created.0 <= newest);
        if pod.metadata.namespace.as_deref() != Some(namespace)
            || !in_pool
            || !is_older
            || sidecar::worker_of(&pod).is_none()
        {
            continue;
        }
        let mut wanted = Map::new();
        want(&pod, names::SECRET_VERSION_ANNOTATION, Some(version), &mut wanted);
        if !wanted.is_empty() && pod.metadata.deletion_timestamp.is_none() {
            patches.push((pod.name_any(), wanted));
        }
    }
    patches
}
