//! Chooses the number of Pods of a pool's Deployment, and writes `spec.replicas`.
//!
//! `kubectl scale` and autoscalers read the pool's scale from the API server, which fails while `spec.replicas` is
//! absent. For a template, the operator therefore writes the number that it uses anyway, once. Manifests that omit the
//! field keep working: neither kind of `kubectl apply` removes what it never set, and if the field is removed, the
//! Deployment's own number stays and is written again. For standalone pools nothing is written: `standalone.replicas`
//! applies while the field is absent, and users who need the scale set it.

use kube::api::{Api, Patch};
use kube::{Client, ResourceExt};
use serde_json::json;

use crate::cluster::apply::patch_params;
use crate::crd::WorkerPool;
use crate::resources::names;
use crate::spec::workload::Workload;

/// Returns the number of replicas that the Deployment should have, meaningless for a DaemonSet. `live` is its current
/// number.
pub fn choose(pool: &WorkerPool, workload: Workload, live: Option<i32>) -> i32 {
    let spec = &pool.spec;
    match workload {
        Workload::Workers => {
            spec.replicas.or_else(|| spec.standalone.as_ref().and_then(|standalone| standalone.replicas)).unwrap_or(1)
        }
        Workload::Backend | Workload::BackendOnNodes => {
            spec.replicas.or(live).or_else(|| spec.scaling.as_ref().map(|scaling| scaling.min_replicas)).unwrap_or(1)
        }
    }
}

/// Writes `spec.replicas`, if the pool has not changed since it was read, and returns the resulting pool.
pub async fn write(client: &Client, pool: &WorkerPool, replicas: i32) -> Result<Option<WorkerPool>, kube::Error> {
    let api: Api<WorkerPool> = Api::namespaced(client.clone(), &pool.namespace().unwrap_or_default());
    let mut metadata = json!({"resourceVersion": pool.metadata.resource_version});
    if pool.spec.scaling.is_some() {
        metadata["annotations"] = json!({names::SCALED_ANNOTATION: replicas.to_string()});
    }
    let patch = json!({"metadata": metadata, "spec": {"replicas": replicas}});
    match api.patch(&pool.name_any(), &patch_params(), &Patch::Merge(&patch)).await {
        Ok(pool) => Ok(Some(pool)),
        // The pool was changed or deleted first, and that change triggers the next reconciliation.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::manifests::testing;

    fn chosen(change: &Value, live: Option<i32>) -> i32 {
        let mut spec = json!({"provider": "local", "template": {"spec": {"containers": [{"name": "a"}]}}});
        json_patch::merge(&mut spec, change);
        let pool = testing::pool(&spec);
        choose(&pool, Workload::of(&pool).unwrap(), live)
    }

    #[test]
    fn template_replicas_are_kept_unless_pool_sets_them() {
        let scaling = json!({"scaling": {"minReplicas": 0, "maxReplicas": 4}});
        assert_eq!(chosen(&json!({}), None), 1);
        assert_eq!(chosen(&scaling, None), 0);
        assert_eq!(chosen(&scaling, Some(3)), 3);
        assert_eq!(chosen(&json!({"replicas": 0}), Some(3)), 0);
    }

    #[test]
    fn standalone_replicas_apply_until_pool_sets_them() {
        let standalone = |replicas: Value, live| chosen(&json!({"template": null, "standalone": replicas}), live);
        assert_eq!(standalone(json!({}), Some(5)), 1);
        assert_eq!(standalone(json!({"replicas": 3}), Some(5)), 3);
        assert_eq!(chosen(&json!({"template": null, "standalone": {"replicas": 3}, "replicas": 2}), None), 2);
    }
}
