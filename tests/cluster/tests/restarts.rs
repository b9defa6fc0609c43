//! The cluster's own processes end and restart while relays and workers keep serving.

use std::time::Duration;

use modelrelay_cluster::Cluster;
use serde_json::json;

use crate::operator::replicas::Operator;
use crate::traffic::stack::{Backends, CLIENTS, Stack, lives};

/// Longer than a leader may lead without a renewal, and than the Lease.
const AWAY: Duration = Duration::from_secs(16);
/// The time in which the API server starts.
const STARTING: Duration = Duration::from_secs(5);

#[tokio::test]
async fn requests_continue_while_api_server_is_away() {
    let cluster = Cluster::connect().await;
    let operator = Operator::settled(&cluster).await;
    let operators = lives(operator.pods().await);
    let stack = Stack::start("restarts", Backends::Injected, 2).await;
    let before = stack.lives().await;
    let traffic = stack.mixed_load().await;
    // A controller manager that cannot renew its own Lease exits, and begins again. This one elects no leader, and
    // would continue with what it knew before: that the node has sent no heartbeat, so that no Service has an endpoint.
    tokio::join!(cluster.restart("apiserver", AWAY), cluster.restart("controllers", AWAY + STARTING));
    traffic.wait_for_answers(CLIENTS / 2).await;
    traffic.expect_no_failure("the API server was away");

    // The operator leads again and applies changes.
    stack.change(&json!({"queue": {"maxLength": 400}})).await;
    stack.wait_for_workers(2, 2).await;
    assert_eq!(stack.lives().await, before, "Pods were restarted or replaced");
    let operator = Operator::settled(&cluster).await;
    assert_eq!(lives(operator.pods().await), operators, "the operator was restarted");
    stack.namespace.kubectl("rollout restart deployment/vllm").await;
    stack.namespace.rolled_out("deployment/vllm").await;
    stack.wait_for_workers(2, 2).await;
    traffic.expect_all_answered().await;
}
