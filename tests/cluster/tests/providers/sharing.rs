//! Providers that share the relay of another one, across namespaces.

use modelrelay_cluster::{Cluster, Namespace, TEST_TIMEOUT, manifests, wait_until};
use serde_json::json;

use super::setup::{LOCAL, Setup, VERSION, condition_of};

/// A Provider of another namespace, which refers to the one of the setup.
const CHAT: &str = "chat";

impl Setup {
    /// Creates a Provider that shares its relay, and one that refers to it, with a connected pool.
    async fn shared() -> (Self, Namespace) {
        let setup = Self::empty().await;
        let guest = Cluster::connect().await.namespace("guest").await;
        setup.provide(&json!({"relay": {"sharedWith": [{"namespace": guest.name, "provider": CHAT}]}})).await;
        let spec = json!({"relayRef": {"name": LOCAL, "namespace": setup.namespace.name}});
        guest
            .apply(&[manifests::provider(CHAT, &spec), manifests::worker_pool("llama", &manifests::demo_pool(CHAT))])
            .await;
        guest.wait_for_condition(&guest.custom(VERSION, "Provider"), CHAT, "Ready", "True").await;
        guest.wait_for_condition(&guest.custom(VERSION, "WorkerPool"), "llama", "Ready", "True").await;
        (setup, guest)
    }

    async fn status_with_provider(&self, name: &str) -> u16 {
        self.send_request("/v1/chat/completions", &[("x-modelrelay-provider", name)]).await.status
    }
}

#[tokio::test]
async fn shared_relay_serves_provider_of_granted_namespace() {
    let (setup, guest) = Setup::shared().await;
    setup.answers(None).await;
    let name = format!("{CHAT}.{}", guest.name);
    assert_eq!(setup.status_with_provider(&name).await, 200);
    assert_eq!(setup.status_with_provider(CHAT).await, 404, "the plain name is free for the owner's namespace");
    let relays = "app.kubernetes.io/component=relay";
    assert_eq!(guest.pod_names(relays).await, Vec::<String>::new());
    let shown = guest.kubectl("get providers").await;
    assert!(shown.contains(&format!("{}/{LOCAL}", setup.namespace.name)), "{shown}");
}

#[tokio::test]
async fn withdrawn_grant_ends_service_without_relay_restart() {
    let (setup, guest) = Setup::shared().await;
    let before: Vec<_> = setup.relays().await.iter().map(|pod| pod.metadata.uid.clone()).collect();
    setup.patch(&json!({"relay": {"sharedWith": null}})).await;
    let refused = |object: &kube::api::DynamicObject| condition_of(object, "Ready")["reason"] == "RelayNotGranted";
    guest.wait_for(&guest.custom(VERSION, "Provider"), CHAT, "RelayNotGranted", refused).await;
    let name = format!("{CHAT}.{}", guest.name);
    wait_until("404 for the withdrawn Provider", TEST_TIMEOUT, async || setup.status_with_provider(&name).await == 404)
        .await;
    let after: Vec<_> = setup.relays().await.iter().map(|pod| pod.metadata.uid.clone()).collect();
    assert_eq!(after, before);
}
