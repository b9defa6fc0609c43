//! Changes of the configuration: they apply at once and restart nothing, and invalid ones change nothing.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::ResourceExt;
use modelrelay_cluster::{namespace::has_condition, traffic::Traffic};
use serde_json::{Value, json};

use super::setup::{LOCAL, Setup, message_of};

/// "Within a few seconds", on a busy machine. A kubelet alone would take a minute.
const FEW_SECONDS: Duration = Duration::from_secs(20);

/// Returns each relay's Pod with the number of its restarts.
fn runs(pods: &[Pod]) -> Vec<(Option<String>, i32)> {
    let restarts = |pod: &Pod| {
        let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.clone()).unwrap_or_default();
        statuses.iter().map(|status| status.restart_count).sum()
    };
    let mut runs: Vec<_> = pods.iter().map(|pod| (pod.uid(), restarts(pod))).collect();
    runs.sort();
    runs
}

/// Returns the hash of each relay's configuration, read from its Pod.
async fn hashes(setup: &Setup, pods: &[Pod]) -> Vec<String> {
    let mut hashes = Vec::new();
    for pod in pods {
        let state = setup.admin(pod, "GET /admin/state", &Value::Null).await;
        assert_eq!((state.status, &state.json()["config_error"]), (200, &Value::Null), "{state:?}");
        hashes.push(state.json()["config_hash"].as_str().expect("a hash").to_owned());
    }
    hashes
}

#[tokio::test]
async fn change_reaches_every_relay_without_restart() {
    let setup = Setup::ready(&json!({"relay": {"replicas": 2}})).await;
    setup.namespace.rolled_out("deployment/local-relay").await;
    setup.condition("Programmed", "True").await;
    let pods = setup.relays().await;
    let (before, runs_before) = (hashes(&setup, &pods).await, runs(&pods));
    assert!(before.len() == 2 && before[0] == before[1], "{before:?}");
    let generation = setup.deployment().await.metadata.generation;

    setup.patch(&json!({"queue": {"maxLength": 7}, "models": [{"id": "demo", "aliases": ["llama3"]}]})).await;
    let confirmed = |it: &kube::api::DynamicObject| has_condition(it, "Programmed", "True");
    setup.namespace.wait_at_most(FEW_SECONDS, &setup.providers, LOCAL, "every relay confirms it", confirmed).await;
    let pods = setup.relays().await;
    let after = hashes(&setup, &pods).await;
    assert!(after[0] == after[1] && after[0] != before[0], "{before:?}, then {after:?}");
    for pod in &pods {
        assert_eq!(pod.annotations().get("modelrelay.io/config-hash"), after.first(), "{}", pod.name_any());
    }
    assert_eq!(runs(&pods), runs_before);
    assert_eq!(setup.deployment().await.metadata.generation, generation, "the Deployment was touched");
}

#[tokio::test]
async fn invalid_spec_stalls_while_previous_configuration_serves() {
    let setup = Setup::serving(&json!({"models": [{"id": "demo", "aliases": ["llama3"]}]})).await;
    let traffic =
        Traffic::to(setup.namespace.service_address(LOCAL).await).streams(4).model("llama3").words(20).start();
    traffic.wait_for_answers(4).await;
    let version = async || setup.namespace.api::<Secret>().get("local-relay").await.unwrap().resource_version();
    let before = version().await;

    setup.patch(&json!({"models": [{"id": "demo", "aliases": ["llama3"]}, {"id": "b", "aliases": ["llama3"]}]})).await;
    let stalled = setup.reason("Stalled", "True", "InvalidSpec").await;
    let message = message_of(&stalled, "Stalled");
    assert!(message.contains("spec.models[1].aliases[0]") && message.contains("llama3"), "{message}");
    let stalled = setup.reason("Ready", "False", "InvalidSpec").await;
    assert!(
        message_of(&stalled, "Ready").ends_with("Relays keep serving with the previous configuration"),
        "{stalled:?}"
    );
    setup.reason("Programmed", "False", "InvalidSpec").await;
    traffic.wait_for_answers(8).await;
    assert_eq!(version().await, before, "the configuration was written");

    setup.patch(&json!({"models": [{"id": "demo", "aliases": ["llama3"]}, {"id": "b", "aliases": ["llama4"]}]})).await;
    setup.condition("Ready", "True").await;
    setup.condition("Programmed", "True").await;
    setup.condition("Stalled", "False").await;
    traffic.wait_for_answers(4).await;
    traffic.finish().await.expect_all_answered();
    assert_ne!(version().await, before);
}
