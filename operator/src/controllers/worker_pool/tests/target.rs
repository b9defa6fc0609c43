//! A workload of another owner that the pool scales.

use super::*;
use crate::controllers::worker_pool::ticker;
use crate::relays::state::ModelReport;

const STATEFUL_SET: &str = "/apis/apps/v1/namespaces/llm/statefulsets/vllm";
const STATEFUL_SET_SCALE: &str = "/apis/apps/v1/namespaces/llm/statefulsets/vllm/scale";
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/llm/deployments/vllm";
const DEPLOYMENT_SCALE: &str = "/apis/apps/v1/namespaces/llm/deployments/vllm/scale";

/// Handles a request for the scale of an object. `body` is null for a read.
pub(super) fn scale(object: &mut Value, body: &Value) -> (u16, Value) {
    let version = object["metadata"]["resourceVersion"].clone();
    if body["metadata"]["resourceVersion"] != Value::Null && body["metadata"]["resourceVersion"] != version {
        return (409, failure(409, "the object has been modified"));
    }
    if let Some(number) = body["spec"].get("replicas") {
        // An admission webhook may replace it.
        let admitted = object["metadata"]["annotations"]["admitted"].clone();
        object["spec"]["replicas"] = if admitted.is_null() { number.clone() } else { admitted };
    }
    let scale = json!({
        "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"resourceVersion": version},
        "spec": {"replicas": object["spec"]["replicas"]}, "status": {"replicas": object["spec"]["replicas"]},
    });
    (200, scale)
}

/// A pool with a target, which has this number of Pods.
fn scene(kind: &str, replicas: i32) -> Scene {
    let target = json!({"apiVersion": "apps/v1", "kind": kind, "name": "vllm"});
    let scaling = json!({
        "maxReplicas": 4, "targetRequestsPerReplica": 4, "scaleDownDelay": "60s", "targetRef": target,
    });
    let scene = Scene::new(&json!({"template": null, "replicas": null, "models": ["qwen"], "scaling": scaling}));
    scene.put(kind, replicas);
    scene
}

impl Scene {
    fn put(&self, kind: &str, replicas: i32) {
        let path = if kind == "Deployment" { DEPLOYMENT } else { STATEFUL_SET };
        let object = json!({
            "apiVersion": "apps/v1", "kind": kind, "spec": {"replicas": replicas},
            "metadata": {"name": "vllm", "namespace": "llm", "uid": "v", "resourceVersion": "7"},
        });
        self.server.lock().unwrap().objects.insert(path.to_owned(), object);
    }

    /// Adds Pods of the target that are the pool's.
    fn put_pods(&mut self, kind: &str, pods: usize) {
        let (owner, name) = if kind == "Deployment" { ("ReplicaSet", "vllm-1f") } else { ("StatefulSet", "vllm") };
        for pod in 0..pods {
            let owner = json!({"apiVersion": "apps/v1", "kind": owner, "name": name, "uid": "o", "controller": true});
            let pod = json!({"metadata": {
                "name": format!("vllm-{pod}"), "namespace": "llm", "ownerReferences": [owner],
                "labels": {"modelrelay.io/pool": "llama", "pod-template-hash": "1f"},
            }});
            self.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
        }
    }

    fn number(&self, path: &str) -> Value {
        self.server.lock().unwrap().objects[path]["spec"]["replicas"].clone()
    }

    fn waiting(&self, waiting: u64) {
        self.report(RelaySnapshot {
            relays: [("r".to_owned(), Ok(RelayReport::default()))].into(),
            models: [("qwen".to_owned(), ModelReport { waiting, ..ModelReport::default() })].into(),
            ..RelaySnapshot::default()
        });
    }

    /// Makes one tick at this time.
    async fn tick(&self, now: Instant) {
        for change in ticker::plan(&self.shared, &[self.pool()], now) {
            ticker::carry_out(&self.shared, change).await;
        }
    }

    fn stalled(&self) -> (String, String, String) {
        let (status, reason) = self.condition("Stalled");
        let conditions = self.pool().status.clone().unwrap_or_default().conditions;
        let message = conditions.into_iter().find(|condition| condition.type_ == "Stalled").unwrap().message;
        (status, reason, message)
    }
}

#[tokio::test]
async fn target_is_scaled_from_zero_and_back() {
    for (kind, path) in [("StatefulSet", STATEFUL_SET), ("Deployment", DEPLOYMENT)] {
        let mut scene = scene(kind, 0);
        let start = Instant::now();
        scene.waiting(5);
        scene.tick(start).await;
        assert_eq!(scene.number(path), 0, "its number is not known yet");
        scene.reconcile().await.unwrap();
        assert_eq!(scene.condition("Ready"), ("True".into(), "ScaledToZero".into()));
        scene.writes();
        scene.tick(start).await;
        assert_eq!((scene.number(path), scene.writes()), (json!(2), written(&[&format!("{path}/scale")])));
        scene.put_pods(kind, 2);
        scene.waiting(0);
        for second in (10..=70).step_by(10) {
            scene.tick(start + Duration::from_secs(second)).await;
        }
        assert_eq!(scene.number(path), 0);
        let events = scene.events();
        assert!(["ScaledUp", "ScaledDown"].iter().all(|one| events.contains(&(*one).to_owned())), "{events:?}");
        assert_eq!(scene.pool().spec.replicas, None, "the pool does not repeat the number");
    }
}

#[tokio::test]
async fn target_with_other_pods_is_not_lowered() {
    for kind in ["StatefulSet", "Deployment"] {
        let mut scene = scene(kind, 3);
        let path = if kind == "Deployment" { DEPLOYMENT } else { STATEFUL_SET };
        let start = Instant::now();
        scene.waiting(0);
        // One of three has no worker, and may serve requests that no relay reports.
        scene.put_pods(kind, 2);
        scene.reconcile().await.unwrap();
        for second in (0..=130).step_by(10) {
            scene.tick(start + Duration::from_secs(second)).await;
        }
        assert_eq!(scene.number(path), 3);
        scene.put_pods(kind, 3);
        scene.tick(start + Duration::from_secs(140)).await;
        assert_eq!(scene.number(path), 0);
    }
}

#[tokio::test]
async fn missing_target_is_reported_until_it_exists() {
    let scene = scene("Deployment", 1);
    scene.server.lock().unwrap().objects.remove(DEPLOYMENT);
    scene.waiting(1);
    let action = scene.reconcile().await.unwrap();
    assert_eq!(action, Action::requeue(Duration::from_secs(10)));
    let message = "Deployment vllm does not exist in this namespace".to_owned();
    assert_eq!(scene.stalled(), ("True".into(), "TargetNotFound".into(), message));
    scene.tick(Instant::now()).await;
    scene.put("Deployment", 0);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled").0, "False");
    scene.tick(Instant::now()).await;
    assert_eq!(scene.number(DEPLOYMENT), 1);
}

#[tokio::test]
async fn forbidden_scale_is_reported_and_retried() {
    let scene = scene("StatefulSet", 0);
    scene.waiting(1);
    scene.reconcile().await.unwrap();
    scene.fail(Method::PATCH, STATEFUL_SET_SCALE, 403, "statefulsets.apps \"vllm\" is forbidden");
    scene.tick(Instant::now()).await;
    for _ in 0..2 {
        scene.reconcile().await.unwrap();
        let (status, reason, message) = scene.stalled();
        assert_eq!((&*status, &*reason), ("True", "Forbidden"));
        assert!(message.starts_with("scale of StatefulSet vllm was refused: "), "{message}");
    }
    scene.heal();
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled").0, "False");
    scene.tick(Instant::now() + Duration::from_secs(600)).await;
    assert_eq!(scene.number(STATEFUL_SET), 1);
}

#[tokio::test]
async fn unreadable_scale_is_reported() {
    let scene = scene("Deployment", 1);
    scene.fail(Method::GET, DEPLOYMENT_SCALE, 403, "deployments.apps \"vllm\" is forbidden");
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled"), ("True".into(), "Forbidden".into()));
}

#[tokio::test]
async fn autoscaled_deployment_is_left_to_its_autoscaler() {
    let scene = scene("Deployment", 1);
    let written_by = |manager: &str| {
        let managed = json!([{
            "manager": manager, "operation": "Update", "subresource": "scale", "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:replicas": {}}},
        }]);
        scene.server.lock().unwrap().objects.get_mut(DEPLOYMENT).unwrap()["metadata"]["managedFields"] = managed;
    };
    written_by("kube-controller-manager");
    scene.waiting(9);
    scene.reconcile().await.unwrap();
    scene.tick(Instant::now()).await;
    assert_eq!(scene.number(DEPLOYMENT), 1);
    let (status, reason, message) = scene.stalled();
    assert_eq!((&*status, &*reason), ("True", "ScalingConflict"));
    assert!(
        message.starts_with("a HorizontalPodAutoscaler (field manager kube-controller-manager) scales Deployment vllm")
    );
    written_by("kubectl");
    scene.reconcile().await.unwrap();
    scene.tick(Instant::now()).await;
    assert_eq!(scene.number(DEPLOYMENT), 3);
}

#[tokio::test]
async fn external_number_is_not_overwritten_or_lowered() {
    let mut scene = scene("StatefulSet", 0);
    scene.put_pods("StatefulSet", 3);
    let start = Instant::now();
    scene.waiting(1);
    scene.reconcile().await.unwrap();
    // Another writer comes between the observation and the write.
    scene.put("StatefulSet", 3);
    scene.tick(start).await;
    assert_eq!(scene.number(STATEFUL_SET), 3);
    scene.waiting(0);
    for second in (1..60).step_by(10) {
        scene.tick(start + Duration::from_secs(second)).await;
    }
    assert_eq!(scene.number(STATEFUL_SET), 3, "for one scaleDownDelay");
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled"), ("False".into(), "ScalingConflict".into()));
    for second in (61..=131).step_by(10) {
        scene.tick(start + Duration::from_secs(second)).await;
    }
    assert_eq!(scene.number(STATEFUL_SET), 0);
}

#[tokio::test]
async fn own_write_with_lost_response_is_no_conflict() {
    let scene = scene("StatefulSet", 0);
    scene.waiting(1);
    scene.reconcile().await.unwrap();
    scene.fail(Method::PATCH, STATEFUL_SET_SCALE, 504, "timeout");
    scene.tick(Instant::now()).await;
    scene.heal();
    // The write succeeded.
    scene.put("StatefulSet", 1);
    scene.reconcile().await.unwrap();
    scene.tick(Instant::now()).await;
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled").1, "NoPods", "no ScalingConflict");
}

#[tokio::test]
async fn deleted_pool_leaves_target_as_it_is() {
    let scene = scene("StatefulSet", 3);
    scene.waiting(16);
    scene.reconcile().await.unwrap();
    scene.writes();
    scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["metadata"]["deletionTimestamp"] =
        json!("2026-01-01T00:00:00Z");
    scene.reconcile().await.unwrap();
    scene.tick(Instant::now()).await;
    assert_eq!((scene.number(STATEFUL_SET), scene.writes()), (json!(3), vec![]));
}

#[tokio::test]
async fn target_of_two_pools_belongs_to_older() {
    let mut scene = scene("StatefulSet", 0);
    let created = |scene: &Scene, second: i64| {
        let time = Timestamp::from_second(1_790_000_000 + second).unwrap().to_string();
        let mut pool = scene.server.lock().unwrap().objects[POOL].clone();
        pool["metadata"]["creationTimestamp"] = json!(time);
        pool
    };
    let dated = created(&scene, 0);
    scene.server.lock().unwrap().objects.insert(POOL.to_owned(), dated);
    let mut other = created(&scene, -60);
    other["metadata"]["name"] = json!("first");
    scene.pools.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(other).unwrap()));
    scene.waiting(1);
    scene.reconcile().await.unwrap();
    let (_, reason, message) = scene.stalled();
    assert_eq!(reason, "InvalidSpec");
    assert!(message.contains("the older WorkerPool first already scales StatefulSet vllm"), "{message}");
    scene.tick(Instant::now()).await;
    assert_eq!(scene.number(STATEFUL_SET), 0);
}

#[tokio::test]
async fn target_without_pools_pods_has_no_pods() {
    let scene = scene("StatefulSet", 1);
    scene.waiting(0);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Ready"), ("False".into(), "NoPods".into()));
    scene.server.lock().unwrap().objects.get_mut(STATEFUL_SET).unwrap()["spec"]["replicas"] = json!(0);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Ready"), ("True".into(), "ScaledToZero".into()));
}

#[tokio::test]
async fn number_replaced_by_webhook_is_reported_and_retried() {
    let scene = scene("StatefulSet", 1);
    let admit = |admitted: Value| {
        let mut server = scene.server.lock().unwrap();
        server.objects.get_mut(STATEFUL_SET).unwrap()["metadata"]["annotations"]["admitted"] = admitted;
    };
    admit(json!(1));
    let start = Instant::now();
    scene.waiting(9);
    scene.reconcile().await.unwrap();
    scene.writes();
    for _ in 0..5 {
        scene.tick(start).await;
    }
    assert_eq!(scene.writes(), written(&[STATEFUL_SET_SCALE]), "it is not written in a loop");
    scene.reconcile().await.unwrap();
    let (status, reason, message) = scene.stalled();
    assert_eq!((&*status, &*reason), ("True", "ScalingConflict"));
    assert!(message.contains("scaled StatefulSet vllm to 3, and the API server stored 1"), "{message}");
    admit(Value::Null);
    scene.tick(start + Duration::from_secs(600)).await;
    scene.reconcile().await.unwrap();
    assert_eq!((scene.number(STATEFUL_SET), scene.stalled().0), (json!(3), "False".into()));
}

#[tokio::test]
async fn webhooks_number_is_no_complaint_once_load_fits() {
    let scene = scene("StatefulSet", 1);
    scene.server.lock().unwrap().objects.get_mut(STATEFUL_SET).unwrap()["metadata"]["annotations"] =
        json!({"admitted": 2});
    scene.waiting(16);
    scene.reconcile().await.unwrap();
    scene.tick(Instant::now()).await;
    scene.reconcile().await.unwrap();
    assert!(scene.stalled().2.contains("stored 2"), "{}", scene.stalled().2);
    scene.waiting(8);
    scene.tick(Instant::now() + Duration::from_secs(1)).await;
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled").0, "False");
}
