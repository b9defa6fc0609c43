//! Manifests that many tests apply: objects of a user, not of the operator.

use serde_json::{Value, json};

/// The image of the worker, which also holds the demo backend.
pub const WORKER_IMAGE: &str = "localhost/modelrelay-worker:dev";

/// The image of the relay.
pub const RELAY_IMAGE: &str = "localhost/modelrelay-relay:dev";

/// The only model that the demo backend serves.
pub const DEMO_MODEL: &str = "demo";

/// The security context that `restricted` requires of a container, plus a read-only root.
#[must_use]
pub fn container_security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": true,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}

/// A container `vllm` with the demo backend on port 8000, which takes 40 ms per word.
#[must_use]
pub fn demo_container() -> Value {
    json!({
        "name": "vllm",
        "image": WORKER_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["demo", "--listen", "0.0.0.0:8000"],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        "securityContext": container_security(),
    })
}

/// A Deployment of demo backends with its Service on port 80, labelled `app: NAME`. It contains nothing of
/// ModelRelay's; add `modelrelay.io/pool` to the template's labels, or edit it otherwise, before applying it.
#[must_use]
pub fn demo_backend(name: &str, replicas: u32) -> Vec<Value> {
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"automountServiceAccountToken": false, "containers": [demo_container()]},
            },
        },
    });
    vec![deployment, service(name, name, 80, 8000)]
}

/// A Service of type ClusterIP that forwards `port` to `target` of the Pods labelled `app: APP`.
#[must_use]
pub fn service(name: &str, app: &str, port: u16, target: u16) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": [{"name": "http", "port": port, "targetPort": target}]},
    })
}

/// A Provider.
#[must_use]
pub fn provider(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider", "metadata": {"name": name}, "spec": spec})
}

/// A WorkerPool; `spec` names the Provider.
#[must_use]
pub fn worker_pool(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "metadata": {"name": name}, "spec": spec})
}

/// The spec of a pool that runs the demo backend itself, from a template with [`demo_container`].
#[must_use]
pub fn demo_pool(provider: &str) -> Value {
    json!({
        "provider": provider,
        "backend": {"port": 8000, "container": "vllm"},
        "shutdownTimeout": "10s",
        "template": {"spec": {"automountServiceAccountToken": false, "containers": [demo_container()]}},
    })
}
