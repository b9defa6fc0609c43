use http::Method;
use kube::runtime::watcher;
use serde_json::{Value, json};

use super::*;
use crate::controllers::worker_pool::tests::{POOL, Scene};
use crate::manifests::testing;
use crate::relays::state::{ModelReport, RelayReport, WorkerReport};

fn pool(name: &str, replicas: i32, change: &Value) -> Arc<WorkerPool> {
    let mut spec = json!({
        "provider": "local", "replicas": replicas, "models": ["qwen"],
        "scaling": {"minReplicas": 0, "maxReplicas": 4, "targetRequestsPerReplica": 4, "scaleDownDelay": "60s"},
        "template": {"spec": {"containers": [{"name": "vllm"}]}},
    });
    json_patch::merge(&mut spec, change);
    let mut pool = testing::pool(&spec);
    pool.metadata.name = Some(name.to_owned());
    pool.metadata.uid = Some(name.to_owned());
    Arc::new(pool)
}

fn waiting(model: &str, waiting: u64) -> RelaySnapshot {
    RelaySnapshot {
        relays: [("r".to_owned(), Ok(RelayReport::default()))].into(),
        models: [(model.to_owned(), ModelReport { waiting, ..ModelReport::default() })].into(),
        ..RelaySnapshot::default()
    }
}

fn planned(scene: &Scene, pools: &[Arc<WorkerPool>], now: Instant) -> Vec<(String, i32)> {
    let mut changes: Vec<_> = plan(&scene.shared, pools, now)
        .into_iter()
        .map(|change| (change.pool.name_any(), change.decision.replicas))
        .collect();
    changes.sort();
    changes
}

fn are(expected: &[(&str, i32)]) -> Vec<(String, i32)> {
    expected.iter().map(|(name, replicas)| ((*name).to_owned(), *replicas)).collect()
}

#[tokio::test]
async fn single_request_wakes_one_of_two_pools() {
    let scene = Scene::new(&json!({}));
    let pools = [pool("b", 0, &json!({})), pool("a", 0, &json!({}))];
    scene.report(waiting("qwen", 1));
    assert_eq!(planned(&scene, &pools, Instant::now()), are(&[("a", 1)]));
    // More requests than one pool can take wake the other.
    scene.report(waiting("qwen", 18));
    assert_eq!(planned(&scene, &pools, Instant::now()), are(&[("a", 4), ("b", 1)]));
}

#[tokio::test]
async fn request_for_any_slot_model_name_wakes_pool() {
    let models = json!([{"id": "llama", "aliases": ["llama3"], "url": "http://127.0.0.1:8000"}]);
    let slots = json!([{"id": "gpu0", "driver": "static", "models": models}]);
    // It will not serve models that it advertised before its slots were changed.
    let status = json!({"models": ["gone"], "modelCount": 1});
    let scene = Scene::new(&json!({}));
    let mut sleeping = (*pool("a", 0, &json!({"models": ["*"], "multiplexer": {"slots": slots}}))).clone();
    sleeping.status = serde_json::from_value(status).unwrap();
    for (model, expected) in [("llama", 1), ("llama3", 1), ("gone", 0)] {
        scene.report(waiting(model, 1));
        let planned = planned(&scene, &[Arc::new(sleeping.clone())], Instant::now());
        assert_eq!(planned.first().map_or(0, |(_, replicas)| *replicas), expected, "{model}");
    }
}

#[tokio::test]
async fn only_request_for_its_models_wakes_pool() {
    let scene = Scene::new(&json!({}));
    scene.report(waiting("other", 1));
    assert_eq!(planned(&scene, &[pool("a", 0, &json!({}))], Instant::now()), []);
    // A pool that takes its models from its backend is woken for the last known ones.
    let mut advertised = (*pool("b", 0, &json!({"models": ["*"]}))).clone();
    advertised.status = serde_json::from_value(json!({"models": ["other"]})).unwrap();
    assert_eq!(planned(&scene, &[advertised.into()], Instant::now()), are(&[("b", 1)]));
    assert_eq!(planned(&scene, &[pool("c", 0, &json!({"models": ["*"]}))], Instant::now()), []);
}

#[tokio::test]
async fn stuck_pool_does_not_keep_others_asleep() {
    let scene = Scene::new(&json!({}));
    scene.report(waiting("qwen", 1));
    let mut stuck = (*pool("a", 1, &json!({}))).clone();
    let stalled = json!({
        "type": "Stalled", "status": "True", "reason": "TemplateInvalid", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    stuck.status = serde_json::from_value(json!({"conditions": [stalled]})).unwrap();
    let pools = [stuck.into(), pool("b", 0, &json!({}))];
    assert_eq!(planned(&scene, &pools, Instant::now()), are(&[("b", 1)]));
}

#[tokio::test]
async fn fixed_pool_absorbs_requests_up_to_its_capacity() {
    let scene = Scene::new(&json!({}));
    let mut snapshot = waiting("qwen", 3);
    let worker = WorkerReport {
        pool: Some("fixed".into()),
        models: ["qwen".to_owned()].into(),
        max_concurrent: 8,
        in_flight: 6,
        ..WorkerReport::default()
    };
    snapshot.workers.insert("w".into(), worker);
    scene.report(snapshot.clone());
    let pools = [pool("fixed", 1, &json!({"scaling": null})), pool("b", 0, &json!({}))];
    assert_eq!(planned(&scene, &pools, Instant::now()), are(&[("b", 1)]));
    snapshot.workers.values_mut().for_each(|worker| worker.in_flight = 5);
    scene.report(snapshot);
    assert_eq!(planned(&scene, &pools, Instant::now()), []);
}

#[tokio::test]
async fn fixed_pool_without_model_lets_others_wake() {
    let scene = Scene::new(&json!({}));
    let pools = [pool("fixed", 1, &json!({"scaling": null})), pool("b", 0, &json!({}))];
    let worker = |models: &[&str], draining| WorkerReport {
        pool: Some("fixed".into()),
        models: models.iter().map(|&model| model.to_owned()).collect(),
        max_concurrent: 8,
        draining,
        ..WorkerReport::default()
    };
    for workers in [
        vec![worker(&["other"], false)],
        vec![worker(&[], false)],
        vec![worker(&["qwen"], true), worker(&["other"], false)],
        vec![],
    ] {
        let mut snapshot = waiting("qwen", 3);
        snapshot.workers = workers.into_iter().enumerate().map(|(i, worker)| (i.to_string(), worker)).collect();
        scene.report(snapshot);
        assert_eq!(planned(&scene, &pools, Instant::now()), are(&[("b", 1)]));
    }
}

#[tokio::test]
async fn formerly_served_model_does_not_wake_pool() {
    let scene = Scene::new(&json!({}));
    scene.report(waiting("old", 1));
    let mut changed = (*pool("a", 0, &json!({}))).clone();
    changed.status = serde_json::from_value(json!({"models": ["old"]})).unwrap();
    assert_eq!(planned(&scene, &[changed.into()], Instant::now()), []);
}

#[tokio::test]
async fn only_bounds_apply_before_first_relay_report() {
    let scene = Scene::new(&json!({}));
    assert_eq!(
        planned(&scene, &[pool("a", 2, &json!({})), pool("b", 9, &json!({}))], Instant::now()),
        are(&[("b", 4)])
    );
}

#[tokio::test]
async fn persistent_writer_is_left_alone() {
    let scene = Scene::new(&json!({}));
    scene.report(waiting("qwen", 8));
    let at = |generation: i64, replicas: i32| {
        let mut pool = (*pool("a", replicas, &json!({}))).clone();
        pool.metadata.generation = Some(generation);
        [Arc::new(pool)]
    };
    let now = Instant::now();
    assert_eq!(planned(&scene, &at(1, 1), now), are(&[("a", 2)]));
    // After one write by another, the number may still be raised; a second is left alone until it has lasted for the
    // delay.
    assert_eq!(planned(&scene, &at(2, 0), now), are(&[("a", 2)]));
    assert_eq!(planned(&scene, &at(3, 1), now), []);
    assert_eq!(planned(&scene, &at(3, 1), now + Duration::from_secs(59)), []);
    assert_eq!(planned(&scene, &at(3, 1), now + Duration::from_secs(60)), are(&[("a", 2)]));
}

#[tokio::test]
async fn change_is_applied_once_and_failure_is_delayed() {
    let scaling = json!({"minReplicas": 0, "maxReplicas": 4, "targetRequestsPerReplica": 4});
    let scene = Scene::new(&json!({"replicas": 0, "models": ["qwen"], "scaling": scaling}));
    scene.report(waiting("qwen", 8));
    let (stale, now) = (scene.pool(), Instant::now());
    scene.fail(Method::PATCH, POOL, 429, "too many requests");
    for change in plan(&scene.shared, std::slice::from_ref(&stale), now) {
        carry_out(&scene.shared, change).await;
    }
    assert_eq!(scene.writes(), [format!("PATCH {POOL}")]);
    assert_eq!(planned(&scene, std::slice::from_ref(&stale), now), []);
    scene.heal();
    let later = now + Duration::from_secs(3);
    for change in plan(&scene.shared, std::slice::from_ref(&stale), later) {
        carry_out(&scene.shared, change).await;
    }
    let written = scene.pool();
    assert_eq!((written.spec.replicas, written.annotations()[names::SCALED_ANNOTATION].as_str()), (Some(2), "2"));
    // Neither an outdated nor an up-to-date cache causes another write.
    assert_eq!(planned(&scene, &[stale], later), []);
    assert_eq!(planned(&scene, &[written], later), []);
}

#[test]
fn single_request_uses_singular() {
    let said = |waiting, running| why(Why::Load, Some(Load { waiting, running, ..Load::default() }));
    assert_eq!(said(1, 0), "1 request waits and 0 run");
    assert_eq!(said(2, 1), "2 requests wait and 1 runs");
}

#[tokio::test]
async fn pool_is_reconciled_when_its_workers_change() {
    let scene = Scene::new(&json!({}));
    let ticker = Ticker::new(scene.shared.clone());
    let pools = [pool("a", 1, &json!({}))];
    let noticed = |snapshot: &RelaySnapshot| {
        scene.report(snapshot.clone());
        let seen = || scene.shared.memory.with(&pools[0], |entry| entry.seen);
        let before = seen();
        ticker.notice(&pools);
        before != seen()
    };
    let mut snapshot = waiting("qwen", 1);
    assert!(noticed(&snapshot));
    snapshot.workers.insert("w".into(), WorkerReport { pool: Some("a".into()), ..WorkerReport::default() });
    assert!(noticed(&snapshot));
    snapshot.workers.values_mut().for_each(|worker| worker.models = ["qwen".to_owned()].into());
    assert!(noticed(&snapshot));
    snapshot.queue_depth = 9;
    snapshot.workers.values_mut().for_each(|worker| worker.in_flight = 5);
    assert!(!noticed(&snapshot));
    snapshot.workers.values_mut().for_each(|worker| worker.draining = true);
    assert!(noticed(&snapshot));
}

#[tokio::test]
async fn pool_is_reconciled_when_its_provider_enables_tls() {
    let mut scene = Scene::new(&json!({}));
    let pool = pool("a", 1, &json!({}));
    let before = fingerprint(&scene.shared, &pool, None);
    scene.certify();
    assert_ne!(fingerprint(&scene.shared, &pool, None), before);
}

#[tokio::test]
async fn pool_of_moving_provider_keeps_its_size() {
    let mut scene = Scene::new(&json!({}));
    let at = |step: Option<&str>| {
        let mut provider = testing::provider("llm", "local", &json!({"relayRef": {"name": "front"}}));
        provider.status = serde_json::from_value(json!({"moving": step})).unwrap();
        watcher::Event::Apply(provider)
    };
    // Requests run at the former relay, and no report contains them.
    scene.report(waiting("qwen", 0));
    let pools = [pool("a", 3, &json!({}))];
    let mut now = Instant::now();
    let mut planned_for = |scene: &Scene, seconds: u64| {
        let mut last = Vec::new();
        for _ in 0..seconds {
            now += Duration::from_secs(1);
            last = planned(scene, &pools, now);
            if !last.is_empty() {
                break;
            }
        }
        last
    };
    for step in ["WaitingForRelay", "ConnectingWorkers"] {
        scene.providers.apply_watcher_event(&at(Some(step)));
        assert_eq!(planned_for(&scene, 90), [], "{step}");
    }
    scene.providers.apply_watcher_event(&at(None));
    assert_eq!(planned_for(&scene, 30), [], "the delay begins with the end of the move");
    assert_eq!(planned_for(&scene, 60), are(&[("a", 0)]));
}
