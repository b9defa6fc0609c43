//! Workers that drain, and a relay that shuts down.

use super::harness::Provider;
use crate::dispatch::Event;

const NOTHING: [&str; 0] = [];

#[test]
fn draining_worker_finishes_requests_without_new_ones() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    p.submit(1, "m");
    assert_eq!(p.drain(1), NOTHING);
    assert_eq!(p.submit(2, "m"), NOTHING);
    assert_eq!(p.load(1, 0), NOTHING);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "idle w1"]);
    assert_eq!(p.join(2, &["m"], 1), ["send r2 to w2 #1"]);
}

#[test]
fn idle_worker_drains_at_once_and_only_once() {
    let mut p = Provider::new();
    p.join(1, &["m"], 4);
    assert_eq!(p.drain(1), ["idle w1"]);
    assert_eq!(p.drain(1), NOTHING);
    assert_eq!(p.models(1, &["n"]), NOTHING);
}

#[test]
fn cancel_of_last_request_drains_worker() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.drain(1);
    assert_eq!(p.cancel(1).last().map(String::as_str), Some("idle w1"));
}

#[test]
fn lost_draining_workers_requests_are_requeued() {
    let mut p = Provider::new();
    p.join(1, &["m"], 2);
    p.submit(1, "m");
    p.drain(1);
    p.join(2, &["m"], 1);
    assert_eq!(p.lose(1, &[]), ["requeued r1 #1: WorkerLost", "send r1 to w2 #2"]);
}

#[test]
fn grant_of_draining_worker_is_not_used() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    p.submit(1, "m");
    p.drain(1);
    assert_eq!(p.grant(1, 4, 0, 1), NOTHING);
}

#[test]
fn draining_relay_serves_queue_but_rejects_new_requests() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.handle(Event::DrainBegun), NOTHING);
    assert_eq!(p.submit(3, "m"), ["fail r3: Draining"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "send r2 to w1 #1"]);
    assert_eq!(p.lose(1, &[]), ["requeued r2 #1: WorkerLost"]);
    assert_eq!(p.join(2, &["m"], 1), ["send r2 to w2 #2"]);
}

#[test]
fn drain_deadline_ends_whatever_is_left() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    p.handle(Event::DrainBegun);
    assert_eq!(
        p.handle(Event::DrainDeadline),
        ["fail r2: Draining", "cancel r1 at w1 #1: DrainDeadline", "fail r1: Draining"]
    );
    assert!(p.dispatch.is_idle());
    assert_eq!(p.next_timeout(), None);
}
