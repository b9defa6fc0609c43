//! A new configuration while the slot is working.

use modelrelay_protocol::message::SlotState;

use super::harness::{Call, NOTHING, Stage, config};
use crate::config::ModelConfig;
use crate::event::{Event, Order, Outcome};
use crate::memory::Reading;

#[test]
fn removed_resident_drains_and_unloads() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=5 {
        s.arrive(request, "a");
    }
    let lines = s.handle(Event::ConfigChanged(Box::new(config(&["b", "c"]))));
    assert_eq!(lines, ["fail r5: model_not_found", "close a"]);
    assert_eq!(s.arrive(6, "a"), ["fail r6: model_not_found"]);
    for request in 1..=3 {
        assert_eq!(s.finish(request), NOTHING);
    }
    assert_eq!(s.finish(4), ["evict a"]);
    s.finish_swap(0.0);
    let known: Vec<_> = s.slot().models.into_iter().map(|model| model.id).collect();
    assert_eq!(known, ["b", "c"]);
    assert_eq!(s.arrive(7, "c"), ["preflight c"]);
}

#[test]
fn removed_target_is_not_loaded() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(
        s.handle(Event::ConfigChanged(Box::new(config(&["a"])))),
        ["fail r2: model_not_found", "open a", "forget b"]
    );

    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.handle(Event::ConfigChanged(Box::new(config(&["a"]))));
    assert_eq!(s.finish_swap(1.0), ["memory of a", "forget b"]);
    assert_eq!(s.state(), SlotState::Empty);

    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    s.handle(Event::ConfigChanged(Box::new(config(&["a"]))));
    assert_eq!(s.loaded(), ["evict b"], "no request is admitted");
}

#[test]
fn removed_former_resident_is_not_restored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    s.not_loaded();
    s.handle(Event::ConfigChanged(Box::new(config(&["b"]))));
    s.killed();
    assert_eq!(s.freed(true), ["forget a"]);
    assert_eq!(s.state(), SlotState::Backoff);
}

#[test]
fn removed_idle_resident_is_unloaded_and_discarded() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.handle(Event::ConfigChanged(Box::new(config(&["b"])))), ["close a", "evict a"]);
    assert_eq!(s.put_to_sleep(), ["memory of a"]);
    assert_eq!(s.freed(true), ["discard a"]);
}

#[test]
fn removed_sleeper_is_not_killed_while_waking() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.put_to_sleep();
    s.finish_swap(1.0);
    s.finish(1);
    s.arrive(2, "a");
    s.fits();
    s.evicted();
    assert_eq!(s.freed(true), ["load a Wake"]);
    assert_eq!(s.handle(Event::ConfigChanged(Box::new(config(&["b"])))), ["fail r2: model_not_found"]);
    assert_eq!(s.loaded(), ["evict a"]);
}

#[test]
fn changed_sleeping_model_is_discarded_and_loaded_cold() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.put_to_sleep();
    s.finish_swap(1.0);
    assert_eq!(s.handle(Event::ModelChanged { model: "a".into() }), ["discard a"]);
    s.finish(1);
    s.arrive(2, "a");
    s.fits();
    s.evicted();
    assert_eq!(s.freed(true), ["load a Cold"]);
}

#[test]
fn changed_model_that_serves_is_not_disturbed() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    assert_eq!(s.handle(Event::ModelChanged { model: "a".into() }), NOTHING);
    assert_eq!(s.arrive(2, "a"), ["lease r2 g1"]);
}

#[test]
fn changed_model_that_failed_is_tried_at_once() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.answer(Call::Preflight, Outcome::Preflight(Err("no".into())));
    assert_eq!(s.arrive(2, "b").len(), 1, "it fails at once");
    s.handle(Event::ModelChanged { model: "b".into() });
    assert_eq!(s.arrive(3, "b"), ["preflight b"]);
}

#[test]
fn changed_model_size_is_measured_again() {
    let reading = |free, held| Reading { free: Some(free), held: Some(held), ..Reading::default() };
    let mut s = Stage::serving("a", &["a", "b"]);
    s.handle(Event::ModelChanged { model: "a".into() });
    s.arrive(1, "b");
    s.measured(reading(0, 100));
    s.evicted();
    s.finish_swap(0.0);
    s.finish(1);
    s.arrive(2, "a");
    assert_eq!(s.measured(reading(10, 50)), ["close b", "evict b"], "its former size does not fit");
}

#[test]
fn never_loaded_model_is_forgotten_at_once() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.handle(Event::ConfigChanged(Box::new(config(&["a"])))), ["forget b"]);
}

#[test]
fn new_capacity_and_models_apply_at_once() {
    let mut s = Stage::serving("a", &["a"]);
    for request in 1..=5 {
        s.arrive(request, "a");
    }
    let mut more = config(&["a", "b"]);
    more.models[0].capacity = 5;
    assert_eq!(s.handle(Event::ConfigChanged(Box::new(more))), ["lease r5 g1"]);
    s.arrive(6, "b");
    assert_eq!(s.pass(6.0), ["preflight b"]);
}

#[test]
fn ordered_pin_survives_reload_without_pin_setting() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.order(1, Order::Pin("a".into()));
    s.handle(Event::ConfigChanged(Box::new(config(&["a", "b"]))));
    assert!(s.slot().models[0].pinned);
    let mut pinned = config(&["a", "b"]);
    pinned.models[1] = ModelConfig { pin: true, ..ModelConfig::new("b", 4) };
    s.handle(Event::ConfigChanged(Box::new(pinned)));
    s.handle(Event::ConfigChanged(Box::new(config(&["a", "b"]))));
    assert!(s.slot().models[0].pinned && !s.slot().models[1].pinned);
}

#[test]
fn removed_sleeper_is_discarded() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.put_to_sleep();
    s.finish_swap(1.0);
    assert_eq!(s.handle(Event::ConfigChanged(Box::new(config(&["b"])))), ["discard a"]);
}
