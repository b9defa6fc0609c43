//! Classes and ranks of requests, as relays report them.

use RequestClass::{Batch, Interactive, Normal};
use modelrelay_protocol::message::SlotState;

use super::harness::{NEW, NOTHING, OLD, Stage};
use crate::event::{Event, LinkKind, RelayKey, RequestClass};

const OTHER: RelayKey = RelayKey(3);

/// `a` has just been loaded and serves four requests of this class. The cost of a swap is 2 s.
fn busy(class: RequestClass, models: &[&str]) -> Stage {
    let mut s = Stage::new(models);
    s.demand_of(NEW, &[(("a", 4, 0.0), class, 0)]);
    s.finish_swap(2.0);
    (1..=4).for_each(|request| _ = s.arrive_of(class, NEW, request, "a"));
    s
}

#[test]
fn running_batch_is_left_early_for_chat() {
    let mut s = busy(Batch, &["a", "b"]);
    s.demand_of(NEW, &[(("a", 9, 1.0), Batch, 1), (("b", 1, 0.0), Interactive, 0)]);
    assert_eq!(s.pass(5.9), NOTHING, "the minimum residency is 5 s, and three costs are 6 s");
    assert_eq!(s.pass(0.1), ["preflight b"]);
    assert_eq!(s.fits(), ["close a"]);
}

#[test]
fn running_chat_keeps_its_turn_beside_waiting_batch() {
    let mut s = busy(Interactive, &["a", "b"]);
    s.demand_of(NEW, &[(("a", 9, 1.0), Batch, 1), (("b", 1, 0.0), Interactive, 0)]);
    assert_eq!(s.pass(15.9), NOTHING);
    assert_eq!(s.pass(0.1), ["preflight b"]);
}

#[test]
fn turn_shortens_when_last_chat_ends() {
    let mut s = busy(Batch, &["a", "b"]);
    s.finish(4);
    s.arrive_of(Interactive, NEW, 5, "a");
    s.demand_of(NEW, &[(("b", 1, 0.0), Interactive, 0)]);
    assert_eq!(s.pass(10.0), NOTHING);
    assert_eq!(s.finish(5), ["preflight b"]);
}

#[test]
fn request_that_waits_here_has_its_class() {
    let mut s = busy(Batch, &["a", "b"]);
    s.arrive_of(Normal, OLD, 5, "b");
    assert_eq!(s.pass(6.0), ["preflight b"]);
}

#[test]
fn highest_class_of_several_relays_counts() {
    let mut s = busy(Batch, &["a", "b", "c"]);
    s.handle(Event::RelayJoined { relay: OTHER, kind: LinkKind::Granted });
    s.demand_of(NEW, &[(("b", 9, 9.0), Normal, 0), (("c", 1, 0.0), Batch, 1)]);
    s.demand_of(OTHER, &[(("c", 1, 0.0), Interactive, 0)]);
    assert_eq!(s.pass(6.0), ["preflight c"]);
}

#[test]
fn first_rank_of_several_relays_counts() {
    let mut s = busy(Normal, &["a", "b", "c"]);
    s.handle(Event::RelayJoined { relay: OTHER, kind: LinkKind::Granted });
    s.demand_of(NEW, &[(("b", 9, 9.0), Normal, 1), (("c", 1, 0.0), Normal, 0)]);
    s.demand_of(OTHER, &[(("b", 1, 0.0), Normal, 0), (("c", 1, 0.0), Normal, 1)]);
    assert_eq!(s.pass(16.0), ["preflight b"], "both are first somewhere, so the waiting time decides");
}

#[test]
fn model_ahead_in_service_gets_short_turn() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    // The keys of `c` have attained less than those of `b`, whose load has begun by then.
    s.demand_of(NEW, &[(("b", 4, 1.0), Normal, 0)]);
    s.fits();
    s.evicted();
    s.demand_of(NEW, &[(("b", 4, 1.0), Normal, 1), (("c", 4, 1.0), Normal, 0)]);
    s.finish_swap(2.0);
    (1..=4).for_each(|request| _ = s.arrive_of(Normal, NEW, request, "b"));
    assert_eq!(s.slot().state, SlotState::Ready);
    assert_eq!(s.pass(5.9), NOTHING);
    assert_eq!(s.pass(0.1), ["preflight c"]);
}

#[test]
fn ranks_of_different_relays_are_not_compared() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.handle(Event::RelayJoined { relay: OTHER, kind: LinkKind::Granted });
    s.demand_of(NEW, &[(("b", 4, 1.0), Normal, 0)]);
    s.fits();
    s.evicted();
    s.demand_of(NEW, &[(("b", 4, 1.0), Normal, 1)]);
    s.demand_of(OTHER, &[(("c", 4, 1.0), Normal, 0)]);
    s.finish_swap(2.0);
    (1..=4).for_each(|request| _ = s.arrive_of(Normal, NEW, request, "b"));
    assert_eq!(s.pass(15.9), NOTHING, "the turn is not short");
    assert_eq!(s.pass(0.1), ["preflight c"]);
}

#[test]
fn batch_at_other_relay_improves_no_rank() {
    let mut s = busy(Normal, &["a", "b", "c"]);
    s.handle(Event::RelayJoined { relay: OTHER, kind: LinkKind::Granted });
    s.demand_of(NEW, &[(("b", 9, 9.0), Normal, 1), (("c", 1, 0.0), Normal, 0)]);
    s.demand_of(OTHER, &[(("b", 1, 0.0), Batch, 0)]);
    assert_eq!(s.pass(16.0), ["preflight c"]);
}

#[test]
fn service_attained_in_turn_does_not_shorten_it() {
    let mut s = busy(Normal, &["a", "b"]);
    s.demand_of(NEW, &[(("a", 4, 1.0), Normal, 1), (("b", 4, 1.0), Normal, 0)]);
    assert_eq!(s.pass(15.9), NOTHING);
    assert_eq!(s.pass(0.1), ["preflight b"]);
}

#[test]
fn chat_learns_of_short_turn_in_its_estimate() {
    let mut s = busy(Batch, &["a", "b"]);
    let eta = |s: &Stage| s.machine.eta(&"b".into(), s.at(s.now)).map(|eta| eta.as_secs_f64());
    s.demand_of(NEW, &[(("b", 1, 0.0), Batch, 0)]);
    assert_eq!(eta(&s), Some(18.0), "eight costs and the swap");
    s.demand_of(NEW, &[(("b", 1, 0.0), Interactive, 0)]);
    assert_eq!(eta(&s), Some(8.0), "three costs and the swap");
}
