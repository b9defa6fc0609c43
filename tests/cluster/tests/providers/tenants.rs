//! Clients that call the relay with the token of a ServiceAccount, with a real API server.

use modelrelay_cluster::{TEST_TIMEOUT, http::fetch, manifests, wait_until};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup, address_of};

/// The ServiceAccount of the tenant.
const CHAT: &str = "chat";
const AUDIENCE: &str = "modelrelay-clients";

impl Setup {
    /// Creates a serving Provider with this tenant, and two ServiceAccounts.
    async fn with_tenant() -> Self {
        let setup = Self::empty().await;
        let account = |name: &str| json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}});
        setup.namespace.apply(&[account(CHAT), account("others")]).await;
        let tenants = json!([{"namespace": setup.namespace.name, "serviceAccount": CHAT, "name": "Chats"}]);
        setup.provide(&json!({"relay": {"requireApiKeys": true, "tenants": tenants}})).await;
        setup.namespace.apply(&[manifests::worker_pool("llama", &manifests::demo_pool(LOCAL))]).await;
        setup.condition("Ready", "True").await;
        setup.connected().await;
        setup
    }

    /// Returns the status of a request with a token of this account.
    async fn status_of(&self, account: &str, audience: &str) -> u16 {
        let create = format!("create token {account} --duration 10m --audience {audience}");
        let bearer = format!("Bearer {}", self.namespace.kubectl(&create).await.trim());
        self.send_request("/v1/chat/completions", &[("authorization", &bearer)]).await.status
    }
}

#[tokio::test]
async fn only_tokens_of_tenants_are_accepted() {
    let setup = Setup::with_tenant().await;
    assert_eq!(setup.status_of(CHAT, AUDIENCE).await, 200);
    assert_eq!(setup.status_of("others", AUDIENCE).await, 403);
    assert_eq!(setup.status_of(CHAT, "modelrelay").await, 401);
    // The other one becomes a tenant with its namespace, without a restart.
    let before = setup.relays().await;
    let tenants = json!([{"namespace": setup.namespace.name}]);
    setup.patch(&json!({"relay": {"requireApiKeys": true, "tenants": tenants}})).await;
    wait_until("the changed tenant", TEST_TIMEOUT, async || setup.status_of("others", AUDIENCE).await == 200).await;
    let names =
        |pods: &[k8s_openapi::api::core::v1::Pod]| pods.iter().map(|pod| pod.metadata.uid.clone()).collect::<Vec<_>>();
    assert_eq!(names(&setup.relays().await), names(&before));
    // A key goes on working next to it.
    let relay = before.first().expect("a relay");
    let (_, key) = setup.make_key(relay).await;
    setup.wait_for_status(relay, &key, 200).await;
    let reply =
        fetch(address_of(relay, 8080), "GET /v1/models", &[("authorization", "Bearer eyJ.x.y")], &Value::Null).await;
    assert_eq!(reply.expect("a response").status, 401);
}
