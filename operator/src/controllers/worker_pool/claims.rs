//! Decides which pool may scale a Deployment or StatefulSet, for pools with driver `kubernetes` or a `targetRef`: two
//! writers of one number would conflict.
//!
//! The schema sees one pool at a time, so this checks all pools of the namespace: the older pool owns the Deployment,
//! and the younger one reports the conflict. Deployments that ModelRelay created serve no model.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;

use crate::cluster::cache::Caches;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::{TargetApiVersion, TargetKind, TargetRef};
use crate::resources::names;
use crate::spec::worker_pool::selection::selects;

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

/// Returns the reason that the pool may not scale its target.
pub(super) fn target_dispute(caches: &Caches, pool: &WorkerPool, target: &TargetRef) -> Option<String> {
    if let Some(why) = own(caches, pool, target) {
        return Some(format!("spec.scaling.targetRef: {why}"));
    }
    let other =
        others(caches, pool, target).into_iter().find(|other| names::age(&**other) < names::age(pool))?.name_any();
    Some(format!(
        "spec.scaling.targetRef: the older WorkerPool {other} already scales {}: name another workload, or remove it from \
         {other}",
        target.display()
    ))
}

/// Returns the reason that this pool may not scale a Deployment.
pub(super) fn objection(caches: &Caches, pool: &WorkerPool, deployment: &str) -> Option<String> {
    let target = self::deployment(deployment);
    if let Some(why) = own(caches, pool, &target) {
        return Some(why);
    }
    let other = others(caches, pool, &target).into_iter().find(|other| names::age(&**other) < names::age(pool))?;
    let other = other.name_any();
    Some(format!(
        "the older WorkerPool {other} already scales Deployment {deployment}: name another Deployment for this model, or \
         remove it from {other}"
    ))
}

fn own(caches: &Caches, pool: &WorkerPool, target: &TargetRef) -> Option<String> {
    let reference = ObjectRef::new(&target.name).within(&pool.namespace().unwrap_or_default());
    let is_own = target.kind == TargetKind::Deployment && caches.deployments.get(&reference).is_some();
    is_own.then(|| format!("{} belongs to ModelRelay: name one that serves the model", target.display()))
}

fn deployment(name: &str) -> TargetRef {
    TargetRef { api_version: TargetApiVersion::AppsV1, kind: TargetKind::Deployment, name: name.to_owned() }
}

/// Returns another pool that names the Deployment.
pub(super) fn other(caches: &Caches, pool: &WorkerPool, deployment: &str) -> Option<Arc<WorkerPool>> {
    others(caches, pool, &self::deployment(deployment)).into_iter().next()
}

/// True if ModelRelay created it.
pub(super) fn is_own(deployment: &Deployment) -> bool {
    deployment.labels().get("app.kubernetes.io/managed-by").map(String::as_str) == Some(names::MANAGED_BY)
}

fn others(caches: &Caches, pool: &WorkerPool, target: &TargetRef) -> Vec<Arc<WorkerPool>> {
    let scales = |other: &WorkerPool| {
        let by_driver = || other.spec.slots().is_some_and(|slots| slots.deployments().contains(target.name.as_str()));
        other.spec.target() == Some(target) || (target.kind == TargetKind::Deployment && by_driver())
    };
    let is_other = |other: &Arc<WorkerPool>| {
        other.metadata.namespace == pool.metadata.namespace
            && other.metadata.name != pool.metadata.name
            && other.metadata.deletion_timestamp.is_none()
            && scales(other)
    };
    caches.pools.state().into_iter().filter(is_other).collect()
}

/// Returns the oldest other pool that has Pods which this pool selects too, and their number.
pub(super) fn taken_pods(caches: &Caches, pool: &WorkerPool) -> Option<(String, usize)> {
    pool.spec.selector.as_ref()?;
    let own = pool.name_any();
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for pod in caches.pool_pods.state() {
        let is_other = |owner: &&String| **owner != own && *owner != names::NO_POOL;
        let Some(owner) = pod.labels().get(names::POOL_LABEL).filter(is_other) else { continue };
        if pod.metadata.namespace == pool.metadata.namespace && selects(pool, pod.labels()) {
            *taken.entry(owner.clone()).or_default() += 1;
        }
    }
    taken.into_iter().next()
}
