//! Checks that the operator's rights sufficed for everything that the other tests required. `.config/nextest.toml` runs
//! it last.

use modelrelay_cluster::{Cluster, SYSTEM_NAMESPACE, TEST_TIMEOUT, manifests::provider, poll_for, wait_until};
use serde_json::{Value, json};

/// Requests that a release sends while it creates one Provider; without them the log proves nothing. Requests that it
/// sends only at its start may be in an older file of the log by now.
const MADE: [(&str, &str); 9] = [
    ("update", "leases"),
    ("patch", "providers/status"),
    ("patch", "secrets"),
    ("patch", "services"),
    ("patch", "serviceaccounts"),
    ("patch", "deployments"),
    ("patch", "poddisruptionbudgets"),
    ("patch", "networkpolicies"),
    ("create", "events"),
];

#[tokio::test]
async fn no_operator_request_was_refused() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("refusals").await;
    namespace.apply(&[provider("local", &json!({}))]).await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    namespace.wait_for_condition(&providers, "local", "Ready", "True").await;

    // The log is written shortly after the requests.
    let mut missing = Vec::new();
    let all = async || {
        let requests = cluster.requests_by(SYSTEM_NAMESPACE, "modelrelay-operator").await;
        let made = |verb: &str, resource: &str| requests.iter().any(|it| it.verb == verb && it.resource == resource);
        missing = MADE.into_iter().filter(|(verb, resource)| !made(verb, resource)).collect();
        missing.is_empty().then_some(())
    };
    if poll_for(TEST_TIMEOUT / 3, all).await.is_none() {
        panic!("the audit log lacks requests that the operator must have sent: {missing:?}");
    }
    let refused = cluster.refusals(SYSTEM_NAMESPACE);
    assert!(refused.is_empty(), "the operator lacks rights: {refused:#?}");
}

#[tokio::test]
async fn refusal_would_be_found() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("refusals").await;
    let token = namespace.kubectl("create token default").await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("kubeconfig");
    let kubeconfig = cluster.kubectl("config view --raw --flatten --output json").await;
    let mut kubeconfig: Value = serde_json::from_str(&kubeconfig).expect("kubectl writes JSON");
    kubeconfig["users"][0]["user"] = json!({"token": token.trim()});
    std::fs::write(&path, kubeconfig.to_string()).expect("the file can be written");
    let error = cluster.kubectl("get nodes").env("KUBECONFIG", &path).expect_failure().await;
    assert!(error.contains("Forbidden"), "{error}");
    wait_until("the refusal in the audit log", TEST_TIMEOUT, async || {
        cluster.refusals(&namespace.name).iter().any(|refused| refused.contains("list /api/v1/nodes"))
    })
    .await;
}
