//! Decides which pool may scale a Deployment, for pools with driver `kubernetes`: two workers that scale one Deployment
//! would conflict.
//!
//! The schema sees one pool at a time, so this checks all pools of the namespace: the older pool owns the Deployment,
//! and the younger one reports the conflict. Deployments that ModelRelay created serve no model.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use crate::cache::Caches;
use crate::crd::{Multiplexer, WorkerPool};
use crate::names;

/// Returns the first problem with the Deployments that the pool names, with its field, or `None` if the pool may scale
/// them.
pub(super) fn dispute(caches: &Caches, pool: &WorkerPool) -> Option<String> {
    let slots = pool.spec.slots()?;
    let named = slots.slots.iter().flat_map(|slot| slot.models.iter().map(move |model| (slot, model)));
    named.filter_map(|(slot, model)| Some((slot, model, model.deployment.as_deref()?))).find_map(
        |(slot, model, deployment)| {
            let objection = objection(caches, pool, deployment)?;
            Some(format!("spec.multiplexer.slots.{}.models.{}.deployment: {objection}", slot.id, model.id))
        },
    )
}

/// Returns the reason that this pool may not scale a Deployment.
pub(super) fn objection(caches: &Caches, pool: &WorkerPool, deployment: &str) -> Option<String> {
    let reference = ObjectRef::new(deployment).within(&pool.namespace().unwrap_or_default());
    if caches.deployments.get(&reference).is_some() {
        return Some(format!("Deployment {deployment} belongs to ModelRelay: name one that serves the model"));
    }
    let other = others(caches, pool, deployment).find(|other| age(other) < age(pool))?;
    let other = other.name_any();
    Some(format!(
        "the older WorkerPool {other} already scales Deployment {deployment}: name another Deployment for this model, or \
         remove it from {other}"
    ))
}

/// Returns another pool that names the Deployment.
pub(super) fn other(caches: &Caches, pool: &WorkerPool, deployment: &str) -> Option<Arc<WorkerPool>> {
    others(caches, pool, deployment).next()
}

/// True if ModelRelay created it.
pub(super) fn is_own(deployment: &Deployment) -> bool {
    deployment.labels().get("app.kubernetes.io/managed-by").map(String::as_str) == Some(names::MANAGED_BY)
}

fn others(caches: &Caches, pool: &WorkerPool, deployment: &str) -> impl Iterator<Item = Arc<WorkerPool>> {
    let is_other = |other: &Arc<WorkerPool>| {
        other.metadata.namespace == pool.metadata.namespace
            && other.metadata.name != pool.metadata.name
            && other.metadata.deletion_timestamp.is_none()
            && other.spec.slots().map(Multiplexer::deployments).is_some_and(|named| named.contains(deployment))
    };
    caches.pools.state().into_iter().filter(is_other).collect::<Vec<_>>().into_iter()
}

/// Returns a key that orders pools by age; pools created within the same second are ordered by name.
fn age(pool: &WorkerPool) -> impl Ord + use<> {
    (pool.metadata.creation_timestamp.as_ref().map(|made| made.0), pool.name_any())
}
