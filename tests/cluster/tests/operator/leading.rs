//! Leadership and the webhook when a replica or the API server is lost.

use std::time::Duration;

use hyper::Request;
use kube::ResourceExt;
use modelrelay_cluster::manifests::{provider, worker_pool};
use modelrelay_cluster::{Cluster, Namespace, SYSTEM_NAMESPACE, wait_until};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::replicas::{OPERATOR, Operator, REPLICAS};

/// The time within which a vanished leader is replaced: 20 s, and its requests on a busy machine.
const FAILOVER: Duration = Duration::from_secs(30);

#[tokio::test]
async fn one_replica_leads_and_all_serve_webhook() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("replicas").await;
    let operator = Operator::settled(&cluster).await;
    let mut pods = operator.ready_pods().await;
    pods.sort();
    assert_eq!(pods.len(), REPLICAS);
    assert_eq!(operator.leaders().await.len(), 1, "of {pods:?}");
    assert_eq!(operator.webhook_endpoints().await, pods, "every replica is an endpoint of the webhook's Service");

    namespace.apply(&[worker_pool("llama", &json!({"provider": "local"}))]).await;
    for pod in pods {
        let answer = reviewed_by(&cluster, &pod, &namespace.name).await;
        assert_eq!(answer["response"]["allowed"], true, "{pod} answered {answer}");
        assert!(answer["response"]["patch"].is_string(), "{pod} injects no worker: {answer}");
    }
}

#[tokio::test]
async fn lost_leader_is_replaced_within_20_seconds() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("failover").await;
    let operator = Operator::settled(&cluster).await;
    let old = operator.leaders().await.swap_remove(0);
    let lost = Instant::now();
    cluster.kubectl(&format!("--namespace {SYSTEM_NAMESPACE} delete pod {old} --grace-period 0 --force")).await;
    namespace.apply(&[provider("local", &json!({}))]).await;
    wait_until(
        "another replica to lead",
        FAILOVER.saturating_sub(lost.elapsed()),
        async || matches!(operator.leaders().await.as_slice(), [leader] if *leader != old),
    )
    .await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    Operator::settled(&cluster).await;
}

#[tokio::test]
async fn returning_api_server_is_not_flooded() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("apiserver").await;
    namespace.apply(&[provider("local", &json!({}))]).await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    let operator = Operator::settled(&cluster).await;
    cluster.nothing_is_leaving().await;
    let restarts = restarts(&operator).await;
    let reconciled = operator.reconciliations().await;
    let before = requests_about(&namespace).await;

    cluster.restart("apiserver", Duration::from_secs(3)).await;
    // It works again: new changes are applied.
    namespace.apply(&[provider("local", &json!({"queue": {"maxLength": 7}}))]).await;
    namespace.wait_for_condition(&providers, "local", "Programmed", "True").await;
    namespace.apply(&[provider("second", &json!({}))]).await;
    namespace.wait_for_condition(&providers, "second", "Ready", "True").await;

    let operator = Operator::settled(&cluster).await;
    assert_eq!(self::restarts(&operator).await, restarts, "a replica ended");
    // Each object is reconciled again once or a few times; a hot loop would do so thousands of times.
    let objects = objects(&cluster).await;
    let more = operator.reconciliations().await - reconciled;
    assert!(more <= f64::from(20 + 12 * objects), "{more} reconciliations of {objects} objects");
    let more = requests_about(&namespace).await - before;
    assert!((1..700).contains(&more), "{more} requests about one namespace");
}

/// Returns one replica's review of a Pod of pool `llama`, requested through the API server.
async fn reviewed_by(cluster: &Cluster, pod: &str, namespace: &str) -> Value {
    let object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "vllm", "namespace": namespace, "labels": {"modelrelay.io/pool": "llama"}},
        "spec": {"containers": [{"name": "vllm", "image": "example/vllm", "ports": [{"containerPort": 8000}]}]},
    });
    let kind = json!({"group": "", "version": "v1", "kind": "Pod"});
    let resource = json!({"group": "", "version": "v1", "resource": "pods"});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002", "kind": kind, "resource": resource, "requestKind": kind,
            "requestResource": resource, "name": "vllm", "namespace": namespace, "operation": "CREATE",
            "userInfo": {"username": "somebody"}, "object": object, "oldObject": null, "dryRun": false,
        },
    });
    let path = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/https:{pod}:9443/proxy/mutate-pods");
    let request = Request::post(path).header("content-type", "application/json").body(review.to_string().into_bytes());
    let answer = cluster.client.request_text(request.expect("the request is valid")).await;
    let answer = answer.unwrap_or_else(|error| panic!("the webhook of {pod} does not respond: {error}"));
    serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{pod} does not return JSON ({error}): {answer}"))
}

/// Returns the number of container restarts, by Pod.
async fn restarts(operator: &Operator) -> Vec<(String, i32)> {
    let pods = operator.pods().await;
    let count = |pod: &k8s_openapi::api::core::v1::Pod| {
        let statuses = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref());
        statuses.into_iter().flatten().map(|status| status.restart_count).sum()
    };
    let mut counts: Vec<_> = pods.iter().map(|pod| (pod.name_any(), count(pod))).collect();
    counts.sort();
    counts
}

/// Returns the number of requests that the operator has sent to the API server about this namespace.
async fn requests_about(namespace: &Namespace) -> usize {
    let path = format!("/namespaces/{}/", namespace.name);
    let requests = namespace.cluster.requests_by(SYSTEM_NAMESPACE, OPERATOR).await;
    requests.iter().filter(|request| request.uri.contains(&path)).count()
}

/// Returns the number of Providers and WorkerPools in the cluster.
async fn objects(cluster: &Cluster) -> u32 {
    let names = cluster.kubectl("get providers,workerpools --all-namespaces --output name").await;
    u32::try_from(names.lines().count()).expect("a test cluster has few")
}
