//! Requests whose clients disconnect while they wait.

use modelrelay_protocol::message::SlotState;

use super::harness::{Call, NOTHING, Stage};
use crate::effect::SlotEvent;

/// `a` serves request 1, request 2 waits for `b`, and the drain has begun.
fn draining() -> Stage {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.state(), SlotState::Draining);
    s
}

#[test]
fn cancelled_waiter_is_taken_out_and_never_leased() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=6 {
        s.arrive(request, "a");
    }
    assert_eq!(s.cancel(5), NOTHING);
    assert_eq!(s.finish(1), ["lease r6 g1"]);
    assert_eq!(s.finish(2), NOTHING);
}

#[test]
fn last_waiter_leaving_before_commit_aborts_swap() {
    let mut s = draining();
    s.arrive(3, "a");
    assert_eq!(s.cancel(2), ["open a", "lease r3 g1"]);
    assert_eq!(s.state(), SlotState::Ready);
    assert!(s.news.contains(&SlotEvent::SwapAborted { from: "a".into() }));
    assert_eq!(s.pass(60.0), NOTHING, "no request is severed for an aborted swap");
}

#[test]
fn demand_withdrawn_before_commit_aborts_swap() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.demand(&[("b", 2, 1.0)]);
    s.pass(6.0);
    assert_eq!(s.fits(), ["close a"]);
    assert_eq!(s.demand(&[]), ["open a"]);
}

// e
#[test]
fn last_waiter_leaving_during_preflight_changes_nothing() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.arrive(1, "b"), ["preflight b"]);
    s.cancel(1);
    assert_eq!(s.fits(), NOTHING);
    assert_eq!(s.arrive(2, "a"), ["lease r2 g1"]);
}

// e, 30
#[test]
fn drain_continues_for_next_waiter_after_cancellation() {
    let mut s = draining();
    s.arrive(3, "c");
    assert_eq!(s.cancel(2), ["preflight c"]);
    assert_eq!(s.finish(1), NOTHING, "nothing is unloaded before it is known that c fits");
    assert_eq!(s.fits(), ["evict a"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "lease r3 g2");
}

// e
#[test]
fn expired_drain_waits_for_preflight_of_new_target() {
    let mut s = draining();
    s.pass(29.0);
    s.arrive(3, "c");
    s.cancel(2);
    assert_eq!(s.pass(5.0), NOTHING, "and no timer spins");
    assert_eq!(s.fits(), ["sever r1"]);
}

// e
#[test]
fn drain_is_aborted_when_new_target_is_refused() {
    let mut s = draining();
    s.arrive(3, "c");
    s.cancel(2);
    s.finish(1);
    let op = s.op();
    let refusal = crate::event::Outcome::Preflight(Err("ill".into()));
    assert_eq!(s.late(op, refusal), ["fail r3: backend_unavailable", "open a"]);
}

// e
#[test]
fn cancel_during_severing_changes_nothing() {
    let mut s = draining();
    assert_eq!(s.pass(30.0), ["sever r1"]);
    assert_eq!(s.cancel(2), NOTHING);
    assert_eq!(s.drop_lease(1), ["evict a"]);
}

#[test]
fn load_completes_when_waiter_leaves_after_commit() {
    let mut s = draining();
    assert_eq!(s.finish(1), ["evict a"]);
    assert_eq!(s.cancel(2), NOTHING);
    assert_eq!(s.evicted(), ["memory of a"]);
    assert_eq!(s.freed(true), ["load b Cold"]);
    assert_eq!(s.loaded(), ["open b"]);
    assert_eq!(s.resident(), Some("b".into()));
}

#[test]
fn request_during_abandoned_load_uses_its_result() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    s.pass(5.0);
    s.cancel(1);
    s.pass(1.0);
    assert_eq!(s.arrive(2, "a"), NOTHING);
    assert_eq!(s.call.map(|(call, _)| call), Some(Call::Load));
    assert_eq!(s.loaded(), ["open a", "lease r2 g1"]);
}

// e
#[test]
fn rollback_completes_after_last_waiter_leaves() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.arrive(2, "a");
    s.evicted();
    s.freed(true);
    s.not_loaded();
    s.killed();
    s.freed(true);
    s.cancel(2);
    assert_eq!(s.loaded(), ["open a"]);
}

// d
#[test]
fn cancel_crossing_lease_defers_to_release() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.arrive(1, "a"), ["lease r1 g1"]);
    assert_eq!(s.cancel(1), NOTHING, "it does not wait; its holder drops the lease");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.drop_lease(1), ["evict a"]);
    assert_eq!(s.drop_lease(1), NOTHING);
}

#[test]
fn drain_is_retargeted_to_model_with_longer_wait() {
    let mut s = draining();
    for request in 10..30 {
        s.arrive(request, "c");
    }
    assert_eq!(s.finish_swap(0.0), NOTHING, "they have not waited yet");
    s.pass(5.0);
    assert_eq!(s.arrive(30, "c"), ["preflight c"]);
    s.fits();
    assert_eq!(s.slot().target, Some("c".into()));
    s.finish(1);
    assert_eq!(s.finish_swap(1.0)[2], "open c");
}
