//! The driver `kubernetes`: a Deployment per model, one of them at one replica.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use modelrelay_cluster::{TEST_TIMEOUT, wait_until};

use super::setup::{Census, Setup, model, standalone};

async fn two_models(name: &str) -> Setup {
    let setup = Setup::start(name, &standalone(&["alpha", "beta"]), &[model("alpha"), model("beta")].concat()).await;
    assert_eq!(
        (setup.replicas("alpha").await, setup.replicas("beta").await),
        (0, 0),
        "no model may be loaded without a request"
    );
    setup
}

#[tokio::test]
async fn streams_across_deployment_swaps_arrive_whole() {
    let setup = two_models("mux-deployments").await;
    let census = Census::begin(&setup.namespace);
    setup.swaps_between("alpha", "beta", 6).await;
    let (most, all) = census.most_and_all();
    assert!(most == 1 && all >= 3, "{most} Pods at once, {all} in turn");
    setup.answers("beta").await;
    setup.resident("beta").await;
    assert_eq!((setup.replicas("alpha").await, setup.replicas("beta").await), (0, 1));
}

#[tokio::test]
async fn new_worker_adopts_running_model() {
    let setup = two_models("mux-adopt").await;
    setup.answers("alpha").await;
    let before = setup.uids().await;
    setup.namespace.kubectl("rollout restart deployment/swap-worker").await;
    setup.namespace.rolled_out("deployment/swap-worker").await;
    setup.answers("alpha").await;
    setup.resident("alpha").await;
    assert_eq!(setup.uids().await, before, "the model was loaded already");
    setup.answers("beta").await;
}

#[tokio::test]
async fn external_replica_changes_are_reverted() {
    let setup = two_models("mux-others").await;
    setup.answers("alpha").await;
    setup.namespace.kubectl("scale deployment/beta --replicas 1").await;
    wait_until("beta is scaled down again", Duration::from_secs(20), async || setup.replicas("beta").await == 0).await;
    setup.answers("alpha").await;
    setup.namespace.kubectl("scale deployment/alpha --replicas 0").await;
    wait_until("alpha's Pod is gone", TEST_TIMEOUT, async || setup.uids().await.is_empty()).await;
    // No client is affected, whether the worker has already noticed or learns of it through this request.
    setup.answers("alpha").await;
    let log = setup.namespace.kubectl("logs deployment/swap-worker").await;
    assert!(log.contains("externally") && log.contains("HorizontalPodAutoscaler"), "{log}");
}

#[tokio::test]
async fn model_with_deleted_pod_serves_again() {
    let setup = two_models("mux-deleted").await;
    setup.answers("alpha").await;
    let pod = setup.namespace.pod_names("app=alpha").await.remove(0);
    setup.namespace.kubectl(&format!("delete pod {pod} --wait=true")).await;
    setup.namespace.wait_gone(&setup.namespace.api::<Pod>(), &pod).await;
    // On a slow machine the worker has given it up before its successor is ready, and loads it for the next request.
    let is_settled = async || setup.namespace.service_accepts("alpha").await || setup.replicas("alpha").await == 0;
    wait_until("alpha serves again, or is unloaded", TEST_TIMEOUT, is_settled).await;
    setup.answers("alpha").await;
    setup.answers("beta").await;
}
