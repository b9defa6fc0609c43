//! How many Pods a pool's Deployment gets, and the writing of `spec.replicas`.
//!
//! `kubectl scale` and autoscalers ask the API server for the pool's scale, which fails while `spec.replicas` is absent. So
//! for a template the operator writes the number once that it uses anyway. Manifests that leave the field out keep on
//! working: neither kind of `kubectl apply` removes what it never set, and where somebody does remove it, the Deployment's
//! own number stays and is written again. For standalone pools nothing is written: there `standalone.replicas` counts while
//! the field is absent, and to use the scale one sets it.

use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;

use crate::crd::WorkerPool;
use crate::manifests::backend::Workload;
use crate::names;

/// What the Deployment should have; for a DaemonSet it means nothing. `live` is what it has.
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

/// Writes `spec.replicas`, if the pool is still what was looked at; the pool as it is then.
pub async fn write(client: &Client, pool: &WorkerPool, replicas: i32) -> Result<Option<WorkerPool>, kube::Error> {
    let api: Api<WorkerPool> = Api::namespaced(client.clone(), &pool.namespace().unwrap_or_default());
    let mut metadata = json!({"resourceVersion": pool.metadata.resource_version});
    if pool.spec.scaling.is_some() {
        metadata["annotations"] = json!({names::SCALED_ANNOTATION: replicas.to_string()});
    }
    let patch = json!({"metadata": metadata, "spec": {"replicas": replicas}});
    let params = PatchParams { field_manager: Some(names::FIELD_MANAGER.into()), ..PatchParams::default() };
    match api.patch(&pool.name_any(), &params, &Patch::Merge(&patch)).await {
        Ok(pool) => Ok(Some(pool)),
        // Somebody was quicker, and the change that they made brings the next look.
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
    fn a_templates_number_is_kept_as_it_is_unless_the_pool_says_one() {
        let scaling = json!({"scaling": {"minReplicas": 0, "maxReplicas": 4}});
        assert_eq!(chosen(&json!({}), None), 1);
        assert_eq!(chosen(&scaling, None), 0);
        assert_eq!(chosen(&scaling, Some(3)), 3);
        assert_eq!(chosen(&json!({"replicas": 0}), Some(3)), 0);
    }

    #[test]
    fn standalone_workers_have_their_own_number_while_there_is_no_other() {
        let standalone = |replicas: Value, live| chosen(&json!({"template": null, "standalone": replicas}), live);
        assert_eq!(standalone(json!({}), Some(5)), 1);
        assert_eq!(standalone(json!({"replicas": 3}), Some(5)), 3);
        assert_eq!(chosen(&json!({"template": null, "standalone": {"replicas": 3}, "replicas": 2}), None), 2);
    }
}
