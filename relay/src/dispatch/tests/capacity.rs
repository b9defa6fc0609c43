//! The number of requests that a worker may have at a time.

use super::harness::Provider;
use crate::dispatch::{AttemptFailure, Event, Model, RequestKey, WorkerKey};

const NOTHING: [&str; 0] = [];

#[test]
fn old_worker_gets_at_most_its_acknowledged_concurrency() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    assert_eq!(p.submit(1, "m"), ["send r1 to w1 #1"]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w1 #1"]);
    assert_eq!(p.submit(3, "m"), NOTHING);
}

#[test]
fn load_from_other_relays_fills_old_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 3);
    p.submit(1, "m");
    p.load(1, 3);
    assert_eq!(p.submit(2, "m"), NOTHING);
    assert_eq!(p.load(1, 2), ["send r2 to w1 #1"]);
}

#[test]
fn load_at_registration_fills_worker() {
    let mut p = Provider::new();
    let mut new = super::harness::worker(1, &["m"], 1, false);
    new.load = 1;
    p.handle(Event::WorkerJoined(new));
    assert_eq!(p.submit(1, "m"), NOTHING);
    assert_eq!(p.load(1, 0), ["send r1 to w1 #1"]);
}

#[test]
fn completion_lowers_reported_load_at_once() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.load(1, 1);
    p.submit(2, "m");
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1"]);
}

#[test]
fn report_sent_before_request_frees_no_slot() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    assert_eq!(p.load(1, 0), NOTHING);
    assert_eq!(p.submit(2, "m"), NOTHING);
}

#[test]
fn report_sent_before_cancel_closes_no_slot() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.cancel(1);
    p.load(1, 1);
    assert_eq!(p.submit(2, "m"), ["send r2 to w1 #1"]);
}

#[test]
fn repeated_report_including_cancelled_request_is_accepted() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.cancel(1);
    p.load(1, 1);
    p.load(1, 1);
    assert_eq!(p.submit(2, "m"), NOTHING);
}

#[test]
fn models_update_carries_load() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.load(1, 1);
    p.submit(1, "m");
    let models = vec![Model::from("m")];
    let event = Event::ModelsUpdated { worker: WorkerKey(1), models, failing: Vec::new(), load: Some(0) };
    assert_eq!(p.handle(event), ["send r1 to w1 #1"]);
}

#[test]
fn core1_worker_gets_nothing_before_first_grant() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    assert_eq!(p.submit(1, "m"), NOTHING);
    assert_eq!(p.grant(1, 1, 0, 1), ["send r1 to w1 #1"]);
}

#[test]
fn core1_worker_gets_as_many_requests_as_granted() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 2);
    for key in 1..=4 {
        p.submit(key, "m");
    }
    assert_eq!(p.dispatch.in_flight(), 2);
    assert_eq!(p.grant(1, 3, 0, 1), ["send r3 to w1 #1"]);
    p.grant(1, 1, 2, 1);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1"]);
    assert_eq!(p.complete(2), ["finished r2 at w1 #1"]);
    assert_eq!(p.complete(3), ["finished r3 at w1 #1", "send r4 to w1 #1"]);
}

#[test]
fn load_report_of_core1_worker_closes_no_slot() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.load(1, 8);
    assert_eq!(p.submit(1, "m"), ["send r1 to w1 #1"]);
}

#[test]
fn request_refused_at_capacity_is_retried_after_grant() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.submit(1, "m");
    p.grant(1, 0, 8, 2);
    let refused = p.fail(1, AttemptFailure::AtCapacity);
    assert_eq!(refused, ["requeued r1 #1: AtCapacity", "demand w1: m 1 0 0"]);
    assert_eq!(p.grant(1, 1, 7, 2), ["send r1 to w1 #2"]);
}

#[test]
fn refused_request_waits_for_completion_without_new_grant() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 3);
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.fail(2, AttemptFailure::AtCapacity), ["requeued r2 #1: AtCapacity"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #2"]);
}

#[test]
fn refusal_overtaken_by_newer_grant_closes_no_slot() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.submit(1, "m");
    // Another relay's request used the slot and freed it before the refusal was written: the worker has sent its last
    // grant, and sends no more while nothing changes.
    p.grant(1, 1, 0, 2);
    let refused = p.fail(1, AttemptFailure::AtCapacity);
    assert_eq!(refused, ["requeued r1 #1: AtCapacity", "send r1 to w1 #2", "demand w1:"]);
    // If the worker refuses again without a new grant, it is treated as full.
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity), ["requeued r1 #2: AtCapacity"]);
}

#[test]
fn refusal_by_old_worker_holds_until_next_report() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    p.submit(1, "m");
    assert_eq!(p.fail(1, AttemptFailure::AtCapacity), ["requeued r1 #1: AtCapacity"]);
    assert_eq!(p.load(1, 1), ["send r1 to w1 #2"]);
}

#[test]
fn slot_of_refused_request_goes_to_oldest() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    // Request 1 comes back from a lost worker and is older than the request that runs on the other one.
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost"]);
    assert_eq!(p.fail(2, AttemptFailure::SeveredBySwap), ["requeued r2 #1: SeveredBySwap", "send r1 to w2 #2"]);
}

#[test]
fn cancel_frees_slot_and_precedes_next_request() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(
        p.cancel(1),
        ["cancel r1 at w1 #1: ClientDisconnect", "cancelled r1 InFlight: ClientDisconnect", "send r2 to w1 #1"]
    );
}

#[test]
fn late_reports_on_cancelled_request_are_ignored() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.cancel(1);
    p.submit(2, "m");
    let (worker, request, attempt) = (WorkerKey(1), RequestKey(1), 1);
    assert_eq!(p.handle(Event::Completed { worker, request, attempt, cached: None, usage: None }), NOTHING);
    let failure = AttemptFailure::BackendReset;
    let event = Event::AttemptFailed { worker, request, attempt, failure };
    assert_eq!(p.handle(event), NOTHING);
    assert_eq!(p.dispatch.in_flight(), 1);
}

#[test]
fn late_completion_of_earlier_attempt_is_ignored() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    assert_eq!(p.fail(1, AttemptFailure::SeveredBySwap)[1], "send r1 to w1 #2");
    let (worker, request) = (WorkerKey(1), RequestKey(1));
    assert_eq!(p.handle(Event::Completed { worker, request, attempt: 1, cached: None, usage: None }), NOTHING);
    assert_eq!(p.complete(1), ["finished r1 at w1 #2"]);
}

#[test]
fn cancel_of_waiting_request_reaches_no_worker() {
    let mut p = Provider::new();
    p.submit(1, "m");
    assert_eq!(p.cancel(1), ["cancelled r1 Queued: ClientDisconnect"]);
    assert_eq!(p.cancel(1), NOTHING);
    assert_eq!(p.join(1, &["m"], 1), NOTHING);
}

#[test]
fn cancel_by_admin_is_reported_to_client() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    let event = Event::Cancel { request: RequestKey(1), reason: crate::dispatch::CancelReason::Admin };
    assert_eq!(p.handle(event), ["cancel r1 at w1 #1: Admin", "fail r1: CancelledByAdmin"]);
}

#[test]
fn events_of_unknown_workers_and_requests_are_ignored() {
    let mut p = Provider::new();
    p.submit(1, "m");
    let (worker, request, attempt) = (WorkerKey(9), RequestKey(1), 1);
    assert_eq!(p.handle(Event::Completed { worker, request, attempt, cached: None, usage: None }), NOTHING);
    assert_eq!(p.load(9, 0), NOTHING);
    assert_eq!(p.grant(9, 1, 0, 1), NOTHING);
    assert_eq!(p.models(9, &["m"]), NOTHING);
    assert_eq!(p.drain(9), NOTHING);
    assert_eq!(p.lose(9, &[1]), NOTHING);
    assert_eq!(p.dispatch.queue_len(), 1);
    assert!(!p.dispatch.worker_serves("m"));
}
