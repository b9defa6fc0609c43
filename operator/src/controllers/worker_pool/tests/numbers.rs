//! The decisions on how many Pods there are, and which are removed first.

use super::*;

fn scaled_by(scene: &Scene, manager: &str, replicas: i32) {
    scene.server.lock().unwrap().scale(manager, replicas);
}

fn replicas(scene: &Scene) -> Value {
    scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["replicas"].clone()
}

#[tokio::test]
async fn autoscaler_of_deployment_is_named_and_not_fought() {
    let scene = Scene::new(&json!({}));
    scene.report(serving());
    scene.reconcile().await.unwrap();
    scene.events();
    for wanted in [4, 5, 4] {
        scaled_by(&scene, "kube-controller-manager", wanted);
        scene.reconcile().await.unwrap();
        scene.reconcile().await.unwrap();
        assert_eq!(replicas(&scene), json!(wanted));
    }
    assert_eq!(scene.condition("Ready"), ("True".into(), "Serving".into()));
    assert_eq!(scene.condition("Stalled"), ("True".into(), "ScalingConflict".into()));
    assert_eq!(scene.events(), ["ScalingConflict"]);
    let status = scene.pool().status.clone().unwrap();
    let stalled = status.conditions.iter().find(|one| one.type_ == "Stalled").unwrap();
    assert_eq!(
        stalled.message,
        "a HorizontalPodAutoscaler (field manager kube-controller-manager) scales Deployment llama-backend, which \
         belongs to this pool, and the operator does not override it: set its scaleTargetRef to WorkerPool llama, or \
         remove it and set spec.replicas"
    );
    // The autoscaler then writes the pool's number.
    scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"]["replicas"] = json!(3);
    scene.reconcile().await.unwrap();
    assert_eq!((replicas(&scene), scene.condition("Stalled").0), (json!(3), "False".into()));
}

#[tokio::test]
async fn user_scaling_deployment_is_corrected_and_reported() {
    let scene = Scene::new(&json!({}));
    scene.report(serving());
    scene.reconcile().await.unwrap();
    scene.events();
    scaled_by(&scene, "kubectl", 7);
    scene.reconcile().await.unwrap();
    assert_eq!((replicas(&scene), scene.events()), (json!(2), vec!["ScalingConflict".to_owned()]));
    assert_eq!(scene.condition("Ready"), ("True".into(), "ScalingConflict".into()));
    scaled_by(&scene, "kubectl", 7);
    scene.reconcile().await.unwrap();
    assert_eq!((replicas(&scene), scene.condition("Stalled").0), (json!(7), "True".into()), "two correct each other");
}

const HPA: &str = "kube-controller-manager";

fn owners(scene: &Scene) -> Vec<String> {
    ownership::owners(&scene.server.lock().unwrap().objects[DEPLOYMENT])
}

fn change(scene: &Scene, spec: &Value) {
    json_patch::merge(&mut scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"], spec);
}

/// A successor, as after a change of release or leader: it remembers nothing.
fn successor(scene: &Scene) -> Arc<PoolContext> {
    Arc::new(PoolContext {
        ctx: scene.shared.ctx.clone(),
        caches: scene.shared.caches.clone(),
        memory: PoolMemories::default(),
    })
}

#[tokio::test]
async fn new_leader_leaves_fleet_to_its_autoscaler() {
    let scene = Scene::new(&json!({}));
    scene.report(serving());
    scene.reconcile().await.unwrap();
    scaled_by(&scene, HPA, 8);
    // Each leader applies its own template.
    for (leader, image) in ["a", "b", "c"].into_iter().enumerate() {
        let containers = json!([{"name": "vllm", "image": image, "ports": [{"containerPort": 8000}]}]);
        change(&scene, &json!({"template": {"spec": {"containers": containers}}}));
        let shared = if leader == 0 { scene.shared.clone() } else { successor(&scene) };
        for _ in 0..2 {
            reconcile(scene.pool(), shared.clone()).await.unwrap();
            assert_eq!((replicas(&scene), owners(&scene)), (json!(8), vec![HPA.to_owned()]), "leader {leader}");
        }
        assert_eq!(scene.condition("Stalled"), ("True".into(), "ScalingConflict".into()));
    }
}

/// An earlier operator applied the autoscaler's number too.
#[tokio::test]
async fn shared_ownership_is_released_to_autoscaler() {
    let scene = Scene::new(&json!({}));
    scene.reconcile().await.unwrap();
    scaled_by(&scene, HPA, 8);
    {
        let mut server = scene.server.lock().unwrap();
        let deployment = server.objects.get_mut(DEPLOYMENT).unwrap();
        let before = deployment.clone();
        ownership::apply(Some(&before), deployment);
        assert_eq!(ownership::owners(deployment), [HPA, "modelrelay-operator"]);
    }
    reconcile(scene.pool(), successor(&scene)).await.unwrap();
    assert_eq!((replicas(&scene), owners(&scene)), (json!(8), vec![HPA.to_owned()]));
}

#[tokio::test]
async fn stale_read_does_not_overwrite_autoscaler() {
    let scene = Scene::new(&json!({}));
    scene.reconcile().await.unwrap();
    scaled_by(&scene, HPA, 8);
    scene.server.lock().unwrap().race = Some((HPA, 6));
    scene.reconcile().await.unwrap();
    assert!(scene.server.lock().unwrap().race.is_none(), "it was applied");
    assert_eq!(replicas(&scene), json!(6));
}

/// Otherwise the API server would set it to 1.
#[tokio::test]
async fn replicas_without_other_owner_are_kept() {
    let scene = Scene::new(&json!({}));
    scene.reconcile().await.unwrap();
    scaled_by(&scene, HPA, 8);
    scene.reconcile().await.unwrap();
    {
        let mut server = scene.server.lock().unwrap();
        let deployment = server.objects.get_mut(DEPLOYMENT).unwrap();
        let before = deployment.clone();
        ownership::apply(Some(&before), deployment);
        deployment["metadata"]["managedFields"].as_array_mut().unwrap().retain(|entry| entry["manager"] != HPA);
        deployment["metadata"]["generation"] = json!(77);
    }
    scene.reconcile().await.unwrap();
    assert_eq!((replicas(&scene), owners(&scene)), (json!(8), vec!["modelrelay-operator".to_owned()]));
}

/// The last report is seconds old, and a Pod that received a request meanwhile must not be the first to go.
#[tokio::test(start_paused = true)]
async fn relays_are_polled_again_before_pods_are_removed() {
    let mut scene = Scene::new(&json!({}));
    for name in ["llama-1", "llama-2"] {
        let pod = json!({"metadata": {"name": name, "namespace": "llm", "labels": {"modelrelay.io/pool": "llama"}}});
        scene.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
    }
    let busy = |busy: &str| {
        let worker = |name: &str| WorkerReport {
            name: name.into(),
            in_flight: u64::from(name == busy),
            ..serving().workers["w"].clone()
        };
        let workers = [("1".to_owned(), worker("llama-1")), ("2".to_owned(), worker("llama-2"))].into();
        RelaySnapshot { workers, ..serving() }
    };
    scene.report(busy("llama-1"));
    scene.reconcile().await.unwrap();
    scene.writes();
    // A new report is requested and delivered.
    let (ctx, now) = (scene.shared.ctx.clone(), busy("llama-2"));
    let mut expectation_changes = ctx.relays.expectations();
    let relays = tokio::spawn(async move {
        expectation_changes.changed().await.unwrap();
        ctx.relays.keep("llm", "local", now);
    });
    scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"]["replicas"] = json!(1);
    scene.reconcile().await.unwrap();
    tokio::time::timeout(Duration::from_secs(1), relays).await.expect("the relays are asked").unwrap();
    assert_eq!(scene.writes()[..2], written(&["/api/v1/namespaces/llm/pods/llama-2", DEPLOYMENT]));
}
