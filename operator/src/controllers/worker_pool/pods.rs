//! The operator's changes to a pool's Pods: it deletes those that waited for the pool, and ranks them for deletion.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, Preconditions};
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use serde_json::json;

use super::pod_counts::{Gated, orphans};
use crate::cluster::apply::patch_params;
use crate::cluster::cache::Caches;
use crate::crd::WorkerPool;
use crate::relays::state::RelaySnapshot;
use crate::resources::names;

/// ReplicaSets delete Pods with a lower cost first, among equally ready ones.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The cost of a Pod whose worker no relay knows: it serves no request.
const UNCONNECTED: i64 = -1;
/// The pause after Pods of a deleted pool could not be deleted.
const ORPHAN_RETRY: Duration = Duration::from_secs(30);
/// The number of Pods that are written at once.
const CONCURRENCY: usize = 8;

/// Deletes Pods that were created before their pool could be used, so that their controllers create new ones with a
/// worker. Returns the number of deleted Pods.
pub async fn release(client: &Client, namespace: &str, gated: &[Gated]) -> Result<usize, kube::Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let mut released = 0;
    for pod in gated {
        let params = DeleteParams {
            // A successor may have the same name.
            preconditions: Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        match api.delete(&pod.name, &params).await {
            Ok(_) => released += 1,
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(released)
}

/// Deletes the Pods that a pool selected and that wait for it, although it is gone. Their controllers create new ones,
/// which then wait for no pool. The pool is looked up at the API server: the cache may not have a new one yet.
pub async fn release_orphans(client: &Client, caches: &Caches, pool: &ObjectRef<WorkerPool>) {
    let namespace = pool.namespace.clone().unwrap_or_default();
    let of_pool = |pod: &Arc<Pod>| {
        pod.metadata.namespace == pool.namespace && pod.labels().get(names::POOL_LABEL) == Some(&pool.name)
    };
    let pods: Vec<Arc<Pod>> = caches.pool_pods.state().into_iter().filter(of_pool).collect();
    let orphans = orphans(pods.iter().map(AsRef::as_ref));
    if orphans.is_empty() {
        return;
    }
    let pools: Api<WorkerPool> = Api::namespaced(client.clone(), &namespace);
    let released = match pools.get_metadata_opt(&pool.name).await {
        Ok(Some(_)) => return,
        Ok(None) => release(client, &namespace, &orphans).await,
        Err(error) => Err(error),
    };
    match released {
        Ok(released) => {
            tracing::info!(
                namespace,
                workerpool = pool.name,
                released,
                "recreated Pods that waited for a deleted pool"
            );
        }
        Err(error) => {
            let workerpool = &pool.name;
            tracing::warn!(namespace, workerpool, %error, "failed to delete Pods that wait for a deleted pool; retrying");
            tokio::time::sleep(ORPHAN_RETRY).await;
            caches.triggers.pool(&namespace, &pool.name);
        }
    }
}

/// Makes the idlest Pods the first to be deleted. A failed write is a lost hint, not an error.
pub async fn rank(client: &Client, pool: &WorkerPool, pods: &[Arc<Pod>], snapshot: &RelaySnapshot) {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pool.namespace().unwrap_or_default());
    let costs = costs(&pool.name_any(), pods, snapshot);
    stream::iter(costs)
        .for_each_concurrent(CONCURRENCY, |(name, cost)| {
            let api = &api;
            async move {
                let patch = json!({"metadata": {"annotations": {DELETION_COST: cost}}});
                if let Err(error) = api.patch_metadata(&name, &patch_params(), &Patch::Merge(&patch)).await {
                    tracing::debug!(pod = name, %error, "failed to set the Pod deletion cost");
                }
            }
        })
        .await;
}

/// Returns the costs that have to be written, by Pod. They are relative to the idlest Pod, because a missing annotation
/// means 0: if all are equal, as in a pool of a thousand idle Pods, nothing is written.
fn costs(pool: &str, pods: &[Arc<Pod>], snapshot: &RelaySnapshot) -> Vec<(String, String)> {
    let in_flight: HashMap<&str, u64> =
        snapshot.workers_of(pool).map(|worker| (worker.name.as_str(), worker.in_flight)).collect();
    // The annotation is a 32-bit number.
    let busy = |running: u64| i64::from(i32::try_from(running).unwrap_or(i32::MAX - 1));
    let cost = |pod: &Pod| in_flight.get(pod.name_any().as_str()).map_or(UNCONNECTED, |running| busy(*running));
    let staying: Vec<_> = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
    let idlest = staying.iter().map(|pod| cost(pod)).min().unwrap_or_default();
    let mut costs = Vec::new();
    for pod in staying {
        let cost = (cost(pod) - idlest).to_string();
        if pod.annotations().get(DELETION_COST).map_or("0", String::as_str) != cost {
            costs.push((pod.name_any(), cost));
        }
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relays::state::WorkerReport;

    #[test]
    fn idlest_pods_are_removed_first() {
        let pod = |name: &str, annotations: &serde_json::Value| -> Arc<Pod> {
            Arc::new(serde_json::from_value(json!({"metadata": {"name": name, "annotations": annotations}})).unwrap())
        };
        let worker = |name: &str, pool: &str, in_flight| WorkerReport {
            name: name.into(),
            pool: Some(pool.into()),
            in_flight,
            ..WorkerReport::default()
        };
        let mut snapshot = RelaySnapshot::default();
        snapshot.workers.insert("1".into(), worker("busy", "llama", 7));
        snapshot.workers.insert("2".into(), worker("idle", "llama", 0));
        snapshot.workers.insert("3".into(), worker("lost", "another", 9));
        let pods = [
            pod("busy", &json!({})),
            pod("idle", &json!({DELETION_COST: "0"})),
            pod("lost", &json!({DELETION_COST: "5"})),
        ];
        let are = |costs: &[(&str, &str)]| -> Vec<(String, String)> {
            costs.iter().map(|(name, cost)| ((*name).to_owned(), (*cost).to_owned())).collect()
        };
        assert_eq!(costs("llama", &pods, &snapshot), are(&[("busy", "8"), ("idle", "1"), ("lost", "0")]));
        assert_eq!(costs("llama", &pods[..2], &snapshot), are(&[("busy", "7")]));
        let idle = [pod("idle", &json!({})), pod("gone", &json!({"b": "c"}))];
        snapshot.workers.clear();
        assert_eq!(costs("llama", &idle, &snapshot), are(&[]));
    }
}
