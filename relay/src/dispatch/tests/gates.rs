//! The requests that a multiplexer may be sent: only those that its gates allow, for each model separately.

use super::harness::{Provider, secs, settings};
use super::slots::{busy, empty, loading};
use crate::dispatch::{AttemptFailure, Event, Gate, Grant, Model, Settings, WorkerKey};

const NOTHING: [&str; 0] = [];

/// One worker with one slot for a and b.
fn one_slot() -> Provider {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "b"], vec![empty(&["a", "b"])]);
    p
}

#[test]
fn no_request_passes_shut_gate() {
    let mut p = one_slot();
    assert_eq!(p.submit(1, "a"), ["demand w1: a 1 0 0"]);
    assert_eq!(p.gates(1, &[("b", 4)]), NOTHING);
    assert_eq!(p.gates(1, &[("a", 4)]), ["send r1 to w1 #1"]);
}

#[test]
fn ready_slots_open_no_gate() {
    let mut p = one_slot();
    p.submit(1, "a");
    assert_eq!(p.slots(1, vec![busy(&["a", "b"], 0)]), NOTHING);
    assert!(!p.dispatch.is_warm("a"));
}

#[test]
fn each_model_has_its_own_capacity() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1), ("b", 2)]);
    assert_eq!(p.submit(1, "a"), ["send r1 to w1 #1"]);
    p.submit(2, "a");
    assert_eq!(p.submit(3, "b"), ["send r3 to w1 #1"]);
    assert_eq!(p.submit(4, "b"), ["send r4 to w1 #1"]);
    p.submit(5, "b");
    assert_eq!(p.dispatch.in_flight(), 3);
    assert_eq!(p.complete(1)[..2], ["finished r1 at w1 #1", "send r2 to w1 #1"]);
}

#[test]
fn freed_slot_gets_one_request() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2)]);
    for key in 1..=4 {
        p.submit(key, "a");
    }
    p.complete(1);
    assert_eq!((p.dispatch.in_flight(), p.dispatch.queue_len()), (2, 1));
}

#[test]
fn unchanged_slot_report_triggers_no_demand() {
    let mut p = one_slot();
    p.submit(1, "a");
    p.pass(1.0);
    assert_eq!(p.slots(1, vec![empty(&["a", "b"])]), NOTHING);
}

#[test]
fn grant_totals_do_not_limit_gates() {
    let mut p = one_slot();
    let gates = vec![(Model::from("a"), Gate { slots: 2, others: 0, capacity: 2 })];
    let sums = Grant { slots: 0, others: 9, capacity: 0, links: 1 };
    p.handle(Event::GatesSet { worker: WorkerKey(1), sums, gates });
    p.submit(1, "a");
    assert_eq!(p.submit(2, "a"), ["send r2 to w1 #1"]);
}

#[test]
fn shutting_gate_keeps_running_requests() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2)]);
    p.submit(1, "a");
    assert_eq!(p.gates(1, &[]), NOTHING);
    assert_eq!(p.dispatch.in_flight(), 1);
    p.submit(2, "a");
    assert_eq!(p.complete(1), ["finished r1 at w1 #1"]);
}

#[test]
fn gate_of_unacknowledged_model_stays_shut() {
    let mut p = one_slot();
    p.gates(1, &[("c", 4)]);
    assert_eq!(p.submit(1, "c"), NOTHING);
    assert_eq!(p.models(1, &["a", "b", "c"])[..1], ["send r1 to w1 #1"], "it counts once the model is");
}

#[test]
fn gates_of_plain_worker_are_ignored() {
    let mut p = Provider::new();
    p.join_core1(1, &["a"]);
    p.gates(1, &[("a", 4)]);
    assert_eq!(p.submit(1, "a"), NOTHING);
}

#[test]
fn load_is_compared_per_model() {
    let mut p = one_slot();
    p.join_granted(2, &["b"], 8);
    p.gates(1, &[("a", 4), ("b", 4)]);
    p.submit(1, "a");
    p.submit(2, "a");
    p.submit(3, "b");
    assert_eq!(p.submit(4, "b"), ["send r4 to w1 #1"], "the two that run a there take nothing from b");
}

#[test]
fn requests_of_other_relays_add_to_load() {
    let mut p = one_slot();
    p.join_granted(2, &["a"], 8);
    p.gates_of(1, vec![(Model::from("a"), Gate { slots: 4, others: 2, capacity: 6 })]);
    p.submit(1, "a");
    p.submit(2, "a");
    assert_eq!(p.dispatch.worker(WorkerKey(1)).unwrap().in_flight, []);
}

#[test]
fn refusal_closes_only_that_models_slots() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2), ("b", 1)]);
    p.submit(1, "a");
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity)[0], "requeued r1 #1: AtCapacity");
    assert_eq!(p.submit(2, "b")[0], "send r2 to w1 #1", "the other model has its own");
    assert_eq!(p.gates(1, &[("a", 1), ("b", 1)])[0], "send r1 to w1 #2");
}

#[test]
fn refusal_overtaken_by_newer_gates_closes_no_slot() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    p.gates(1, &[("a", 0)]);
    p.gates(1, &[("a", 1)]);
    let lines = p.fail(1, AttemptFailure::AtCapacity);
    assert_eq!(lines[..2], ["requeued r1 #1: AtCapacity", "send r1 to w1 #2"]);
}

#[test]
fn gate_report_triggers_demand_for_open_model() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    p.submit(1, "a");
    p.pass(1.0);
    assert_eq!(p.gates(1, &[("a", 0)]), ["demand w1: a 1 1000 1000"]);
    p.gates(1, &[]);
    p.pass(1.0);
    assert_eq!(p.gates(1, &[("b", 0)]), NOTHING, "what waits for a load is known");
}

#[test]
fn request_waits_on_cold_clock_while_gates_shut() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(100.0)), ..settings() });
    p.join_slots(1, &["a"], vec![empty(&["a"])]);
    assert!(p.dispatch.worker_serves("a") && !p.dispatch.is_warm("a"), "served, and cold");
    p.submit(1, "a");
    assert_eq!(p.pass(50.0), NOTHING);
    p.gates(1, &[("a", 0)]);
    assert!(p.dispatch.is_warm("a"), "all its slots are others', and it is served");
    assert_eq!(p.next_timeout(), Some(secs(80.0)));
    p.pass(10.0);
    p.gates(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)), "50 s of cold time were used");
}

#[test]
fn slot_model_may_load_for_ten_minutes() {
    let mut p = one_slot();
    p.submit(1, "a");
    p.submit(2, "nobody's");
    assert_eq!(p.pass(30.0).len(), 1, "only the one that no slot declares");
    assert_eq!(p.pass(570.0), ["fail r1: ModelLoading { retry_after: None }", "demand w1:"]);
}

#[test]
fn overlong_load_fails_with_remaining_time() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(10.0)), ..settings() });
    p.join_slots(1, &["a"], vec![loading(&["a"], 12_000)]);
    p.submit(1, "a");
    assert_eq!(p.pass(10.0), ["fail r1: ModelLoading { retry_after: Some(2s) }", "demand w1:"]);
}

#[test]
fn open_busy_model_fails_with_queue_timeout() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    p.submit(1, "a");
    assert_eq!(p.pass(30.0)[0], "fail r1: QueueTimeout { retry_after_secs: 30 }");
}

#[test]
fn severed_request_waits_for_gate_without_spending_attempt() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    for sending in 1..=3 {
        p.gates(1, &[("b", 1)]);
        assert_eq!(p.fail(1, AttemptFailure::SeveredBySwap)[0], format!("requeued r1 #{sending}: SeveredBySwap"));
        p.pass(1.0);
        assert_eq!(p.gates(1, &[("a", 1)])[0], format!("send r1 to w1 #{}", sending + 1));
    }
    assert_eq!(p.fail(1, AttemptFailure::SeveredBySwap), ["fail r1: SeveredBySwap"]);
}

#[test]
fn other_models_gate_does_not_retry_failed_request() {
    let mut p = one_slot();
    p.gates(1, &[("a", 4)]);
    p.submit(1, "a");
    p.fail(1, AttemptFailure::BackendReset);
    p.gates(1, &[("a", 4), ("b", 4)]);
    assert_eq!(p.dispatch.in_flight(), 0, "a did not become ready again");
    p.gates(1, &[("b", 4)]);
    p.gates(1, &[("a", 4), ("b", 4)]);
    assert_eq!(p.dispatch.in_flight(), 1);
}

#[test]
fn broken_backend_is_retried_when_gate_reopens() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["requeued r1 #1: BackendReset"]);
    p.gates(1, &[]);
    p.pass(1.0);
    assert_eq!(p.gates(1, &[("a", 1)])[0], "send r1 to w1 #2");
}

#[test]
fn broken_request_demands_load_of_its_backend() {
    for is_shut_first in [false, true] {
        let mut p = one_slot();
        p.gates(1, &[("a", 1)]);
        p.submit(1, "a");
        let mut lines = Vec::new();
        if is_shut_first {
            lines.extend(p.gates(1, &[]));
        }
        lines.extend(p.fail(1, AttemptFailure::BackendReset));
        if !is_shut_first {
            lines.extend(p.gates(1, &[]));
        }
        lines.extend(p.pass(1.0));
        assert!(lines.iter().any(|line| line.starts_with("demand w1: a 1 ")), "{lines:?}");
        assert_eq!(p.gates(1, &[("a", 1)])[0], "send r1 to w1 #2");
    }
}

#[test]
fn pinned_request_fails_with_own_workers_load_time() {
    let mut p = one_slot();
    p.join_slots(2, &["a", "b"], vec![loading(&["b", "a"], 40_000)]);
    p.change(|settings| settings.cold_timeout = Some(secs(35.0)));
    p.gates(1, &[("a", 4)]);
    p.submit_pinned(1, "a", 2);
    let lines = p.pass(34.0);
    assert!(!lines.iter().any(|line| line.starts_with("fail")), "the queue timeout is not its clock: {lines:?}");
    let lines = p.pass(1.0);
    assert!(lines.contains(&"fail r1: ModelLoading { retry_after: Some(5s) }".to_owned()), "{lines:?}");
}

#[test]
fn pinned_request_waits_on_clock_of_its_worker() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(100.0)), ..settings() });
    p.join_slots(1, &["a"], vec![empty(&["a"])]);
    p.join_slots(2, &["a"], vec![empty(&["a"])]);
    p.gates(1, &[("a", 0)]);
    p.submit_pinned(1, "a", 2);
    p.pass(50.0);
    p.gates(2, &[("a", 0)]);
    assert_eq!(p.next_timeout(), Some(secs(80.0)), "warm from here on");
    p.pass(10.0);
    p.gates(2, &[]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)), "50 s of cold time were used");
    p.gates(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)), "it was cold already");
}

#[test]
fn failed_request_waits_for_other_load_while_cold() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(100.0)), ..settings() });
    p.join_slots(1, &["a"], vec![empty(&["a"])]);
    p.join_slots(2, &["a"], vec![empty(&["a"])]);
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    p.pass(10.0);
    p.fail(1, AttemptFailure::BackendReset);
    assert_eq!(p.next_timeout(), Some(secs(70.0)), "until another worker is chosen");
    p.pass(50.0);
    assert_eq!(p.dispatch.queue_len(), 1);
    p.drain(2);
    assert_eq!(p.next_timeout(), Some(secs(80.0)), "no other worker can load it, so it waits for the one that failed");
}

#[test]
fn cold_time_is_kept_when_process_moves() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(100.0)), ..settings() });
    p.join_slots(1, &["a"], vec![empty(&["a"])]);
    p.submit_pinned(1, "a", 1);
    p.pass(30.0);
    p.join_slots(2, &["a"], vec![empty(&["a"])]);
    p.handle(Event::WorkerSucceeded { older: WorkerKey(1), newer: WorkerKey(2) });
    p.drain(1);
    p.gates(2, &[("a", 0)]);
    p.pass(5.0);
    p.gates(2, &[]);
    assert_eq!(p.next_timeout(), Some(secs(105.0)), "30 s of cold time were used on the older link");
}

#[test]
fn each_request_keeps_own_cold_time_across_move() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(100.0)), ..settings() });
    p.join_slots(1, &["a"], vec![empty(&["a"])]);
    p.submit_pinned(1, "a", 1);
    p.pass(20.0);
    p.submit_pinned(2, "a", 1);
    p.pass(10.0);
    p.join_slots(2, &["a"], vec![empty(&["a"])]);
    p.handle(Event::WorkerSucceeded { older: WorkerKey(1), newer: WorkerKey(2) });
    p.drain(1);
    p.cancel(1);
    p.pass(1.0);
    assert_eq!(p.next_timeout(), Some(secs(120.0)), "100 s after it came");
}

#[test]
fn demand_ages_cover_only_reported_requests() {
    let mut p = one_slot();
    let full = || vec![(Model::from("a"), Gate { slots: 0, others: 1, capacity: 1 })];
    p.gates_of(1, full());
    for key in 1..=4 {
        p.submit(key, "a");
        p.pass(1.0);
    }
    assert_eq!(p.gates_of(1, full()), ["demand w1: a 2 4000 7000"]);
}

#[test]
fn exhausted_demand_is_renewed_at_once() {
    let mut p = one_slot();
    p.gates_of(1, vec![(Model::from("a"), Gate { slots: 1, others: 0, capacity: 1 })]);
    for key in 1..=5 {
        p.submit(key, "a");
    }
    p.pass(1.0);
    // Each lasts a millisecond: two were reported, and without a new report the model would seem idle after them.
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1", "demand w1: a 2 1000 2000"]);
    p.pass(0.001);
    assert_eq!(p.complete(2), ["finished r2 at w1 #1", "send r3 to w1 #1"]);
    p.pass(0.001);
    assert_eq!(p.complete(3), ["finished r3 at w1 #1", "send r4 to w1 #1", "demand w1: a 1 1002 1002"]);
}

#[test]
fn empty_demand_is_reported_at_usual_pace() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    p.submit(1, "a");
    p.pass(0.010);
    assert_eq!(p.gates(1, &[("a", 1)]), ["send r1 to w1 #1"]);
    assert_eq!(p.pass(0.040), ["demand w1:"]);
}

#[test]
fn demand_for_open_model_stops_at_double_capacity() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    for key in 1..=7 {
        p.submit(key, "a");
    }
    assert_eq!(p.pass(1.0), ["demand w1: a 7 50 350"]);
    p.submit(8, "a");
    assert_eq!(p.pass(1.0), NOTHING, "reported at once");
    p.submit(9, "a");
    p.submit(10, "a");
    assert_eq!(p.pass(1.0), NOTHING);
}

#[test]
fn demand_is_reported_in_full_without_known_capacity() {
    let mut p = one_slot();
    p.gates_of(1, vec![(Model::from("a"), Gate { slots: 0, others: 0, capacity: 0 })]);
    p.submit(1, "a");
    p.submit(2, "a");
    assert_eq!(p.pass(1.0), ["demand w1: a 2 50 100"]);
}

#[test]
fn multiplexer_gets_demand_even_with_single_link() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    assert_eq!(p.submit(2, "a"), ["demand w1: a 1 0 0"]);
}

#[test]
fn draining_multiplexer_gets_no_requests_or_demand() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.drain(1);
    assert_eq!(p.submit(1, "a"), NOTHING);
    assert!(!p.dispatch.is_warm("a"));
}

#[test]
fn worker_snapshot_includes_gates() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    let gates = p.dispatch.worker(WorkerKey(1)).unwrap().gates;
    assert_eq!(gates, Some(vec![(Model::from("a"), Gate { slots: 1, others: 0, capacity: 4 })]));
}
