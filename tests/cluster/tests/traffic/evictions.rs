//! Pods are evicted: each of them in turn, and all Pods of a node by `kubectl drain`.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt, api::EvictParams};
use modelrelay_cluster::{Cluster, Namespace, SecondNode, TEST_TIMEOUT, manifests, namespace::is_ready, wait_until};
use serde_json::json;

use super::stack::{Backends, CLIENTS, POOL, POOL_PODS, RELAY_PODS, Stack, pool, provider};

/// The status of an eviction that a PodDisruptionBudget forbids at present.
const TOO_MANY_REQUESTS: u16 = 429;

#[tokio::test]
async fn evicting_every_pod_in_turn_fails_no_request() {
    let stack = Stack::start("traffic-evict", Backends::Injected, 2).await;
    let traffic = stack.mixed_load().await;
    for (what, labels) in [("relay", RELAY_PODS), ("backend", POOL_PODS)] {
        for pod in stack.namespace.pod_names(labels).await {
            evict(&stack.namespace, &pod).await;
            stack.namespace.wait_gone(&stack.namespace.api::<Pod>(), &pod).await;
            stack.wait_for_workers(2, 2).await;
            traffic.wait_for_answers(CLIENTS / 2).await;
            traffic.expect_no_failure(&format!("{what} {pod} was evicted"));
        }
    }
    traffic.expect_all_answered().await;
}

#[tokio::test]
async fn second_relay_is_evicted_after_first_is_replaced() {
    let namespace = Cluster::connect().await.namespace("evictions").await;
    let stack = Stack::apply(namespace, &[provider(&json!({}))], 0).await;
    let relays = stack.namespace.pod_names(RELAY_PODS).await;
    let [first, second] = relays.as_slice() else { panic!("there should be two relays: {relays:?}") };
    evict(&stack.namespace, first).await;
    // Accepted once the budget allows it: two relays are desired, and one may be away.
    evict(&stack.namespace, second).await;
    let replaced = |pod: &Pod| !relays.contains(&pod.name_any()) && is_ready(pod);
    let now = stack.namespace.pods(RELAY_PODS).await;
    assert!(now.iter().any(replaced), "no relay had replaced {first} when {second} was evicted");
}

/// The node runs all relays and all backends. It is the second one of this machine, where no other test's Pods run.
#[tokio::test]
async fn draining_node_of_all_pods_fails_no_request() {
    let cluster = Cluster::connect().await;
    let _second = SecondNode::start(&cluster, "").await;
    let namespace = cluster.namespace("traffic-drain").await;
    // A label of this test alone: first only the second node has it, then both.
    let label = format!("modelrelay.io/{}", namespace.name);
    cluster.kubectl(&format!("label node {} {label}=", SecondNode::NAME)).await;
    let place = json!({"nodeSelector": {&label: ""}, "tolerations": [SecondNode::toleration()]});
    let mut pool = pool();
    pool["replicas"] = json!(2);
    for (key, value) in place.as_object().expect("a map") {
        pool["template"]["spec"][key] = value.clone();
    }
    let all = [provider(&json!({"podTemplate": place})), manifests::worker_pool(POOL, &pool)];
    let stack = Stack::apply(namespace, &all, 2).await;
    stack.expect_all_on(SecondNode::NAME).await;
    let first = first_node(&cluster).await;
    cluster.kubectl(&format!("label node {first} {label}=")).await;

    let traffic = stack.mixed_load().await;
    let drain = "drain --ignore-daemonsets --delete-emptydir-data --timeout 240s";
    cluster.kubectl(&format!("{drain} {}", SecondNode::NAME)).await;
    // All Pods are there, so no more are scheduled.
    stack.wait_for_workers(2, 2).await;
    cluster.kubectl(&format!("label node {first} {label}-")).await;
    stack.expect_all_on(&first).await;
    traffic.wait_for_answers(CLIENTS / 2).await;
    traffic.expect_all_answered().await;
}

impl Stack {
    async fn expect_all_on(&self, node: &str) {
        for labels in [RELAY_PODS, POOL_PODS] {
            for pod in self.namespace.pods(labels).await {
                let on = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
                assert_eq!(on, Some(node), "the node of {}", pod.name_any());
            }
        }
    }
}

async fn first_node(cluster: &Cluster) -> String {
    let nodes = Api::<Node>::all(cluster.client.clone()).list(&Default::default()).await.expect("nodes can be listed");
    let names = nodes.items.iter().map(ResourceExt::name_any);
    names.into_iter().find(|name| name != SecondNode::NAME).expect("there is a first node")
}

/// Evicts a Pod as `kubectl drain` does: repeats it while a budget forbids it, as this client does by itself for some
/// time.
async fn evict(namespace: &Namespace, pod: &str) {
    let pods = namespace.api::<Pod>();
    let evicted = async || match pods.evict(pod, &EvictParams::default()).await {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.code == TOO_MANY_REQUESTS => false,
        Err(error) => panic!("cannot evict {pod}: {error}"),
    };
    wait_until(&format!("the eviction of {pod}"), TEST_TIMEOUT, evicted).await;
}
