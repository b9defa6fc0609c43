//! A Provider with its backends and its clients.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use k8s_openapi::api::core::v1;
use kube::{Api, api::DynamicObject};
use modelrelay_cluster::http::fetch;
use modelrelay_cluster::traffic::{Mixed, Running, Traffic};
use modelrelay_cluster::{Cluster, Namespace, TEST_TIMEOUT, manifests, wait_until};
use serde_json::{Value, json};

/// The Provider.
pub(crate) const PROVIDER: &str = "local";
/// Its only pool.
pub(crate) const POOL: &str = "llama";
/// Its relay Pods.
pub(crate) const RELAY_PODS: &str = "modelrelay.io/provider=local,app.kubernetes.io/component=relay";
/// The Pods of the pool.
pub(crate) const POOL_PODS: &str = "modelrelay.io/pool=llama";
/// The number of concurrent clients.
pub(crate) const CLIENTS: usize = 200;
/// With the introductory words, responses of 3.7 s.
pub(crate) const WORDS: usize = 80;

/// The source of the backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backends {
    /// A user's Deployment `vllm`, whose Pods get the worker by injection.
    Injected,
    /// The pool's template.
    Template,
}

/// A Provider whose workers are all connected to all its relays.
pub(crate) struct Stack {
    pub(crate) namespace: Namespace,
    pub(crate) service: SocketAddr,
    admin_token: String,
}

/// The state of one relay Pod from `/admin/state`.
pub(crate) struct RelayView {
    pub(crate) state: Value,
}

impl Stack {
    /// Starts a stack with two relays and this number of backends.
    pub(crate) async fn start(name: &str, backends: Backends, replicas: usize) -> Self {
        let namespace = Cluster::connect().await.namespace(name).await;
        let mut pool = pool();
        let mut all = vec![provider(&json!({}))];
        match backends {
            Backends::Template => pool["replicas"] = json!(replicas),
            Backends::Injected => {
                pool["template"].take();
                let replicas = u32::try_from(replicas).expect("a small number");
                all.extend(injected_backend(replicas));
            }
        }
        all.insert(1, manifests::worker_pool(POOL, &without_nulls(pool)));
        Self::apply(namespace, &all, replicas).await
    }

    /// Applies these manifests, and waits for this number of workers.
    pub(crate) async fn apply(namespace: Namespace, all: &[Value], workers: usize) -> Self {
        namespace.apply(all).await;
        let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
        namespace.wait_for_condition(&providers, PROVIDER, "Ready", "True").await;
        let secret = namespace.api::<v1::Secret>().get("local-admin").await.expect("the operator created it");
        let token = secret.data.unwrap_or_default().remove("token").expect("the Secret has a token").0;
        let admin_token = String::from_utf8(token).expect("a token is text");
        let service = namespace.service_address(PROVIDER).await;
        let stack = Self { namespace, service, admin_token };
        stack.wait_for_workers(2, workers).await;
        stack
    }

    /// Starts its clients and waits until all are busy. Two cores can handle no more than two hundred streams, so
    /// `.config/nextest.toml` runs one such test at a time.
    pub(crate) async fn load(&self) -> Running {
        let traffic = self.clients().start();
        traffic.wait_for_underway(CLIENTS).await;
        traffic
    }

    /// Starts its clients, of both kinds: half of them keep their connections. Waits until all are busy.
    pub(crate) async fn mixed_load(&self) -> Mixed {
        let traffic = Mixed::start(&self.clients(), CLIENTS / 2);
        traffic.wait_for_underway(CLIENTS / 2).await;
        traffic
    }

    /// Returns its clients, which do not run yet.
    pub(crate) fn clients(&self) -> Traffic {
        Traffic::to(self.service).streams(CLIENTS).words(WORDS)
    }

    pub(crate) fn providers(&self) -> Api<DynamicObject> {
        self.namespace.custom("modelrelay.io/v1alpha1", "Provider")
    }

    /// Changes the Provider as `kubectl edit` would, and waits until every relay runs the new configuration.
    pub(crate) async fn change(&self, spec: &Value) {
        let patch = json!({"spec": spec}).to_string();
        self.namespace.kubectl("patch provider local --type merge --patch").arg(patch).await;
        self.namespace.wait_for_condition(&self.providers(), PROVIDER, "Programmed", "True").await;
    }

    /// Waits until there is this number of relays, all linked to the same workers, this many, none of which is
    /// draining.
    pub(crate) async fn wait_for_workers(&self, relays: usize, workers: usize) {
        wait_until(&format!("the same {workers} workers at each of {relays} relays"), TEST_TIMEOUT, async || {
            let views = self.relays().await;
            let known: BTreeSet<BTreeSet<String>> = views.iter().map(RelayView::staying_workers).collect();
            views.len() == relays
                && known.len() == 1
                && known.iter().all(|known| known.len() == workers)
                && views.iter().all(|view| view.workers().len() == workers)
        })
        .await;
    }

    /// Returns the state of every relay Pod that responds and is not being deleted.
    pub(crate) async fn relays(&self) -> Vec<RelayView> {
        let mut views = Vec::new();
        for pod in self.namespace.pods(RELAY_PODS).await {
            if let Some(state) = self.admin_get(&pod, "/admin/state").await {
                views.push(RelayView { state });
            }
        }
        views
    }

    /// Returns the response of one relay's admin port.
    pub(crate) async fn admin_get(&self, pod: &v1::Pod, path: &str) -> Option<Value> {
        let address = pod.status.as_ref()?.pod_ip.as_ref()?.parse().ok()?;
        let token = format!("Bearer {}", self.admin_token);
        let headers = [("authorization", token.as_str())];
        let reply = fetch(SocketAddr::new(address, 8082), &format!("GET {path}"), &headers, &Value::Null).await.ok()?;
        (reply.status == 200).then(|| reply.json())
    }

    /// Returns the metrics page of every relay Pod that responds and is not being deleted.
    pub(crate) async fn metrics(&self) -> Vec<String> {
        let mut pages = Vec::new();
        for pod in self.namespace.pods(RELAY_PODS).await {
            let Some(ip) = pod.status.and_then(|status| status.pod_ip?.parse().ok()) else { continue };
            let page = fetch(SocketAddr::new(ip, 8082), "GET /metrics", &[], &Value::Null).await;
            pages.extend(page.map(|reply| reply.body));
        }
        pages
    }

    /// Returns the lives of all Pods of relays and pool.
    pub(crate) async fn lives(&self) -> BTreeMap<String, i32> {
        lives([self.namespace.pods(RELAY_PODS).await, self.namespace.pods(POOL_PODS).await].concat())
    }
}

/// Returns uid and restarts of each Pod, which change when one is replaced or restarted.
pub(crate) fn lives(pods: Vec<v1::Pod>) -> BTreeMap<String, i32> {
    let life = |pod: v1::Pod| {
        let status = pod.status.unwrap_or_default();
        let containers = [status.container_statuses, status.init_container_statuses];
        let restarts = containers.into_iter().flatten().flatten().map(|container| container.restart_count).sum();
        (pod.metadata.uid.unwrap_or_default(), restarts)
    };
    pods.into_iter().map(life).collect()
}

impl RelayView {
    pub(crate) fn workers(&self) -> &[Value] {
        self.state["providers"][0]["workers"].as_array().map_or(&[], Vec::as_slice)
    }

    /// Returns the linked instances that accept work.
    pub(crate) fn staying_workers(&self) -> BTreeSet<String> {
        let staying = self.workers().iter().filter(|worker| worker["is_draining"] == false);
        staying.filter_map(|worker| worker["instance_id"].as_str().map(str::to_owned)).collect()
    }

    /// Returns the links, which get another id with every dial.
    pub(crate) fn links(&self) -> BTreeSet<String> {
        self.workers().iter().filter_map(|worker| worker["worker_id"].as_str().map(str::to_owned)).collect()
    }
}

/// A Provider `local` with two relays and a long queue; `change` is merged into `spec.relay`.
pub(crate) fn provider(change: &Value) -> Value {
    let mut relay = json!({"replicas": 2});
    for (key, value) in change.as_object().into_iter().flatten() {
        relay[key] = value.clone();
    }
    let queue = json!({"maxLength": 500, "timeout": "60s"});
    manifests::provider(PROVIDER, &json!({"queue": queue, "relay": relay}))
}

/// Panics if a request has failed so far; `what` names the last change.
pub(crate) fn expect_no_failure(traffic: &Running, what: &str) {
    let counts = traffic.counts();
    assert!(counts.has_no_failure(), "{what}: not every request was answered: {counts}");
}

/// The spec of a pool with a template whose workers have room for all clients each.
pub(crate) fn pool() -> Value {
    let mut pool = manifests::demo_pool(PROVIDER);
    pool["maxConcurrency"] = json!(CLIENTS);
    pool
}

fn injected_backend(replicas: u32) -> Vec<Value> {
    let mut backend = manifests::demo_backend("vllm", replicas);
    backend[0]["spec"]["template"]["metadata"]["labels"]["modelrelay.io/pool"] = json!(POOL);
    backend
}

fn without_nulls(mut spec: Value) -> Value {
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    spec
}
