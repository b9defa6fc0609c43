//! Secrets and settings change under running requests; only the Pods' configuration changes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1;
use kube::api::DynamicObject;
use modelrelay_cluster::traffic::Traffic;
use modelrelay_cluster::{TEST_TIMEOUT, wait_until};
use serde_json::json;

use super::stack::{Backends, CLIENTS, PROVIDER, Stack, expect_no_failure};

type Data = BTreeMap<String, Vec<u8>>;

#[tokio::test]
async fn rotating_and_revoking_worker_secret_fails_no_request() {
    let stack = Stack::start("traffic-rotate", Backends::Injected, 2).await;
    let lives = stack.lives().await;
    let first = secret(&stack, "local-worker").await;
    let traffic = stack.load().await;

    annotate(&stack, "2026-a").await;
    stack
        .namespace
        .wait_for(&stack.providers(), PROVIDER, "status.workerSecret.previousUntil", |provider: &DynamicObject| {
            provider.data["status"]["workerSecret"]["previousUntil"].is_string()
        })
        .await;
    let second = secret(&stack, "local-worker").await;
    assert_ne!(first["worker-secret"], second["worker-secret"], "workers still mount the previous value");
    let relay = secret(&stack, "local-relay").await;
    assert_eq!(relay["worker-secret"], second["worker-secret"]);
    assert_eq!(relay["worker-secret-previous"], first["worker-secret"]);
    let links = links(&stack).await;
    traffic.wait_for_answers(CLIENTS).await;
    expect_no_failure(&traffic, "the worker secret was rotated");

    annotate(&stack, "revoke").await;
    let relinked = async || {
        let now = self::links(&stack).await;
        now.len() == links.len() && now.iter().all(|link| !links.contains(link))
    };
    wait_until("links made with the new secret", TEST_TIMEOUT, relinked).await;
    stack.wait_for_workers(2, 2).await;
    stack
        .namespace
        .wait_for(&stack.providers(), PROVIDER, "no previousUntil", |provider: &DynamicObject| {
            provider.data["status"]["workerSecret"]["previousUntil"].is_null()
        })
        .await;
    let relay = secret(&stack, "local-relay").await;
    assert!(!relay.contains_key("worker-secret-previous"), "the previous value is kept");
    traffic.wait_for_answers(CLIENTS).await;
    traffic.finish().await.expect_all_answered();
    assert_eq!(stack.lives().await, lives, "Pods were restarted or replaced");
}

#[tokio::test]
async fn changing_configuration_fails_no_request() {
    let stack = Stack::start("traffic-config", Backends::Injected, 2).await;
    let lives = stack.lives().await;
    let hashes = hashes(&stack).await;
    let links = links(&stack).await;
    let traffic = stack.load().await;
    let models = json!([{"id": "demo", "aliases": ["fast"]}]);
    stack.change(&json!({"models": models, "queue": {"maxLength": 400}, "requestTimeout": "4m"})).await;
    let now = self::hashes(&stack).await;
    assert!(now.iter().all(|hash| !hashes.contains(hash)), "Programmed, but relays run {now:?} as before");
    let by_alias = Traffic::to(stack.service).streams(10).model("fast").words(5).start();
    by_alias.wait_for_answers(20).await;
    by_alias.finish().await.expect_all_answered();
    traffic.wait_for_answers(CLIENTS).await;
    expect_no_failure(&traffic, "settings changed");
    stack.change(&json!({"models": null, "queue": {"maxLength": 500}, "requestTimeout": "5m"})).await;
    traffic.wait_for_answers(CLIENTS).await;
    traffic.finish().await.expect_all_answered();
    assert_eq!(stack.lives().await, lives, "Pods were restarted or replaced");
    assert_eq!(self::links(&stack).await, links, "workers reconnected");
}

async fn annotate(stack: &Stack, rotate: &str) {
    let annotate = format!("annotate provider local --overwrite modelrelay.io/rotate={rotate}");
    stack.namespace.kubectl(&annotate).await;
}

async fn secret(stack: &Stack, name: &str) -> Data {
    let secret = stack.namespace.api::<v1::Secret>().get(name).await.expect("the operator created it");
    secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0)).collect()
}

async fn links(stack: &Stack) -> Vec<String> {
    let mut links: Vec<String> = stack.relays().await.iter().flat_map(|view| view.links()).collect();
    links.sort();
    links
}

async fn hashes(stack: &Stack) -> Vec<String> {
    stack.relays().await.iter().map(|view| view.state["config_hash"].to_string()).collect()
}
