//! A worker's rights on Deployments, and the handling of Deployments that leave the pool.
//!
//! A worker that ends leaves its resident loaded, and the next one knows only its own configuration: a Deployment that
//! was removed from the pool would hold its GPU indefinitely. The operator therefore scales it to 0, once, after the
//! worker that may still use it is gone. The Role records such Deployments, where a new operator finds them: it names a
//! Deployment until that is done. A pool at zero has no worker and therefore no rights, and its Deployments are
//! released the same way. A Deployment that another pool names, or that ModelRelay created, is left alone.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject, Patch};
use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use super::{PoolContext, ReconcileError, claims, objects};
use crate::cluster::apply::{self, ApplyError, patch_params};
use crate::crd::{Multiplexer, WorkerPool};
use crate::manifests::{Manifest, sidecar, worker_access};
use crate::resources::names;

/// Creates the worker's rights while `runs`, and removes them otherwise.
pub(super) async fn ensure(
    pool: &WorkerPool,
    shared: &PoolContext,
    pods: &[Arc<Pod>],
    runs: bool,
) -> Result<(), ReconcileError> {
    let slots = pool.spec.slots().filter(|_| runs);
    let named: BTreeSet<String> =
        slots.map(Multiplexer::deployments).unwrap_or_default().into_iter().map(str::to_owned).collect();
    let mut granted = granted(pool, shared).await?;
    if granted.iter().any(|deployment| !named.contains(deployment)) && !is_used(pool, pods, runs) {
        for deployment in granted.difference(&named) {
            release(pool, shared, deployment, &named).await?;
        }
        granted.retain(|deployment| named.contains(deployment));
    }
    match named.is_empty() {
        false => grant(pool, shared, &named.union(&granted).cloned().collect()).await,
        true if granted.is_empty() => withdraw(pool, shared).await,
        // Its worker is still stopping.
        true => Ok(()),
    }
}

/// Revokes a pool's rights on Deployments that it may not scale.
pub(super) async fn withhold(pool: &WorkerPool, shared: &PoolContext) -> Result<(), ReconcileError> {
    let granted = granted(pool, shared).await?;
    let is_left = |deployment: &&String| claims::objection(&shared.caches, pool, deployment).is_none();
    let left: BTreeSet<String> = granted.iter().filter(is_left).cloned().collect();
    match left.len() {
        all if all == granted.len() => Ok(()),
        0 => withdraw(pool, shared).await,
        _ => grant(pool, shared, &left).await,
    }
}

async fn grant(pool: &WorkerPool, shared: &PoolContext, deployments: &BTreeSet<String>) -> Result<(), ReconcileError> {
    for manifest in worker_access::objects(pool, deployments) {
        objects::unread(shared, pool, &manifest).await?;
    }
    Ok(())
}

/// Deletes Role and RoleBinding. Without them the account, which is deleted with the pool, has no rights.
async fn withdraw(pool: &WorkerPool, shared: &PoolContext) -> Result<(), ReconcileError> {
    let [_, role, binding] = worker_access::objects(pool, &BTreeSet::new());
    objects::gone(shared, pool, &binding).await?;
    Ok(objects::gone(shared, pool, &role).await?)
}

/// Returns the Deployments that the pool's Role names.
async fn granted(pool: &WorkerPool, shared: &PoolContext) -> Result<BTreeSet<String>, ReconcileError> {
    let [_, role, _] = worker_access::objects(pool, &BTreeSet::new());
    if shared.memory.with(pool, |entry| entry.absent.contains(&role.display())) {
        return Ok(BTreeSet::new());
    }
    let api: Api<DynamicObject> = Api::namespaced_with(shared.ctx.client.clone(), &role.namespace, &role.resource);
    let live = api.get_opt(&role.name).await.map_err(|error| ApplyError::api(role.display(), error))?;
    Ok(live
        .filter(|live| objects::owner(pool).owns(&live.metadata))
        .map(|live| named(&live, &role))
        .unwrap_or_default())
}

fn named(live: &DynamicObject, role: &Manifest) -> BTreeSet<String> {
    let rules = live.data.get("rules").and_then(Value::as_array).into_iter().flatten();
    let scales = rules.filter(|rule| rule["resources"] == role.value["rules"][0]["resources"]);
    let names = scales.filter_map(|rule| rule["resourceNames"].as_array()).flatten();
    names.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// True if a worker exists that was created for other slots, or any worker if none should run.
fn is_used(pool: &WorkerPool, pods: &[Arc<Pod>], runs: bool) -> bool {
    let now = sidecar::slots_hash(&pool.spec);
    let has_ended = |pod: &Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Failed" | "Succeeded"))
    };
    let is_former = |pod: &Pod| !runs || pod.annotations().get(names::SLOTS_HASH_ANNOTATION) != now.as_ref();
    pods.iter().any(|pod| is_former(pod) && !has_ended(pod))
}

/// Scales a Deployment to 0 that no pool names any more.
async fn release(
    pool: &WorkerPool,
    shared: &PoolContext,
    deployment: &str,
    named: &BTreeSet<String>,
) -> Result<(), ReconcileError> {
    if claims::other(&shared.caches, pool, deployment).is_some() {
        return Ok(());
    }
    let api: Api<Deployment> = Api::namespaced(shared.ctx.client.clone(), &pool.namespace().unwrap_or_default());
    let failed = |source| ReconcileError::Write { what: "a Deployment that left the pool", source: Box::new(source) };
    let Some(there) = api.get_opt(deployment).await.map_err(failed)? else { return Ok(()) };
    if claims::is_own(&there) || there.spec.and_then(|spec| spec.replicas) == Some(0) {
        return Ok(());
    }
    let why = if named.is_empty() { "the pool has no worker that scales it" } else { "the pool no longer names it" };
    let (type_, reason, note) = match api
        .patch_scale(deployment, &patch_params(), &Patch::Merge(json!({"spec": {"replicas": 0}})))
        .await
    {
        Ok(_) => (EventType::Normal, "DeploymentReleased", format!("Deployment {deployment} scaled to 0: {why}")),
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        Err(error) if apply::is_forbidden(&error) => {
            let shown = apply::display_kube_error(&error);
            let note = format!(
                "failed to scale Deployment {deployment} to 0, so it may still hold its GPU: scale it to 0, because {why} ({shown})"
            );
            (EventType::Warning, "DeploymentNotReleased", note)
        }
        Err(error) => return Err(failed(error)),
    };
    shared.ctx.publish(&pool.object_ref(&()), type_, reason, "Release", note).await;
    Ok(())
}
