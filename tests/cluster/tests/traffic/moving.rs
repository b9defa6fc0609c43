//! A Provider moves from a relay of its own to another Provider's.

use kube::api::DynamicObject;
use modelrelay_cluster::{TEST_TIMEOUT, manifests, wait_until};
use serde_json::json;

use super::stack::{Backends, CLIENTS, POOL_PODS, PROVIDER, RELAY_PODS, Stack};

/// The Provider that owns the relay.
const FRONT: &str = "front";

#[tokio::test]
async fn moving_to_shared_relay_fails_no_request() {
    let stack = Stack::start("traffic-moving", Backends::Injected, 2).await;
    stack.namespace.apply(&[manifests::provider(FRONT, &json!({"relay": {"replicas": 2}}))]).await;
    stack.namespace.wait_for_condition(&stack.providers(), FRONT, "Ready", "True").await;
    let backends = stack.namespace.pod_names(POOL_PODS).await;
    let traffic = stack.mixed_load().await;

    let patch = json!({"spec": {"relay": null, "relayRef": {"name": FRONT}}}).to_string();
    stack.namespace.kubectl("patch provider local --type merge --patch").arg(patch).await;
    let has_moved = |provider: &DynamicObject| {
        let status = &provider.data["status"];
        status["relay"] == FRONT && status["moving"].is_null()
    };
    stack.namespace.wait_for(&stack.providers(), PROVIDER, "the end of the move", has_moved).await;
    let own_relays = async || stack.namespace.pod_names(RELAY_PODS).await.is_empty();
    wait_until("the end of the former relays", TEST_TIMEOUT, own_relays).await;
    traffic.wait_for_answers(CLIENTS).await;
    traffic.expect_no_failure("the Provider moved");
    traffic.expect_all_answered().await;
    assert_eq!(stack.namespace.pod_names(POOL_PODS).await, backends, "workers were replaced");
}
