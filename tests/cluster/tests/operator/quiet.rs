//! The operator while nothing happens, and its memory with many Pods.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use modelrelay_cluster::manifests::{demo_backend, provider, worker_pool};
use modelrelay_cluster::{Cluster, Namespace, SYSTEM_NAMESPACE, TEST_TIMEOUT, wait_until};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::certificates::unschedulable_pod;
use super::replicas::{OPERATOR, Operator, sum};

/// The time in which nothing may be written.
const WINDOW: Duration = Duration::from_secs(20);

const PODS: usize = 300;
const AT_ONCE: usize = 8;

/// The memory limit of one replica with this number of Pods: a quarter of the chart's limit.
const MEMORY: u64 = 64 << 20;

#[tokio::test]
async fn idle_operator_writes_nothing() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("idle").await;
    let mut backend = demo_backend("vllm", 1);
    backend[0]["spec"]["template"]["metadata"]["labels"]["modelrelay.io/pool"] = json!("llama");
    namespace.apply(&[provider("local", &json!({})), worker_pool("llama", &json!({"provider": "local"}))]).await;
    namespace.apply(&backend).await;
    let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    let connected = |pool: &kube::api::DynamicObject| pool.data["status"]["connected"] == 1;
    namespace.wait_for(&pools, "llama", "a connected worker", connected).await;
    let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
    let known = |provider: &kube::api::DynamicObject| provider.data["status"]["workers"] == 1;
    namespace.wait_for(&providers, "local", "its worker in the status", known).await;
    let operator = Operator::settled(&cluster).await;
    cluster.nothing_is_leaving().await;
    settle(&namespace).await;

    let (reconciled, sent) = (operator.reconciliations().await, requests(&namespace).await.len());
    #[expect(clippy::disallowed_methods, reason = "the test observes the requests made during this time")]
    tokio::time::sleep(WINDOW).await;
    let reconciled = operator.reconciliations().await - reconciled;
    let sent = requests(&namespace).await.split_off(sent);
    let written: Vec<_> = sent.iter().filter(|(verb, _)| !matches!(verb.as_str(), "get" | "list" | "watch")).collect();
    assert!(written.is_empty(), "wrote while idle: {written:?}");
    assert!(sent.len() <= 4, "sent requests while idle: {sent:?}");
    let objects = cluster.kubectl("get providers,workerpools --all-namespaces --output name").await.lines().count();
    let objects = u32::try_from(objects).expect("a test cluster has few");
    assert!(reconciled <= f64::from(4 * objects), "{reconciled} reconciliations of {objects} objects in {WINDOW:?}");
}

#[tokio::test]
async fn three_hundred_pods_fit_into_little_memory() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("many").await;
    let operator = Operator::settled(&cluster).await;
    namespace.apply(&[worker_pool("llama", &json!({"provider": "local"}))]).await;
    create_pods(&namespace.api()).await;
    let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
    let all = |pool: &kube::api::DynamicObject| pool.data["status"]["injected"] == PODS;
    let pool = namespace.wait_for(&pools, "llama", "every Pod to be counted", all).await;
    assert_eq!(pool.data["status"]["notInjected"].as_array().map_or(0, Vec::len), 0, "{:?}", pool.data);

    let counted = k8s_openapi::jiff::Timestamp::now();
    for name in operator.ready_pods().await {
        let mut held = None;
        wait_until(&format!("the kubelet to measure {name}"), TEST_TIMEOUT, async || {
            held = memory(&cluster, &name, counted).await;
            held.is_some()
        })
        .await;
        let held = held.expect("the metric exists");
        eprintln!("{name} holds {} KiB", held >> 10);
        assert!(held <= MEMORY, "{name} holds {held} bytes with {PODS} Pods");
    }
    // Counting them took a handful of reconciliations, not one for each change of each Pod.
    let leader = operator.leaders().await.swap_remove(0);
    let page = operator.metrics(&leader).await.expect("the leader shows its metrics");
    assert!(sum(&page, "modelrelay_operator_reconciliations_total", "workerpool") > 0.0);
}

/// Waits until nothing was written about the namespace for a while: a status with numbers is written at most every ten
/// seconds.
async fn settle(namespace: &Namespace) {
    let mut before = (0, tokio::time::Instant::now());
    wait_until("the operator to become idle", TEST_TIMEOUT, async || {
        let now = requests(namespace).await.len();
        if now != before.0 {
            before = (now, tokio::time::Instant::now());
        }
        before.1.elapsed() > Duration::from_secs(11)
    })
    .await;
}

/// Returns verb and path of the operator's requests about this namespace, in order.
async fn requests(namespace: &Namespace) -> Vec<(String, String)> {
    let path = format!("/namespaces/{}/", namespace.name);
    let sent = namespace.cluster.requests_by(SYSTEM_NAMESPACE, OPERATOR).await;
    sent.into_iter().filter(|request| request.uri.contains(&path)).map(|request| (request.verb, request.uri)).collect()
}

async fn create_pods(pods: &Api<Pod>) {
    let mut creating = JoinSet::new();
    for worker in 0..AT_ONCE {
        let pods = pods.clone();
        creating.spawn(async move {
            for number in (worker..PODS).step_by(AT_ONCE) {
                let pod: Pod = serde_json::from_value(unschedulable_pod(&number.to_string())).expect("this is a Pod");
                let created = pods.create(&PostParams::default(), &pod).await;
                created.unwrap_or_else(|error| panic!("Pod {number} was not created: {error}"));
            }
        });
    }
    while let Some(created) = creating.join_next().await {
        created.expect("the Pods were created");
    }
}

/// Returns the kubelet's measurement of a Pod's containers after that time.
async fn memory(cluster: &Cluster, pod: &str, after: k8s_openapi::jiff::Timestamp) -> Option<u64> {
    let nodes = cluster.kubectl("get nodes --output jsonpath={.items[*].metadata.name}").await;
    let node = nodes.split_whitespace().next().expect("the cluster has a node");
    let summary = cluster.kubectl(&format!("get --raw /api/v1/nodes/{node}/proxy/stats/summary")).await;
    let summary: Value = serde_json::from_str(&summary).ok()?;
    let pods = summary["pods"].as_array()?;
    let stats = pods.iter().find(|stats| stats["podRef"]["name"] == pod)?;
    let containers = stats["containers"].as_array()?;
    let recent = |memory: &Value| {
        let time = memory["time"].as_str().and_then(|time| time.parse::<k8s_openapi::jiff::Timestamp>().ok());
        time.is_some_and(|time| time > after)
    };
    let held = |container: &Value| {
        let memory = &container["memory"];
        recent(memory).then(|| memory["workingSetBytes"].as_u64()).flatten()
    };
    containers.iter().map(held).sum()
}
