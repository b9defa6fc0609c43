//! Deleting and recreating a Provider, and the Secrets that outlive it.

use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Secret, Service},
};
use kube::ResourceExt;
use modelrelay_cluster::{TEST_TIMEOUT, manifests, wait_until};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup, message_of};

const SECRETS: [&str; 3] = ["local-worker", "local-admin", "local-api-keys"];

#[tokio::test]
async fn recreated_provider_keeps_client_keys() {
    let spec = json!({"relay": {"requireApiKeys": true, "drainTimeout": "1s"}});
    let setup = Setup::serving(&spec).await;
    let (id, key) = setup.make_key(&setup.relays().await[0]).await;
    setup.wait_for_status(&setup.relays().await[0], &key, 200).await;
    setup.answers(Some(&key)).await;
    assert_eq!(setup.send_request("/v1/chat/completions", &[]).await.status, 401);
    let mut before = Vec::new();
    for secret in SECRETS {
        let secret = setup.namespace.api::<Secret>().get(secret).await.expect("the Secret exists");
        assert_eq!(secret.owner_references(), &[], "{}", secret.name_any());
        before.push((secret.uid(), secret.data));
    }
    let backends = setup.namespace.pod_names("modelrelay.io/pool=llama").await;

    setup.namespace.kubectl("delete provider local").await;
    setup.namespace.wait_gone(&setup.namespace.api::<Deployment>(), "local-relay").await;
    setup.namespace.wait_gone(&setup.namespace.api::<Service>(), LOCAL).await;
    setup.namespace.wait_gone(&setup.namespace.api::<Secret>(), "local-relay").await;
    wait_until("the relay's Pods to be gone", TEST_TIMEOUT, async || setup.relays().await.is_empty()).await;

    setup.provide(&spec).await;
    setup.condition("Ready", "True").await;
    setup.connected().await;
    for (secret, (uid, data)) in SECRETS.into_iter().zip(before) {
        let now = setup.namespace.api::<Secret>().get(secret).await.expect("the Secret still exists");
        assert_eq!(now.uid(), uid, "{secret} is another");
        // Compared without being printed. The time of a key's last use changes meanwhile; whether the key works is
        // checked below.
        assert!(secret == "local-api-keys" || now.data == data, "{secret} was changed");
    }
    setup.answers(Some(&key)).await;
    assert_eq!(setup.send_request("/v1/chat/completions", &[]).await.status, 401);
    let listed = setup.admin(&setup.relays().await[0], "GET /admin/keys", &Value::Null).await;
    assert_eq!(listed.json()["keys"][0]["id"], id, "{listed:?}");
    assert_eq!(setup.namespace.pod_names("modelrelay.io/pool=llama").await, backends);
}

#[tokio::test]
async fn secrets_are_deleted_with_provider_if_configured() {
    let spec = |policy: &str| json!({"secretsPolicy": policy, "relay": {"replicas": 0, "requireApiKeys": true}});
    let setup = Setup::empty().await;
    let secrets = setup.namespace.api::<Secret>();
    for (policy, owners) in [("Delete", 1), ("Retain", 0), ("Delete", 1)] {
        setup.provide(&spec(policy)).await;
        for secret in SECRETS {
            let owned = |it: &Secret| it.owner_references().len() == owners;
            setup.namespace.wait_for(&secrets, secret, &format!("{owners} owners under {policy}"), owned).await;
        }
    }
    setup.namespace.kubectl("delete provider local").await;
    for secret in SECRETS {
        setup.namespace.wait_gone(&secrets, secret).await;
    }
}

#[tokio::test]
async fn user_worker_secret_is_awaited_and_never_written() {
    let setup = Setup::empty().await;
    setup.provide(&json!({"workerSecretRef": {"name": "own", "key": "value"}})).await;
    setup.namespace.apply(&[manifests::worker_pool("llama", &manifests::demo_pool(LOCAL))]).await;
    let waiting = setup.reason("Ready", "False", "SecretNotFound").await;
    let message = message_of(&waiting, "Ready");
    assert!(message.contains("spec.workerSecretRef") && message.contains("Secret own does not exist"), "{message}");
    // It may still be created, so this is not a stall.
    setup.reason("Reconciling", "True", "SecretNotFound").await;
    setup.condition("Stalled", "False").await;

    let secret = |key: &str| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own"}, "stringData": {key: "of-my-own"}});
    setup.namespace.apply(&[secret("other-key")]).await;
    let what = "the message names the missing key";
    let says = |it: &kube::api::DynamicObject| message_of(it, "Ready").contains("has no text in the key value");
    setup.namespace.wait_for(&setup.providers, LOCAL, what, says).await;
    setup.namespace.apply(&[secret("value")]).await;
    let version = setup.namespace.api::<Secret>().get("own").await.expect("the Secret exists").resource_version();

    setup.condition("Ready", "True").await;
    setup.connected().await;
    setup.answers(None).await;
    assert!(setup.secret("local-worker").await["worker-secret"] == "of-my-own", "workers mount another value");
    assert_eq!(
        setup.namespace.api::<Secret>().get("own").await.expect("the Secret exists").resource_version(),
        version
    );
}
