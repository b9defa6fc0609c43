//! A pool nested too deep for the operator's JSON parser, next to a valid one.

use modelrelay_cluster::manifests::worker_pool;
use modelrelay_cluster::{Cluster, SYSTEM_NAMESPACE, TEST_TIMEOUT, wait_until};
use serde_json::json;

use super::replicas::{OPERATOR, Operator};

/// The operator's JSON parser fails at 128 levels, the API server at thousands.
const LEVELS: usize = 300;

#[tokio::test]
async fn too_deeply_nested_pool_blocks_no_other() {
    let cluster = Cluster::connect().await;
    Operator::settled(&cluster).await;
    // In its own namespace: the tests' own watches could not parse it either.
    let deep = cluster.namespace("deep").await;
    let limits = (0..LEVELS).fold(json!({}), |inner, _| json!({"a": inner}));
    deep.apply(&[worker_pool("deep", &json!({"provider": "local", "sidecar": {"resources": limits}}))]).await;
    let status = "get workerpool deep --output jsonpath={.status.conditions[?(@.type=='Ready')].status}";
    wait_until("the pool to be judged", TEST_TIMEOUT, async || !deep.kubectl(status).await.is_empty()).await;

    let other = cluster.namespace("beside").await;
    let pools = other.custom("modelrelay.io/v1alpha1", "WorkerPool");
    other.apply(&[worker_pool("llama", &json!({"provider": "local"}))]).await;
    other.wait_for_condition(&pools, "llama", "Ready", "False").await;

    // A new replica lists all of them again.
    let rollout =
        |what: &str| cluster.kubectl(&format!("--namespace {SYSTEM_NAMESPACE} rollout {what} deployment/{OPERATOR}"));
    rollout("restart").await;
    rollout("status --timeout 90s").await;
    Operator::settled(&cluster).await;
    other.apply(&[worker_pool("mistral", &json!({"provider": "local"}))]).await;
    other.wait_for_condition(&pools, "mistral", "Ready", "False").await;
    deep.kubectl("delete workerpool deep --timeout 60s").await;
}
