//! A pool without Pods is woken by many requests at once, and sleeps again.

use kube::api::DynamicObject;
use modelrelay_cluster::traffic::Mixed;
use modelrelay_cluster::{Cluster, TEST_TIMEOUT, manifests, wait_until};
use serde_json::json;

use super::stack::{CLIENTS, POOL, Stack, pool, provider};

/// True of the line of a metrics page that shows that requests for the model wait for a worker.
fn is_known(line: &str) -> bool {
    line.starts_with("modelrelay_queue_depth{") && line.contains(&format!("model=\"{}\"", manifests::DEMO_MODEL))
}

#[tokio::test]
async fn waking_pool_from_zero_fails_no_request() {
    let namespace = Cluster::connect().await.namespace("traffic-zero").await;
    let mut pool = pool();
    pool["models"] = json!([manifests::DEMO_MODEL]);
    pool["maxConcurrency"] = json!(CLIENTS / 2);
    let target = CLIENTS / 2;
    pool["scaling"] =
        json!({"minReplicas": 0, "maxReplicas": 2, "targetRequestsPerReplica": target, "scaleDownDelay": "5s"});
    let stack = Stack::apply(namespace, &[provider(&json!({})), manifests::worker_pool(POOL, &pool)], 0).await;
    let pools = stack.namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    let at_zero = |pool: &DynamicObject| {
        let conditions = pool.data["status"]["conditions"].as_array();
        conditions.into_iter().flatten().any(|it| it["type"] == "Ready" && it["reason"] == "ScaledToZero")
    };
    for _ in 0..2 {
        stack.namespace.wait_for(&pools, POOL, "no Pods", at_zero).await;
        wait_until("both relays to know the model", TEST_TIMEOUT, async || {
            let pages = stack.metrics().await;
            pages.len() == 2 && pages.iter().all(|page| page.lines().any(is_known))
        })
        .await;
        let traffic = Mixed::start(&stack.clients(), CLIENTS / 2);
        traffic.wait_for_underway(CLIENTS / 2).await;
        stack.wait_for_workers(2, 2).await;
        traffic.wait_for_answers(CLIENTS / 2).await;
        traffic.expect_all_answered().await;
    }
}
