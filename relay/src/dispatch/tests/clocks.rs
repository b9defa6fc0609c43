//! Deadlines: waiting warm, waiting cold, and the total time of the request.

use std::time::Duration;

use super::harness::{Provider, secs, settings};
use crate::dispatch::{Event, Model, RequestKey, Settings, TokenUsage};

const NOTHING: [&str; 0] = [];

/// 30 s warm, 100 s cold.
fn two_clocks() -> Provider {
    Provider::with(Settings { cold_timeout: Some(Duration::from_secs(100)), ..settings() })
}

#[test]
fn idle_provider_has_no_timeout() {
    let mut p = Provider::new();
    assert_eq!(p.next_timeout(), None);
    p.join(1, &["m"], 1);
    assert_eq!(p.next_timeout(), None);
    p.submit(1, "m");
    assert_eq!(p.next_timeout(), Some(secs(300.0)));
    p.complete(1);
    assert_eq!(p.next_timeout(), None);
}

#[test]
fn queue_timeout_is_exact() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.pass(1.0);
    p.submit(2, "m");
    assert_eq!(p.next_timeout(), Some(secs(31.0)));
    assert_eq!(p.pass(29.999), NOTHING);
    assert_eq!(p.pass(0.001), ["fail r2: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn one_tick_ends_every_due_request() {
    let mut p = Provider::new();
    p.submit(1, "a");
    p.submit(2, "b");
    p.submit(3, "b");
    p.advance_late(31.0);
    assert_eq!(p.handle(Event::Tick).len(), 3);
    assert_eq!(p.next_timeout(), None);
}

#[test]
fn expired_request_is_not_sent_before_late_tick() {
    let mut p = Provider::new();
    p.submit(1, "m");
    p.advance_late(30.0);
    assert_eq!(p.join(1, &["m"], 1), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn request_timeout_cancels_and_frees_slot() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.pass(290.0);
    p.submit(2, "m");
    assert_eq!(p.pass(10.0), ["cancel r1 at w1 #1: Timeout", "fail r1: RequestTimeout", "send r2 to w1 #1"]);
}

#[test]
fn requests_running_out_are_known_before_they_end() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    p.submit(1, "m");
    p.submit(2, "m");
    p.pass(299.0);
    p.submit(3, "m");
    p.advance_late(1.0);
    let (before, ending) = p.dispatch.running_out(p.instant()).expect("two requests end");
    assert_eq!(ending, [RequestKey(1), RequestKey(2)], "the third one waits");
    assert!(before < p.instant());
    let usage = TokenUsage { input: 1, output: 1 };
    let mut effects = Vec::new();
    let used = |request| Event::Used { request, usage };
    ending.into_iter().for_each(|request| p.dispatch.handle(used(request), before, &mut effects));
    assert!(effects.is_empty(), "they still run: {effects:?}");
    assert_eq!(p.handle(Event::Tick).len(), 5, "both are cancelled and fail, and the third one is sent");
    assert!(p.dispatch.running_out(p.instant()).is_none());
}

#[test]
fn request_timeout_runs_from_arrival_not_from_dispatch() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.pass(5.0);
    p.submit(2, "m");
    p.pass(20.0);
    p.complete(1);
    assert_eq!(p.next_timeout(), Some(secs(305.0)));
}

#[test]
fn request_timeout_shorter_than_queue_timeout_ends_wait() {
    let mut p = Provider::with(Settings { request_timeout: Duration::from_secs(10), ..settings() });
    p.join(1, &["m"], 1);
    p.load(1, 1);
    p.submit(1, "m");
    assert_eq!(p.pass(10.0), ["fail r1: RequestTimeout"]);
}

#[test]
fn cold_and_warm_wait_share_single_clock() {
    let mut p = Provider::new();
    p.submit(1, "m");
    p.pass(20.0);
    p.join_core1(1, &["m"]);
    p.pass(5.0);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(30.0)));
    assert_eq!(p.pass(5.0).len(), 1);
}

#[test]
fn request_timeout_excludes_cold_wait_with_single_clock() {
    let mut p = Provider::new();
    p.submit(1, "m");
    p.pass(20.0);
    p.join(1, &["m"], 1);
    assert_eq!(p.next_timeout(), Some(secs(320.0)));
}

#[test]
fn short_request_timeout_pauses_while_cold() {
    let mut p = Provider::with(Settings { request_timeout: Duration::from_secs(10), ..settings() });
    p.submit(1, "m");
    p.pass(15.0);
    p.join_core1(1, &["m"]);
    assert_eq!(p.next_timeout(), Some(secs(25.0)));
    assert_eq!(p.pass(10.0), ["fail r1: RequestTimeout"]);
}

#[test]
fn cold_clock_runs_while_model_is_unserved() {
    let mut p = two_clocks();
    p.submit(1, "m");
    assert_eq!(p.next_timeout(), Some(secs(100.0)));
    assert_eq!(p.pass(99.0), NOTHING);
    assert_eq!(p.pass(1.0), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn warm_clock_stops_while_model_is_cold() {
    let mut p = two_clocks();
    p.join_core1(1, &["m"]);
    p.submit(1, "m");
    p.pass(10.0);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)));
    p.pass(50.0);
    p.join_core1(2, &["m"]);
    assert_eq!(p.next_timeout(), Some(secs(80.0)));
    assert_eq!(p.pass(20.0), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn cold_clock_resumes_after_warm_period() {
    let mut p = two_clocks();
    p.submit(1, "m");
    p.pass(60.0);
    p.join_core1(1, &["m"]);
    p.pass(10.0);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)));
}

#[test]
fn each_request_is_charged_its_own_cold_time() {
    let mut p = two_clocks();
    p.submit(1, "m");
    p.pass(60.0);
    p.submit(2, "m");
    assert_eq!(p.pass(40.0), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
    p.join_core1(1, &["m"]);
    assert_eq!(p.next_timeout(), Some(secs(130.0)));
    p.pass(10.0);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(170.0)));
}

#[test]
fn running_time_is_warm_never_cold() {
    let mut p = two_clocks();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.models(1, &[]);
    p.pass(20.0);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(120.0)), "all 100 s of cold time are left");
    p.join_core1(2, &["m"]);
    assert_eq!(p.next_timeout(), Some(secs(30.0)), "10 s of warm time are left");
}

#[test]
fn request_timeout_excludes_cold_wait() {
    let mut p = two_clocks();
    p.submit(1, "m");
    p.pass(80.0);
    p.join(1, &["m"], 1);
    assert_eq!(p.next_timeout(), Some(secs(380.0)));
    p.pass(100.0);
    p.lose(1, &[]);
    assert!(p.dispatch.is_idle(), "its warm waiting time was over long ago");
}

#[test]
fn request_timeout_excludes_only_own_cold_wait() {
    let mut p = two_clocks();
    p.submit(1, "m");
    p.pass(60.0);
    p.submit(2, "m");
    p.pass(20.0);
    p.join(1, &["m"], 2);
    p.complete(1);
    assert_eq!(p.next_timeout(), Some(secs(380.0)), "300 s after it came, and the 20 s that it waited");
}

#[test]
fn model_served_only_by_draining_workers_is_cold() {
    let mut p = two_clocks();
    p.join_core1(1, &["m"]);
    p.submit(1, "m");
    p.pass(10.0);
    p.drain(1);
    assert!(!p.dispatch.is_warm("m"));
    assert_eq!(p.next_timeout(), Some(secs(110.0)));
}

#[test]
fn declared_model_waits_ten_minutes_or_queue_timeout() {
    let mut p = Provider::with(Settings { cold_models: [Model::from("big")].into(), ..settings() });
    p.submit(1, "big");
    assert_eq!(p.next_timeout(), Some(secs(600.0)));
    p.submit(2, "small");
    assert_eq!(p.next_timeout(), Some(secs(30.0)));
    p.change(|new| {
        new.cold_models = [Model::from("huge")].into();
        new.queue_timeout = Duration::from_secs(900);
    });
    p.cancel(1);
    p.cancel(2);
    p.submit(3, "huge");
    assert_eq!(p.next_timeout(), Some(secs(900.0)));
}

#[test]
fn wait_for_absent_model_has_shorter_limit() {
    let day = Duration::from_secs(86_400);
    let absent = Some(Duration::from_secs(30));
    let mut p =
        Provider::with(Settings { queue_timeout: day, request_timeout: day, absent_timeout: absent, ..settings() });
    p.submit(1, "m");
    assert_eq!(p.next_timeout(), Some(secs(30.0)));
    p.pass(10.0);
    p.join_core1(1, &["m"]);
    assert_eq!(p.next_timeout(), Some(secs(86_410.0)));
    p.pass(3600.0);
    p.lose(1, &[]);
    assert_eq!(p.pass(20.0), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn explicit_cold_timeout_may_undercut_queue_timeout() {
    let mut p = Provider::with(Settings { cold_timeout: Some(Duration::from_secs(5)), ..settings() });
    p.submit(1, "m");
    assert_eq!(p.pass(5.0), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
}

#[test]
fn timeouts_are_fixed_at_arrival() {
    let mut p = Provider::new();
    p.submit(1, "m");
    p.change(|new| new.queue_timeout = Duration::from_secs(3));
    p.submit(2, "m");
    assert_eq!(p.pass(3.0), ["fail r2: QueueTimeout { retry_after_secs: 3 }"]);
    assert_eq!(p.next_timeout(), Some(secs(30.0)));
}

#[test]
fn maximum_timeouts_never_overflow() {
    let mut p = Provider::with(Settings {
        queue_timeout: Duration::MAX,
        request_timeout: Duration::MAX,
        cold_timeout: Some(Duration::MAX),
        ..settings()
    });
    p.submit(1, "m");
    p.pass(1e6);
    p.join(1, &["m"], 1);
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost"]);
}

#[test]
fn clock_read_out_of_order_never_moves_back() {
    let mut p = Provider::new();
    let early = p.instant();
    p.pass(5.0);
    p.submit(1, "m");
    let mut out = Vec::new();
    let join = Event::WorkerJoined(super::harness::worker(1, &["m"], 1, false));
    p.dispatch.handle(join, early, &mut out);
    assert_eq!(out.len(), 1);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(35.0)));
}

#[test]
fn simultaneous_timeouts_are_reported_as_queue_timeout() {
    for cold_timeout in [None, Some(secs(100.0))] {
        let queue_timeout = settings().queue_timeout;
        let mut p = Provider::with(Settings { cold_timeout, request_timeout: queue_timeout, ..settings() });
        p.join_core1(1, &["m"]);
        p.submit(1, "m");
        assert_eq!(p.pass(30.0), ["fail r1: QueueTimeout { retry_after_secs: 30 }"]);
    }
}

#[test]
fn zero_queue_timeout_fails_requests_that_would_wait() {
    let mut p = Provider::with(Settings { queue_timeout: Duration::ZERO, ..settings() });
    assert_eq!(p.submit(1, "m"), ["fail r1: QueueTimeout { retry_after_secs: 1 }"]);
    p.join(1, &["m"], 1);
    assert_eq!(p.submit(2, "m"), ["send r2 to w1 #1"]);
}

#[test]
fn requeue_keeps_cold_time_of_earlier_wait() {
    let mut p = two_clocks();
    p.submit(1, "m");
    p.pass(60.0);
    p.join(1, &["m"], 1);
    p.pass(10.0);
    p.lose(1, &[]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)), "40 s of cold time are left");
    p.pass(20.0);
    p.join_core1(2, &["m"]);
    assert_eq!(p.next_timeout(), Some(secs(110.0)), "20 s of warm time are left");
}

#[test]
fn shorter_request_timeout_ends_wait_with_two_clocks() {
    let mut p = Provider::with(Settings {
        cold_timeout: Some(Duration::from_secs(100)),
        request_timeout: Duration::from_secs(10),
        ..settings()
    });
    p.join_core1(1, &["m"]);
    p.submit(1, "m");
    assert_eq!(p.pass(10.0), ["fail r1: RequestTimeout"]);
}
