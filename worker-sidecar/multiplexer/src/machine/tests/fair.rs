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
fn abandoned_batch_is_left_early() {
    let mut s = busy(Batch, &["a", "b"]);
    (1..=4).for_each(|request| _ = s.cancel(request));
    s.demand_of(NEW, &[(("b", 1, 0.0), Normal, 0)]);
    assert_eq!(s.pass(5.9), NOTHING, "its requests have not ended yet");
    assert_eq!(s.pass(0.1), ["preflight b"]);
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

/// Serves four requests of each resident until its turn ends, for this number of turns, while an old batch backlog
/// waits for `a` and chats for the others. Returns the residents.
fn turns_with_old_batch(s: &mut Stage, turns: u64) -> String {
    let place = |model: &str| if model == "a" { (Batch, 1) } else { (Normal, 0) };
    let mut residents = String::new();
    for turn in 0..turns {
        s.finish_swap(2.0);
        let resident = s.resident().expect("a resident");
        residents.push_str(&resident);
        let requests = 100 + 4 * turn..104 + 4 * turn;
        requests.clone().for_each(|request| _ = s.arrive_of(place(&resident).0, NEW, request, &resident));
        let others = ["a", "b", "c"].into_iter().filter(|model| *model != resident);
        let demand = |model: &'static str| {
            let ((class, rank), age) = (place(model), if model == "a" { 5_000.0 } else { 0.0 });
            ((model, 4, age), class, rank)
        };
        s.demand_of(NEW, &others.map(demand).collect::<Vec<_>>());
        while s.call.is_none() {
            s.pass(1.0);
        }
        s.fits();
        requests.for_each(|request| _ = s.finish(request));
    }
    residents
}

#[test]
fn old_batch_backlog_gets_one_turn_per_bound() {
    let mut s = Stage::new(&["a", "b", "c"]);
    s.demand_of(NEW, &[(("a", 4, 5_000.0), Batch, 0)]);
    // Two other turns of 16 s, each with a swap of 2 s and a drain of 30 s, and its own swap: 128 s.
    assert_eq!(turns_with_old_batch(&mut s, 19), "abcbcbcbcabcbcbcbca");
}

#[test]
fn drain_for_departed_chat_is_withdrawn() {
    let mut s = busy(Batch, &["a", "b", "c"]);
    s.demand_of(NEW, &[(("b", 1, 0.0), Interactive, 0), (("c", 5, 0.0), Batch, 1)]);
    assert_eq!(s.pass(6.0), ["preflight b"]);
    assert_eq!(s.fits(), ["close a"]);
    assert_eq!(s.demand_of(NEW, &[(("c", 5, 0.0), Batch, 1)]), ["open a"]);
    assert_eq!(s.state(), SlotState::Ready);
    assert_eq!(s.pass(9.9), NOTHING, "the turn before another batch model lasts eight costs");
    assert_eq!(s.pass(0.1), ["preflight c"]);
}

#[test]
fn drain_continues_for_another_chat() {
    let mut s = busy(Batch, &["a", "b", "c"]);
    s.demand_of(NEW, &[(("b", 1, 0.0), Interactive, 0), (("c", 1, 0.0), Normal, 1)]);
    s.pass(6.0);
    s.fits();
    assert_eq!(s.demand_of(NEW, &[(("c", 1, 0.0), Normal, 0)]), ["preflight c"]);
    assert_eq!(s.fits(), NOTHING);
    assert_eq!(s.state(), SlotState::Draining);
}

#[test]
fn chat_for_draining_batch_model_withdraws_nothing() {
    let mut s = busy(Batch, &["a", "b"]);
    s.demand_of(NEW, &[(("b", 1, 0.0), Interactive, 0)]);
    s.pass(6.0);
    s.fits();
    assert_eq!(s.arrive_of(Interactive, OLD, 5, "a"), NOTHING);
    assert_eq!(s.state(), SlotState::Draining);
}

#[test]
fn linger_of_batch_model_ends_for_chat() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    for request in 100..104 {
        s.arrive_of(Batch, NEW, request, "a");
        s.finish(request);
        s.pass(0.4);
    }
    s.arrive_of(Batch, NEW, 1, "a");
    s.demand_of(NEW, &[(("c", 1, 0.0), Batch, 0)]);
    assert_eq!(s.finish(1), NOTHING, "it lingers");
    let both = [(("b", 1, 0.0), Interactive, 0), (("c", 1, 0.0), Batch, 1)];
    assert_eq!(s.demand_of(NEW, &both), ["preflight b"]);
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
