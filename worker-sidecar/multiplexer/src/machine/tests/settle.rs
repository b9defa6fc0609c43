//! The step in which a model becomes ready.

use super::harness::{NEW, NOTHING, Stage, config};
use crate::config::{ModelConfig, SlotConfig};
use crate::effect::SlotEvent;

#[test]
fn request_that_caused_load_is_served_first() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "b");
    s.fits();
    for request in 2..40 {
        s.arrive(request, "c");
    }
    s.evicted();
    s.freed(true);
    s.pass(30.0);
    assert_eq!(s.loaded(), ["open b", "lease r1 g2"], "in one step, whatever waits for c");
}

#[test]
fn all_waiters_for_model_precede_next_swap() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    for request in 2..=8 {
        s.arrive(request, "b");
        s.arrive(request + 10, "a");
    }
    s.evicted();
    s.freed(true);
    assert_eq!(s.loaded(), ["open b", "lease r1 g2", "lease r2 g2", "lease r3 g2", "lease r4 g2"]);
    for request in 1..=4 {
        assert_eq!(s.finish(request), [format!("lease r{} g2", request + 4)]);
    }
    for request in 5..=7 {
        assert_eq!(s.finish(request), NOTHING);
    }
    assert_eq!(s.finish(8), ["preflight a"]);
}

#[test]
fn requests_are_served_in_first_arrival_order() {
    let mut s = Stage::new(&["a"]);
    s.pass(50.0);
    s.arrive(5, "a");
    let at = s.at(s.now - super::harness::secs(20.0));
    let back = crate::event::Arrival {
        relay: super::harness::OLD,
        request: crate::event::RequestKey(6),
        model: "a".into(),
        at,
        class: crate::event::RequestClass::Normal,
    };
    s.handle(crate::event::Event::Arrived(back));
    assert_eq!(s.finish_swap(1.0), ["load a Cold", "open a", "lease r6 g1", "lease r5 g1"]);
}

#[test]
fn two_waiting_models_are_both_served() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(1.0);
    s.arrive(3, "c");
    s.finish(1);
    s.fits();
    assert_eq!(s.finish_swap(2.0).last().unwrap(), "lease r2 g2");
    s.finish(2);
    assert_eq!(s.finish_swap(2.0).last().unwrap(), "lease r3 g3");
    assert_eq!(s.swaps().len(), 2);
}

#[test]
fn swap_whose_queue_has_become_empty_is_skipped() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "b");
    s.cancel(1);
    assert_eq!(s.fits(), NOTHING, "no request waits for b any more");
    s.arrive(2, "b");
    s.fits();
    s.arrive(3, "a");
    s.evicted();
    s.freed(true);
    s.loaded();
    s.finish(2);
    s.cancel(3);
    s.finish_swap(1.0);
    assert_eq!(s.resident(), Some("b".into()), "nor did the slot swap back without a request");
}

#[test]
fn further_requests_for_load_are_reported_as_coalesced() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    s.arrive(2, "a");
    s.arrive_from(NEW, 3, "a");
    let coalesced = s.news.iter().filter(|news| matches!(news, SlotEvent::Coalesced { .. }));
    assert_eq!(coalesced.count(), 2);
}

#[test]
fn capacity_is_each_models_own() {
    let models = vec![ModelConfig::new("a", 1), ModelConfig::new("b", 2)];
    let mut s = Stage::with(SlotConfig { models, ..config(&[]) });
    for request in 1..=3 {
        s.arrive(request, "b");
        s.arrive(request + 10, "a");
    }
    let lines = s.finish_swap(1.0);
    assert_eq!(lines[1..], ["open b", "lease r1 g1", "lease r2 g1"]);
    for request in 1..=3 {
        s.finish(request);
    }
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "lease r11 g2");
}
