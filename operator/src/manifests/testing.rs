//! Resources for the builders' tests.

use serde_json::{Value, json};

use super::worker_config::{RelayTarget, RelayTransport};
use crate::crd::{Provider, WorkerPool};
use crate::settings::defaults::WorkerDefaults;

/// Pool `llama` in namespace `llm`.
pub(crate) fn pool(spec: &Value) -> WorkerPool {
    serde_json::from_value(json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool",
        "metadata": {"name": "llama", "namespace": "llm", "uid": "11111111-2222-3333-4444-555555555555", "generation": 1},
        "spec": spec,
    }))
    .unwrap()
}

/// Returns a Provider.
pub(crate) fn provider(namespace: &str, name: &str, spec: &Value) -> Provider {
    serde_json::from_value(json!({
        "apiVersion": "modelrelay.io/v1alpha1", "kind": "Provider",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec,
    }))
    .unwrap()
}

/// Returns defaults like the chart's.
pub(crate) fn defaults() -> WorkerDefaults {
    WorkerDefaults { image: "registry.example/modelrelay-worker:1.2.3".to_owned(), ..WorkerDefaults::default() }
}

/// Returns the relays of Provider `local` in namespace `llm`.
pub(crate) fn relay(transport: RelayTransport) -> RelayTarget {
    RelayTarget { address: "local-workers.llm.svc:8081".to_owned(), provider: "local".to_owned(), transport }
}
