//! The workload of a pool: Deployment or DaemonSet `<pool>-backend` for a template, Deployment `<pool>-worker` for
//! standalone workers.
//!
//! The Pod template is passed in complete; whether it is rendered again or kept is decided elsewhere. Two invariants
//! hold here. The selector, which can never change, consists of two labels of the operator and none of the user's. And
//! a Deployment states its number of replicas unless another manager owns it: omitting the field gives it up, and if it
//! has no other owner, the API server sets it to 1.

use kube::Resource;
use serde_json::{Map, Value, json};

use super::{Manifest, sidecar};
use crate::crd::WorkerPool;
use crate::resources::names;
use crate::spec::workload::Workload;

/// Annotation of the Deployment or DaemonSet: the inputs of its Pod template, and what was added to the user's part.
pub const RENDERED_ANNOTATION: &str = "modelrelay.io/rendered";

/// The time without progress after which a Deployment of backends reports that it is stuck. Its Pods become ready when
/// their models are loaded, and a first start that pulls an engine's image and a model of some hundred GB takes longer
/// than the API server's default of 10 minutes. Only the condition depends on it: the rollout continues all the same.
const LOADING_SECS: i32 = 3600;

/// Returns the user's part of the Pod template, `{metadata, spec}` as written, or an empty object for standalone
/// workers.
pub fn given(pool: &WorkerPool) -> Value {
    match &pool.spec.template {
        Some(template) => {
            let metadata = serde_json::to_value(&template.metadata).unwrap_or_default();
            json!({"metadata": metadata, "spec": template.spec})
        }
        None => json!({}),
    }
}

/// Returns the whole Pod template: the user's part, the worker, and the operator's labels, which take precedence.
pub fn template(
    workload: Workload,
    inputs: &sidecar::SidecarInputs<'_>,
) -> Result<(Value, Vec<sidecar::Note>), sidecar::Refusal> {
    let mut pod = given(inputs.pool);
    let mut notes = Vec::new();
    match workload {
        Workload::Backend | Workload::BackendOnNodes if sidecar::runs_in_engine(&inputs.pool.spec) => {
            notes = sidecar::run_in_engine(&mut pod, inputs)?;
        }
        Workload::Backend | Workload::BackendOnNodes => notes = sidecar::add_to_pod(&mut pod, inputs)?,
        Workload::Workers => pod = alone(inputs)?,
    }
    let name = inputs.pool.metadata.name.as_deref().unwrap_or_default();
    if let Some(metadata) = pod.get_mut("metadata").and_then(Value::as_object_mut) {
        let labels = metadata.entry("labels").or_insert_with(|| Value::Object(Map::new()));
        if let Some(labels) = labels.as_object_mut() {
            labels.extend(names::pool_labels(workload.component(), name).into_iter().map(|(k, v)| (k, v.into())));
        }
    }
    Ok((pod, notes))
}

/// Returns the Deployment or DaemonSet. `rendered` is the annotation's value; without `replicas`, the number is left to
/// its owner.
pub fn workload(
    workload: Workload,
    pool: &WorkerPool,
    template: &Value,
    rendered: &str,
    replicas: Option<i32>,
) -> Manifest {
    let name = pool.metadata.name.as_deref().unwrap_or_default();
    let component = workload.component();
    let mut spec = json!({
        "selector": {"matchLabels": {
            names::POOL_LABEL: name, "app.kubernetes.io/component": component.as_str(),
        }},
        "template": template,
    });
    if let Some(spec) = spec.as_object_mut() {
        if let Some(replicas) = replicas.filter(|_| workload.is_scaled()) {
            spec.insert("replicas".to_owned(), replicas.into());
        }
        if let Some((field, strategy)) = strategy(workload, pool) {
            spec.insert(field.to_owned(), strategy);
        }
        if workload == Workload::Backend {
            spec.insert("progressDeadlineSeconds".to_owned(), LOADING_SECS.into());
        }
    }
    let resource = workload.resource();
    let value = json!({
        "apiVersion": resource.api_version, "kind": resource.kind,
        "metadata": {
            "name": workload.name(name), "namespace": pool.metadata.namespace,
            "labels": names::pool_labels(component, name),
            "annotations": {RENDERED_ANNOTATION: rendered},
            "ownerReferences": pool.controller_owner_ref(&()).map(|owner| vec![owner]).unwrap_or_default(),
        },
        "spec": spec,
    });
    Manifest::of_json(resource, value)
}

/// Returns the update strategy. It is set for every kind: the API server fills in an omitted one, which then has no
/// owner and stays when another one is wanted.
fn strategy(workload: Workload, pool: &WorkerPool) -> Option<(&'static str, Value)> {
    let given = pool.spec.template.as_ref().map(|template| &template.strategy).filter(|one| !one.is_empty());
    let given = given.map(|strategy| strategy.0.clone());
    let rolling = |parameters: Value| json!({"type": "RollingUpdate", "rollingUpdate": parameters});
    let spec = &pool.spec;
    match workload {
        // Two workers would scale the same Deployments against each other.
        Workload::Workers if spec.scales_deployments() => Some(("strategy", json!({"type": "Recreate"}))),
        // Workers with engines hold GPUs, of which none is spare.
        Workload::Workers if spec.runs_commands() => {
            Some(("strategy", rolling(json!({"maxSurge": 0, "maxUnavailable": 1}))))
        }
        // Workers without engines hold no GPU: use the API server's default.
        Workload::Workers => Some(("strategy", rolling(json!({"maxSurge": "25%", "maxUnavailable": "25%"})))),
        // With one Pod more than there are GPUs, a rollout would never end.
        Workload::Backend => {
            Some(("strategy", given.unwrap_or_else(|| rolling(json!({"maxSurge": 0, "maxUnavailable": 1})))))
        }
        Workload::BackendOnNodes => {
            Some(("updateStrategy", given.unwrap_or_else(|| rolling(json!({"maxUnavailable": 1})))))
        }
    }
}

/// Returns a Pod that contains only the worker.
fn alone(inputs: &sidecar::SidecarInputs<'_>) -> Result<Value, sidecar::Refusal> {
    let pool = &inputs.pool.spec;
    let access = pool.scales_deployments();
    let mut spec = json!({
        "containers": [sidecar::container(inputs, true)],
        "volumes": sidecar::volumes(inputs),
        "terminationGracePeriodSeconds": sidecar::standalone_grace_seconds(pool)?,
        "automountServiceAccountToken": access,
        "enableServiceLinks": false,
        "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
    });
    if let Some(spec) = spec.as_object_mut() {
        if access {
            let name = inputs.pool.metadata.name.as_deref().unwrap_or_default();
            spec.insert("serviceAccountName".to_owned(), names::worker(name).into());
        }
        if !inputs.defaults.image_pull_secrets.is_empty() {
            spec.insert("imagePullSecrets".to_owned(), json!(inputs.defaults.image_pull_secrets));
        }
    }
    let port = sidecar::sidecar_port(pool).to_string();
    let mut annotations =
        json!({"prometheus.io/scrape": "true", "prometheus.io/port": port, "prometheus.io/path": "/metrics"});
    if let (Some(hash), Some(annotations)) = (sidecar::slots_hash(pool), annotations.as_object_mut()) {
        annotations.insert(names::SLOTS_HASH_ANNOTATION.to_owned(), hash.into());
    }
    Ok(json!({"metadata": {"annotations": annotations}, "spec": spec}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifests::{snapshot, testing};

    fn built(spec: &Value, replicas: i32) -> Manifest {
        let (pool, defaults) = (testing::pool(spec), testing::defaults());
        let inputs = sidecar::SidecarInputs { pool: &pool, defaults: &defaults, drain_token: "t0ken" };
        let kind = Workload::of(&pool).unwrap();
        let (template, notes) = template(kind, &inputs).unwrap();
        assert_eq!(notes, []);
        workload(kind, &pool, &template, "{}", Some(replicas))
    }

    fn vllm() -> Value {
        json!({
            "containers": [{
                "name": "vllm", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", "Qwen/Qwen3-8B"],
                "ports": [{"containerPort": 8000}], "resources": {"limits": {"nvidia.com/gpu": 1}},
                "fieldOfTomorrow": {"kept": true},
            }],
            "nodeSelector": {"gpu": "l40s"},
        })
    }

    #[test]
    fn template_renders_deployment() {
        let spec = json!({
            "provider": "local", "backend": {"engine": "vllm"},
            "template": {
                "metadata": {"labels": {"team": "a", "app.kubernetes.io/component": "mine"}, "annotations": {"note": "kept"}},
                "spec": vllm(),
            },
        });
        snapshot::check("backend-deployment", &built(&spec, 3).to_yaml());
    }

    #[test]
    fn template_renders_daemon_set() {
        let spec = json!({
            "provider": "local", "backend": {"engine": "vllm"}, "template": {"kind": "DaemonSet", "spec": vllm()},
        });
        snapshot::check("backend-daemonset", &built(&spec, 3).to_yaml());
    }

    #[test]
    fn deployment_progress_deadline_is_one_hour() {
        let deadline = |spec: Value| built(&spec, 1).value["spec"].get("progressDeadlineSeconds").cloned();
        let template = |kind: &str| json!({"provider": "local", "template": {"kind": kind, "spec": {"containers": [{"name": "a"}]}}});
        assert_eq!(deadline(template("Deployment")), Some(json!(3600)));
        assert_eq!(deadline(template("DaemonSet")), None, "a DaemonSet has none");
        assert_eq!(deadline(json!({"provider": "local", "standalone": {}})), None, "workers alone load nothing");
    }

    #[test]
    fn user_strategy_is_kept() {
        let spec = json!({
            "provider": "local",
            "template": {"strategy": {"type": "Recreate"}, "spec": {"containers": [{"name": "a"}]}},
        });
        assert_eq!(built(&spec, 1).value["spec"]["strategy"], json!({"type": "Recreate"}));
    }

    #[test]
    fn standalone_workers_render_deployment_with_remote_backend() {
        let spec = json!({
            "provider": "local", "standalone": {"replicas": 2},
            "backend": {
                "engine": "openai", "url": "https://api.example", "apiKeySecretRef": {"name": "engine", "key": "token"},
            },
        });
        snapshot::check("backend-standalone", &built(&spec, 2).to_yaml());
    }

    #[test]
    fn worker_scaling_deployments_has_one_replica_and_token() {
        let models = json!([{"id": "qwen", "deployment": "qwen", "url": "http://qwen:8000", "maxConcurrency": 8}]);
        let spec = json!({
            "provider": "local", "standalone": {},
            "multiplexer": {"slots": [{"id": "gpu0", "driver": "kubernetes", "models": models}]},
        });
        snapshot::check("backend-standalone-kubernetes", &built(&spec, 1).to_yaml());
    }

    #[test]
    fn standalone_engine_worker_releases_gpu_before_replacement() {
        let models = json!([{"id": "qwen", "command": ["vllm", "--port", "${PORT}"]}]);
        let spec = json!({
            "provider": "local", "standalone": {}, "shutdownTimeout": "60s", "sidecar": {"image": "mine"},
            "multiplexer": {"slots": [{"id": "gpu0", "driver": "process", "models": models}]},
        });
        let spec = &built(&spec, 1).value["spec"];
        assert_eq!(spec["strategy"]["rollingUpdate"], json!({"maxSurge": 0, "maxUnavailable": 1}));
        let pod = &spec["template"]["spec"];
        assert_eq!(pod["terminationGracePeriodSeconds"], 90);
        assert_eq!((&pod["automountServiceAccountToken"], pod.get("serviceAccountName")), (&json!(false), None));
        let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
        assert!(mounts.contains(&json!({"name": "modelrelay-tmp", "mountPath": "/tmp", "readOnly": false})));
    }

    #[test]
    fn injecting_pool_renders_no_workload() {
        assert_eq!(Workload::of(&testing::pool(&json!({"provider": "local"}))), None);
    }
}
