//! Relays end, gracefully and otherwise, and are replaced.

use k8s_openapi::api::core::v1;
use kube::ResourceExt;
use modelrelay_cluster::process::kill_process;
use modelrelay_cluster::traffic::Running;
use modelrelay_cluster::{TEST_TIMEOUT, wait_until};
use serde_json::json;

use super::stack::{Backends, CLIENTS, RELAY_PODS, Stack, expect_no_failure};

#[tokio::test]
async fn replacing_and_rescaling_relays_fails_no_request() {
    let stack = Stack::start("traffic-relays", Backends::Injected, 2).await;
    let traffic = stack.load().await;
    let before = stack.namespace.pod_names(RELAY_PODS).await;
    stack.namespace.kubectl("rollout restart deployment/local-relay").await;
    stack.namespace.rolled_out("deployment/local-relay").await;
    stack.wait_for_workers(2, 2).await;
    let after = stack.namespace.pod_names(RELAY_PODS).await;
    assert!(after.iter().all(|pod| !before.contains(pod)), "{before:?} should have been replaced: {after:?}");
    traffic.wait_for_answers(CLIENTS).await;
    expect_no_failure(&traffic, "the relays were replaced");

    for replicas in [1, 2] {
        stack.change(&json!({"relay": {"replicas": replicas}})).await;
        stack.wait_for_workers(replicas, 2).await;
        traffic.wait_for_answers(CLIENTS).await;
        expect_no_failure(&traffic, &format!("the number of relays became {replicas}"));
    }
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn relay_rollout_fails_no_request_of_kept_connections() {
    let stack = Stack::start("traffic-kept", Backends::Injected, 2).await;
    // Clients stay with the relay that they are connected to, whatever the Service's endpoints are.
    let traffic = stack.clients().kept().start();
    traffic.wait_for_underway(CLIENTS).await;
    stack.namespace.kubectl("rollout restart deployment/local-relay").await;
    stack.namespace.rolled_out("deployment/local-relay").await;
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(2 * CLIENTS).await;
    for replicas in [1, 2] {
        stack.change(&json!({"relay": {"replicas": replicas}})).await;
        stack.wait_for_workers(replicas, 2).await;
        traffic.wait_for_answers(2 * CLIENTS).await;
    }
    traffic.finish().await.expect_all_answered();
}

/// Only the requests that the relay held are lost, and those sent to it before the Service was updated.
#[tokio::test]
async fn killed_relay_breaks_only_its_own_requests() {
    let stack = Stack::start("traffic-kill", Backends::Injected, 2).await;
    let traffic = stack.load().await;
    let pods = stack.namespace.pods(RELAY_PODS).await;
    let [victim, survivor] = pods.as_slice() else { panic!("there should be two relays") };
    kill_process(victim, |command| command.starts_with("/modelrelay-relay"));
    let came_back = async || restarts_of(&stack, &victim.name_any()).await == Some(1);
    wait_until("the killed relay's restart", TEST_TIMEOUT, came_back).await;
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(CLIENTS).await;
    expect_only_losses_of(&stack, &traffic, survivor).await;

    let settled = traffic.counts();
    traffic.wait_for_answers(2 * CLIENTS).await;
    let now = traffic.counts();
    let losses = |counts: &modelrelay_cluster::traffic::Counts| counts.cut.len() + counts.retryable.len();
    assert_eq!(losses(&now), losses(&settled), "requests fail though the relay is back: {now}");

    // Like a lost node: the Pod's end is not awaited.
    stack.namespace.kubectl(&format!("delete pod {} --grace-period 0 --force", victim.name_any())).await;
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(CLIENTS).await;
    expect_only_losses_of(&stack, &traffic, survivor).await;
    traffic.finish().await.expect_no_final_failure();
}

/// Checks that the other relay completed every request it received, and that no client saw a failure that it would not
/// retry.
async fn expect_only_losses_of(stack: &Stack, traffic: &Running, survivor: &v1::Pod) {
    let counts = traffic.counts();
    counts.expect_no_final_failure();
    let stats = stack.admin_get(survivor, "/admin/stats").await.expect("the other relay responds");
    let ended = stats["providers"]["local"]["requests"].as_object().expect("requests by outcome").clone();
    let answered_alone = ended.keys().all(|outcome| outcome == "ok");
    assert!(answered_alone, "the relay that was not killed failed requests: {ended:?}; clients saw {counts}");
}

async fn restarts_of(stack: &Stack, pod: &str) -> Option<i32> {
    let pod = stack.namespace.api::<v1::Pod>().get(pod).await.ok()?;
    Some(pod.status?.container_statuses?.first()?.restart_count)
}
