//! Read-only queries.

use super::harness::{Provider, secs};
use crate::dispatch::{Grant, Model, ModelSnapshot, RequestKey, WorkerKey, WorkerSnapshot};

#[test]
fn queue_is_described_in_total_and_per_model() {
    let mut p = Provider::new();
    p.join(1, &["a", "b"], 1);
    p.submit(1, "a");
    p.pass(1.0);
    p.submit(2, "b");
    p.pass(1.0);
    p.submit(3, "c");
    p.submit(4, "b");
    let now = p.instant();
    assert_eq!(p.dispatch.queue_len(), 3);
    assert_eq!(p.dispatch.queue_bytes(), 300);
    assert_eq!(p.dispatch.in_flight(), 1);
    assert_eq!(p.dispatch.oldest_age(now), Some(secs(1.0)));
    let model = |model: &str, waiting, oldest, workers| ModelSnapshot {
        model: Model::from(model),
        counted_as: Model::from(model),
        waiting,
        oldest,
        workers,
        open_workers: workers,
        assigned: None,
    };
    assert_eq!(
        p.dispatch.models(now),
        [model("a", 0, None, 1), model("b", 2, Some(secs(1.0)), 1), model("c", 1, Some(secs(0.0)), 0)]
    );
    assert_eq!(p.dispatch.queued().collect::<Vec<_>>(), [2, 3, 4].map(RequestKey));
}

#[test]
fn provider_is_idle_without_waiting_or_running_requests() {
    let mut p = Provider::new();
    assert!(p.dispatch.is_idle());
    p.submit(1, "m");
    assert!(!p.dispatch.is_idle());
    p.join(1, &["m"], 1);
    assert!(!p.dispatch.is_idle());
    p.complete(1);
    assert!(p.dispatch.is_idle());
}

#[test]
fn workers_are_described() {
    let mut p = Provider::new();
    p.join_core1(1, &["b", "a"]);
    p.models_failing(1, &["b", "a"], &["b", "c"]);
    p.grant(1, 2, 3, 2);
    p.submit(1, "a");
    p.drain(1);
    let snapshot = WorkerSnapshot {
        key: WorkerKey(1),
        models: vec![Model::from("a"), Model::from("b")],
        failing: vec![Model::from("b")],
        open: vec![Model::from("a"), Model::from("b")],
        max_concurrent: 8,
        core1: true,
        load: 4,
        reported_load: 0,
        in_flight: vec![RequestKey(1)],
        draining: true,
        backlog: 0,
        trust: 1000,
        grant: Some(Grant { slots: 2, others: 3, capacity: 8, links: 2 }),
        gates: None,
    };
    assert_eq!(p.dispatch.workers().collect::<Vec<_>>(), [snapshot]);
    assert_eq!(p.dispatch.workers().count(), 1);
    assert_eq!(p.dispatch.worker(WorkerKey(2)), None);
}

#[test]
fn model_queries_reflect_connected_workers() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "unknown");
    assert!(p.dispatch.worker_serves("m") && p.dispatch.is_warm("m"));
    assert!(!p.dispatch.worker_serves("unknown") && !p.dispatch.is_warm("unknown"));
    assert!(!p.dispatch.has_core1_worker_for("m"));
    assert_eq!(p.dispatch.sole_worker_for("m"), Some(WorkerKey(1)));
    p.join_core1(2, &["m"]);
    assert!(p.dispatch.has_core1_worker_for("m"));
    assert_eq!(p.dispatch.sole_worker_for("m"), None);
    p.drain(1);
    assert_eq!(p.dispatch.sole_worker_for("m"), Some(WorkerKey(2)));
    p.drain(2);
    assert!(p.dispatch.worker_serves("m") && !p.dispatch.is_warm("m"));
}
