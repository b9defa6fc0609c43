//! A pool's own Pods: the order of removal, and replacement without spare capacity.

use k8s_openapi::api::core::v1;
use kube::api::{DynamicObject, ListParams};
use kube::{Api, ResourceExt};
use modelrelay_cluster::traffic::Traffic;
use modelrelay_cluster::{Cluster, TEST_TIMEOUT, manifests, wait_until};
use serde_json::{Value, json};

use super::stack::{POOL, POOL_PODS, PROVIDER, Stack, provider};

#[tokio::test]
async fn scaling_down_removes_idle_pods_and_cuts_nothing() {
    let namespace = Cluster::connect().await.namespace("traffic-scale").await;
    let mut pool = manifests::demo_pool(PROVIDER);
    pool["replicas"] = json!(3);
    // A response takes 37 s: longer than the grace period of a wrongly deleted Pod, and longer than the operator needs
    // to see the request.
    pool["template"]["spec"]["containers"][0]["args"] = json!(["demo", "--listen", "0.0.0.0:8000", "--delay", "400ms"]);
    let stack = Stack::apply(namespace, &[provider(&json!({})), manifests::worker_pool(POOL, &pool)], 3).await;
    let traffic = Traffic::to(stack.service).streams(1).words(80).start();
    traffic.wait_for_underway(1).await;
    let busy = busy_pods(&stack).await;
    assert_eq!(busy.len(), 1, "one request runs in one Pod");
    // The operator polls relays every 5 s.
    let runs = |provider: &DynamicObject| provider.data["status"]["inFlight"] == 1;
    stack.namespace.wait_for(&stack.providers(), PROVIDER, "status.inFlight 1", runs).await;
    stack.namespace.kubectl(&format!("scale workerpool {POOL} --replicas 1")).await;
    wait_until("one Pod left", TEST_TIMEOUT, async || stack.namespace.pods(POOL_PODS).await.len() == 1).await;
    assert_eq!(stack.namespace.pod_names(POOL_PODS).await, busy, "a busy Pod was deleted before idle ones");
    // By chance alone, it would be spared one time in three.
    let left = stack.namespace.pods(POOL_PODS).await.swap_remove(0);
    let cost = left.annotations().get("controller.kubernetes.io/pod-deletion-cost");
    assert_eq!(cost.map(String::as_str), Some("1"), "the busy Pod has no deletion cost");
    traffic.finish().await.expect_all_answered();
    stack.wait_for_workers(2, 1).await;
}

/// The old Pod has to end before the new one gets a GPU, and requests wait meanwhile.
#[tokio::test]
async fn rollout_on_single_gpu_node_completes() {
    let cluster = Cluster::connect().await;
    let namespace = cluster.namespace("traffic-gpu").await;
    // A resource of this test alone.
    let gpu = format!("example.com/{}", namespace.name);
    let _gpu = Gpu::add(&cluster, &gpu).await;

    let mut pool = manifests::demo_pool(PROVIDER);
    pool["template"]["spec"]["containers"][0]["resources"] = json!({"limits": {&gpu: "1"}});
    let stack = Stack::apply(namespace, &[provider(&json!({})), manifests::worker_pool(POOL, &pool)], 1).await;
    let before = stack.namespace.pod_names(POOL_PODS).await;
    let traffic = Traffic::to(stack.service).streams(20).words(20).start();
    traffic.wait_for_underway(1).await;
    let patch = json!({"spec": {"template": {"metadata": {"annotations": {"changed": "yes"}}}}}).to_string();
    stack.namespace.kubectl(&format!("patch workerpool {POOL} --type merge --patch")).arg(patch).await;
    wait_until("a new Pod", TEST_TIMEOUT, async || {
        let now = stack.namespace.pod_names(POOL_PODS).await;
        !now.is_empty() && now.iter().all(|pod| !before.contains(pod))
    })
    .await;
    stack.namespace.rolled_out("deployment/llama-backend").await;
    stack.wait_for_workers(2, 1).await;
    traffic.wait_for_answers(20).await;
    traffic.finish().await.expect_all_answered();
}

/// Returns the Pods whose worker runs requests, as the relays report.
async fn busy_pods(stack: &Stack) -> Vec<String> {
    let busy = |worker: &Value| worker["in_flight_count"].as_u64() > Some(0);
    let views = stack.relays().await;
    let workers = views.iter().flat_map(|view| view.workers()).filter(|worker| busy(worker));
    workers.filter_map(|worker| worker["worker_name"].as_str().map(str::to_owned)).collect()
}

/// One unit of an extended resource on the only node; dropping it removes it, also in a panic.
struct Gpu {
    cluster: Cluster,
    node: String,
    resource: String,
}

impl Gpu {
    async fn add(cluster: &Cluster, resource: &str) -> Self {
        let nodes: Api<v1::Node> = Api::all(cluster.client.clone());
        let node = nodes.list(&ListParams::default()).await.expect("nodes can be listed").items.remove(0).name_any();
        let gpu = Self { cluster: cluster.clone(), node, resource: resource.to_owned() };
        cluster.kubectl(&gpu.patch(&json!("1"))).await;
        gpu
    }

    /// The JSON contains no white space.
    fn patch(&self, number: &Value) -> String {
        let patch = json!({"status": {"capacity": {&self.resource: number}, "allocatable": {&self.resource: number}}});
        format!("patch node {} --subresource status --type merge --patch {patch}", self.node)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        let _ = self.cluster.blocking("kubectl", &self.patch(&Value::Null));
    }
}
