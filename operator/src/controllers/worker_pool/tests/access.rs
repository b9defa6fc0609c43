//! A worker's rights on Deployments: granted with the driver, revoked with it.

use super::*;

pub(super) const SERVICE_ACCOUNT: &str = "/api/v1/namespaces/llm/serviceaccounts/llama-worker";
pub(super) const ROLE: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/llm/roles/llama-worker";
pub(super) const ROLE_BINDING: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/llm/rolebindings/llama-worker";
pub(super) const WORKERS: &str = "/apis/apps/v1/namespaces/llm/deployments/llama-worker";

pub(super) fn scaling(deployment: &str) -> Value {
    let models = json!([{"id": "qwen", "deployment": deployment, "url": "http://qwen:8000"}]);
    json!({
        "template": null, "replicas": null, "standalone": {}, "backend": null,
        "multiplexer": {"slots": [{"id": "gpu0", "driver": "kubernetes", "models": models}]},
    })
}

pub(super) fn change(scene: &Scene, change: &Value) {
    let mut server = scene.server.lock().unwrap();
    let pool = server.objects.get_mut(POOL).unwrap();
    json_patch::merge(&mut pool["spec"], change);
    pool["metadata"]["generation"] = json!(pool["metadata"]["generation"].as_i64().unwrap() + 1);
}

#[tokio::test]
async fn worker_rights_precede_worker_and_end_with_driver() {
    let scene = Scene::new(&scaling("qwen"));
    scene.reconcile().await.unwrap();
    let first = [CONFIG_MAP, SERVICE_ACCOUNT, ROLE, ROLE_BINDING, WORKERS, STATUS];
    assert_eq!(scene.writes(), written(&first));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), [""; 0], "nothing changed");

    change(&scene, &scaling("qwen-2"));
    scene.reconcile().await.unwrap();
    let role = scene.server.lock().unwrap().objects[ROLE].clone();
    assert_eq!(role["rules"][0]["resourceNames"], json!(["qwen-2"]));
    scene.writes();

    let elsewhere = json!({"backend": {"url": "http://gpu:8000"}, "multiplexer": null});
    change(&scene, &elsewhere);
    scene.reconcile().await.unwrap();
    let taken: Vec<_> = [ROLE_BINDING, ROLE].map(|path| format!("DELETE {path}")).into();
    let writes = scene.writes();
    assert_eq!(writes, [written(&[CONFIG_MAP, WORKERS]), taken, written(&[STATUS])].concat());
    let account = scene.server.lock().unwrap().objects.contains_key(SERVICE_ACCOUNT);
    assert!(account, "without rights it is harmless, and is deleted with the pool");
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), [""; 0], "they are looked up once");
}

#[tokio::test]
async fn undeletable_account_does_not_make_pool_forbidden() {
    let scene = Scene::new(&scaling("qwen"));
    scene.reconcile().await.unwrap();
    scene.fail(Method::DELETE, SERVICE_ACCOUNT, 403, "serviceaccounts is forbidden: cannot delete");
    change(&scene, &json!({"backend": {"url": "http://gpu:8000"}, "multiplexer": null}));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.condition("Stalled").0, "False");
}

#[tokio::test]
async fn foreign_account_is_neither_adopted_nor_deleted() {
    let theirs = json!({"metadata": {"name": "llama-worker", "namespace": "llm", "uid": "theirs"}});
    let scene = Scene::new(&json!({
        "template": null, "replicas": null, "standalone": {}, "backend": {"url": "http://gpu:8000"},
    }));
    scene.server.lock().unwrap().objects.insert(SERVICE_ACCOUNT.to_owned(), theirs);
    scene.reconcile().await.unwrap();
    assert_eq!(scene.writes(), written(&[CONFIG_MAP, WORKERS, STATUS]));
    change(&scene, &scaling("qwen"));
    scene.reconcile().await.unwrap_err();
    assert_eq!(scene.condition("Stalled"), ("True".to_owned(), "NameTaken".to_owned()));
}

#[tokio::test]
async fn missing_right_to_grant_is_reported() {
    let scene = Scene::new(&scaling("qwen"));
    scene.fail(Method::PATCH, ROLE, 403, "user is attempting to grant RBAC permissions not currently held");
    scene.reconcile().await.unwrap_err();
    assert_eq!(scene.condition("Stalled"), ("True".to_owned(), "Forbidden".to_owned()));
    let made = scene.server.lock().unwrap().objects.contains_key(WORKERS);
    assert!(!made, "a worker that may do nothing is not started");
}

#[tokio::test]
async fn failed_loads_and_slots_are_reported() {
    use crate::crd::worker_pool::{SlotFailure, SlotState};
    use crate::relays::state::{Since, SlotReport};

    let scene = Scene::new(&scaling("qwen"));
    let failure = SlotFailure { model: "qwen".into(), code: "backend_unavailable".into(), message: "no Pod".into() };
    let slot = SlotReport {
        id: "gpu0".into(),
        state: SlotState::Backoff,
        resident: None,
        target: None,
        since: Since(Timestamp::UNIX_EPOCH),
        failures: vec![failure],
        last_failure: None,
    };
    let mut snapshot = serving();
    for worker in snapshot.workers.values_mut() {
        worker.slots = vec![slot.clone()];
    }
    scene.report(snapshot);
    scene.reconcile().await.unwrap();
    assert!(scene.events().contains(&"LoadFailed".to_owned()));
    let status = scene.pool().status.clone().unwrap();
    assert_eq!((status.slot_count, status.quarantined), (Some(1), Some(0)));
    assert_eq!(status.slots[0].failure.as_ref().map(|failure| failure.message.as_str()), Some("no Pod"));
    scene.reconcile().await.unwrap();
    assert_eq!(scene.events(), [""; 0]);
}
