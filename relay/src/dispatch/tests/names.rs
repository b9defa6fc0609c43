//! Aliases of a multiplexer's models: one gate, one load and one count for all names of a model.

use std::sync::Arc;

use super::harness::Provider;
use super::slots::{also, empty, failed, idle, loading};
use crate::dispatch::{AttemptFailure, LoadFailure, Model, WorkerKey};

const NOTHING: [&str; 0] = [];

/// One worker with one slot for a (alias x) and b.
fn one_slot() -> Provider {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "b", "x"], vec![also(empty(&["a", "b"]), "a", &["x"])]);
    p
}

#[test]
fn names_of_model_share_its_gate() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2)]);
    assert_eq!(p.submit(1, "x"), ["send r1 to w1 #1"]);
    assert_eq!(p.submit(2, "a"), ["send r2 to w1 #1"]);
    assert_eq!(p.submit(3, "x"), ["demand w1: x 1 0 0"]);
    p.pass(1.0);
    assert_eq!(p.submit(4, "a"), ["demand w1: a 1 0 0, x 1 1000 1000"]);
    assert_eq!(p.complete(1)[..2], ["finished r1 at w1 #1", "send r3 to w1 #1"], "the oldest by whatever name");
    assert_eq!(p.complete(2)[..2], ["finished r2 at w1 #1", "send r4 to w1 #1"]);
    assert_eq!(p.dispatch.in_flight(), 2);
}

#[test]
fn open_gate_warms_every_name() {
    let mut p = one_slot();
    p.submit(1, "x");
    assert!(!p.dispatch.is_warm("x"));
    assert_eq!(p.gates(1, &[("a", 1)])[..1], ["send r1 to w1 #1"]);
    assert!(p.dispatch.is_warm("x") && p.dispatch.is_warm("a") && !p.dispatch.is_warm("b"));
    p.gates(1, &[("b", 1)]);
    assert!(!p.dispatch.is_warm("x"));
}

#[test]
fn load_includes_requests_by_other_names() {
    let mut p = one_slot();
    p.join_granted(2, &["a"], 8);
    p.gates(1, &[("a", 4)]);
    p.submit_pinned(1, "x", 1);
    p.submit_pinned(2, "x", 1);
    assert_eq!(p.submit(3, "a"), ["send r3 to w2 #1"]);
    assert_eq!(p.submit(4, "a"), ["send r4 to w2 #1"]);
}

#[test]
fn refusal_by_one_name_closes_slots_of_all() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2)]);
    p.submit(1, "x");
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity)[0], "requeued r1 #1: AtCapacity");
    p.submit(2, "a");
    assert_eq!(p.dispatch.in_flight(), 0, "until the next word");
    assert_eq!(p.gates(1, &[("a", 1)])[0], "send r1 to w1 #2");
}

#[test]
fn all_names_choose_same_worker() {
    for other in ["x", "another", "third"] {
        let mut p = Provider::new();
        for key in [1, 2, 3] {
            p.join_slots(key, &["a", other], vec![also(empty(&["a"]), "a", &[other])]);
        }
        p.submit(1, "a");
        p.submit(2, other);
        let assigned: Vec<_> = p.dispatch.models(p.instant()).into_iter().map(|model| model.assigned).collect();
        assert!(assigned[0].is_some() && assigned[0] == assigned[1], "{other}: {assigned:?}");
    }
}

#[test]
fn alias_keeps_chosen_worker_despite_nearer_one() {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "x"], vec![also(idle(&["b", "a"], 9_000), "a", &["x"])]);
    assert_eq!(p.submit(1, "a"), ["demand w1: a 1 0 0"]);
    p.join_slots(2, &["a", "x"], vec![also(empty(&["a"]), "a", &["x"])]);
    assert_eq!(p.submit(2, "x"), NOTHING, "it was reported a moment ago");
    assert_eq!(p.pass(1.0), ["demand w1: a 1 50 50, x 1 50 50"]);
    // If one worker can no longer load the model, the other one is assigned.
    p.slots(1, vec![failed(also(idle(&["b", "a"], 9_000), "a", &["x"]), "a", "backend_unavailable", None)]);
    let assigned: Vec<_> = p.dispatch.models(p.instant()).into_iter().filter_map(|model| model.assigned).collect();
    assert_eq!(assigned, [WorkerKey(2); 2]);
}

#[test]
fn loading_slot_is_near_for_every_name() {
    let mut p = one_slot();
    p.join_slots(2, &["x"], vec![empty(&["x"])]);
    p.slots(1, vec![also(loading(&["b", "a"], 9_000), "a", &["x"])]);
    assert_eq!(p.submit(1, "x"), ["demand w1: x 1 0 0"]);
}

#[test]
fn failed_load_ends_waiting_requests_by_any_name() {
    let mut p = one_slot();
    p.submit(1, "x");
    let slot = failed(also(empty(&["a", "b"]), "a", &["x"]), "a", "insufficient_memory", Some(4_000));
    let lines = p.slots(1, vec![slot]);
    let why = format!("{:?}", LoadFailure::InsufficientMemory);
    assert!(lines[0].starts_with("fail r1: ModelFailed") && lines[0].contains(&why), "{lines:?}");
    assert_eq!(p.message, "no a here");
}

#[test]
fn workers_may_mean_different_models_by_one_name() {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "x"], vec![also(empty(&["a"]), "a", &["x"])]);
    p.join_slots(2, &["b", "x"], vec![also(empty(&["b"]), "b", &["x"])]);
    p.gates(1, &[("a", 1)]);
    p.gates(2, &[("b", 1)]);
    assert_eq!(p.submit(1, "x"), ["send r1 to w1 #1"]);
    assert_eq!(p.submit(2, "x"), ["send r2 to w2 #1"]);
    p.submit(3, "b");
    assert_eq!(p.dispatch.in_flight(), 2);
    let ids: Vec<_> = p.dispatch.ids_of("x").iter().map(ToString::to_string).collect();
    assert_eq!((ids, &*p.dispatch.counted_as("x")), (vec!["a".to_owned(), "b".to_owned()], "x"));
}

/// Submits a request for x that only a may serve.
fn submit_for_a(p: &mut Provider, key: u64) -> Vec<String> {
    p.submit_with(key, "x", |new| new.allowed = Some(Arc::new([Model::from("a")].into())))
}

#[test]
fn restricted_request_skips_worker_with_different_model() {
    let mut p = one_slot();
    submit_for_a(&mut p, 1);
    p.join_slots(2, &["b", "x"], vec![also(empty(&["b"]), "b", &["x"])]);
    assert_eq!(p.gates(2, &[("b", 4)]), NOTHING);
    assert_eq!(p.submit(2, "x"), ["send r2 to w2 #1"], "whom any may answer");
    assert_eq!(p.gates(1, &[("a", 1)])[..1], ["send r1 to w1 #1"]);
    assert_eq!(p.fail(1, AttemptFailure::BackendReset)[0], "requeued r1 #1: BackendReset");
    assert_eq!(p.dispatch.in_flight(), 1, "nor when it has to go elsewhere");
}

#[test]
fn restricted_request_does_not_follow_reassigned_alias() {
    let mut p = one_slot();
    submit_for_a(&mut p, 1);
    p.submit_with(2, "x", |new| {
        new.allowed = Some(Arc::new([Model::from("a")].into()));
        new.pin = Some(WorkerKey(1));
    });
    p.slots(1, vec![also(idle(&["b", "a"], 5), "b", &["x"])]);
    p.gates(1, &[("b", 4)]);
    assert_eq!(p.dispatch.in_flight(), 0);
    submit_for_a(&mut p, 3);
    assert_eq!(p.dispatch.in_flight(), 0, "nor who comes late with a right of before");
    p.slots(1, vec![also(idle(&["b", "a"], 5), "a", &["x"])]);
    assert_eq!(p.gates(1, &[("a", 2)])[..2], ["send r1 to w1 #1", "send r2 to w1 #1"]);
}

#[test]
fn alias_becomes_id_when_all_workers_agree() {
    let mut p = one_slot();
    assert_eq!(&*p.dispatch.counted_as("x"), "a");
    assert_eq!((&*p.dispatch.counted_as("a"), &*p.dispatch.counted_as("nobody's")), ("a", "nobody's"));
    p.join_granted(2, &["x"], 1);
    assert_eq!(&*p.dispatch.counted_as("x"), "x", "a worker without slots has a model of that name");
    p.drain(2);
    assert_eq!(&*p.dispatch.counted_as("x"), "x", "which answers still");
    p.lose(2, &[]);
    assert_eq!(&*p.dispatch.counted_as("x"), "a");
    p.models(1, &["x"]);
    assert_eq!(&*p.dispatch.counted_as("x"), "x", "no client may request the id");
}

#[test]
fn model_id_is_never_alias() {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "b"], vec![also(empty(&["a", "b"]), "a", &["b"])]);
    p.gates(1, &[("a", 1)]);
    assert_eq!(p.submit(1, "b"), ["demand w1: b 1 0 0"]);
}

#[test]
fn later_alias_passes_open_gate_at_once() {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "x"], vec![empty(&["a"])]);
    p.gates(1, &[("a", 2)]);
    p.submit(1, "x");
    assert_eq!(p.dispatch.in_flight(), 0);
    assert_eq!(p.slots(1, vec![also(idle(&["a"], 5), "a", &["x"])])[..1], ["send r1 to w1 #1"]);
    assert_eq!(p.slots(1, vec![idle(&["a"], 5)]), NOTHING);
    assert!(!p.dispatch.is_warm("x"), "and one that is taken back no more");
    p.submit(2, "a");
    p.submit(3, "a");
    assert_eq!(p.dispatch.in_flight(), 3, "what ran by it is another model's now");
}
