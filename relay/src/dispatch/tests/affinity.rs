//! Requests that only one worker, or only workers with `core1`, may serve.

use super::harness::{Provider, report};
use crate::dispatch::{AttemptFailure, Event, LoadFailure, WorkerKey};

const NOTHING: [&str; 0] = [];

#[test]
fn pinned_request_waits_despite_other_free_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    assert_eq!(p.submit_pinned(2, "m", 1), NOTHING);
    assert_eq!(p.submit(3, "m"), ["send r3 to w2 #1"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1"]);
}

#[test]
fn pinned_request_keeps_its_place_in_queue() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    p.submit_pinned(3, "m", 1);
    p.submit(4, "m");
    assert_eq!(p.complete(1)[1], "send r2 to w1 #1");
    assert_eq!(p.complete(2)[1], "send r3 to w1 #1");
    assert_eq!(p.complete(3)[1], "send r4 to w1 #1");
}

#[test]
fn pin_to_lost_worker_fails_at_once() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.lose(1, &[]);
    assert_eq!(p.submit_pinned(1, "m", 1), ["fail r1: AffinityLost"]);
}

#[test]
fn losing_pinned_worker_ends_only_its_requests() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    p.submit(3, "m");
    p.submit_pinned(4, "m", 2);
    assert_eq!(p.lose(1, &[]), ["fail r1: AffinityLost", "fail r2: AffinityLost"]);
    assert_eq!(p.dispatch.queue_len(), 1);
}

#[test]
fn draining_pinned_worker_ends_requests_waiting_for_it() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    assert_eq!(p.drain(1), ["fail r2: AffinityLost"]);
    assert_eq!(p.submit_pinned(3, "m", 1), ["fail r3: AffinityLost"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "idle w1"]);
}

#[test]
fn pinned_request_is_retried_only_at_its_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity), ["requeued r1 #1: AtCapacity"]);
    assert_eq!(p.load(1, 0), ["send r1 to w1 #2"]);
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["fail r1: BackendUnreachable"]);
    p.submit_pinned(2, "m", 1);
    let (code, retry_after, report) = (LoadFailure::SlotQuarantined, None, report("x"));
    assert_eq!(
        p.fail(2, AttemptFailure::LoadFailed { code, retry_after, report }),
        ["fail r2: LoadFailed { code: SlotQuarantined, retry_after: None }"]
    );
}

#[test]
fn core1_request_goes_only_to_core1_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    p.join_granted(2, &["m"], 1);
    assert_eq!(p.submit_core1(1, "m"), ["send r1 to w2 #1"]);
    assert_eq!(p.submit_core1(2, "m"), NOTHING);
    assert_eq!(p.submit(3, "m"), ["send r3 to w1 #1"]);
    assert_eq!(p.complete(1), ["finished r1 at w2 #1", "send r2 to w2 #1"]);
}

#[test]
fn core1_request_fails_with_only_old_workers() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["other"], 1);
    assert_eq!(p.submit_core1(1, "m"), ["fail r1: WorkerTooOld { worker: WorkerKey(1) }"]);
}

#[test]
fn core1_request_waits_for_unserved_model() {
    let mut p = Provider::new();
    assert_eq!(p.submit_core1(1, "m"), NOTHING);
    assert_eq!(p.join_granted(1, &["m"], 1), ["send r1 to w1 #1"]);
}

#[test]
fn core1_request_fails_once_only_old_workers_remain() {
    let mut p = Provider::new();
    p.submit_core1(1, "m");
    assert_eq!(p.join(1, &["m"], 1), ["fail r1: WorkerTooOld { worker: WorkerKey(1) }"]);
    p.join_core1(2, &["m"]);
    assert_eq!(p.submit_core1(2, "m"), NOTHING);
    assert_eq!(p.lose(2, &[]), ["fail r2: WorkerTooOld { worker: WorkerKey(1) }"]);
}

#[test]
fn core1_request_waits_while_core1_worker_drains() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["m"], 1);
    p.drain(2);
    assert_eq!(p.submit_core1(1, "m"), NOTHING);
    assert_eq!(p.join_granted(3, &["m"], 1), ["send r1 to w3 #1"]);
}

#[test]
fn core1_request_pinned_to_old_worker_fails() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["m"], 1);
    let sent = p.submit_with(1, "m", |new| {
        new.needs_core1 = true;
        new.pin = Some(WorkerKey(1));
    });
    assert_eq!(sent, ["fail r1: WorkerTooOld { worker: WorkerKey(1) }"]);
}

#[test]
fn pinned_request_refused_by_draining_worker_fails() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 2);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    p.drain(1);
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity), ["fail r1: AffinityLost"]);
    assert_eq!(p.fail(2, AttemptFailure::Draining), ["fail r2: AffinityLost", "idle w1"]);
}

#[test]
fn lost_workers_core1_request_fails_with_old_workers() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["m"], 1);
    p.submit_core1(1, "m");
    p.models(2, &[]);
    let failed = "fail r1: WorkerTooOld { worker: WorkerKey(1) }";
    assert_eq!(p.lose(2, &[]), ["requeued r1 #1: WorkerLost", failed]);
}

#[test]
fn old_worker_with_room_skips_core1_request() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    p.submit_core1(1, "m");
    p.submit(2, "m");
    assert_eq!(p.join(2, &["m"], 2), ["send r2 to w2 #1"]);
}

#[test]
fn pinned_request_follows_process_to_newer_connection() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    p.join_core1(2, &["m"]);
    let succeeded = Event::WorkerSucceeded { older: WorkerKey(1), newer: WorkerKey(2) };
    assert_eq!(p.handle(succeeded), NOTHING);
    assert_eq!(p.drain(1), NOTHING);
    // Requests that the older connection has not begun go to the newer one too.
    assert_eq!(p.fail(1, AttemptFailure::Draining), ["requeued r1 #1: Draining", "idle w1"]);
    assert_eq!(p.grant(2, 2, 0, 2), ["send r1 to w2 #2", "send r2 to w2 #1"]);
}

#[test]
fn unusable_newer_connection_leaves_requests_with_older_one() {
    for core1 in [false, true] {
        let mut p = Provider::new();
        p.join_granted(1, &["m"], 1);
        p.submit_pinned(1, "m", 1);
        p.submit_pinned(2, "m", 1);
        if core1 {
            p.join_granted(2, &["m"], 1);
            p.drain(2);
        } else {
            p.join(2, &["m"], 1);
        }
        let succeeded = Event::WorkerSucceeded { older: WorkerKey(1), newer: WorkerKey(2) };
        assert_eq!(p.handle(succeeded), NOTHING);
        assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1"]);
    }
}

#[test]
fn pinned_request_waits_until_its_worker_advertises_model() {
    let mut p = Provider::new();
    p.join(1, &["other"], 1);
    p.join(2, &["m"], 1);
    assert_eq!(p.submit_pinned(1, "m", 1), NOTHING);
    assert_eq!(p.models(1, &["m"]), ["send r1 to w1 #1"]);
}

#[test]
fn lost_superseded_connections_request_moves_to_newer_one() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 2);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    p.join_core1(2, &["m"]);
    p.handle(Event::WorkerSucceeded { older: WorkerKey(1), newer: WorkerKey(2) });
    // The client has received part of the second request's response.
    assert_eq!(p.lose(1, &[2]), ["requeued r1 #1: WorkerLost", "severed r2 of w1"]);
    assert_eq!(p.grant(2, 1, 0, 1), ["send r1 to w2 #2"]);
    assert_eq!(p.lose(2, &[]), ["fail r1: AffinityLost"], "and no further");
}
