//! The part of the queue that one key may fill.

use std::sync::Arc;

use super::harness::{Provider, settings};
use crate::dispatch::{QueueShare, Settings};

const NOTHING: [&str; 0] = [];

fn of(key: &str, percent: u8) -> Option<QueueShare> {
    Some(QueueShare { key: Arc::from(key), percent })
}

fn submit(p: &mut Provider, request: u64, share: Option<QueueShare>) -> Vec<String> {
    p.submit_with(request, "m", |new| new.share = share)
}

/// A provider whose queue has four places.
fn provider() -> Provider {
    Provider::with(Settings { max_queue_len: 4, ..settings() })
}

#[test]
fn key_that_fills_its_share_blocks_no_other() {
    let mut p = provider();
    assert_eq!(submit(&mut p, 1, of("a", 50)), NOTHING);
    assert_eq!(submit(&mut p, 2, of("a", 50)), NOTHING);
    assert_eq!(submit(&mut p, 3, of("a", 50)), ["fail r3: QueueShareFull { percent: 50 }"]);
    assert_eq!(submit(&mut p, 4, of("b", 50)), NOTHING);
    assert_eq!(submit(&mut p, 5, None), NOTHING);
    assert_eq!(submit(&mut p, 6, of("b", 50)), ["fail r6: QueueFull { retry_after_secs: 30 }"]);
    assert_eq!(p.dispatch.queue_len(), 4);
}

#[test]
fn immediately_served_request_needs_no_share() {
    let mut p = provider();
    submit(&mut p, 1, of("a", 1));
    p.join(1, &["other"], 1);
    assert_eq!(p.submit_with(2, "other", |new| new.share = of("a", 1)), ["send r2 to w1 #1"]);
}

#[test]
fn one_request_may_wait_despite_exceeding_share() {
    let mut p = Provider::with(Settings { max_queue_len: 4, max_queue_bytes: 1_000, ..settings() });
    assert_eq!(p.submit_with(1, "m", |new| (new.share, new.bytes) = (of("a", 1), 900)), NOTHING);
    assert_eq!(submit(&mut p, 2, of("a", 1)), ["fail r2: QueueShareFull { percent: 1 }"]);
}

#[test]
fn share_limits_bytes() {
    let mut p = Provider::with(Settings { max_queue_bytes: 1_000, ..settings() });
    assert_eq!(p.submit_with(1, "m", |new| (new.share, new.bytes) = (of("a", 50), 300)), NOTHING);
    assert_eq!(p.submit_with(2, "m", |new| (new.share, new.bytes) = (of("a", 50), 200)), NOTHING);
    assert_eq!(
        p.submit_with(3, "m", |new| (new.share, new.bytes) = (of("a", 50), 1)),
        ["fail r3: QueueShareFull { percent: 50 }"]
    );
}

#[test]
fn share_is_freed_when_its_request_leaves() {
    let mut p = provider();
    submit(&mut p, 1, of("a", 25));
    p.cancel(1);
    assert_eq!(submit(&mut p, 2, of("a", 25)), NOTHING);
    assert_eq!(p.join(1, &["m"], 1), ["send r2 to w1 #1"]);
    assert_eq!(submit(&mut p, 3, of("a", 25)), NOTHING);
    assert_eq!(p.dispatch.keys_waiting(), 1);
    p.complete(2);
    assert_eq!(p.dispatch.keys_waiting(), 0);
}

#[test]
fn requeue_exceeds_share_and_fills_it() {
    let mut p = provider();
    p.join(1, &["m"], 1);
    assert_eq!(submit(&mut p, 1, of("a", 25)), ["send r1 to w1 #1"]);
    assert_eq!(submit(&mut p, 2, of("a", 25)), NOTHING);
    p.lose(1, &[]);
    assert_eq!(p.dispatch.queue_len(), 2);
    p.cancel(2);
    assert_eq!(submit(&mut p, 3, of("a", 25)), ["fail r3: QueueShareFull { percent: 25 }"]);
}

#[test]
fn shorter_queue_shrinks_shares_of_later_requests() {
    let mut p = provider();
    submit(&mut p, 1, of("a", 50));
    submit(&mut p, 2, of("a", 50));
    p.change(|new| new.max_queue_len = 3);
    assert_eq!(p.dispatch.queue_len(), 2);
    p.cancel(1);
    assert_eq!(submit(&mut p, 3, of("a", 50)), ["fail r3: QueueShareFull { percent: 50 }"]);
}
