//! Backends are deleted and replaced.

use super::stack::{Backends, CLIENTS, POOL_PODS, Stack, expect_no_failure};

/// Deletes one Pod, then replaces all.
async fn backends_come_and_go(name: &str, backends: Backends, deployment: &str) {
    let stack = Stack::start(name, backends, 2).await;
    let traffic = stack.load().await;
    let victim = stack.namespace.pod_names(POOL_PODS).await.swap_remove(0);
    stack.namespace.kubectl(&format!("delete pod {victim}")).await;
    stack.wait_for_workers(2, 2).await;
    traffic.wait_for_answers(CLIENTS).await;
    expect_no_failure(&traffic, "a backend Pod was deleted");
    let before = stack.namespace.pod_names(POOL_PODS).await;
    stack.namespace.kubectl(&format!("rollout restart {deployment}")).await;
    stack.namespace.rolled_out(deployment).await;
    stack.wait_for_workers(2, 2).await;
    let after = stack.namespace.pod_names(POOL_PODS).await;
    assert!(after.iter().all(|pod| !before.contains(pod)), "{before:?} should have been replaced: {after:?}");
    traffic.wait_for_answers(CLIENTS).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn replacing_injected_backends_fails_no_request() {
    backends_come_and_go("traffic-injected", Backends::Injected, "deployment/vllm").await;
}

#[tokio::test]
async fn replacing_template_backends_fails_no_request() {
    backends_come_and_go("traffic-template", Backends::Template, "deployment/llama-backend").await;
}
