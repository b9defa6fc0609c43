//! Pods before pools, pools before Providers, and Pods that bypassed the webhook.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;
use modelrelay_cluster::{namespace::is_ready, wait_until};
use serde_json::json;

use super::setup::{POOL_LABEL, Setup, deployment, is_gated, json_of, not_injected, pod, pool, ready_of, uids, worker};

/// The time from the pool's creation to an injected Pod, on a busy machine. A controller whose Pod was rejected would
/// have waited longer before its next attempt.
const SOON: Duration = Duration::from_secs(20);

#[tokio::test]
async fn pool_without_provider_serves_once_provider_exists() {
    let setup = Setup::pool(&json!({})).await;
    let alone = setup.reason("False", "ProviderNotFound").await;
    assert_eq!(ready_of(&alone)["message"], "Provider local does not exist in this namespace");
    setup.namespace.apply(&[pod("vllm", "llama")]).await;
    // The backend does not wait for the Provider.
    let before = setup.running("vllm").await;
    assert!(worker(&json_of(&before)).is_some());
    setup.reason("False", "ProviderNotFound").await;
    setup.provide().await;
    setup.reason("True", "Serving").await;
    setup.answers().await;
    assert_eq!(uids(&setup.namespace.pods(POOL_LABEL).await), uids(&[before]));
}

#[tokio::test]
async fn pool_selects_unlabelled_pods_where_namespace_opted_in() {
    let setup = Setup::provided(&json!({"selector": {"matchLabels": {"app": "theirs"}}})).await;
    let mut theirs = pod("vllm", "any");
    theirs["metadata"]["labels"] = json!({"app": "theirs"});
    assert!(worker(&setup.admitted(&theirs).await).is_none(), "the namespace has not opted in");
    let name = &setup.namespace.name;
    setup.namespace.kubectl(&format!("label namespace {name} modelrelay.io/select-pods=enabled")).await;
    wait_until("the webhook to receive unlabelled Pods", modelrelay_cluster::TEST_TIMEOUT, async || {
        worker(&setup.admitted(&theirs).await).is_some()
    })
    .await;
    let mut others = theirs.clone();
    others["metadata"]["labels"] = json!({"app": "others"});
    assert!(worker(&setup.admitted(&others).await).is_none());
    setup.namespace.apply(&[theirs]).await;
    let running = json_of(&setup.running("vllm").await);
    assert_eq!(running["metadata"]["labels"], json!({"app": "theirs", POOL_LABEL: "llama"}));
    setup.status(&json!({"injected": 1, "connected": 1})).await;
    setup.answers().await;
}

#[tokio::test]
async fn deployment_pods_wait_for_their_pool() {
    let setup = Setup::empty().await;
    setup.provide().await;
    setup.namespace.apply(&[deployment("vllm", "llama", 2)]).await;
    wait_until("two gated Pods", modelrelay_cluster::TEST_TIMEOUT, async || {
        let pods = setup.namespace.pods("app=vllm").await;
        pods.len() == 2 && pods.iter().all(is_gated)
    })
    .await;
    let gated = setup.namespace.pods("app=vllm").await;
    assert!(gated.iter().all(|pod| worker(&json_of(pod)).is_none()));
    setup.namespace.apply(&[pool("llama", &json!({}))]).await;
    wait_until("two injected Pods in their place", SOON, async || {
        let pods = setup.namespace.pods("app=vllm").await;
        pods.len() == 2 && pods.iter().all(|pod| !is_gated(pod) && worker(&json_of(pod)).is_some())
    })
    .await;
    let fresh = uids(&setup.namespace.pods("app=vllm").await);
    assert!(uids(&gated).iter().all(|uid| !fresh.contains(uid)));
    setup.namespace.rolled_out("deployment/vllm").await;
    setup.reason("True", "Serving").await;
    setup.answers().await;
}

#[tokio::test]
async fn controlled_pod_with_empty_label_waits() {
    let setup = Setup::pool(&json!({})).await;
    setup.namespace.apply(&[deployment("vllm", "", 1)]).await;
    let gated = async || setup.namespace.pods("app=vllm").await.iter().filter(|pod| is_gated(pod)).count();
    wait_until("a gated Pod", modelrelay_cluster::TEST_TIMEOUT, async || gated().await == 1).await;
    // A pool exists, but not the one of these Pods.
    setup.reason("False", "ProviderNotFound").await;
    assert_eq!(gated().await, 1);
}

#[tokio::test]
async fn pod_missed_by_webhook_is_listed() {
    let setup = Setup::provided(&json!({})).await;
    let mut late = pod("late", "llama");
    late["metadata"]["labels"] = json!({"app": "vllm"});
    setup.namespace.apply(&[late]).await;
    setup.namespace.wait_for(&setup.namespace.api::<Pod>(), "late", "it is ready", is_ready).await;
    setup.namespace.kubectl("label pod late modelrelay.io/pool=llama").await;
    let lists = |pool: &DynamicObject| not_injected(pool) == ["late"];
    setup.namespace.wait_for(&setup.pools, "llama", "notInjected names it", lists).await;
    let reported = setup.reason("False", "PodsNotInjected").await;
    assert_eq!(ready_of(&reported)["message"], "1 of 1 Pods has no worker: late; delete it");
    setup.status(&json!({"replicas": 1, "injected": 0})).await;
    // Next to a Pod that serves, it does not make the pool unready, but stays listed.
    setup.namespace.apply(&[pod("right", "llama")]).await;
    setup.reason("True", "PodsNotInjected").await;
    setup.status(&json!({"replicas": 2, "injected": 1, "notInjected": ["late"]})).await;
    setup.namespace.kubectl("delete pod late --grace-period 1").await;
    setup.reason("True", "Serving").await;
    setup.status(&json!({"replicas": 1, "injected": 1, "notInjected": null})).await;
}
