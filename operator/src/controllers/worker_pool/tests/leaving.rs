//! Deployments that a pool's worker scaled before and no longer scales, and Deployments that two pools would scale.

use super::access::{ROLE, ROLE_BINDING, SERVICE_ACCOUNT, WORKERS, change, scaling};
use super::*;
use crate::resources::names;

const QWEN: &str = "/apis/apps/v1/namespaces/llm/deployments/qwen";
const QWEN_SCALE: &str = "/apis/apps/v1/namespaces/llm/deployments/qwen/scale";

/// A Deployment of another owner.
fn deployment(name: &str, labels: &Value, replicas: i32) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": name, "namespace": "llm", "uid": name, "labels": labels},
        "spec": {
            "replicas": replicas, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": []}},
        },
    })
}

impl Scene {
    /// Puts a Deployment of the user's on the server, with a resident model.
    fn run(&self, name: &str) {
        let path = format!("/apis/apps/v1/namespaces/llm/deployments/{name}");
        self.server.lock().unwrap().objects.insert(path, deployment(name, &json!({}), 1));
    }

    fn replicas(&self, path: &str) -> Value {
        self.server.lock().unwrap().objects[path]["spec"]["replicas"].clone()
    }

    fn has(&self, path: &str) -> bool {
        self.server.lock().unwrap().objects.contains_key(path)
    }

    fn may_scale(&self) -> Value {
        self.server.lock().unwrap().objects[ROLE]["rules"][0]["resourceNames"].clone()
    }

    /// Returns a Pod of the worker's current Deployment.
    fn worker_pod(&self) -> Pod {
        let template = self.server.lock().unwrap().objects[WORKERS]["spec"]["template"].clone();
        let mut pod =
            json!({"metadata": template["metadata"], "spec": template["spec"], "status": {"phase": "Running"}});
        pod["metadata"]["name"] = json!("llama-worker-1");
        pod["metadata"]["namespace"] = json!("llm");
        pod["metadata"]["uid"] = json!("pod");
        serde_json::from_value(pod).unwrap()
    }

    /// Adds another pool to the namespace, younger by this number of seconds (or older).
    fn another(&mut self, name: &str, deployment: &str, younger_by: i64) {
        let mut other = serde_json::to_value(testing::pool(&json!({"provider": "local"}))).unwrap();
        json_patch::merge(&mut other["spec"], &scaling(deployment));
        other["metadata"]["name"] = json!(name);
        other["metadata"]["uid"] = json!(name);
        other["metadata"]["creationTimestamp"] = json!(Timestamp::from_second(NOON + younger_by).unwrap().to_string());
        self.pools.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(other).unwrap()));
    }

    /// Sets the pool's creation time to noon.
    fn dated(self) -> Self {
        let noon = json!(Timestamp::from_second(NOON).unwrap().to_string());
        self.server.lock().unwrap().objects.get_mut(POOL).unwrap()["metadata"]["creationTimestamp"] = noon;
        self
    }

    fn message(&self, type_: &str) -> String {
        let conditions = self.pool().status.clone().unwrap_or_default().conditions;
        conditions.into_iter().find(|condition| condition.type_ == type_).unwrap().message
    }
}

const NOON: i64 = 1_790_000_000;

#[tokio::test]
async fn dropped_deployment_is_scaled_down_after_former_worker() {
    let mut scene = Scene::new(&scaling("qwen"));
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    let former = scene.worker_pod();
    scene.pods.apply_watcher_event(&watcher::Event::Apply(former.clone()));
    change(&scene, &scaling("llama"));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.replicas(QWEN), 1, "requests may run on it until its worker is gone");
    assert_eq!(
        scene.may_scale(),
        json!(["llama", "qwen"]),
        "what was left is remembered where a new operator reads it"
    );

    scene.pods.apply_watcher_event(&watcher::Event::Delete(former));
    scene.pods.apply_watcher_event(&watcher::Event::Apply(scene.worker_pod()));
    scene.events();
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.may_scale()), (json!(0), json!(["llama"])));
    assert!(scene.events().contains(&"DeploymentReleased".to_owned()));
    // Scaling it from now on is the user's decision.
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    assert_eq!(scene.replicas(QWEN), 1);
}

#[tokio::test]
async fn pool_at_zero_leaves_no_model_loaded() {
    let mut scene = Scene::new(&scaling("qwen"));
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    let former = scene.worker_pod();
    scene.pods.apply_watcher_event(&watcher::Event::Apply(former.clone()));
    change(&scene, &json!({"replicas": 0}));
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.has(ROLE)), (json!(1), true), "its worker ends first");
    scene.pods.apply_watcher_event(&watcher::Event::Delete(former));
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.has(ROLE), scene.has(ROLE_BINDING)), (json!(0), false, false));

    change(&scene, &json!({"replicas": 1}));
    scene.reconcile().await.unwrap();
    assert!(scene.has(ROLE) && scene.has(ROLE_BINDING) && scene.has(SERVICE_ACCOUNT));
}

#[tokio::test]
async fn removed_driver_scales_its_deployments_to_zero() {
    let scene = Scene::new(&scaling("qwen"));
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    change(&scene, &json!({"backend": {"url": "http://gpu:8000"}, "multiplexer": null}));
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.has(ROLE)), (json!(0), false));
}

#[tokio::test]
async fn worker_of_other_driver_is_not_awaited() {
    let mut scene = Scene::new(&scaling("qwen"));
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    let former = scene.worker_pod();
    scene.pods.apply_watcher_event(&watcher::Event::Apply(former.clone()));
    let slot = json!({"id": "gpu0", "driver": "static", "models": [{"id": "qwen", "url": "http://gpu:8000"}]});
    change(&scene, &json!({"multiplexer": {"slots": [slot]}}));
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.has(ROLE)), (json!(1), true), "the former worker ends first");
    scene.pods.apply_watcher_event(&watcher::Event::Delete(former));
    scene.pods.apply_watcher_event(&watcher::Event::Apply(scene.worker_pod()));
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.has(ROLE)), (json!(0), false));
}

#[tokio::test]
async fn deployment_moved_to_other_pool_is_left_alone() {
    let mut scene = Scene::new(&scaling("qwen")).dated();
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    scene.another("second", "qwen", 60);
    change(&scene, &scaling("llama"));
    scene.reconcile().await.unwrap();
    assert_eq!((scene.replicas(QWEN), scene.may_scale()), (json!(1), json!(["llama"])));
}

#[tokio::test]
async fn unscalable_deployment_does_not_block_pool() {
    let scene = Scene::new(&scaling("qwen"));
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    scene.fail(Method::PATCH, QWEN_SCALE, 403, "deployments.apps \"qwen\" is forbidden");
    change(&scene, &scaling("llama"));
    scene.events();
    scene.reconcile().await.unwrap();
    assert_eq!(scene.may_scale(), json!(["llama"]));
    assert!(scene.events().contains(&"DeploymentNotReleased".to_owned()));
}

#[tokio::test]
async fn deployment_named_by_two_pools_belongs_to_older() {
    let mut scene = Scene::new(&scaling("qwen")).dated();
    scene.another("first", "qwen", -60);
    scene.reconcile().await.unwrap_err();
    assert_eq!(scene.condition("Stalled"), ("True".to_owned(), "InvalidSpec".to_owned()));
    let message = scene.message("Stalled");
    let expected =
        "spec.multiplexer.slots.gpu0.models.qwen.deployment: the older WorkerPool first already scales Deployment qwen";
    assert!(message.starts_with(expected), "{message}");
    assert!(!scene.has(WORKERS), "two workers would take it from each other");

    let mut scene = Scene::new(&scaling("qwen")).dated();
    scene.another("second", "qwen", 60);
    scene.reconcile().await.unwrap();
    assert!(scene.has(WORKERS));
}

#[tokio::test]
async fn younger_pool_loses_right_to_contested_deployment() {
    let mut scene = Scene::new(&scaling("qwen")).dated();
    scene.run("qwen");
    scene.reconcile().await.unwrap();
    assert!(scene.has(ROLE_BINDING));
    scene.another("first", "qwen", -60);
    scene.reconcile().await.unwrap_err();
    assert!(!scene.has(ROLE) && !scene.has(ROLE_BINDING));
    assert_eq!(scene.replicas(QWEN), 1, "it is the other pool's");
}

#[tokio::test]
async fn modelrelay_deployment_is_not_accepted_as_model() {
    let mut scene = Scene::new(&scaling("local-relay"));
    let labels = json!({"app.kubernetes.io/managed-by": names::MANAGED_BY});
    let own = serde_json::from_value(deployment("local-relay", &labels, 1)).unwrap();
    scene.deployments.apply_watcher_event(&watcher::Event::Apply(own));
    scene.reconcile().await.unwrap_err();
    assert_eq!(scene.condition("Stalled"), ("True".to_owned(), "InvalidSpec".to_owned()));
    assert!(scene.message("Stalled").contains("Deployment local-relay belongs to ModelRelay"));
}
