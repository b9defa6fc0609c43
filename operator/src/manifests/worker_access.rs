//! The rights of a worker whose multiplexer scales Deployments: to scale those Deployments, and to watch their Pods.
//!
//! The Deployments are listed by name, so a compromised worker can stop its own backends and nothing else. Pods cannot
//! be named beforehand; a worker can read those of its namespace, and change none.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::Resource;
use kube::core::ApiResource;
use serde_json::{Map, Value, json};

use super::Manifest;
use crate::crd::WorkerPool;
use crate::resources::names::{self, Component};

/// Returns ServiceAccount, Role and RoleBinding `<pool>-worker` for these Deployments. A Role without names would allow
/// all Deployments, so with an empty set the manifests may only be used to find and delete the objects.
pub fn objects(pool: &WorkerPool, deployments: &BTreeSet<String>) -> [Manifest; 3] {
    let name = names::worker(pool.metadata.name.as_deref().unwrap_or_default());
    let rules = json!([
        {
            "apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": deployments,
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
    ]);
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
    let subjects = json!([{"kind": "ServiceAccount", "name": name, "namespace": pool.metadata.namespace}]);
    [
        // Only the worker's own Pods request its token.
        object::<ServiceAccount>(pool, &name, [("automountServiceAccountToken", json!(false))]),
        object::<Role>(pool, &name, [("rules", rules)]),
        object::<RoleBinding>(pool, &name, [("roleRef", role), ("subjects", subjects)]),
    ]
}

fn object<K: Resource<DynamicType = ()>>(
    pool: &WorkerPool,
    name: &str,
    parts: impl IntoIterator<Item = (&'static str, Value)>,
) -> Manifest {
    let resource = ApiResource::erase::<K>(&());
    let metadata = json!({
        "name": name, "namespace": pool.metadata.namespace,
        "labels": names::pool_labels(Component::Worker, pool.metadata.name.as_deref().unwrap_or_default()),
        "ownerReferences": pool.controller_owner_ref(&()).map(|owner| vec![owner]).unwrap_or_default(),
    });
    let mut value = Map::from_iter([
        ("apiVersion".to_owned(), json!(resource.api_version)),
        ("kind".to_owned(), json!(resource.kind)),
        ("metadata".to_owned(), metadata),
    ]);
    value.extend(parts.into_iter().map(|(key, value)| (key.to_owned(), value)));
    Manifest::of_json(resource, Value::Object(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifests::{snapshot, testing};

    #[test]
    fn role_allows_scaling_only_named_deployments() {
        let models = json!([{"id": "qwen", "deployment": "qwen-b"}, {"id": "llama", "deployment": "llama-a"}]);
        let pool = testing::pool(&json!({
            "provider": "local", "standalone": {},
            "multiplexer": {"slots": [{"id": "gpu0", "driver": "kubernetes", "models": models}]},
        }));
        let deployments = ["qwen-b", "llama-a"].map(str::to_owned).into();
        let yaml = objects(&pool, &deployments).map(|manifest| manifest.to_yaml()).join("---\n");
        snapshot::check("worker-access", &yaml);
    }
}
