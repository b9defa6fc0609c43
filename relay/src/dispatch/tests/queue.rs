//! Bounds and order of the queue.

use super::harness::{Provider, settings};
use crate::dispatch::{Effect, Event, Failure, RequestKey};

const NOTHING: [&str; 0] = [];

#[test]
fn request_goes_straight_to_free_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    assert_eq!(p.submit(1, "m"), ["send r1 to w1 #1"]);
}

#[test]
fn waiting_request_is_sent_when_worker_joins() {
    let mut p = Provider::new();
    assert_eq!(p.submit(1, "m"), NOTHING);
    p.pass(12.0);
    assert_eq!(p.join(1, &["m"], 1), ["send r1 to w1 #1"]);
}

#[test]
fn completion_sends_oldest_waiting_request() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    for key in 1..=3 {
        p.submit(key, "m");
    }
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1"]);
    assert_eq!(p.complete(2), ["finished r2 at w1 #1", "send r3 to w1 #1"]);
}

#[test]
fn new_worker_is_filled_oldest_request_first() {
    let mut p = Provider::new();
    for key in 1..=4 {
        p.submit(key, "m");
    }
    assert_eq!(p.join(1, &["m"], 3), ["send r1 to w1 #1", "send r2 to w1 #1", "send r3 to w1 #1"]);
    assert_eq!(p.dispatch.queue_len(), 1);
}

#[test]
fn order_holds_across_models_of_one_worker() {
    let mut p = Provider::new();
    p.submit(1, "b");
    p.submit(2, "a");
    p.submit(3, "b");
    assert_eq!(p.join(1, &["a", "b", "c"], 8), ["send r1 to w1 #1", "send r2 to w1 #1", "send r3 to w1 #1"]);
}

#[test]
fn unservable_request_does_not_block_younger_ones() {
    let mut p = Provider::new();
    p.submit(1, "rare");
    p.join(1, &["common"], 1);
    assert_eq!(p.submit(2, "common"), ["send r2 to w1 #1"]);
    assert_eq!(p.dispatch.queue_len(), 1);
}

#[test]
fn new_worker_skips_older_requests_for_other_models() {
    let mut p = Provider::new();
    for (key, model) in [(1, "a"), (2, "b"), (3, "m"), (4, "c")] {
        p.submit(key, model);
    }
    assert_eq!(p.join(1, &["m"], 1), ["send r3 to w1 #1"]);
}

#[test]
fn key_determines_place_regardless_of_arrival() {
    let mut p = Provider::new();
    p.submit(7, "m");
    p.submit(5, "m");
    assert_eq!(p.join(1, &["m"], 1), ["send r5 to w1 #1"]);
}

#[test]
fn queue_is_full_by_length() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_len: 2, ..settings() });
    p.submit(1, "m");
    p.submit(2, "other");
    assert_eq!(p.submit(3, "m"), ["fail r3: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(p.dispatch.queue_len(), 2);
}

#[test]
fn queue_is_full_by_bytes() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_bytes: 250, ..settings() });
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.submit(3, "m"), ["fail r3: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(p.submit_with(4, "m", |new| new.bytes = 50), NOTHING);
    assert_eq!(p.dispatch.queue_bytes(), 250);
}

#[test]
fn last_tenth_is_reserved_for_served_models() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_len: 10, ..settings() });
    p.join(1, &["m"], 1);
    p.submit(0, "m");
    for key in 1..10 {
        assert_eq!(p.submit(key, "away"), NOTHING);
    }
    assert_eq!(p.submit(10, "other"), ["fail r10: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(p.submit(11, "m"), NOTHING);
    assert_eq!(p.submit(12, "m"), ["fail r12: QueueFull { retry_after_secs: 30 }"]);
}

#[test]
fn all_models_share_queue_without_workers() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_len: 10, ..settings() });
    for key in 0..10 {
        assert_eq!(p.submit(key, "away"), NOTHING);
    }
    assert_eq!(p.submit(10, "m"), ["fail r10: QueueFull { retry_after_secs: 30 }"]);
}

#[test]
fn full_queue_admits_request_that_need_not_wait() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_len: 0, ..settings() });
    p.join(1, &["m"], 1);
    assert_eq!(p.submit(1, "m"), ["send r1 to w1 #1"]);
    assert_eq!(p.submit(2, "m"), ["fail r2: QueueFull { retry_after_secs: 30 }"]);
}

#[test]
fn place_is_freed_when_its_request_leaves() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_len: 1, ..settings() });
    p.submit(1, "m");
    p.cancel(1);
    assert_eq!(p.submit(2, "m"), NOTHING);
    assert_eq!(p.dispatch.queue_bytes(), 100);
}

#[test]
fn retry_after_follows_pace_of_queue() {
    let mut p = Provider::with(crate::dispatch::Settings { max_queue_len: 10, ..settings() });
    p.join(1, &["m"], 1);
    for key in 0..=10 {
        p.submit(key, "m");
    }
    for key in 0..5 {
        p.pass(0.5);
        p.complete(key);
        p.submit(key + 11, "m");
    }
    // One leaves every half second, ten wait.
    assert_eq!(p.dispatch.retry_after(p.instant()), 5);
    assert_eq!(p.submit(20, "m"), ["fail r20: QueueFull { retry_after_secs: 5 }"]);
}

#[test]
fn retry_after_is_1_to_60_whole_seconds() {
    let mut p =
        Provider::with(crate::dispatch::Settings { queue_timeout: std::time::Duration::from_secs(3600), ..settings() });
    assert_eq!(p.dispatch.retry_after(p.instant()), 60);
    p.submit(1, "m");
    p.submit(2, "m");
    p.join(1, &["m"], 2);
    assert_eq!(p.dispatch.retry_after(p.instant()), 1);
}

#[test]
fn repeated_key_is_ignored() {
    let mut p = Provider::new();
    p.submit(1, "m");
    assert_eq!(p.submit(1, "other"), NOTHING);
    assert_eq!(p.dispatch.queue_len(), 1);
    assert_eq!(p.join(1, &["m"], 2), ["send r1 to w1 #1"]);
}

#[test]
fn send_and_fail_report_elapsed_time() {
    let mut p = Provider::new();
    p.submit(1, "m");
    p.submit(2, "m");
    p.advance_late(2.5);
    let mut out = Vec::new();
    let event = Event::WorkerJoined(super::harness::worker(1, &["m"], 1, false));
    p.dispatch.handle(event, p.instant(), &mut out);
    let Effect::Send { waited, .. } = out[0] else { panic!("{out:?}") };
    assert_eq!(waited, super::harness::secs(2.5));

    out.clear();
    p.advance_late(1.0);
    p.dispatch.handle(Event::Deleted, p.instant(), &mut out);
    let age = super::harness::secs(3.5);
    let failed = Effect::Fail { request: RequestKey(2), failure: Failure::Deleted, attempts: 0, age, position: None };
    assert_eq!(out[0], failed);
}

#[test]
fn unserved_models_without_requests_are_forgotten() {
    let mut p = Provider::new();
    for key in 0..50 {
        p.submit(key, &format!("made-up-{key}"));
        p.cancel(key);
    }
    assert_eq!(p.dispatch.models(p.instant()), []);
    p.join(1, &["a", "b"], 1);
    p.models(1, &["c"]);
    p.lose(1, &[]);
    assert_eq!(p.dispatch.models(p.instant()), []);
}
