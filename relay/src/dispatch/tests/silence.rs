//! Requests whose worker sends nothing of a response.

use super::harness::{Provider, settings, worker};
use crate::dispatch::{AttemptFailure, Event, RequestKey, Settings};

const NOTHING: [&str; 0] = [];

/// Request 1 runs at worker 1, and worker 2 has room.
fn two_workers() -> Provider {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.join(2, &["m"], 1);
    p
}

#[test]
fn silent_request_moves_to_free_worker() {
    let mut p = two_workers();
    let moved = ["cancel r1 at w1 #1: Timeout", "requeued r1 #1: FirstByteTimeout", "send r1 to w2 #2"];
    assert_eq!(p.silent(1), moved);
    assert_eq!(p.complete(1), ["finished r1 at w2 #2"]);
}

#[test]
fn silent_request_stays_without_free_worker() {
    let mut p = two_workers();
    p.submit(2, "m");
    assert_eq!((p.dispatch.can_move(RequestKey(1)), p.silent(1)), (None, vec![]));
    p.complete(2);
    assert_eq!(p.dispatch.can_move(RequestKey(1)), Some(1));
}

#[test]
fn queue_gets_slot_of_silent_request() {
    let mut p = two_workers();
    p.submit_pinned(2, "m", 1);
    let moved =
        ["cancel r1 at w1 #1: Timeout", "requeued r1 #1: FirstByteTimeout", "send r1 to w2 #2", "send r2 to w1 #1"];
    assert_eq!(p.silent(1), moved);
}

#[test]
fn request_never_returns_to_silent_worker() {
    let mut p = two_workers();
    p.silent(1);
    assert_eq!(p.silent(1), NOTHING);
    p.join(3, &["m"], 1);
    let moved = ["cancel r1 at w2 #2: Timeout", "requeued r1 #2: FirstByteTimeout", "send r1 to w3 #3"];
    assert_eq!(p.silent(1), moved);
}

#[test]
fn request_moves_three_times_at_most() {
    let mut p = two_workers();
    for key in 3..=5 {
        p.join(key, &["m"], 1);
    }
    assert!((0..3).all(|_| p.silent(1).len() == 3));
    assert_eq!(p.silent(1), NOTHING);
}

#[test]
fn pinned_request_stays_at_silent_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    p.join(2, &["m"], 1);
    assert_eq!(p.silent(1), NOTHING);
}

#[test]
fn silent_request_avoids_workers_that_failed_it() {
    let mut p = two_workers();
    p.fail(1, AttemptFailure::BackendUnreachable);
    assert_eq!(p.silent(1), NOTHING);
}

#[test]
fn silent_request_avoids_failing_workers() {
    let mut p = two_workers();
    let mut failing = worker(3, &["m"], 1, false);
    failing.failing.push("m".into());
    p.submit(2, "m");
    p.handle(Event::WorkerJoined(failing));
    assert_eq!(p.silent(1), NOTHING);
}

#[test]
fn silent_request_stays_in_disabled_provider() {
    let mut p = two_workers();
    p.handle(Event::SettingsChanged(Settings { enabled: false, ..settings() }));
    assert_eq!(p.silent(1), NOTHING);
}

#[test]
fn queued_or_unknown_request_is_never_moved() {
    let mut p = two_workers();
    p.submit(2, "m");
    p.submit(3, "m");
    assert_eq!((p.silent(3), p.silent(4)), (vec![], vec![]));
}

#[test]
fn draining_silent_worker_is_idle_after_move() {
    let mut p = two_workers();
    p.drain(1);
    assert_eq!(p.silent(1).last().map(String::as_str), Some("idle w1"));
}
