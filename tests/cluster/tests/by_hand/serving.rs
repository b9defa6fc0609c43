//! Fifty clients while everything behind them ends and restarts.

use super::stack::Stack;

const CLIENTS: usize = 50;

#[tokio::test]
async fn deleting_backend_pod_fails_no_request() {
    let stack = Stack::start("delete", 2, 2).await;
    let traffic = stack.traffic().streams(CLIENTS).words(80).start();
    traffic.wait_for_underway(CLIENTS).await;
    let victim = stack.namespace.pod_names("app=vllm").await.swap_remove(0);
    stack.namespace.kubectl(&format!("delete pod {victim}")).await;
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(CLIENTS).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn rolling_backend_then_relay_fails_no_request() {
    let stack = Stack::start("roll", 1, 1).await;
    let traffic = stack.traffic().streams(CLIENTS).words(80).start();
    for deployment in ["deployment/vllm", "deployment/relay"] {
        traffic.wait_for_underway(CLIENTS).await;
        stack.namespace.kubectl(&format!("rollout restart {deployment}")).await;
        stack.namespace.rolled_out(deployment).await;
        stack.wait_for_workers(1, 1).await;
        traffic.wait_for_answers(CLIENTS).await;
    }
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn killing_relay_fails_no_request_permanently() {
    let stack = Stack::start("kill", 2, 1).await;
    let traffic = stack.traffic().streams(CLIENTS).words(80).start();
    traffic.wait_for_underway(CLIENTS).await;
    let victim = stack.namespace.pod_names("app=relay").await.swap_remove(0);
    stack.namespace.kubectl(&format!("delete pod {victim} --grace-period 0 --force")).await;
    stack.wait_for_workers(2, 1).await;
    traffic.wait_for_answers(CLIENTS).await;
    traffic.finish().await.expect_no_final_failure();
}
