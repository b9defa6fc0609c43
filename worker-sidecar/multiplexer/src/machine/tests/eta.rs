//! Estimates of the remaining time, as clients that wait receive them.

use modelrelay_protocol::message::SlotState;

use super::harness::{NEW, Stage, secs};
use crate::event::{Event, Order, RequestClass};

fn eta(s: &Stage, model: &str) -> Option<f64> {
    s.machine.eta(&model.into(), s.at(s.now)).map(|eta| eta.as_secs_f64())
}

/// `a` is idle. It took 2 s to load and 4 s to unload, `b` took 10 s and 1 s; `c` was never loaded.
fn measured() -> Stage {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    let swap = |s: &mut Stage, request, model: &str, evict, load| {
        s.arrive(request, model);
        s.fits();
        s.pass(evict);
        s.evicted();
        s.freed(true);
        s.finish_swap(load);
        s.finish(request);
    };
    swap(&mut s, 901, "b", 4.0, 10.0);
    swap(&mut s, 902, "a", 1.0, 2.0);
    s
}

/// `a` serves request 1, request 2 waits for `b`, and the drain has begun.
fn draining() -> Stage {
    let mut s = measured();
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(120.0);
    s.fits();
    s
}

#[test]
fn idle_resident_serves_now_and_others_after_swap() {
    let s = measured();
    assert_eq!((eta(&s, "a"), eta(&s, "b")), (Some(0.0), Some(14.0)));
    assert_eq!(eta(&s, "c"), Some(10.0), "which is taken to load as fast as others on average");
}

#[test]
fn next_model_waits_for_remaining_resident_quantum() {
    let mut s = measured();
    s.arrive(1, "a");
    s.arrive(2, "b");
    assert_eq!(eta(&s, "b"), Some(8.0 * 14.0 + 14.0));
    s.pass(3.0);
    assert_eq!(eta(&s, "b"), Some(8.0 * 14.0 + 14.0 - 3.0));
    assert_eq!(eta(&s, "a"), Some(0.0), "which serves");
}

#[test]
fn later_model_waits_for_turns_of_others() {
    let mut s = measured();
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.arrive(3, "c");
    // A turn is eight times its swap cost, the swap itself, and a drain.
    let (turn, turn_of_b, own_swap) = (9.0 * 10.0 + 30.0, 9.0 * 14.0 + 30.0, 10.0 + 30.0);
    let longest = turn + turn_of_b + own_swap + turn_of_b + own_swap;
    assert_eq!(eta(&s, "c"), Some(longest));
    s.pass(1.0);
    s.handle(Event::Tick);
    assert_eq!(eta(&s, "c"), Some(longest - 1.0));
}

#[test]
fn unwanted_model_waits_for_resident_and_wanted_models() {
    let mut s = measured();
    s.arrive(1, "a");
    assert_eq!(eta(&s, "c"), Some(8.0 * 10.0 + 10.0), "the resident's quantum and the swap");
    s.arrive(2, "b");
    let unwanted = eta(&s, "c");
    s.arrive(3, "c");
    assert_eq!(unwanted, eta(&s, "c"), "as if a request had just come");
}

#[test]
fn backlog_waits_from_its_last_turn() {
    let mut s = measured();
    s.demand(&[("c", 60, 1.0), ("b", 1, 0.0)]);
    s.finish_swap(10.0);
    assert_eq!(s.resident().as_deref(), Some("c"));
    while s.call.is_none() {
        s.pass(1.0);
    }
    s.finish_swap(10.0);
    assert_eq!(s.resident().as_deref(), Some("b"));
    (1..=4).for_each(|request| _ = s.arrive(request, "b"));
    let chat = (("a", 1, 0.0), RequestClass::Normal, 0);
    s.demand_of(NEW, &[(("c", 60, 500.0), RequestClass::Batch, 1), chat]);
    let longest = eta(&s, "c").expect("an estimate");
    assert!(longest > 200.0, "{longest} s, although its requests have waited that long before its turn");
}

#[test]
fn each_swap_step_lowers_only_targets_eta() {
    let mut s = draining();
    s.arrive(3, "c");
    s.arrive(4, "a");
    assert_eq!((s.state(), eta(&s, "b")), (SlotState::Draining, Some(30.0 + 4.0 + 10.0)));
    s.pass(10.0);
    assert_eq!(eta(&s, "b"), Some(20.0 + 4.0 + 10.0));
    let (turn_of_b, turn_of_c, own_swap) = (9.0 * 14.0 + 30.0, 9.0 * 10.0 + 30.0, 6.0 + 30.0);
    let longest = turn_of_b + turn_of_c + own_swap + turn_of_b + own_swap;
    assert_eq!(eta(&s, "a"), Some(longest), "it has to come back after the others");
    let far = |s: &Stage| assert!(eta(s, "c") > Some(100.0), "{:?}: {:?}", s.state(), eta(s, "c"));
    far(&s);
    s.pass(20.0);
    assert_eq!((s.state(), eta(&s, "b")), (SlotState::Severing, Some(4.0 + 10.0)));
    far(&s);
    s.drop_lease(1);
    s.pass(1.0);
    assert_eq!((s.state(), eta(&s, "b")), (SlotState::Evicting, Some(3.0 + 10.0)));
    far(&s);
    s.evicted();
    s.freed(true);
    s.pass(3.0);
    assert_eq!((s.state(), eta(&s, "b")), (SlotState::Loading, Some(7.0)));
    far(&s);
    s.not_loaded();
    assert_eq!((s.state(), eta(&s, "a")), (SlotState::Evicting, Some(1.0 + 2.0)), "b is ended, a comes back");
    s.killed();
    s.freed(true);
    s.pass(0.5);
    assert_eq!((s.state(), eta(&s, "a")), (SlotState::RollingBack, Some(1.5)));
    far(&s);
}

#[test]
fn stopping_slot_has_no_eta_unlike_empty_slot() {
    let mut s = measured();
    s.order(1, Order::Unload { model: "a".into(), now: false });
    s.finish_swap(0.0);
    assert_eq!((s.state(), eta(&s, "b")), (SlotState::Empty, Some(10.0)));
    s.handle(Event::Stop { timeout: secs(1.0) });
    assert_eq!(eta(&s, "b"), None);
}
