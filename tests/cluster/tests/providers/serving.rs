//! A working Provider and a disabled one, from the user's view.

use modelrelay_cluster::{TEST_TIMEOUT, manifests, poll_for, traffic::Traffic};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup};

#[tokio::test]
async fn empty_spec_becomes_ready_and_serves() {
    let setup = Setup::empty().await;
    setup.provide(&json!({})).await;
    setup.namespace.apply(&[manifests::worker_pool("llama", &manifests::demo_pool(LOCAL))]).await;
    let patience = TEST_TIMEOUT.as_secs();
    setup.namespace.kubectl(&format!("wait --for=condition=Ready --timeout={patience}s provider/local")).await;
    setup.namespace.kubectl(&format!("wait --for=condition=Ready --timeout={patience}s workerpool/llama")).await;
    setup.answers(None).await;
    let provider = setup.condition("Programmed", "True").await;
    let namespace = &setup.namespace.name;
    assert_eq!(provider.data["status"]["endpoint"], format!("http://local.{namespace}.svc/v1"));
    assert_eq!(provider.data["status"]["workerEndpoint"], format!("http://local-workers.{namespace}.svc:8081"));
    assert_eq!(provider.data["status"]["workerSecret"]["name"], "local-worker");
    // kstatus considers it settled if neither of these is true.
    setup.condition("Reconciling", "False").await;
    setup.condition("Stalled", "False").await;
}

/// Returns the rows of a table of kubectl, each split into its cells.
async fn table(setup: &Setup, arguments: &str) -> Vec<Vec<String>> {
    let printed = setup.namespace.kubectl(arguments).await;
    printed.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
}

/// Waits for a table of one row, whose last cell is an age.
async fn wait_for_row(setup: &Setup, arguments: &str, wanted: &[&str]) {
    let mut last = Vec::new();
    let found = poll_for(TEST_TIMEOUT, async || {
        last = table(setup, arguments).await;
        let row = last.get(1).and_then(|row| row.split_last());
        row.is_some_and(|(age, row)| is_age(age) && row == wanted).then_some(())
    });
    let found = found.await;
    assert!(found.is_some(), "timed out after {TEST_TIMEOUT:?} waiting for {wanted:?} and an age; last seen: {last:?}");
}

fn is_age(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_digit()) && text.ends_with(['s', 'm'])
}

#[tokio::test]
async fn every_column_of_both_kinds_is_correct() {
    let setup = Setup::empty().await;
    let mut pool = manifests::demo_pool(LOCAL);
    pool["maxConcurrency"] = json!(1);
    setup.provide(&json!({})).await;
    setup.namespace.apply(&[manifests::worker_pool("llama", &pool)]).await;
    setup.condition("Ready", "True").await;
    setup.connected().await;
    let header = table(&setup, "get prov").await.swap_remove(0);
    assert_eq!(header, ["NAME", "READY", "ENDPOINT", "RELAY", "WORKERS", "MODELS", "QUEUED", "IN-FLIGHT", "AGE"]);
    let header = table(&setup, "get wp").await.swap_remove(0);
    assert_eq!(header, ["NAME", "READY", "PROVIDER", "MODE", "PODS", "CONNECTED", "MODELS", "AGE"]);
    let endpoint = format!("http://local.{}.svc/v1", setup.namespace.name);
    wait_for_row(&setup, "get prov", &[LOCAL, "True", &endpoint, LOCAL, "1", "1", "0", "0"]).await;
    wait_for_row(&setup, "get wp", &["llama", "True", LOCAL, "Template", "1", "1", "1"]).await;
    // At any time, one request runs and two wait.
    let traffic = Traffic::to(setup.namespace.service_address(LOCAL).await).streams(3).words(80).start();
    wait_for_row(&setup, "get prov", &[LOCAL, "True", &endpoint, LOCAL, "1", "1", "2", "1"]).await;
    traffic.finish().await.expect_all_answered();
    wait_for_row(&setup, "get prov", &[LOCAL, "True", &endpoint, LOCAL, "1", "1", "0", "0"]).await;
}

#[tokio::test]
async fn disabled_provider_reports_it_and_loses_nothing() {
    let setup = Setup::serving(&json!({})).await;
    setup.answers(None).await;
    let before = setup.everything().await;
    assert!(before.iter().any(|object| object.starts_with("Pod llama-backend")), "{before:?}");

    setup.patch(&json!({"enabled": false})).await;
    setup.reason("Ready", "False", "Disabled").await;
    setup.condition("Programmed", "True").await;
    let refused = setup.send_request("/v1/chat/completions", &[]).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status, refused.header("x-should-retry")), (503, "false"), "{refused:?}");
    assert_eq!((&error["type"], &error["code"]), (&json!("service_unavailable_error"), &json!("provider_disabled")));
    assert_eq!((&error["message"], error.get("param")), (&json!("Provider is currently disabled"), Some(&Value::Null)));
    let refused = setup.send_request("/v1/messages", &[("anthropic-version", "2023-06-01")]).await;
    let body = refused.json();
    assert_eq!(
        (refused.status, &body["type"], &body["error"]["type"]),
        (503, &json!("error"), &json!("overloaded_error"))
    );
    let disabled = |pool: &kube::api::DynamicObject| {
        let ready = super::setup::condition_of(pool, "Ready");
        (&ready["status"], &ready["reason"]) == (&json!("False"), &json!("ProviderDisabled"))
    };
    setup.namespace.wait_for(&setup.pools, "llama", "the pool reports it too", disabled).await;

    setup.patch(&json!({"enabled": true})).await;
    setup.condition("Ready", "True").await;
    setup.condition("Programmed", "True").await;
    setup.connected().await;
    setup.answers(None).await;
    assert_eq!(setup.everything().await, before);
}
