//! A lease is created and ended once, whatever its holder does.

use super::harness::{NEW, NOTHING, OLD, Stage, config};
use crate::config::{Knobs, SlotConfig};
use crate::event::{DownCause, RequestKey};

#[test]
fn request_for_resident_is_leased_at_once() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.arrive(1, "a"), ["lease r1 g1"]);
    assert_eq!(s.finish(1), NOTHING);
    assert_eq!(s.machine.lease_of(RequestKey(1)), None);
}

#[test]
fn request_above_model_capacity_waits_for_lease() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        assert_eq!(s.arrive(request, "a"), [format!("lease r{request} g1")]);
    }
    assert_eq!(s.arrive(5, "a"), NOTHING);
    assert_eq!(s.finish(2), ["lease r5 g1"]);
}

#[test]
fn refused_request_leaves_nothing_behind() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.arrive(1, "nobody"), ["fail r1: model_not_found"]);
    s.arrive(2, "b");
    assert_eq!(s.fits(), ["close a", "evict a"], "no lease holds the swap up");
    s.evicted();
    s.freed(true);
    assert_eq!(s.not_loaded(), ["fail r2: backend_unavailable", "kill b"]);
    assert_eq!(s.machine.lease_of(RequestKey(2)), None);
}

// The guard that the panic drops releases the lease.
#[test]
fn lease_of_panicked_holder_is_released() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        s.arrive(request, "a");
    }
    s.arrive(5, "a");
    assert_eq!(s.drop_lease(3), ["lease r5 g1"]);
}

#[test]
fn second_release_frees_nothing() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        s.arrive(request, "a");
    }
    s.finish(1);
    assert_eq!(s.finish(1), NOTHING);
    assert_eq!(s.arrive(5, "a"), ["lease r5 g1"]);
    assert_eq!(s.arrive(6, "a"), NOTHING, "four run");
}

#[test]
fn release_after_sever_spares_next_generation() {
    let knobs = Knobs { drain_timeout: super::harness::secs(0.0), ..Knobs::default() };
    let mut s = Stage::serving_with("a", SlotConfig { knobs, ..config(&["a", "b"]) });
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    assert_eq!(s.fits(), ["close a", "sever r1"]);
    assert_eq!(s.pass(2.0), ["evict a"], "the grace is over, whether it hung up or not");
    s.finish_swap(1.0);
    s.finish(2);
    s.arrive(3, "a");
    s.finish_swap(1.0);
    assert_eq!(s.machine.lease_of(RequestKey(3)), Some(3));
    for request in 4..=6 {
        s.arrive(request, "a");
    }
    assert_eq!(s.arrive(7, "a"), NOTHING, "four run");
    assert_eq!(s.drop_lease(1), NOTHING, "it hangs up at last, two generations late");
    assert_eq!(s.arrive(8, "a"), NOTHING, "and four run still");
    s.drop_lease(3);
    assert_eq!(s.machine.lease_of(RequestKey(7)), Some(3));
}

#[test]
fn unwanted_lease_is_passed_to_next_request() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        s.arrive(request, "a");
    }
    s.arrive(5, "a");
    s.arrive(6, "a");
    assert_eq!(s.finish(1), ["lease r5 g1"]);
    assert_eq!(s.drop_lease(5), ["lease r6 g1"], "its caller had vanished");
}

#[test]
fn relay_without_grants_is_limited_to_registered_capacity() {
    let mut s = Stage::serving_with("a", SlotConfig { max_held_per_relay: 2, ..config(&["a", "b"]) });
    s.arrive(1, "a");
    s.arrive(2, "b");
    assert_eq!(s.arrive(3, "b"), ["fail r3: queue_full"]);
    assert_eq!(s.arrive_from(NEW, 4, "a"), ["lease r4 g1"], "another relay is not in its way");
    s.finish(1);
    assert!(!s.arrive(5, "b").contains(&"fail r5: queue_full".to_owned()));
}

#[test]
fn request_of_departed_relay_is_refused() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.handle(crate::event::Event::RelayLost { relay: OLD });
    assert_eq!(s.arrive(1, "a"), ["fail r1: at_capacity"]);
}

#[test]
fn no_request_outcome_leaks_capacity() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for round in 0..50 {
        let first = round * 10;
        for request in first..first + 8 {
            s.arrive(request, "a");
        }
        s.cancel(first + 4);
        s.finish(first);
        s.drop_lease(first + 1);
        s.finish(first + 1);
        s.cancel(first + 7);
        for request in first..first + 8 {
            s.drop_lease(request);
            s.cancel(request);
        }
    }
    for request in 1001..=1004 {
        assert_eq!(s.arrive(request, "a"), [format!("lease r{request} g1")]);
    }
    assert_eq!(s.arrive(1005, "a"), NOTHING);
    assert_eq!(s.down(1, DownCause::Gone).len(), 6, "a closed gate, four cancels, one look at the memory");
}

// A relay frees the place of a request that it cancelled, and sends the next one right after the cancel.
#[test]
fn cancelled_request_frees_its_place_before_its_lease() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        s.arrive(request, "a");
    }
    assert_eq!(s.arrive(5, "a"), NOTHING);
    assert_eq!(s.cancel(2), ["lease r5 g1"]);
    assert_eq!(s.cancel(2), NOTHING, "a second cancellation has no effect");
    s.arrive(6, "b");
    for request in [1, 3, 4, 5] {
        assert_eq!(s.finish(request), NOTHING);
    }
    s.pass(6.0);
    assert_eq!(s.fits(), ["close a"], "the backend still answers the second");
    assert_eq!(s.drop_lease(2), ["evict a"]);
}

#[test]
fn cancelled_request_frees_no_second_place_on_release() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        s.arrive(request, "a");
    }
    s.cancel(2);
    s.arrive(5, "a");
    assert_eq!(s.arrive(6, "a"), NOTHING);
    assert_eq!(s.drop_lease(2), NOTHING);
    assert_eq!(s.finish(5), ["lease r6 g1"]);
}

#[test]
fn relays_next_request_after_cancel_is_not_refused() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=4 {
        s.arrive_from(NEW, request, "a");
    }
    s.cancel(4);
    assert_eq!(s.arrive_from(NEW, 5, "a"), ["lease r5 g1"]);
}
