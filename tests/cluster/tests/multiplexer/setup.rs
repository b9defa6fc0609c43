//! A Provider, a pool with slots, models for them, and a counter of their Pods.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DynamicObject, ListParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use modelrelay_cluster::http::fetch;
use modelrelay_cluster::traffic::{Running, Traffic};
use modelrelay_cluster::{Cluster, Namespace, manifests};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// The only pool of a namespace.
pub(crate) const POOL: &str = "swap";
/// Label of the Deployments' Pods: the slot that they occupy.
const SLOT_LABEL: &str = "slot=gpu0";
/// The deadline for a slot to reach an expected state: several swaps.
const SETTLED: Duration = Duration::from_secs(60);

/// A Provider `local` with one relay, whose only pool has slots.
pub(crate) struct Setup {
    pub(crate) namespace: Namespace,
    pub(crate) service: SocketAddr,
}

impl Setup {
    /// Applies the pool and the objects that it needs, and waits until its one worker is connected.
    pub(crate) async fn start(name: &str, pool: &Value, objects: &[Value]) -> Self {
        Self::start_at(&json!({"queue": {"timeout": "60s"}}), name, pool, objects).await
    }

    /// As [`Self::start`], with these settings of the Provider.
    pub(crate) async fn start_at(provider: &Value, name: &str, pool: &Value, objects: &[Value]) -> Self {
        let namespace = Cluster::connect().await.namespace(name).await;
        let provider = manifests::provider("local", provider);
        namespace.apply(&[objects, &[provider, manifests::worker_pool(POOL, pool)]].concat()).await;
        let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
        namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
        let service = namespace.service_address("local").await;
        let setup = Self { namespace, service };
        let connected = |pool: &DynamicObject| pool.data["status"]["connected"] == 1;
        setup.namespace.wait_for(&setup.pools(), POOL, "its worker is connected", connected).await;
        setup
    }

    pub(crate) fn pools(&self) -> Api<DynamicObject> {
        self.namespace.custom("modelrelay.io/v1alpha1", "WorkerPool")
    }

    /// Starts clients of a model.
    pub(crate) fn clients_of(&self, model: &str, streams: usize) -> Running {
        Traffic::to(self.service).model(model).streams(streams).words(15).start()
    }

    /// Sends a request for a model and expects success.
    pub(crate) async fn answers(&self, model: &str) {
        let traffic = self.clients_of(model, 1);
        traffic.wait_for_answers(1).await;
        traffic.finish().await.expect_all_answered();
    }

    /// Sends a request for a model and returns the status and the error.
    pub(crate) async fn refused(&self, model: &str) -> (u16, Value) {
        let body = json!({"model": model, "messages": [{"role": "user", "content": "hello"}]});
        let reply = fetch(self.service, "POST /v1/chat/completions", &[], &body)
            .await
            .expect("the request is rejected in time");
        (reply.status, reply.json()["error"].clone())
    }

    /// Runs clients of both models at once until each has received this number of responses; all must be complete.
    pub(crate) async fn swaps_between(&self, one: &str, other: &str, answers: usize) {
        let (of_one, of_other) = (self.clients_of(one, 3), self.clients_of(other, 3));
        for _ in 0..answers {
            of_one.wait_for_answers(1).await;
            of_other.wait_for_answers(1).await;
        }
        let (of_one, of_other) = tokio::join!(of_one.finish(), of_other.finish());
        of_one.expect_all_answered();
        of_other.expect_all_answered();
    }

    /// Waits until the pool's status reports this model as resident.
    pub(crate) async fn resident(&self, model: &str) {
        let holds = |pool: &DynamicObject| {
            let slot = &pool.data["status"]["slots"][0];
            (&slot["slot"], &slot["state"], &slot["resident"]) == (&json!("gpu0"), &json!("Ready"), &json!(model))
        };
        self.namespace.wait_at_most(SETTLED, &self.pools(), POOL, &format!("slot gpu0 holds {model}"), holds).await;
    }

    /// Returns a Deployment's number of replicas.
    pub(crate) async fn replicas(&self, deployment: &str) -> i32 {
        let found = self.namespace.api::<Deployment>().get(deployment).await.expect("the Deployment exists");
        found.spec.and_then(|spec| spec.replicas).unwrap_or_default()
    }

    /// Returns the uids of the slot's Pods.
    pub(crate) async fn uids(&self) -> Vec<String> {
        let pods = self.namespace.api::<Pod>().list(&ListParams::default().labels(SLOT_LABEL)).await;
        pods.expect("Pods can be listed").items.iter().filter_map(ResourceExt::uid).collect()
    }
}

/// A standalone pool with one slot of driver `kubernetes`, in which each model has a Deployment of the same name. Swaps
/// are cheap here, so they are frequent.
pub(crate) fn standalone(models: &[&str]) -> Value {
    let model = |id: &&str| json!({"id": id, "deployment": id, "url": format!("http://{id}"), "maxConcurrency": 4});
    let models: Vec<_> = models.iter().map(model).collect();
    let slot = json!({"id": "gpu0", "driver": "kubernetes", "models": models});
    json!({"provider": "local", "standalone": {"replicas": 1}, "shutdownTimeout": "10s", "multiplexer": quick(&slot)})
}

/// A multiplexer with this slot that swaps as soon as allowed.
pub(crate) fn quick(slot: &Value) -> Value {
    json!({"maxWait": "5s", "minResidency": "1s", "linger": "off", "slots": [slot]})
}

/// A Deployment at zero with a demo backend of that name, and its Service on port 80.
pub(crate) fn model(name: &str) -> Vec<Value> {
    let mut backend = manifests::demo_backend(name, 0);
    backend[0]["spec"]["strategy"] = json!({"type": "Recreate"});
    let template = &mut backend[0]["spec"]["template"];
    template["metadata"]["labels"]["slot"] = json!("gpu0");
    template["spec"]["containers"][0]["args"] = json!(["demo", "--listen", "0.0.0.0:8000", "--model", name]);
    backend
}

/// Counts the slot's Pods from now on. Terminating Pods are included until they are gone.
pub(crate) struct Census {
    observed: Arc<Mutex<ObservedPods>>,
    _task: JoinSet<()>,
}

#[derive(Debug, Default)]
struct ObservedPods {
    current: BTreeSet<String>,
    most: usize,
    ever: BTreeSet<String>,
}

impl Census {
    pub(crate) fn begin(namespace: &Namespace) -> Self {
        let observed = Arc::new(Mutex::new(ObservedPods::default()));
        let mut task = JoinSet::new();
        task.spawn(count(namespace.api::<Pod>(), Arc::clone(&observed)));
        Self { observed, _task: task }
    }

    /// Returns the largest number of Pods at once, and the total.
    pub(crate) fn most_and_all(&self) -> (usize, usize) {
        let observed = self.observed.lock().unwrap_or_else(PoisonError::into_inner);
        (observed.most, observed.ever.len())
    }
}

async fn count(pods: Api<Pod>, observed: Arc<Mutex<ObservedPods>>) {
    let params = WatchParams::default().labels(SLOT_LABEL).disable_bookmarks();
    loop {
        let Ok(changes) = pods.watch(&params, "0").await else { continue };
        let mut changes = Box::pin(changes);
        observed.lock().unwrap_or_else(PoisonError::into_inner).current.clear();
        while let Some(Ok(change)) = changes.next().await {
            let mut observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
            match change {
                WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                    observed.current.insert(pod.name_any());
                    observed.ever.insert(pod.name_any());
                }
                WatchEvent::Deleted(pod) => drop(observed.current.remove(&pod.name_any())),
                WatchEvent::Bookmark(_) => {}
                WatchEvent::Error(_) => break,
            }
            observed.most = observed.most.max(observed.current.len());
        }
    }
}
