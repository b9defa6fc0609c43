//! A user of the operator: a Provider, and one pool of each mode with backends.

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, api::DynamicObject};
use modelrelay_cluster::manifests::{demo_backend, demo_container, provider, worker_pool};
use modelrelay_cluster::traffic::Traffic;
use modelrelay_cluster::{Cluster, Namespace};
use serde_json::{Value, json};

/// The user's objects.
pub(crate) struct User {
    pub(crate) namespace: Namespace,
}

/// The state of a Pod: its uid, and the number of its container restarts.
pub(crate) type PodState = (String, i32);

impl User {
    /// Applies everything, and waits until both pools are connected.
    pub(crate) async fn begin(cluster: &Cluster) -> Self {
        let user = Self { namespace: cluster.namespace("user").await };
        let template = json!({"metadata": {"labels": {"app": "own"}}, "spec": template()});
        let template = json!({"provider": "local", "template": template});
        let pools = [worker_pool("llama", &json!({"provider": "local"})), worker_pool("own", &template)];
        user.namespace.apply(&[provider("local", &json!({}))]).await;
        user.namespace.apply(&pools).await;
        let mut backend = demo_backend("vllm", 1);
        backend[0]["spec"]["template"]["metadata"]["labels"]["modelrelay.io/pool"] = json!("llama");
        user.namespace.apply(&backend).await;
        for pool in ["llama", "own"] {
            user.pool(pool, "a connected worker", |pool| pool.data["status"]["connected"] == 1).await;
        }
        user.ready().await;
        user
    }

    /// Returns clients of the Provider.
    pub(crate) async fn traffic(&self) -> Traffic {
        Traffic::to(self.namespace.service_address("local").await).streams(6).words(20)
    }

    /// Waits until the Provider is ready in its latest generation.
    pub(crate) async fn ready(&self) {
        let providers = self.namespace.custom("modelrelay.io/v1alpha1", "Provider");
        self.namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
    }

    /// Waits until a pool satisfies `condition`.
    pub(crate) async fn pool(&self, name: &str, what: &str, condition: impl Fn(&DynamicObject) -> bool) {
        let pools = self.namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
        self.namespace.wait_for(&pools, name, what, condition).await;
    }

    /// Returns the backend Pods, each with its worker.
    pub(crate) async fn backends(&self) -> Vec<PodState> {
        let states = states_of(&self.namespace.pods("app in (vllm,own)").await);
        assert_eq!(states.len(), 2, "one Pod of each pool: {states:?}");
        states
    }

    /// Returns the relay Pods.
    pub(crate) async fn relays(&self) -> Vec<PodState> {
        states_of(&self.namespace.pods("modelrelay.io/provider=local,app.kubernetes.io/component=relay").await)
    }

    /// Waits until the relay runs only images of this tag.
    pub(crate) async fn relay_of(&self, tag: &str) {
        let deployments = self.namespace.api::<k8s_openapi::api::apps::v1::Deployment>();
        let image = format!("localhost/modelrelay-relay:{tag}");
        let of_tag = |deployment: &k8s_openapi::api::apps::v1::Deployment| {
            let spec = deployment.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
            spec.is_some_and(|spec| spec.containers.iter().any(|it| it.image.as_deref() == Some(&*image)))
        };
        self.namespace.wait_for(&deployments, "local-relay", &image, of_tag).await;
        self.namespace.rolled_out("deployment/local-relay").await;
    }
}

fn template() -> Value {
    let mut container = demo_container();
    container["resources"] = json!({"requests": {"cpu": "1m"}});
    json!({"automountServiceAccountToken": false, "containers": [container]})
}

fn states_of(pods: &[Pod]) -> Vec<PodState> {
    let mut states: Vec<PodState> = pods.iter().map(|pod| (pod.uid().unwrap_or_default(), restarts(pod))).collect();
    states.sort();
    states
}

fn restarts(pod: &Pod) -> i32 {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref()).into_iter().flatten();
    let init = status.and_then(|status| status.init_container_statuses.as_ref()).into_iter().flatten();
    containers.chain(init).map(|status| status.restart_count).sum()
}
