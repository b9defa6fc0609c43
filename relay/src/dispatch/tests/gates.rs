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
fn nothing_goes_through_a_shut_gate() {
    let mut p = one_slot();
    assert_eq!(p.submit(1, "a"), ["demand w1: a 1 0 0"]);
    assert_eq!(p.gates(1, &[("b", 4)]), NOTHING);
    assert_eq!(p.gates(1, &[("a", 4)]), ["send r1 to w1 #1"]);
}

#[test]
fn slots_that_say_ready_open_no_gate() {
    let mut p = one_slot();
    p.submit(1, "a");
    assert_eq!(p.slots(1, vec![busy(&["a", "b"], 0)]), NOTHING);
    assert!(!p.dispatch.is_warm("a"));
}

#[test]
fn each_model_has_a_capacity_of_its_own() {
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
fn free_slot_takes_one_request() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2)]);
    for key in 1..=4 {
        p.submit(key, "a");
    }
    p.complete(1);
    assert_eq!((p.dispatch.in_flight(), p.dispatch.queue_len()), (2, 1));
}

#[test]
fn word_on_slots_that_changes_nothing_is_not_answered() {
    let mut p = one_slot();
    p.submit(1, "a");
    p.pass(1.0);
    assert_eq!(p.slots(1, vec![empty(&["a", "b"])]), NOTHING);
}

#[test]
fn sums_limit_nothing() {
    let mut p = one_slot();
    let gates = vec![(Model::from("a"), Gate { slots: 2, others: 0, capacity: 2 })];
    let sums = Grant { slots: 0, others: 9, capacity: 0, links: 1 };
    p.handle(Event::GatesSet { worker: WorkerKey(1), sums, gates });
    p.submit(1, "a");
    assert_eq!(p.submit(2, "a"), ["send r2 to w1 #1"]);
}

#[test]
fn gate_that_shuts_takes_no_request_away() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2)]);
    p.submit(1, "a");
    assert_eq!(p.gates(1, &[]), NOTHING);
    assert_eq!(p.dispatch.in_flight(), 1);
    p.submit(2, "a");
    assert_eq!(p.complete(1), ["finished r1 at w1 #1"]);
}

#[test]
fn gate_of_a_model_that_was_not_acknowledged_lets_nothing_through() {
    let mut p = one_slot();
    p.gates(1, &[("c", 4)]);
    assert_eq!(p.submit(1, "c"), NOTHING);
    assert_eq!(p.models(1, &["a", "b", "c"])[..1], ["send r1 to w1 #1"], "it counts once the model is");
}

#[test]
fn gates_of_a_worker_without_a_multiplexer_mean_nothing() {
    let mut p = Provider::new();
    p.join_core1(1, &["a"]);
    p.gates(1, &[("a", 4)]);
    assert_eq!(p.submit(1, "a"), NOTHING);
}

#[test]
fn load_is_compared_for_the_model_alone() {
    let mut p = one_slot();
    p.join_granted(2, &["b"], 8);
    p.gates(1, &[("a", 4), ("b", 4)]);
    p.submit(1, "a");
    p.submit(2, "a");
    p.submit(3, "b");
    assert_eq!(p.submit(4, "b"), ["send r4 to w1 #1"], "the two that run a there take nothing from b");
}

#[test]
fn what_runs_for_others_counts_as_load_of_the_model() {
    let mut p = one_slot();
    p.join_granted(2, &["a"], 8);
    p.gates_of(1, vec![(Model::from("a"), Gate { slots: 4, others: 2, capacity: 6 })]);
    p.submit(1, "a");
    p.submit(2, "a");
    assert_eq!(p.dispatch.worker(WorkerKey(1)).unwrap().in_flight, []);
}

#[test]
fn refusal_for_capacity_closes_the_models_slots_until_the_next_word() {
    let mut p = one_slot();
    p.gates(1, &[("a", 2), ("b", 1)]);
    p.submit(1, "a");
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity)[0], "requeued r1 #1: AtCapacity");
    assert_eq!(p.submit(2, "b")[0], "send r2 to w1 #1", "the other model has its own");
    assert_eq!(p.gates(1, &[("a", 1), ("b", 1)])[0], "send r1 to w1 #2");
}

#[test]
fn refusal_that_newer_gates_have_overtaken_closes_no_slot() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    p.gates(1, &[("a", 0)]);
    p.gates(1, &[("a", 1)]);
    let lines = p.fail(1, AttemptFailure::AtCapacity);
    assert_eq!(lines[..2], ["requeued r1 #1: AtCapacity", "send r1 to w1 #2"]);
}

#[test]
fn gates_are_answered_while_something_waits_for_an_open_one() {
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
fn model_whose_gates_are_shut_waits_on_the_cold_clock() {
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
fn load_that_takes_too_long_is_told_with_the_time_that_is_left() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(10.0)), ..settings() });
    p.join_slots(1, &["a"], vec![loading(&["a"], 12_000)]);
    p.submit(1, "a");
    assert_eq!(p.pass(10.0), ["fail r1: ModelLoading { retry_after: Some(2s) }", "demand w1:"]);
}

#[test]
fn model_that_is_open_and_busy_is_late_as_any_other() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    p.submit(1, "a");
    assert_eq!(p.pass(30.0)[0], "fail r1: QueueTimeout { retry_after_secs: 30 }");
}

#[test]
fn request_severed_by_a_swap_waits_for_the_gate_and_spends_no_attempt() {
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
fn what_broke_is_not_tried_again_when_the_gate_of_another_model_opens() {
    let mut p = one_slot();
    p.gates(1, &[("a", 4)]);
    p.submit(1, "a");
    p.fail(1, AttemptFailure::BackendReset);
    p.gates(1, &[("a", 4), ("b", 4)]);
    assert_eq!(p.dispatch.in_flight(), 0, "a did not become ready anew");
    p.gates(1, &[("b", 4)]);
    p.gates(1, &[("a", 4), ("b", 4)]);
    assert_eq!(p.dispatch.in_flight(), 1);
}

#[test]
fn backend_that_broke_is_tried_again_when_the_gate_opens_anew() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["requeued r1 #1: BackendReset"]);
    p.gates(1, &[]);
    p.pass(1.0);
    assert_eq!(p.gates(1, &[("a", 1)])[0], "send r1 to w1 #2");
}

#[test]
fn backend_that_broke_is_loaded_again_for_the_very_request_that_it_broke() {
    for is_shut_first in [false, true] {
        let mut p = one_slot();
        p.gates(1, &[("a", 1)]);
        p.submit(1, "a");
        let mut told = Vec::new();
        if is_shut_first {
            told.extend(p.gates(1, &[]));
        }
        told.extend(p.fail(1, AttemptFailure::BackendReset));
        if !is_shut_first {
            told.extend(p.gates(1, &[]));
        }
        told.extend(p.pass(1.0));
        assert!(told.iter().any(|line| line.starts_with("demand w1: a 1 ")), "{told:?}");
        assert_eq!(p.gates(1, &[("a", 1)])[0], "send r1 to w1 #2");
    }
}

#[test]
fn pinned_request_is_told_when_its_own_worker_will_have_the_model() {
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
fn pinned_request_waits_on_the_clock_of_its_own_worker() {
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
fn what_only_the_loaded_worker_has_failed_waits_for_a_load_on_the_cold_clock() {
    let mut p = Provider::with(Settings { cold_timeout: Some(secs(100.0)), ..settings() });
    p.join_slots(1, &["a"], vec![empty(&["a"])]);
    p.join_slots(2, &["a"], vec![empty(&["a"])]);
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    p.pass(10.0);
    p.fail(1, AttemptFailure::BackendReset);
    assert_eq!(p.next_timeout(), Some(secs(70.0)), "until another is asked");
    p.pass(50.0);
    assert_eq!(p.dispatch.queue_len(), 1);
    p.drain(2);
    assert_eq!(p.next_timeout(), Some(secs(80.0)), "nobody is left to load it, so it waits for the one that failed it");
}

#[test]
fn time_in_another_workers_queue_counts_when_the_process_moves() {
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
fn each_request_takes_the_cold_time_of_its_own_wait_along_when_the_process_moves() {
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
fn ages_are_those_of_the_requests_that_are_told() {
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
fn a_worker_that_has_counted_down_what_it_was_told_hears_at_once_that_more_waits() {
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
fn a_worker_that_has_counted_down_all_that_waited_is_told_so_at_its_pace() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    p.submit(1, "a");
    p.pass(0.010);
    assert_eq!(p.gates(1, &[("a", 1)]), ["send r1 to w1 #1"]);
    assert_eq!(p.pass(0.040), ["demand w1:"]);
}

#[test]
fn demand_for_an_open_model_stops_at_twice_its_capacity() {
    let mut p = one_slot();
    p.gates(1, &[("a", 0)]);
    for key in 1..=7 {
        p.submit(key, "a");
    }
    assert_eq!(p.pass(1.0), ["demand w1: a 7 50 350"]);
    p.submit(8, "a");
    assert_eq!(p.pass(1.0), NOTHING, "told at once");
    p.submit(9, "a");
    p.submit(10, "a");
    assert_eq!(p.pass(1.0), NOTHING);
}

#[test]
fn demand_is_told_in_full_where_the_worker_did_not_say_what_it_can_run() {
    let mut p = one_slot();
    p.gates_of(1, vec![(Model::from("a"), Gate { slots: 0, others: 0, capacity: 0 })]);
    p.submit(1, "a");
    p.submit(2, "a");
    assert_eq!(p.pass(1.0), ["demand w1: a 2 50 100"]);
}

#[test]
fn multiplexer_is_told_what_waits_whatever_its_links() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.submit(1, "a");
    assert_eq!(p.submit(2, "a"), ["demand w1: a 1 0 0"]);
}

#[test]
fn draining_multiplexer_is_neither_sent_nor_told_anything() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    p.drain(1);
    assert_eq!(p.submit(1, "a"), NOTHING);
    assert!(!p.dispatch.is_warm("a"));
}

#[test]
fn gates_are_described() {
    let mut p = one_slot();
    p.gates(1, &[("a", 1)]);
    let gates = p.dispatch.worker(WorkerKey(1)).unwrap().gates;
    assert_eq!(gates, Some(vec![(Model::from("a"), Gate { slots: 1, others: 0, capacity: 4 })]));
}
