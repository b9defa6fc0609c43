//! Requests that only one worker, or only workers with `core1`, may serve.

use super::harness::Provider;
use crate::dispatch::{AttemptFailure, Event, LoadFailure, WorkerKey};

const NOTHING: [&str; 0] = [];

#[test]
fn pinned_request_waits_for_its_worker_though_another_is_free() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    assert_eq!(p.submit_pinned(2, "m", 1), NOTHING);
    assert_eq!(p.submit(3, "m"), ["send r3 to w2 #1"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1"]);
}

#[test]
fn pinned_request_keeps_its_place_among_the_others() {
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
fn pin_to_a_worker_that_is_gone_fails_at_once() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.lose(1, &[]);
    assert_eq!(p.submit_pinned(1, "m", 1), ["fail r1: AffinityLost"]);
}

#[test]
fn losing_the_pinned_worker_ends_its_requests_and_no_others() {
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
fn draining_the_pinned_worker_ends_what_waits_for_it() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    assert_eq!(p.drain(1), ["fail r2: AffinityLost"]);
    assert_eq!(p.submit_pinned(3, "m", 1), ["fail r3: AffinityLost"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "idle w1"]);
}

#[test]
fn pinned_request_is_sent_again_to_its_own_worker_only() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit_pinned(1, "m", 1);
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity), ["requeued r1 #1: AtCapacity"]);
    assert_eq!(p.load(1, 0), ["send r1 to w1 #2"]);
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["fail r1: BackendUnreachable"]);
    p.submit_pinned(2, "m", 1);
    let (code, retry_after) = (LoadFailure::SlotQuarantined, None);
    assert_eq!(
        p.fail(2, AttemptFailure::LoadFailed { code, retry_after }),
        ["fail r2: LoadFailed { code: SlotQuarantined, retry_after: None }"]
    );
}

#[test]
fn request_that_needs_core1_goes_only_to_such_a_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    p.join_granted(2, &["m"], 1);
    assert_eq!(p.submit_core1(1, "m"), ["send r1 to w2 #1"]);
    assert_eq!(p.submit_core1(2, "m"), NOTHING);
    assert_eq!(p.submit(3, "m"), ["send r3 to w1 #1"]);
    assert_eq!(p.complete(1), ["finished r1 at w2 #1", "send r2 to w2 #1"]);
}

#[test]
fn request_that_needs_core1_fails_where_only_old_workers_serve_the_model() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["other"], 1);
    assert_eq!(p.submit_core1(1, "m"), ["fail r1: WorkerTooOld { worker: WorkerKey(1) }"]);
}

#[test]
fn request_that_needs_core1_waits_where_nobody_serves_the_model() {
    let mut p = Provider::new();
    assert_eq!(p.submit_core1(1, "m"), NOTHING);
    assert_eq!(p.join_granted(1, &["m"], 1), ["send r1 to w1 #1"]);
}

#[test]
fn request_that_needs_core1_fails_as_soon_as_only_old_workers_are_left() {
    let mut p = Provider::new();
    p.submit_core1(1, "m");
    assert_eq!(p.join(1, &["m"], 1), ["fail r1: WorkerTooOld { worker: WorkerKey(1) }"]);
    p.join_core1(2, &["m"]);
    assert_eq!(p.submit_core1(2, "m"), NOTHING);
    assert_eq!(p.lose(2, &[]), ["fail r2: WorkerTooOld { worker: WorkerKey(1) }"]);
}

#[test]
fn draining_core1_worker_may_be_followed_by_another() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["m"], 1);
    p.drain(2);
    assert_eq!(p.submit_core1(1, "m"), NOTHING);
    assert_eq!(p.join_granted(3, &["m"], 1), ["send r1 to w3 #1"]);
}

#[test]
fn pin_to_an_old_worker_cannot_carry_what_needs_core1() {
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
fn pinned_request_refused_by_its_draining_worker_has_nowhere_to_go() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 2);
    p.submit_pinned(1, "m", 1);
    p.submit_pinned(2, "m", 1);
    p.drain(1);
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity), ["fail r1: AffinityLost"]);
    assert_eq!(p.fail(2, AttemptFailure::Draining), ["fail r2: AffinityLost", "idle w1"]);
}

#[test]
fn request_of_a_lost_worker_that_had_withdrawn_its_model_may_be_left_with_old_workers_only() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join_granted(2, &["m"], 1);
    p.submit_core1(1, "m");
    p.models(2, &[]);
    let failed = "fail r1: WorkerTooOld { worker: WorkerKey(1) }";
    assert_eq!(p.lose(2, &[]), ["requeued r1 #1: WorkerLost", failed]);
}

#[test]
fn old_worker_with_room_passes_over_what_needs_core1() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    p.submit_core1(1, "m");
    p.submit(2, "m");
    assert_eq!(p.join(2, &["m"], 2), ["send r2 to w2 #1"]);
}

#[test]
fn request_that_waits_for_a_process_waits_for_its_newer_connection() {
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
fn newer_connection_that_cannot_take_over_takes_nothing_from_the_older_one() {
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
fn pinned_request_waits_until_its_worker_advertises_the_model() {
    let mut p = Provider::new();
    p.join(1, &["other"], 1);
    p.join(2, &["m"], 1);
    assert_eq!(p.submit_pinned(1, "m", 1), NOTHING);
    assert_eq!(p.models(1, &["m"]), ["send r1 to w1 #1"]);
}

#[test]
fn what_a_superseded_connection_had_goes_on_over_the_newer_one_when_it_breaks() {
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
