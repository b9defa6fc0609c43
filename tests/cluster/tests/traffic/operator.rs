//! Requests succeed while the operator is down, and it continues where it stopped. `.config/nextest.toml` runs this
//! alone, because all other tests need the operator.

use super::stack::{Backends, CLIENTS, Stack, expect_no_failure};
use modelrelay_cluster::SYSTEM_NAMESPACE;
use serde_json::json;

#[tokio::test]
async fn deleting_operator_fails_no_request() {
    let stack = Stack::start("traffic-operator", Backends::Injected, 2).await;
    let lives = stack.lives().await;
    let traffic = stack.load().await;
    let system =
        |arguments: &str| stack.namespace.cluster.kubectl(&format!("--namespace {SYSTEM_NAMESPACE} {arguments}"));
    system("delete pods --selector app.kubernetes.io/component=operator --wait=false").await;
    // Requested while no operator runs.
    stack.change(&json!({"queue": {"maxLength": 400}})).await;
    traffic.wait_for_answers(CLIENTS).await;
    system("rollout status --timeout 90s deployment/modelrelay-operator").await;
    expect_no_failure(&traffic, "the operator was away");
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(CLIENTS).await;
    traffic.finish().await.expect_all_answered();
    assert_eq!(stack.lives().await, lives, "a new operator restarted Pods");
}
