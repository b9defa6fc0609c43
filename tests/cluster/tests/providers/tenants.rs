//! Pods that call the relay with the token of their ServiceAccount, with a real API server.

use modelrelay_cluster::{TEST_TIMEOUT, http::fetch, manifests, wait_until};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup, address_of};

/// The ServiceAccount of the tenant.
const CHAT: &str = "chat";
/// The Provider whose worker is a client of the other one.
const FRONT: &str = "front";
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

/// A worker of the Provider `front` whose backend is the relay of `local`, which it calls with its own projected token.
fn client_pod() -> Value {
    let secret = json!({"secretKeyRef": {"name": format!("{FRONT}-worker"), "key": "worker-secret"}});
    let token = json!({"serviceAccountToken": {"path": "token", "audience": AUDIENCE, "expirationSeconds": 3600}});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "client"},
        "spec": {
            "serviceAccountName": CHAT, "automountServiceAccountToken": false,
            "containers": [{
                "name": "client", "image": "localhost/modelrelay-worker:dev", "imagePullPolicy": "Never",
                "env": [
                    {"name": "PROXY_URL", "value": format!("http://{FRONT}-workers:8081")},
                    {"name": "PROVIDER_NAME", "value": FRONT},
                    {"name": "WORKER_SECRET", "valueFrom": secret},
                    {"name": "BACKEND_URL", "value": format!("http://{LOCAL}")},
                    {"name": "BACKEND_API_KEY_FILE", "value": "/var/run/secrets/modelrelay/token"},
                ],
                "volumeMounts": [{"name": "modelrelay", "mountPath": "/var/run/secrets/modelrelay", "readOnly": true}],
            }],
            "volumes": [{"name": "modelrelay", "projected": {"sources": [token]}}],
        },
    })
}

#[tokio::test]
async fn pod_calls_relay_with_projected_token() {
    let setup = Setup::with_tenant().await;
    setup.namespace.apply(&[manifests::provider(FRONT, &json!({}))]).await;
    setup.namespace.wait_for_condition(&setup.providers, FRONT, "Ready", "True").await;
    setup.namespace.apply(&[client_pod()]).await;
    let front = setup.namespace.service_address(FRONT).await;
    let body = json!({"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
    wait_until("a response through the Pod", TEST_TIMEOUT, async || {
        fetch(front, "POST /v1/chat/completions", &[], &body).await.is_ok_and(|reply| reply.status == 200)
    })
    .await;
    let relay = setup.relays().await.into_iter().next().expect("a relay");
    let id = format!("sa:{}/{CHAT}", setup.namespace.name);
    let usage = setup.admin(&relay, &format!("GET /admin/usage?key={id}"), &Value::Null).await.json();
    assert_eq!(usage["usage"][0]["key"], "Chats", "{usage}");
    let listed = setup.admin(&relay, "GET /admin/keys", &Value::Null).await.json();
    assert_eq!(listed["tenants"][0]["id"], id.as_str(), "{listed}");
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
