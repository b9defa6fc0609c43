//! Changed settings and deleted providers.

use super::harness::Provider;
use crate::dispatch::Event;

const NOTHING: [&str; 0] = [];

#[test]
fn disabling_fails_waiting_requests_but_keeps_running_ones() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.change(|new| new.enabled = false), ["fail r2: Disabled"]);
    assert_eq!(p.submit(3, "m"), ["fail r3: Disabled"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1"]);
    assert_eq!(p.change(|new| new.enabled = true), NOTHING);
    assert_eq!(p.submit(4, "m"), ["send r4 to w1 #1"]);
}

#[test]
fn lost_workers_request_fails_in_disabled_provider() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["m"], 1);
    p.submit(1, "m");
    p.change(|new| new.enabled = false);
    assert_eq!(p.lose(1, &[]), ["fail r1: Disabled"]);
}

#[test]
fn lower_queue_length_evicts_no_request() {
    let mut p = Provider::new();
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.change(|new| new.max_queue_len = 1), NOTHING);
    assert_eq!(p.dispatch.queue_len(), 2);
    assert_eq!(p.submit(3, "m"), ["fail r3: QueueFull { retry_after_secs: 30 }"]);
}

#[test]
fn deleted_provider_fails_waiting_requests_and_drains_workers() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.join(2, &["n"], 1);
    p.submit(1, "m");
    p.submit(2, "m");
    assert_eq!(p.handle(Event::Deleted), ["fail r2: Deleted", "idle w2"]);
    assert_eq!(p.submit(3, "n"), ["fail r3: Deleted"]);
    assert_eq!(p.complete(1), ["finished r1 at w1 #1", "idle w1"]);
}

#[test]
fn worker_joining_deleted_provider_is_drained_at_once() {
    let mut p = Provider::new();
    p.handle(Event::Deleted);
    assert_eq!(p.join(1, &["m"], 1), ["idle w1"]);
}

#[test]
fn lost_workers_request_fails_in_deleted_provider() {
    let mut p = Provider::new();
    p.join(1, &["m"], 1);
    p.submit(1, "m");
    p.handle(Event::Deleted);
    assert_eq!(p.lose(1, &[]), ["fail r1: Deleted"]);
}
