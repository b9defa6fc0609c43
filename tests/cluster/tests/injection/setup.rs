//! Labelled Pods, and their pool.

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::DynamicObject};
use modelrelay_cluster::{Cluster, Namespace, manifests, namespace::is_ready, traffic::Traffic};
use serde_json::{Value, json};

const VERSION: &str = "modelrelay.io/v1alpha1";

pub(crate) const POOL_LABEL: &str = "modelrelay.io/pool";

/// A namespace that enforces `restricted`, with or without Provider `local` and pool `llama`.
pub(crate) struct Setup {
    pub(crate) namespace: Namespace,
    pub(crate) pools: Api<DynamicObject>,
}

impl Setup {
    pub(crate) async fn empty() -> Self {
        let namespace = Cluster::connect().await.namespace("injection").await;
        let pools = namespace.custom(VERSION, "WorkerPool");
        Self { namespace, pools }
    }

    /// Creates a pool of injected Pods with these additional fields, but no Provider.
    pub(crate) async fn pool(more: &Value) -> Self {
        let setup = Self::empty().await;
        setup.namespace.apply(&[pool("llama", more)]).await;
        setup
    }

    /// Creates the pool and a Provider that is ready.
    pub(crate) async fn provided(more: &Value) -> Self {
        let setup = Self::pool(more).await;
        setup.provide().await;
        setup
    }

    /// Creates the Provider and waits until it is ready.
    pub(crate) async fn provide(&self) {
        self.namespace.apply(&[manifests::provider("local", &json!({}))]).await;
        let providers = self.namespace.custom(VERSION, "Provider");
        self.namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    }

    /// Returns a Pod as the API server would admit it.
    pub(crate) async fn admitted(&self, pod: &Value) -> Value {
        let command = self.namespace.kubectl("create --dry-run=server --output json --filename -");
        let given = command.input(pod.to_string()).await;
        serde_json::from_str(&given).expect("kubectl prints JSON")
    }

    /// Returns the API server's message for a rejected Pod.
    pub(crate) async fn refused(&self, pod: &Value) -> String {
        self.namespace.kubectl("create --filename -").input(pod.to_string()).expect_failure().await
    }

    /// Waits until a Pod is ready.
    pub(crate) async fn running(&self, name: &str) -> Pod {
        self.namespace.wait_for(&self.namespace.api::<Pod>(), name, "it is ready", is_ready).await
    }

    /// Waits until the pool's Ready condition has this status and reason, for its latest generation.
    pub(crate) async fn reason(&self, status: &str, reason: &str) -> DynamicObject {
        let holds = |pool: &DynamicObject| {
            let ready = ready_of(pool);
            (&ready["status"], &ready["reason"]) == (&json!(status), &json!(reason))
                && ready["observedGeneration"].as_i64() == pool.metadata.generation
        };
        self.namespace.wait_for(&self.pools, "llama", &format!("Ready={status} because of {reason}"), holds).await
    }

    /// Waits until the pool's status has these values.
    pub(crate) async fn status(&self, wanted: &Value) {
        let wanted_fields = wanted.as_object().expect("an object");
        let holds = |pool: &DynamicObject| wanted_fields.iter().all(|(key, value)| pool.data["status"][key] == *value);
        self.namespace.wait_for(&self.pools, "llama", &format!("status {wanted}"), holds).await;
    }

    /// Sends requests to the Provider until three have succeeded, and checks each response word by word; none may fail.
    pub(crate) async fn answers(&self) {
        let traffic = Traffic::to(self.namespace.service_address("local").await).streams(2).words(10).start();
        traffic.wait_for_answers(3).await;
        traffic.finish().await.expect_all_answered();
    }
}

/// A pool of injected Pods with a demo backend.
pub(crate) fn pool(name: &str, more: &Value) -> Value {
    let mut spec = json!({"provider": "local", "backend": {"port": 8000}, "shutdownTimeout": "10s"});
    for (key, value) in more.as_object().expect("an object") {
        spec[key] = value.clone();
    }
    manifests::worker_pool(name, &spec)
}

/// A Pod with a demo backend and this label.
pub(crate) fn pod(name: &str, label: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {POOL_LABEL: label}},
        "spec": {"containers": [manifests::demo_container()]},
    })
}

/// A Deployment of such Pods.
pub(crate) fn deployment(name: &str, label: &str, replicas: u32) -> Value {
    let mut deployment = manifests::demo_backend(name, replicas).swap_remove(0);
    deployment["spec"]["template"]["metadata"]["labels"][POOL_LABEL] = json!(label);
    deployment
}

/// Returns the worker's container, and the list of which it is the last.
pub(crate) fn worker(pod: &Value) -> Option<(&'static str, &Value)> {
    ["initContainers", "containers"].into_iter().find_map(|list| {
        let last = pod["spec"][list].as_array()?.last()?;
        (last["name"] == "modelrelay-worker").then_some((list, last))
    })
}

/// A Pod as JSON.
pub(crate) fn json_of(pod: &Pod) -> Value {
    serde_json::to_value(pod).expect("a Pod is JSON")
}

/// Returns the token that drains this Pod's worker.
pub(crate) fn drain_token(pod: &Value) -> String {
    let (_, worker) = worker(pod).expect("the Pod has a worker");
    let env = worker["env"].as_array().expect("the worker has variables");
    let token = env.iter().find(|variable| variable["name"] == "DRAIN_TOKEN").expect("one variable is the token");
    token["value"].as_str().expect("text").to_owned()
}

/// True if a Pod waits for its pool.
pub(crate) fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_ref());
    gates.into_iter().flatten().any(|gate| gate.name == "modelrelay.io/no-such-pool")
}

/// Returns a pool's Ready condition, or null.
pub(crate) fn ready_of(pool: &DynamicObject) -> Value {
    let conditions = pool.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == "Ready").unwrap_or_default()
}

/// Returns the names of Pods that a pool's status lists as lacking a worker.
pub(crate) fn not_injected(pool: &DynamicObject) -> Vec<String> {
    let names = pool.data["status"]["notInjected"].as_array().cloned().unwrap_or_default();
    names.iter().map(|name| name.as_str().unwrap_or_default().to_owned()).collect()
}

/// Returns the uids of the Pods.
pub(crate) fn uids(pods: &[Pod]) -> Vec<String> {
    pods.iter().filter_map(ResourceExt::uid).collect()
}
