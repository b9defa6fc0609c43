//! Requests that their worker did not serve.

use super::harness::{Provider, report, settings};
use crate::dispatch::{AttemptFailure, Event, LoadFailure, LossCause, Settings, WorkerKey};

const NOTHING: [&str; 0] = [];

fn no_memory() -> AttemptFailure {
    let (code, report) = (LoadFailure::InsufficientMemory, report("it does not fit"));
    AttemptFailure::LoadFailed { code, retry_after: None, report }
}

#[test]
fn lost_workers_request_is_requeued() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.join(2, &["m"], 1);
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost", "send r1 to w2 #2"]);
}

#[test]
fn silent_worker_is_separate_requeue_reason() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    let (worker, cause) = (WorkerKey(1), LossCause::HeartbeatTimeout);
    let event = Event::WorkerLost { worker, started: [].into(), cause };
    assert_eq!(p.handle(event), ["requeued r1 #1: HeartbeatTimeout"]);
}

#[test]
fn begun_response_is_never_retried() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    p.submit(1, "m");
    p.submit(2, "m");
    p.join(2, &["m"], 2);
    assert_eq!(p.lose(1, &[1]), ["severed r1 of w1", "requeued r2 #1: WorkerLost", "send r2 to w2 #2"]);
    assert_eq!(p.cancel(1), NOTHING);
}

#[test]
fn requeued_request_returns_to_its_place() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    for key in 1..=4 {
        p.submit(key, "m");
    }
    p.lose(1, &[]);
    assert_eq!(p.join(2, &["m"], 3), ["send r1 to w2 #2", "send r2 to w2 #2", "send r3 to w2 #1"]);
}

#[test]
fn full_queue_admits_requeue() {
    let mut p = Provider::with(Settings { max_queue_len: 1, ..settings() });
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost"]);
    assert_eq!(p.dispatch.queue_len(), 2);
}

#[test]
fn fourth_loss_exhausts_request() {
    let mut p = Provider::new();
    p.submit(1, "m");
    for worker in 1..=3 {
        assert_eq!(p.join(worker, &["m"], 1), [format!("send r1 to w{worker} #{worker}")]);
        assert_eq!(p.lose(worker, &[]), [format!("requeued r1 #{worker}: WorkerLost")]);
    }
    assert_eq!(p.join(4, &["m"], 1), ["send r1 to w4 #4"]);
    assert_eq!(p.lose(4, &[]), ["fail r1: RequeueExhausted"]);
}

#[test]
fn refusals_spend_no_attempt() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.submit(1, "m");
    for sending in 2..=9 {
        p.fail(1, AttemptFailure::AtCapacity);
        assert_eq!(p.grant(1, 1, 0, 1), [format!("send r1 to w1 #{sending}")]);
    }
}

#[test]
fn refusal_by_draining_worker_spends_no_attempt() {
    let mut p = Provider::new();
    p.submit(1, "m");
    for worker in 1..=6 {
        p.join(worker, &["m"], 1);
        assert_eq!(
            p.fail(1, AttemptFailure::Draining),
            [format!("requeued r1 #{worker}: Draining"), format!("idle w{worker}")]
        );
    }
}

#[test]
fn fourth_swap_ends_request() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    for sending in 1..=3 {
        assert_eq!(
            p.fail(1, AttemptFailure::SeveredBySwap),
            [format!("requeued r1 #{sending}: SeveredBySwap"), format!("send r1 to w1 #{}", sending + 1)]
        );
    }
    assert_eq!(p.fail(1, AttemptFailure::SeveredBySwap), ["fail r1: SeveredBySwap"]);
}

#[test]
fn swaps_and_losses_are_counted_apart() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    for _ in 0..3 {
        p.fail(1, AttemptFailure::SeveredBySwap);
    }
    for worker in 2..=4 {
        p.join(worker, &["m"], 1);
        assert_eq!(p.lose(worker - 1, &[]).len(), 2, "requeued and sent");
    }
    assert_eq!(p.lose(4, &[]), ["fail r1: RequeueExhausted"]);
}

#[test]
fn request_moves_from_unreachable_backend_to_another() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    p.submit(1, "m");
    p.join(2, &["m"], 4);
    p.load(2, 3);
    assert_eq!(
        p.fail(1, AttemptFailure::BackendUnreachable),
        ["requeued r1 #1: BackendUnreachable", "send r1 to w2 #2"]
    );
}

#[test]
fn worker_that_failed_one_request_gets_others() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["requeued r1 #1: BackendReset"]);
    assert_eq!(p.submit(2, "m"), ["send r2 to w1 #1"]);
    assert_eq!(p.complete(2), ["finished r2 at w1 #1"]);
}

#[test]
fn failed_request_returns_once_model_is_advertised_again() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.models(1, &[]);
    assert_eq!(p.fail(1, AttemptFailure::BackendUnreachable), ["requeued r1 #1: BackendUnreachable"]);
    assert_eq!(p.load(1, 0), NOTHING);
    assert_eq!(p.models(1, &["other"]), NOTHING);
    assert_eq!(p.models(1, &["m"]), ["send r1 to w1 #2"]);
}

#[test]
fn unreachable_backend_exhausts_attempts() {
    let mut p = Provider::new();
    p.submit(1, "m");
    for worker in 1..=3 {
        p.join(worker, &["m"], 1);
        let requeued = format!("requeued r1 #{worker}: BackendUnreachable");
        assert_eq!(p.fail(1, AttemptFailure::BackendUnreachable), [requeued]);
    }
    p.join(4, &["m"], 1);
    assert_eq!(p.fail(1, AttemptFailure::BackendUnreachable), ["fail r1: BackendUnreachable"]);
}

#[test]
fn wait_for_unreachable_backend_ends_as_unreachable() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.fail(1, AttemptFailure::BackendReset);
    assert_eq!(p.pass(29.9), NOTHING);
    assert_eq!(p.pass(0.1), ["fail r1: BackendUnreachable"]);
}

#[test]
fn reconnected_worker_may_retry_request() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.fail(1, AttemptFailure::BackendReset);
    p.lose(1, &[]);
    assert_eq!(p.join(2, &["m"], 1), ["send r1 to w2 #2"]);
}

#[test]
fn unloadable_model_is_tried_elsewhere_before_failing() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.join(2, &["m"], 1);
    assert_eq!(p.fail(1, no_memory()), ["requeued r1 #1: LoadFailed", "send r1 to w2 #2"]);
    assert_eq!(p.fail(1, no_memory()), ["fail r1: LoadFailed { code: InsufficientMemory, retry_after: None }"]);
}

#[test]
fn unloadable_model_waits_for_untried_busy_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.join(2, &["m"], 1);
    p.submit(2, "m");
    assert_eq!(p.fail(1, no_memory()), ["requeued r1 #1: LoadFailed"]);
    assert_eq!(p.complete(2), ["finished r2 at w2 #1", "send r1 to w2 #2"]);
}

#[test]
fn wait_ends_when_last_untried_worker_leaves() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.join(2, &["m"], 1);
    p.submit(2, "m");
    p.fail(1, no_memory());
    let failed = "fail r1: LoadFailed { code: InsufficientMemory, retry_after: None }";
    assert_eq!(p.drain(2), [failed]);
    assert_eq!(p.message, "it does not fit");
}

#[test]
fn load_failures_spend_no_attempt() {
    let mut p = Provider::new();
    for worker in 1..=8 {
        p.join(worker, &["m"], 1);
    }
    p.submit(1, "m");
    for sending in 1..=7 {
        assert_eq!(p.fail(1, no_memory()).len(), 2, "requeued and sent, time {sending}");
    }
    assert_eq!(p.fail(1, no_memory()).len(), 1);
    assert!(p.dispatch.is_idle());
}

#[test]
fn fatal_worker_error_ends_request() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    p.submit(3, "m");
    let failure = AttemptFailure::Fatal(report("it broke"));
    assert_eq!(p.fail(1, failure), ["fail r1: Fatal", "send r3 to w1 #1"]);
    assert_eq!(p.message, "it broke");
}

#[test]
fn expired_requeued_request_is_sent_to_free_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.pass(100.0);
    p.join(2, &["m"], 1);
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost", "send r1 to w2 #2"]);
}

#[test]
fn expired_requeued_request_fails_without_free_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.pass(100.0);
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost", "fail r1: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn requeue_does_not_extend_deadline() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.pass(20.0);
    p.lose(1, &[]);
    assert_eq!(p.pass(9.9), NOTHING);
    assert_eq!(p.pass(0.1).len(), 1);
    assert!(p.dispatch.is_idle());
}

#[test]
fn severed_request_goes_to_least_loaded_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    p.submit(1, "m");
    p.submit(2, "m");
    p.join(2, &["m"], 2);
    assert_eq!(p.fail(2, AttemptFailure::SeveredBySwap), ["requeued r2 #1: SeveredBySwap", "send r2 to w2 #2"]);
}
