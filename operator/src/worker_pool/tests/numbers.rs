//! Who decides how many Pods there are, and which go.

use super::*;

/// Somebody scales the Deployment itself.
fn scaled_by(scene: &Scene, manager: &str, replicas: i32) {
    let mut server = scene.server.lock().unwrap();
    server.version += 1;
    let version = server.version;
    let deployment = server.objects.get_mut(DEPLOYMENT).unwrap();
    deployment["spec"]["replicas"] = json!(replicas);
    deployment["metadata"]["generation"] = json!(version);
    deployment["metadata"]["managedFields"] = json!([
        {"manager": "modelrelay-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:template": {}}}},
        {
            "manager": manager, "operation": "Update", "subresource": "scale",
            "time": format!("2026-01-01T00:00:{:02}Z", version % 60), "fieldsV1": {"f:spec": {"f:replicas": {}}},
        },
    ]);
}

fn replicas(scene: &Scene) -> Value {
    scene.server.lock().unwrap().objects[DEPLOYMENT]["spec"]["replicas"].clone()
}

#[tokio::test]
async fn an_autoscaler_of_the_deployment_is_named_and_not_fought() {
    let scene = Scene::new(&json!({}));
    scene.report(serving());
    scene.look().await.unwrap();
    scene.events();
    for wanted in [4, 5, 4] {
        scaled_by(&scene, "kube-controller-manager", wanted);
        scene.look().await.unwrap();
        scene.look().await.unwrap();
        assert_eq!(replicas(&scene), json!(wanted));
    }
    assert_eq!(scene.condition("Ready"), ("True".into(), "Serving".into()));
    assert_eq!(scene.condition("Stalled"), ("True".into(), "ScalingConflict".into()));
    assert_eq!(scene.events(), ["ScalingConflict"]);
    let status = scene.pool().status.clone().unwrap();
    let stalled = status.conditions.iter().find(|one| one.type_ == "Stalled").unwrap();
    assert_eq!(
        stalled.message,
        "a HorizontalPodAutoscaler (field manager kube-controller-manager) scales Deployment llama-backend, whose \
         replicas are those of this pool, and is left to it: make WorkerPool llama its scaleTargetRef, or remove it and \
         write spec.replicas"
    );
    // As it is then: the autoscaler writes the pool's number.
    scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"]["replicas"] = json!(3);
    scene.look().await.unwrap();
    assert_eq!((replicas(&scene), scene.condition("Stalled").0), (json!(3), "False".into()));
}

#[tokio::test]
async fn a_person_who_scales_the_deployment_is_corrected_and_told() {
    let scene = Scene::new(&json!({}));
    scene.report(serving());
    scene.look().await.unwrap();
    scene.events();
    scaled_by(&scene, "kubectl", 7);
    scene.look().await.unwrap();
    assert_eq!((replicas(&scene), scene.events()), (json!(2), vec!["ScalingConflict".to_owned()]));
    assert_eq!(scene.condition("Ready"), ("True".into(), "ScalingConflict".into()));
    scaled_by(&scene, "kubectl", 7);
    scene.look().await.unwrap();
    assert_eq!((replicas(&scene), scene.condition("Stalled").0), (json!(7), "True".into()), "two correct each other");
}

/// What is known of who is idle is seconds old, and a Pod that got a request meanwhile must not be the first to go.
#[tokio::test(start_paused = true)]
async fn relays_are_asked_once_more_before_pods_go() {
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
    scene.look().await.unwrap();
    scene.writes();
    // Whoever asks the relays is told to, and does.
    let (ctx, now) = (scene.shared.ctx.clone(), busy("llama-2"));
    let mut news = ctx.relays.expectations();
    let relays = tokio::spawn(async move {
        news.changed().await.unwrap();
        ctx.relays.keep("llm", "local", now);
    });
    scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"]["replicas"] = json!(1);
    scene.look().await.unwrap();
    tokio::time::timeout(Duration::from_secs(1), relays).await.expect("the relays are asked").unwrap();
    assert_eq!(scene.writes()[..2], written(&["/api/v1/namespaces/llm/pods/llama-2", DEPLOYMENT]));
}
