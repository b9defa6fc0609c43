//! The number of Pods of pools: scaled by the operator, also from zero, manually, and by an HPA; and pools without
//! their own number, with one Pod per node or with workers in front of an external backend.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use k8s_openapi::api::{
    apps::v1::{Deployment, StatefulSet},
    core::v1::Pod,
};
use kube::{Api, api::DynamicObject};
use modelrelay_cluster::{
    Cluster, Namespace, TEST_TIMEOUT, http,
    manifests::{DEMO_MODEL, demo_backend, demo_container, demo_pool, provider, worker_pool},
    namespace::has_condition,
    traffic::Traffic,
    wait_until,
};
use serde_json::{Value, json};

/// A namespace with a Provider `local` and one pool.
struct Scene {
    namespace: Namespace,
    pools: Api<DynamicObject>,
    pool: &'static str,
}

impl Scene {
    /// Applies both, with `change` applied to a pool of demo backends, and waits until the Provider is ready.
    async fn new(pool: &'static str, provider_spec: Value, change: Value) -> Self {
        Self::of(pool, provider_spec, with(demo_pool("local"), change)).await
    }

    async fn of(pool: &'static str, provider_spec: Value, pool_spec: Value) -> Self {
        let namespace = Cluster::connect().await.namespace("scaling").await;
        namespace.apply(&[provider("local", &provider_spec), worker_pool(pool, &pool_spec)]).await;
        let providers = namespace.custom("modelrelay.io/v1alpha1", "Provider");
        namespace.wait_for_condition(&providers, "local", "Ready", "True").await;
        let pools = namespace.custom("modelrelay.io/v1alpha1", "WorkerPool");
        Self { namespace, pools, pool }
    }

    async fn address(&self) -> SocketAddr {
        self.namespace.service_address("local").await
    }

    /// Waits until a condition has this status and this reason; returns the pool.
    async fn condition(&self, kind: &str, status: &str, reason: &str) -> DynamicObject {
        let what = format!("{kind}={status}, reason {reason}");
        let holds =
            |pool: &DynamicObject| has_condition(pool, kind, status) && condition(pool, kind)["reason"] == reason;
        self.namespace.wait_for(&self.pools, self.pool, &what, holds).await
    }

    /// Waits until the pool requests this number of Pods, as many of its workers are connected, and no other Pod is
    /// left.
    async fn settled_at(&self, number: u64) -> DynamicObject {
        let what = format!("{number} Pods desired, ready and connected");
        let holds = |pool: &DynamicObject| {
            let (spec, status) = (&pool.data["spec"], &pool.data["status"]);
            spec["replicas"] == number && status["replicas"] == number && status["connected"] == number
        };
        self.namespace.wait_for(&self.pools, self.pool, &what, holds).await
    }

    async fn get(&self) -> DynamicObject {
        self.pools.get(self.pool).await.expect("the pool exists")
    }

    async fn pods(&self) -> Vec<Pod> {
        self.namespace.pods(&format!("modelrelay.io/pool={}", self.pool)).await
    }

    async fn deployment_replicas(&self) -> Option<i32> {
        let deployment = self.namespace.api::<Deployment>().get(&format!("{}-backend", self.pool)).await;
        deployment.expect("the pool has a Deployment").spec.and_then(|spec| spec.replicas)
    }

    async fn scale(&self, replicas: u32) {
        self.namespace.kubectl(&format!("scale wp {} --replicas {replicas}", self.pool)).await;
    }

    /// Returns the result of `GET /scale`: desired replicas, actual replicas, selector.
    async fn scale_read(&self) -> (i64, i64, Value) {
        let (namespace, pool) = (&self.namespace.name, self.pool);
        let path = format!("/apis/modelrelay.io/v1alpha1/namespaces/{namespace}/workerpools/{pool}/scale");
        let scale = self.namespace.kubectl(&format!("get --raw {path}")).await;
        let mut scale: Value = serde_json::from_str(&scale).expect("a Scale is JSON");
        assert_eq!(scale["kind"], "Scale");
        // The kind omits a zero.
        let desired = scale["spec"]["replicas"].as_i64().unwrap_or_default();
        (desired, scale["status"]["replicas"].as_i64().expect("a number"), scale["status"]["selector"].take())
    }

    /// Waits until the relay queues requests for a model that no worker serves.
    async fn wait_for_cold(&self, model: &str) {
        let label = format!("model=\"{model}\"");
        let known = async || {
            let metrics = self.relay_metrics().await;
            metrics.lines().any(|line| line.starts_with("modelrelay_queue_depth{") && line.contains(&label))
        };
        wait_until(&format!("a queue for {model} on the relay"), TEST_TIMEOUT, known).await;
    }

    async fn relay_metrics(&self) -> String {
        let relays = self.namespace.pods("modelrelay.io/provider=local,app.kubernetes.io/component=relay").await;
        let ip = relays.first().and_then(|pod| pod.status.clone()?.pod_ip).expect("a relay runs");
        let address = SocketAddr::new(ip.parse().expect("an address"), 8082);
        http::fetch(address, "GET /metrics", &[], &Value::Null).await.map(|reply| reply.body).unwrap_or_default()
    }

    /// Waits until the relay holds this number of requests for lack of a worker.
    async fn wait_for_waiting(&self, number: usize) {
        let waiting = async || {
            let metrics = self.relay_metrics().await;
            let depths = metrics.lines().filter(|line| line.starts_with("modelrelay_queue_depth{"));
            depths.filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok()).sum::<usize>() == number
        };
        wait_until(&format!("{number} requests in the queue"), TEST_TIMEOUT, waiting).await;
    }
}

fn with(mut spec: Value, more: Value) -> Value {
    let Value::Object(more) = more else { return spec };
    more.into_iter().for_each(|(key, value)| spec[key] = value);
    spec
}

fn condition<'a>(pool: &'a DynamicObject, kind: &str) -> &'a Value {
    let conditions = pool.data["status"]["conditions"].as_array();
    conditions.into_iter().flatten().find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

fn chat(model: &str) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": "hello"}]})
}

#[tokio::test]
async fn waiting_request_wakes_pool_at_zero() {
    let scaling = json!({"minReplicas": 0, "maxReplicas": 2, "scaleDownDelay": "2s"});
    let scene = Scene::new("sleeper", json!({}), json!({"models": [DEMO_MODEL], "scaling": scaling})).await;
    let pool = scene.condition("Ready", "True", "ScaledToZero").await;
    assert_eq!(pool.data["spec"]["replicas"], 0, "the pool must start at zero");
    assert_eq!(scene.pods().await.len(), 0);
    scene.wait_for_cold(DEMO_MODEL).await;

    // Each response takes longer than the delay, so a pool that slept during one would truncate it.
    let traffic = Traffic::to(scene.address().await).streams(3).words(80).start();
    scene.condition("Ready", "True", "Serving").await;
    traffic.wait_for_answers(6).await;
    traffic.finish().await.expect_all_answered();

    let pool = scene.settled_at(0).await;
    scene.condition("Ready", "True", "ScaledToZero").await;
    assert_eq!(
        pool.data["status"]["models"],
        json!([DEMO_MODEL]),
        "the status must keep the models that may wake the pool"
    );
    assert_eq!(pool.data["status"]["modelCount"], 1);
    let events = scene.namespace.kubectl("get events --output jsonpath={.items[*].reason}").await;
    for reason in ["ScaledUp", "ScaledDown"] {
        assert!(events.contains(reason), "no Event {reason}: {events}");
    }
}

#[tokio::test]
async fn waiting_request_wakes_stateful_set_of_another_owner() {
    let template = json!({
        "metadata": {"labels": {"app": "theirs", "modelrelay.io/pool": "adopter"}},
        "spec": {"automountServiceAccountToken": false, "containers": [demo_container()]},
    });
    let stateful_set = json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "theirs"},
        "spec": {"replicas": 0, "serviceName": "theirs", "selector": {"matchLabels": {"app": "theirs"}}, "template": template},
    });
    let scaling = json!({
        "maxReplicas": 2, "scaleDownDelay": "2s",
        "targetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "theirs"},
    });
    let spec = json!({
        "provider": "local", "models": [DEMO_MODEL], "backend": {"port": 8000}, "shutdownTimeout": "10s", "scaling": scaling,
    });
    let scene = Scene::of("adopter", json!({}), spec).await;
    scene.condition("Stalled", "True", "TargetNotFound").await;
    scene.namespace.apply(&[stateful_set]).await;
    scene.condition("Ready", "True", "ScaledToZero").await;
    scene.wait_for_cold(DEMO_MODEL).await;

    let traffic = Traffic::to(scene.address().await).streams(3).words(80).start();
    scene.condition("Ready", "True", "Serving").await;
    traffic.wait_for_answers(6).await;
    traffic.finish().await.expect_all_answered();
    scene.condition("Ready", "True", "ScaledToZero").await;

    scene.namespace.kubectl("scale statefulset theirs --replicas 1").await;
    scene.namespace.kubectl("delete wp adopter").await;
    let sets = scene.namespace.api::<StatefulSet>();
    let set = sets.get("theirs").await.expect("the StatefulSet stays");
    assert_eq!(set.spec.and_then(|spec| spec.replicas), Some(1), "its number stays too");
}

#[tokio::test]
async fn requests_for_unlisted_model_wake_nothing() {
    // The catalogue has a model that no pool lists: requests for it wait like others.
    let catalogue = json!({"models": [{"id": DEMO_MODEL}, {"id": "lonely"}], "queue": {"coldTimeout": "6s"}});
    let scaling = json!({"minReplicas": 0, "maxReplicas": 2, "scaleDownDelay": "5m"});
    let scene = Scene::new("listed", catalogue, json!({"models": [DEMO_MODEL], "scaling": scaling})).await;
    scene.condition("Ready", "True", "ScaledToZero").await;
    scene.wait_for_cold(DEMO_MODEL).await;
    let address = scene.address().await;

    let unknown =
        http::fetch(address, "POST /v1/chat/completions", &[], &chat("unheard-of")).await.expect("a response");
    assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
    let started = Instant::now();
    let lonely = http::fetch(address, "POST /v1/chat/completions", &[], &chat("lonely")).await.expect("a response");
    let waited = started.elapsed();
    assert!(matches!(lonely.status, 503 | 504), "{lonely:?}");
    // Several polls of the operator, which happen every second.
    assert!(waited > Duration::from_secs(5), "the request was queued for only {waited:?}: {lonely:?}");
    assert_eq!(scene.get().await.data["spec"]["replicas"], 0, "the pool was woken for a model that it does not list");

    // The same request for the other model does wake it; otherwise the above proves nothing.
    let body = chat(DEMO_MODEL);
    let listed = http::fetch(address, "POST /v1/chat/completions", &[], &body);
    let woken =
        scene.namespace.wait_for(&scene.pools, scene.pool, "to be woken", |pool| pool.data["spec"]["replicas"] == 1);
    let _ = tokio::join!(listed, woken);
}

#[tokio::test]
async fn pool_follows_its_load_and_cuts_nothing() {
    let scaling = json!({"minReplicas": 1, "maxReplicas": 3, "targetRequestsPerReplica": 4, "scaleDownDelay": "3s"});
    let scene = Scene::new("busy", json!({}), json!({"maxConcurrency": 4, "scaling": scaling})).await;
    scene.settled_at(1).await;
    let address = scene.address().await;

    let steady = Traffic::to(address).streams(2).words(80).start();
    steady.wait_for_underway(2).await;
    let burst = Traffic::to(address).streams(8).words(80).start();
    scene.settled_at(3).await;
    burst.wait_for_answers(8).await;
    burst.finish().await.expect_all_answered();
    // The steady clients continue while Pods that may run their requests leave.
    scene.settled_at(1).await;
    steady.wait_for_answers(2).await;
    steady.finish().await.expect_all_answered();
}

#[tokio::test]
async fn kubectl_scale_works_and_scale_reports_replicas() {
    let scene = Scene::new("manual", json!({}), json!({})).await;
    scene.settled_at(1).await;
    let selector = json!("modelrelay.io/pool=manual");
    assert_eq!(scene.scale_read().await, (1, 1, selector.clone()));

    scene.scale(2).await;
    scene.settled_at(2).await;
    assert_eq!(scene.scale_read().await, (2, 2, selector.clone()));
    assert_eq!(scene.deployment_replicas().await, Some(2));
    assert_eq!(scene.pods().await.len(), 2, "the selector finds the Pods");

    scene.scale(0).await;
    scene.settled_at(0).await;
    scene.condition("Ready", "True", "ScaledToZero").await;
    assert_eq!(scene.scale_read().await, (0, 0, selector));
    // A number that a user set changes only by the user, and a rejection names the field.
    let refused = scene.namespace.kubectl("scale wp manual --replicas -1").expect_failure().await;
    assert!(refused.contains("replicas"), "{refused}");
}

#[tokio::test]
async fn hpa_scales_pool_through_its_scale() {
    let scene = Scene::new("autoscaled", json!({}), json!({})).await;
    scene.settled_at(1).await;
    let hpa = json!({
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "autoscaled"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "name": "autoscaled"},
            "minReplicas": 2, "maxReplicas": 3,
            "metrics": [{
                "type": "External",
                "external": {
                    "metric": {"name": "modelrelay_requests", "selector": {"matchLabels": {"provider": "local"}}},
                    "target": {"type": "AverageValue", "averageValue": "24"},
                },
            }],
        },
    });
    scene.namespace.apply(&[hpa]).await;
    // That metric is not served here, and the HPA needs none to keep its minimum.
    let pool = scene.settled_at(2).await;
    assert_eq!(condition(&pool, "Stalled")["status"], "False", "an HPA on a pool without scaling is no conflict");
    let able = "get hpa autoscaled --output jsonpath={.status.conditions[?(@.type==\"AbleToScale\")].status}";
    assert_eq!(scene.namespace.kubectl(able).await, "True");
}

#[tokio::test]
async fn foreign_replicas_are_yielded_to_until_delay_ends() {
    let scaling = json!({"minReplicas": 0, "maxReplicas": 4, "scaleDownDelay": "20s"});
    let scene = Scene::new("contested", json!({}), json!({"models": [DEMO_MODEL], "scaling": scaling})).await;
    scene.condition("Ready", "True", "ScaledToZero").await;

    scene.scale(1).await;
    let pool = scene.condition("Ready", "True", "ScalingConflict").await;
    assert_eq!(condition(&pool, "Stalled")["status"], "False", "one write is respected: {:#}", pool.data);
    assert_eq!(pool.data["spec"]["replicas"], 1);
    scene.scale(2).await;
    let pool = scene.condition("Stalled", "True", "ScalingConflict").await;
    let message = condition(&pool, "Stalled")["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("spec.replicas") && message.contains("spec.scaling"), "{message}");
    assert_eq!(pool.data["spec"]["replicas"], 2, "while yielding, the operator leaves the number alone");

    // Without further writes, the operator scales again: to zero, because there is no load.
    scene.settled_at(0).await;
    let pool = scene.condition("Ready", "True", "ScaledToZero").await;
    assert_eq!(condition(&pool, "Stalled")["status"], "False");
}

#[tokio::test]
async fn pool_at_zero_without_known_model_reports_it() {
    let scaling = json!({"minReplicas": 0, "maxReplicas": 2, "scaleDownDelay": "3s"});
    let scene = Scene::new("ignorant", json!({}), json!({"models": ["*"], "scaling": scaling})).await;
    let pool = scene.condition("Ready", "False", "ModelsUnknown").await;
    assert_eq!(pool.data["spec"]["replicas"], 0);
    let message = condition(&pool, "Ready")["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("spec.models") && message.contains("spec.replicas"), "{message}");

    scene.scale(1).await;
    // Once up, its model is known; then it sleeps by itself and remembers it.
    let pool = scene.namespace.wait_for(&scene.pools, scene.pool, "models in its status", |pool| {
        pool.data["status"]["models"] == json!([DEMO_MODEL])
    });
    pool.await;
    let pool = scene.settled_at(0).await;
    assert_eq!(pool.data["status"]["models"], json!([DEMO_MODEL]));
    scene.condition("Ready", "True", "ScaledToZero").await;

    scene.wait_for_cold(DEMO_MODEL).await;
    let traffic = Traffic::to(scene.address().await).streams(1).words(10).start();
    traffic.wait_for_answers(1).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn pool_manually_at_zero_holds_requests_until_scaled() {
    let scene = Scene::new("held", json!({}), json!({"models": [DEMO_MODEL], "replicas": 0})).await;
    scene.condition("Ready", "True", "ScaledToZero").await;
    scene.wait_for_cold(DEMO_MODEL).await;
    let traffic = Traffic::to(scene.address().await).streams(2).words(10).start();
    scene.wait_for_waiting(2).await;
    assert_eq!(scene.get().await.data["spec"]["replicas"], 0, "without scaling only its owner may wake it");
    scene.scale(1).await;
    traffic.wait_for_answers(2).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn daemon_set_runs_one_pod_and_serves() {
    let mut template = demo_pool("local")["template"].take();
    template["kind"] = json!("DaemonSet");
    let scene = Scene::new("everywhere", json!({}), json!({"template": template})).await;
    let pool = scene.condition("Ready", "True", "Serving").await;
    assert_eq!((&pool.data["status"]["mode"], &pool.data["spec"]["replicas"]), (&json!("Template"), &Value::Null));
    scene.namespace.rolled_out("daemonset/everywhere-backend").await;
    assert_eq!(scene.pods().await.len(), 1);
    let traffic = Traffic::to(scene.address().await).streams(3).words(10).start();
    traffic.wait_for_answers(6).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn standalone_workers_serve_backend_at_url() {
    let spec = json!({"provider": "local", "backend": {"url": "http://vllm"}, "maxConcurrency": 4, "standalone": {"replicas": 2}});
    let scene = Scene::of("outside", json!({}), spec).await;
    scene.namespace.apply(&demo_backend("vllm", 1)).await;
    scene.namespace.rolled_out("deployment/vllm").await;
    let pool = scene.condition("Ready", "True", "Serving").await;
    assert_eq!(pool.data["status"]["mode"], "Standalone");
    scene.namespace.rolled_out("deployment/outside-worker").await;
    let containers = |pod: &Pod| pod.spec.as_ref().map_or(0, |spec| spec.containers.len());
    assert_eq!(scene.pods().await.iter().map(containers).collect::<Vec<_>>(), [1, 1], "workers without a backend");
    let traffic = Traffic::to(scene.address().await).streams(6).words(20).start();
    traffic.wait_for_answers(12).await;
    traffic.finish().await.expect_all_answered();
}

#[tokio::test]
async fn multiplexer_rejected_by_its_workers_is_rejected_clearly() {
    // The schema accepts it: slots may be omitted if the block is empty.
    let mut spec = with(demo_pool("local"), json!({"multiplexer": {"loadTimeout": "5m"}}));
    spec.as_object_mut().expect("a spec").remove("backend");
    let scene = Scene::of("juggler", json!({}), spec).await;
    let pool = scene.condition("Stalled", "True", "InvalidSpec").await;
    assert_eq!(condition(&pool, "Ready")["status"], "False");
    let message = condition(&pool, "Stalled")["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.starts_with("spec.multiplexer.slots: ") && message.contains("spec.backend"), "{message}");
    let made = scene.namespace.api::<Deployment>().get_opt("juggler-backend").await.expect("Deployments can be read");
    assert!(made.is_none(), "no incomplete object may be made");
    let events = scene.namespace.kubectl("get events --field-selector reason=InvalidSpec --output name").await;
    assert!(!events.is_empty(), "an Event must report it too");
}
