//! Workers whose backend fails a model: passed over while a sound worker serves it.

use super::harness::Provider;
use super::slots::empty;
use crate::dispatch::AttemptFailure;

const NOTHING: [&str; 0] = [];

/// Worker 1 fails the model, worker 2 does not; each has room for one request.
fn one_fails() -> Provider {
    let mut p = Provider::new();
    p.join(1, &["m", "n"], 1);
    p.join(2, &["m"], 1);
    assert_eq!(p.models_failing(1, &["m", "n"], &["m"]), NOTHING);
    p
}

/// The same, with request 1 at the sound worker and requests 2 and 3 behind it.
fn two_wait() -> Provider {
    let mut p = one_fails();
    p.submit(1, "m");
    p.submit(2, "m");
    p.submit(3, "m");
    p
}

#[test]
fn failing_worker_is_passed_over() {
    let mut p = one_fails();
    for key in 1..=4 {
        assert_eq!(p.submit(key, "m"), [format!("send r{key} to w2 #1")]);
        p.complete(key);
    }
}

#[test]
fn failing_worker_serves_its_other_models() {
    let mut p = one_fails();
    assert_eq!(p.submit(1, "n"), ["send r1 to w1 #1"]);
}

#[test]
fn request_waits_for_busy_sound_worker() {
    let mut p = one_fails();
    assert_eq!(p.submit(1, "m"), ["send r1 to w2 #1"]);
    assert_eq!(p.submit(2, "m"), NOTHING);
    p.submit(3, "n");
    assert_eq!(p.complete(3), ["finished r3 at w1 #1"]);
    assert_eq!(p.complete(1), ["finished r1 at w2 #1", "send r2 to w2 #1"]);
}

#[test]
fn failing_workers_are_used_without_sound_ones() {
    let mut p = one_fails();
    p.models_failing(2, &["m"], &["m"]);
    assert_eq!(p.submit(1, "m"), ["send r1 to w1 #1"]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w2 #1"]);
}

#[test]
fn waiting_request_falls_back_to_failing_worker() {
    let lost = |p: &mut Provider| p.lose(2, &[1]).split_off(1);
    let drains = |p: &mut Provider| p.drain(2);
    let withdraws = |p: &mut Provider| p.models(2, &[]);
    let fails = |p: &mut Provider| p.models_failing(2, &["m"], &["m"]);
    for leaves in [lost, drains, withdraws, fails] {
        let mut p = two_wait();
        assert_eq!(leaves(&mut p), ["send r2 to w1 #1"]);
        assert_eq!(p.complete(2), ["finished r2 at w1 #1", "send r3 to w1 #1"]);
    }
}

#[test]
fn failing_workers_serve_waiting_requests_in_order() {
    let mut p = one_fails();
    p.join(3, &["m"], 1);
    p.models_failing(3, &["m"], &["m"]);
    for key in 1..=4 {
        p.submit(key, "m");
    }
    assert_eq!(p.lose(2, &[1]), ["severed r1 of w2", "send r2 to w1 #1", "send r3 to w3 #1"]);
}

#[test]
fn requeued_request_keeps_its_place_at_failing_worker() {
    let mut p = two_wait();
    assert_eq!(p.lose(2, &[]), ["requeued r1 #1: WorkerLost", "send r1 to w1 #2"]);
}

#[test]
fn request_failed_at_sound_worker_tries_failing_one() {
    let mut p = one_fails();
    p.submit(1, "m");
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["requeued r1 #1: BackendReset", "send r1 to w1 #2"]);
}

#[test]
fn pinned_request_goes_to_its_failing_worker() {
    let mut p = one_fails();
    assert_eq!(p.submit_pinned(1, "m", 1), ["send r1 to w1 #1"]);
}

#[test]
fn older_worker_is_not_sound_for_core1_request() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 4);
    p.join(2, &["m"], 4);
    p.models_failing(1, &["m"], &["m"]);
    assert_eq!(p.submit_core1(1, "m"), ["send r1 to w1 #1"]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w2 #1"]);
}

#[test]
fn recovered_worker_gets_waiting_request() {
    let mut p = two_wait();
    assert_eq!(p.models(1, &["m", "n"]), ["send r2 to w1 #1"]);
}

#[test]
fn demand_leaves_out_passed_over_worker() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    p.grant(1, 0, 0, 2);
    p.join(2, &["m"], 1);
    p.submit(1, "m");
    assert_eq!(p.submit(2, "m"), ["demand w1: m 1 0 0"]);
    p.pass(1.0);
    assert_eq!(p.models_failing(1, &["m"], &["m"]), ["demand w1:"]);
    p.pass(1.0);
    assert_eq!(p.lose(2, &[1]), ["severed r1 of w2", "demand w1: m 1 2000 2000"]);
}

#[test]
fn multiplexer_is_sound_only_with_open_gate() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.models_failing(1, &["m"], &["m"]);
    p.join_slots(2, &["m"], vec![empty(&["m"])]);
    assert_eq!(p.submit(1, "m"), ["send r1 to w1 #1"]);
    p.gates(2, &[("m", 1)]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w2 #1"]);
    p.complete(1);
    p.submit(3, "m");
    assert_eq!(p.dispatch.queue_len(), 1);
    assert_eq!(p.gates(2, &[])[0], "send r3 to w1 #1");
}
