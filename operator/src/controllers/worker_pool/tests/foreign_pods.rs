//! Pods that other owners create.

use k8s_openapi::api::core::v1::ConfigMap;

use super::*;
use crate::cluster::cache::Now;
use crate::webhook::inject::decide::{self, Lookup};
use crate::webhook::inject::review::AdmissionDecision;
use crate::webhook::inject::review::Review;

const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/llm/deployments";

/// Returns a Pod as the webhook would currently inject it for the pool.
fn injected(scene: &Scene, name: &str) -> Value {
    let pod = json!({
        "metadata": {"name": name, "namespace": "llm", "uid": name, "labels": {"modelrelay.io/pool": "llama"}},
        "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}, {"containerPort": 9000}]}]},
    });
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "operation": "CREATE", "namespace": "llm", "object": pod,
            "resource": {"group": "", "version": "v1", "resource": "pods"},
        },
    });
    let review = Review::parse(review.to_string().as_bytes()).unwrap();
    let pool = Lookup::Found(Box::new(WorkerPool::clone(&scene.pool())));
    let decision = decide::decide(&review, "llama", &pool, &scene.shared.ctx.defaults.worker, name);
    let AdmissionDecision::Injected { pod, .. } = decision else { panic!("{decision:?}") };
    pod
}

#[tokio::test]
async fn injected_pods_are_outdated_when_rendering_changes() {
    let outdated = |change: Value| async move {
        let mut scene = Scene::new(&json!({"template": null, "replicas": null}));
        // Two Pods, because each has its own drain token.
        for name in ["vllm-1", "vllm-2"] {
            let mut pod = injected(&scene, name);
            // Another webhook may rewrite it like this, for a registry mirror.
            let worker = pod["spec"]["initContainers"][0].as_object_mut().unwrap();
            worker.insert("image".to_owned(), json!("mirror.example/worker"));
            scene.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
        }
        json_patch::merge(&mut scene.server.lock().unwrap().objects.get_mut(POOL).unwrap()["spec"], &change);
        scene.reconcile().await.unwrap();
        scene.pool().status.as_ref().and_then(|status| status.outdated)
    };
    for elsewhere in [json!({}), json!({"models": ["m"], "maxConcurrency": 3})] {
        assert_eq!(outdated(elsewhere.clone()).await, Some(0), "{elsewhere}");
    }
    for change in [
        json!({"backend": {"port": 9000}}),
        json!({"backend": {"basePath": "/v2"}}),
        json!({"backend": {"engine": "sglang", "port": 8000}}),
        json!({"backend": {"container": "vllm"}}),
        json!({"sidecar": {"port": 18000}}),
        json!({"sidecar": {"image": "worker:next"}}),
        json!({"shutdownTimeout": "5m"}),
    ] {
        assert_eq!(outdated(change.clone()).await, Some(2), "{change}");
    }
}

#[tokio::test]
async fn pods_that_deleted_pool_selected_are_recreated() {
    let mut scene = Scene::new(&json!({"template": null, "replicas": null}));
    let mut put = |name: &str, pool: &str, annotations: Value| {
        let pod = json!({
            "metadata": {
                "name": name, "namespace": "llm", "uid": "u", "labels": {"modelrelay.io/pool": pool}, "annotations": annotations,
                "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}],
            },
            "spec": {"containers": [{"name": "vllm"}], "schedulingGates": [{"name": "modelrelay.io/no-such-pool"}]},
        });
        scene.server.lock().unwrap().objects.insert(format!("/api/v1/namespaces/llm/pods/{name}"), pod.clone());
        scene.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
    };
    put("selected", "gone", json!({"modelrelay.io/selected": "true"}));
    // Its creator names a pool, which may be created later.
    put("labelled", "gone", json!({}));
    put("other", "another", json!({"modelrelay.io/selected": "true"}));
    // The cache does not have this pool yet.
    put("early", "new", json!({"modelrelay.io/selected": "true"}));
    let path = "/apis/modelrelay.io/v1alpha1/namespaces/llm/workerpools/new".to_owned();
    let new = json!({"apiVersion": "modelrelay.io/v1alpha1", "kind": "WorkerPool", "metadata": {"name": "new", "namespace": "llm"}});
    scene.server.lock().unwrap().objects.insert(path, new);
    for pool in ["gone", "new"] {
        let pool = ObjectRef::new(pool).within("llm");
        pods::release_orphans(&scene.shared.ctx.client, &scene.shared.caches, &pool).await;
    }
    assert_eq!(scene.writes(), ["DELETE /api/v1/namespaces/llm/pods/selected"]);
}

#[tokio::test]
async fn gated_pods_are_released_when_pool_becomes_usable() {
    const GATED: &str = "/api/v1/namespaces/llm/pods/vllm-1";
    let mut scene = Scene::new(&json!({"template": null, "replicas": null, "multiplexer": {"loadTimeout": "5m"}}));
    let change = |scene: &Scene, change: Value| {
        json_patch::merge(scene.server.lock().unwrap().objects.get_mut(POOL).unwrap(), &change);
    };
    change(&scene, json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}));
    let pod = json!({
        "metadata": {
            "name": "vllm-1", "namespace": "llm", "uid": "u", "creationTimestamp": "2026-01-02T00:00:00Z",
            "labels": {"modelrelay.io/pool": "llama"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}],
        },
        "spec": {"containers": [{"name": "vllm"}], "schedulingGates": [{"name": "modelrelay.io/no-such-pool"}]},
    });
    scene.pods.apply_watcher_event(&watcher::Event::Apply(serde_json::from_value(pod).unwrap()));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[STATUS]));
    assert_eq!(scene.events(), ["InvalidSpec"]);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.events(), ["PodsWaiting"]);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.events(), [""; 0], "said once");
    change(&scene, json!({"spec": {"multiplexer": null}}));
    scene.reconcile().await.unwrap();
    // The webhook reads the status, so the Pod's successor must not be created before it is written.
    let freed = format!("DELETE {GATED}");
    assert_eq!(scene.writes(), [written(&[CONFIG_MAP, STATUS]), vec![freed.clone()]].concat());
    // A Pod that was created meanwhile is released too.
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), [freed]);
}

#[tokio::test]
async fn foreign_deployment_without_pods_is_explained() {
    let scene = Scene::new(&json!({"template": null, "replicas": null}));
    scene.report(RelaySnapshot { workers: BTreeMap::default(), ..serving() });
    let why =
        "admission webhook \"inject.modelrelay.io\" denied the request: WorkerPool llama: the Pod uses hostNetwork";
    let deployment = |name: &str, pool: &str, status: &str| {
        json!({
            "metadata": {"name": name, "namespace": "llm"},
            "spec": {
                "selector": {},
                "template": {"metadata": {"labels": {"modelrelay.io/pool": pool}}, "spec": {"containers": []}},
            },
            "status": {"conditions": [
                {"type": "ReplicaFailure", "status": status, "reason": "FailedCreate", "message": why},
            ]},
        })
    };
    let list =
        |items: Value| json!({"apiVersion": "apps/v1", "kind": "DeploymentList", "metadata": {}, "items": items});
    let theirs = json!([deployment("other", "another", "True"), deployment("fine", "llama", "False")]);
    let say = |items: Value| scene.server.lock().unwrap().objects.insert(DEPLOYMENTS.to_owned(), list(items));
    say(theirs.clone());
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Ready"), ("False".into(), "NoPods".into()));
    let mut with_ours = theirs.clone();
    with_ours.as_array_mut().unwrap().push(deployment("vllm", "llama", "True"));
    say(with_ours);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Ready").1, "NoPods", "not read again before a change");
    scene.shared.caches.triggers.deployment_changed("llm".to_owned());
    let again = scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Ready"), ("False".into(), "PodsNotCreated".into()));
    let status = scene.pool().status.clone().unwrap();
    assert_eq!(status.conditions[0].message, format!("Deployment vllm cannot create its Pods: {why}"));
    // No change of such a Deployment triggers a reconciliation.
    assert_eq!(again, Action::requeue(Duration::from_secs(60)));
}

#[tokio::test]
async fn unchanged_pool_without_pods_reads_nothing() {
    let scene = Scene::new(&json!({"template": null, "replicas": null}));
    let none = json!({"apiVersion": "apps/v1", "kind": "DeploymentList", "metadata": {}, "items": []});
    scene.server.lock().unwrap().objects.insert(DEPLOYMENTS.to_owned(), none);
    scene.reconcile().await.unwrap();
    let applied = scene.server.lock().unwrap().objects[CONFIG_MAP].clone();
    let applied: ConfigMap = serde_json::from_value(applied).unwrap();
    scene.shared.caches.triggers.object(&applied, Now::There);
    let requests = || std::mem::take(&mut scene.server.lock().unwrap().requests);
    assert!(requests() > 0);
    scene.reconcile().await.unwrap();
    assert_eq!(requests(), 0);
    // A change of the ConfigMap, or of any Deployment, is read.
    let mut changed = applied.clone();
    changed.metadata.resource_version = Some("another".to_owned());
    scene.shared.caches.triggers.object(&changed, Now::There);
    scene.shared.caches.triggers.deployment_changed("llm".to_owned());
    scene.reconcile().await.unwrap();
    assert_eq!(requests(), 2);
}

#[tokio::test]
async fn pods_that_another_pool_has_are_reported_once() {
    let selector = json!({"matchLabels": {"app": "vllm"}});
    let mut scene = Scene::new(&json!({"template": null, "replicas": null, "selector": selector}));
    let pod = |name: &str, pool: &str| -> Pod {
        let labels = json!({"app": "vllm", "modelrelay.io/pool": pool});
        serde_json::from_value(json!({"metadata": {"name": name, "namespace": "llm", "uid": name, "labels": labels}}))
            .unwrap()
    };
    scene.pods.apply_watcher_event(&watcher::Event::Apply(pod("a", "llama")));
    scene.reconcile().await.unwrap();
    assert!(!scene.events().contains(&"PodsOfAnotherPool".to_owned()));
    scene.pods.apply_watcher_event(&watcher::Event::Apply(pod("b", "older")));
    for reported in [true, false] {
        scene.reconcile().await.unwrap();
        assert_eq!(scene.events().contains(&"PodsOfAnotherPool".to_owned()), reported);
    }
}
