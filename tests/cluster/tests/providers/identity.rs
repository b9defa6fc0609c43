//! Workers that present the token of their ServiceAccount, with a real API server.

use k8s_openapi::api::core::v1::Pod;
use modelrelay_cluster::{TEST_TIMEOUT, http::fetch, manifests, wait_until};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup, address_of};

/// The workers' ServiceAccount.
const WORKERS: &str = "gpu-workers";

impl Setup {
    /// Creates a Provider that lists the account, and a pool whose connected workers run as it.
    async fn by_token() -> Self {
        let setup = Self::empty().await;
        let account = |name: &str| json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}});
        setup.namespace.apply(&[account(WORKERS), account("others")]).await;
        let often = json!([{"name": "WORKER_TOKEN_RECHECK_SECS", "value": "2"}]);
        setup.provide(&json!({"workerServiceAccounts": [WORKERS], "relay": {"podTemplate": {"env": often}}})).await;
        let mut pool = manifests::demo_pool(LOCAL);
        pool["credential"] = json!("ServiceAccountToken");
        pool["template"]["spec"]["serviceAccountName"] = json!(WORKERS);
        setup.namespace.apply(&[manifests::worker_pool("llama", &pool)]).await;
        setup.condition("Ready", "True").await;
        setup.connected().await;
        setup
    }

    /// Returns a token like the kubelet's.
    async fn token(&self, account: &str, audience: &str) -> String {
        let audience = if audience.is_empty() { String::new() } else { format!("--audience {audience}") };
        self.namespace.kubectl(&format!("create token {account} --duration 10m {audience}")).await.trim().to_owned()
    }

    async fn relay(&self) -> Pod {
        self.relays().await.into_iter().next().expect("a relay")
    }

    /// Returns a relay's status for a worker that presents this token.
    async fn dial(&self, relay: &Pod, token: &str) -> u16 {
        let bearer = format!("Bearer {token}");
        let headers = [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-version", "13"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("authorization", bearer.as_str()),
        ];
        let what = format!("GET /v1/worker/connect?provider={LOCAL}");
        fetch(address_of(relay, 8081), &what, &headers, &Value::Null).await.expect("a response").status
    }

    async fn identities(&self, relay: &Pod) -> Vec<Value> {
        let workers = self.admin(relay, "GET /admin/workers", &Value::Null).await.json();
        let workers = workers["workers"].as_array().cloned().unwrap_or_default();
        workers.into_iter().map(|mut worker| worker["identity"].take()).collect()
    }

    /// True if the relay's account may have tokens reviewed.
    async fn may_review(&self) -> bool {
        let who = format!("system:serviceaccount:{}:{LOCAL}-relay", self.namespace.name);
        let what = format!("auth can-i --as {who} create tokenreviews.authentication.k8s.io");
        self.namespace.kubectl(&what).output().await.stdout.trim() == "yes"
    }
}

#[tokio::test]
async fn workers_register_only_with_token_of_their_account() {
    let setup = Setup::by_token().await;
    setup.answers(None).await;
    let relay = setup.relay().await;
    assert_eq!(setup.identities(&relay).await, [json!(format!("{}/{WORKERS}", setup.namespace.name))]);
    for pod in setup.namespace.pods("modelrelay.io/pool=llama").await {
        let volumes = pod.spec.and_then(|spec| spec.volumes).unwrap_or_default();
        assert!(volumes.iter().all(|volume| volume.secret.is_none()), "{volumes:?}");
    }
    let (good, unused) = (setup.token(WORKERS, "modelrelay").await, setup.token(WORKERS, "modelrelay").await);
    assert_eq!(setup.dial(&relay, &good).await, 101);
    for (account, audience) in [("others", "modelrelay"), (WORKERS, "somebody-else"), (WORKERS, "")] {
        let token = setup.token(account, audience).await;
        assert_eq!(setup.dial(&relay, &token).await, 401, "{account} for {audience:?}");
    }
    // The account's tokens end with it, including those of workers that are still connected.
    setup.namespace.kubectl(&format!("delete serviceaccount {WORKERS}")).await;
    wait_until("its workers to be gone", TEST_TIMEOUT, async || setup.identities(&relay).await.is_empty()).await;
    assert_eq!(setup.dial(&relay, &unused).await, 401);
    let name = relay.metadata.name.as_deref().expect("a Pod has a name");
    let log = setup.namespace.kubectl(&format!("logs {name}")).await;
    assert!(log.contains("the worker's token is no longer valid"), "{log}");
    for token in [good, unused] {
        assert!(!log.contains(token.rsplit('.').next().expect("a signature")), "the relay's log discloses a token");
    }
}

#[tokio::test]
async fn relay_reviews_tokens_while_provider_lists_accounts() {
    let setup = Setup::ready(&json!({})).await;
    assert!(!setup.may_review().await);
    setup.patch(&json!({"workerServiceAccounts": [WORKERS]})).await;
    wait_until("the right", TEST_TIMEOUT, async || setup.may_review().await).await;
    let relay = format!("system:serviceaccount:{}:{LOCAL}-relay", setup.namespace.name);
    for more in
        ["get secrets", "create pods", "create serviceaccounts --subresource token", "create subjectaccessreviews"]
    {
        let output = setup.namespace.kubectl(&format!("auth can-i --as {relay} {more}")).output().await;
        assert_eq!(output.stdout.trim(), "no", "{more}");
    }
    setup.patch(&json!({"workerServiceAccounts": []})).await;
    wait_until("the right to be revoked", TEST_TIMEOUT, async || !setup.may_review().await).await;
    setup.patch(&json!({"workerServiceAccounts": [WORKERS]})).await;
    wait_until("the right", TEST_TIMEOUT, async || setup.may_review().await).await;
    setup.namespace.kubectl(&format!("delete provider {LOCAL}")).await;
    wait_until("the right to be deleted with the Provider", TEST_TIMEOUT, async || !setup.may_review().await).await;
}
