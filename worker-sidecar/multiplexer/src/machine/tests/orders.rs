//! Orders of operators, and the shutdown of the worker.

use modelrelay_protocol::message::SlotState;

use super::harness::{Call, NOTHING, Stage, config, secs};
use crate::config::SlotConfig;
use crate::event::{DownCause, Event, Found, Order, Outcome};
use crate::memory::Reading;

fn load(model: &str) -> Order {
    Order::Load(model.into())
}

fn unload(model: &str, now: bool) -> Order {
    Order::Unload { model: model.into(), now }
}

#[test]
fn ordered_load_is_answered_when_it_is_done() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.order(1, load("a")), ["order 1 done"]);
    assert_eq!(s.order(2, load("b")), ["preflight b"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "order 2 done");
    assert_eq!(s.resident(), Some("b".into()));
    assert_eq!(s.order(3, load("nobody")), ["order 3 failed: the slot has no such model"]);
}

#[test]
fn ordered_load_yields_to_requests_for_other_models() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    for request in 1..=5 {
        s.arrive(request, "a");
    }
    assert_eq!(s.order(1, load("b")), ["order 1 failed: requests for model a are waiting"]);
    s.cancel(5);
    assert_eq!(s.order(2, load("b")), ["preflight b"]);
    s.arrive(6, "c");
    assert_eq!(s.fits(), ["order 2 failed: requests for model c are waiting"]);
}

#[test]
fn failed_ordered_load_reports_reason() {
    let mut s = Stage::new(&["a"]);
    s.order(1, load("a"));
    s.fits();
    let failed = "order 1 failed: model a could not be loaded: its backend exited while loading; search the worker's log for c79493aa";
    assert_eq!(s.not_loaded(), [failed, "kill a"]);
    s.finish_swap(0.0);
    assert_eq!(s.order(2, load("a")), ["preflight a"], "who asks by hand does not wait for the back-off");
}

#[test]
fn ordered_load_joins_only_load_of_same_model() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "b");
    s.fits();
    assert_eq!(s.order(1, load("c")), ["order 1 failed: the slot is in the middle of a swap"]);
    assert_eq!(s.order(2, load("b")), NOTHING);
    assert!(s.finish_swap(1.0).contains(&"order 2 done".to_owned()));
}

#[test]
fn ordered_load_does_not_retarget_drain() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.order(1, load("c")), ["order 1 failed: the slot is in the middle of a swap"]);
}

#[test]
fn ordered_load_continues_after_swap_initiators_leave() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.order(1, load("b")), NOTHING);
    assert_eq!(s.cancel(2), NOTHING);
    assert_eq!(s.finish(1), ["evict a"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "order 1 done");
}

#[test]
fn ordered_load_is_not_retargeted_by_earlier_preflight() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    assert_eq!(s.fits(), ["close a"]);
    for request in 11..=20 {
        s.arrive(request, "c");
    }
    s.oversleep(5.0);
    assert_eq!(s.handle(Event::Tick), ["preflight c"], "which is wanted more by now");
    let superseded = s.op();
    assert_eq!(s.order(1, load("b")), NOTHING);
    assert_eq!(s.late(superseded, Outcome::Preflight(Ok(Reading::default()))), NOTHING);
    assert_eq!(s.finish(1), ["evict a"]);
    s.evicted();
    assert_eq!(s.freed(true), ["load b Cold"]);
}

#[test]
fn ordered_load_refused_meanwhile_is_not_executed() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.order(1, load("b"));
    let reload = |s: &mut Stage, models: &[&str]| s.handle(Event::ConfigChanged(Box::new(config(models))));
    assert_eq!(reload(&mut s, &["a"]), ["order 1 failed: the slot has no such model", "forget b"]);
    assert_eq!(reload(&mut s, &["a", "b"]), NOTHING);
    assert_eq!(s.fits(), NOTHING);
}

#[test]
fn later_order_replaces_earlier_one() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.order(1, load("b"));
    assert_eq!(s.order(2, load("c")), ["order 1 failed: another model was loaded in the meantime", "preflight c"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "order 2 done");
}

#[test]
fn order_interrupted_by_crash_reports_failure() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.order(1, load("b"));
    s.down(1, DownCause::Gone);
    assert_eq!(s.freed(true), ["order 1 failed: another model was loaded in the meantime"]);
}

#[test]
fn unload_drains_by_default_and_severs_if_immediate() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    assert_eq!(s.order(1, unload("a", false)), ["close a"]);
    assert_eq!(s.order(2, unload("a", true)), ["sever r1"]);
    assert_eq!(s.drop_lease(1), ["evict a"]);
    assert_eq!(s.finish_swap(0.0), ["memory of a", "order 1 done", "order 2 done"]);
    assert_eq!(s.state(), SlotState::Empty);
    assert_eq!(s.order(3, unload("a", false)), ["order 3 failed: the model is not loaded"]);
}

#[test]
fn unload_of_pinned_model_is_refused() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.order(1, Order::Pin("a".into()));
    assert_eq!(s.order(2, unload("a", true)), ["order 2 failed: model a is pinned; unpin it first"]);
    assert_eq!(s.order(3, load("b")), ["order 3 failed: model a is pinned; unpin it first"]);
}

#[test]
fn pin_during_preflight_stops_ordered_load() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.order(1, load("b"));
    s.order(2, Order::Pin("a".into()));
    assert_eq!(s.fits(), ["order 1 failed: model a is pinned; unpin it first"]);
}

#[test]
fn unloaded_model_is_loaded_again_on_demand() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.order(1, unload("a", false));
    s.arrive(1, "a");
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "lease r1 g2");
}

// k
#[test]
fn unload_during_load_waits_until_waiters_are_served() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    assert_eq!(s.order(1, unload("a", false)), NOTHING);
    assert_eq!(s.loaded(), ["open a", "lease r1 g1", "close a"]);
    assert_eq!(s.finish(1), ["evict a"]);
    assert_eq!(s.finish_swap(0.0), ["memory of a", "order 1 done"]);
}

// k
#[test]
fn immediate_unload_during_load_kills_backend() {
    let mut s = Stage::new(&["a"]);
    s.order(1, load("a"));
    s.fits();
    let op = s.op();
    assert_eq!(s.order(2, unload("a", true)), ["kill a"]);
    let late = Outcome::Loaded(Ok(()));
    assert_eq!(s.late(op, late), NOTHING, "its success is of no interest any more");
    assert_eq!(
        s.finish_swap(0.0),
        ["memory of a", "order 2 done", "order 1 failed: another model was loaded in the meantime"]
    );
}

#[test]
fn immediate_unload_ends_quarantine() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.not_evicted();
    s.not_killed();
    assert_eq!(s.state(), SlotState::Quarantined);
    let refused = "order 1 failed: the slot's memory could not be freed; unload with mode now kills the backend";
    assert_eq!(s.order(1, unload("a", false)), [refused]);
    assert_eq!(s.order(2, unload("a", true)), ["kill a"]);
    assert_eq!(s.finish_swap(0.0), ["memory of a", "order 2 done"]);
    assert_eq!(s.arrive(2, "b"), ["preflight b"]);
}

/// Just started: the models that are already loaded are still unknown.
fn starting(config: SlotConfig) -> Stage {
    let mut s = Stage::unstarted(config);
    s.handle(Event::Started);
    s
}

#[test]
fn ordered_load_waits_for_initial_probe() {
    let ordered = || {
        let mut s = starting(config(&["a", "b"]));
        assert_eq!(s.order(1, load("b")), NOTHING);
        s
    };
    let mut s = ordered();
    assert_eq!(s.answer_probe(Found::Nothing), ["preflight b"]);
    assert_eq!(s.finish_swap(1.0), ["load b Cold", "open b", "order 1 done"]);

    assert_eq!(ordered().answer_probe(Found::Serving("b".into())), ["open b", "order 1 done"]);

    let mut s = ordered();
    assert_eq!(s.answer_probe(Found::Serving("a".into())), ["open a", "preflight b"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "order 1 done");

    let mut s = ordered();
    for _ in 0..2 {
        assert_eq!(s.answer_probe(Found::Silence), NOTHING);
        assert_eq!(s.pass(1.0), NOTHING);
    }
    assert_eq!(s.answer_probe(Found::Silence), ["preflight b"]);
}

#[test]
fn ordered_unload_waits_for_initial_probe() {
    let ordered = || {
        let mut s = starting(SlotConfig { default: Some("a".into()), ..config(&["a", "b"]) });
        assert_eq!(s.order(1, unload("a", false)), NOTHING);
        s
    };
    let mut s = ordered();
    assert_eq!(s.answer_probe(Found::Serving("a".into())), ["open a", "close a", "evict a"]);
    assert_eq!(s.finish_swap(0.0), ["memory of a", "order 1 done"], "and the default stays away");
    assert_eq!(s.pass(100.0), NOTHING);

    let not_loaded = "order 1 failed: the model is not loaded";
    assert_eq!(ordered().answer_probe(Found::Serving("b".into())), ["open b", not_loaded]);
    assert_eq!(ordered().answer_probe(Found::Nothing), [not_loaded, "preflight a"]);
}

#[test]
fn last_order_during_start_overrides_default() {
    let mut s = starting(SlotConfig { default: Some("a".into()), ..config(&["a", "b", "c"]) });
    s.order(1, load("b"));
    assert_eq!(s.order(2, load("c")), ["order 1 failed: another model was loaded in the meantime"]);
    assert_eq!(s.answer_probe(Found::Nothing), ["preflight c"]);
    assert_eq!(s.finish_swap(1.0), ["load c Cold", "open c", "order 2 done"]);
}

#[test]
fn orders_during_start_fail_if_unknown_or_ending() {
    let mut s = starting(config(&["a", "b"]));
    assert_eq!(s.order(1, load("nobody")), ["order 1 failed: the slot has no such model"]);
    assert_eq!(s.order(2, unload("nobody", false)), ["order 2 failed: the slot has no such model"]);
    s.order(3, load("b"));
    assert_eq!(s.order(4, unload("a", true)), NOTHING);
    s.handle(Event::ConfigChanged(Box::new(config(&["a"]))));
    let ended = s.handle(Event::Stop { timeout: secs(1.0) });
    assert_eq!(ended, ["order 4 failed: the worker is shutting down", "stopped"]);
}

#[test]
fn ordered_load_continues_when_lost_backend_returns() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.down(1, DownCause::Gone);
    s.freed(true);
    assert_eq!(s.order(1, load("b")), ["preflight b"]);
    s.finds = Some(Found::Serving("a".into()));
    assert_eq!(s.pass(5.0), ["open a", "preflight b"]);
    s.finds = None;
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "order 1 done");
}

#[test]
fn stop_drains_running_requests_and_returns_waiting_ones() {
    let stop = || Event::Stop { timeout: secs(20.0) };
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=5 {
        s.arrive(request, "a");
    }
    s.arrive(6, "b");
    assert_eq!(s.handle(stop()), ["close a", "fail r5: draining", "fail r6: draining"]);
    assert_eq!(s.arrive(7, "a"), ["fail r7: draining"]);
    for request in 1..=3 {
        assert_eq!(s.finish(request), NOTHING);
    }
    assert_eq!(s.pass(19.9), NOTHING);
    assert_eq!(s.pass(0.1), ["cancel r4: Shutdown", "stopped"]);
    assert_eq!(s.handle(stop()), NOTHING);
    assert_eq!(s.drop_lease(4), NOTHING);
}

/// A slot in each of its states, with request 2 waiting for `b` if requests can wait in that state.
fn in_each_state() -> Vec<(SlotState, Stage)> {
    let draining = || {
        let mut s = Stage::serving("a", &["a", "b"]);
        s.arrive(1, "a");
        s.arrive(2, "b");
        s.pass(6.0);
        s.fits();
        s
    };
    let loading = || {
        let mut s = draining();
        s.finish(1);
        s.evicted();
        s.freed(true);
        s
    };
    let mut severing = draining();
    severing.pass(30.0);
    let mut evicting = draining();
    evicting.finish(1);
    let mut rolling_back = loading();
    rolling_back.not_loaded();
    rolling_back.killed();
    rolling_back.freed(true);
    rolling_back.arrive(2, "a");
    let mut backoff = loading();
    backoff.not_loaded();
    backoff.killed();
    backoff.freed(true);
    backoff.not_loaded();
    backoff.killed();
    backoff.freed(true);
    let mut quarantined = draining();
    quarantined.finish(1);
    quarantined.not_evicted();
    quarantined.not_killed();
    vec![
        (SlotState::Empty, Stage::new(&["a", "b"])),
        (SlotState::Ready, Stage::serving("a", &["a", "b"])),
        (SlotState::Draining, draining()),
        (SlotState::Severing, severing),
        (SlotState::Evicting, evicting),
        (SlotState::Loading, loading()),
        (SlotState::RollingBack, rolling_back),
        (SlotState::Backoff, backoff),
        (SlotState::Quarantined, quarantined),
    ]
}

#[test]
fn unload_during_swap_applies_to_current_resident() {
    for (state, mut s) in in_each_state() {
        let (there, not_there) = match state {
            SlotState::Draining | SlotState::Severing | SlotState::Evicting | SlotState::RollingBack => ("a", "b"),
            SlotState::Loading => ("b", "a"),
            SlotState::Empty | SlotState::Ready | SlotState::Backoff | SlotState::Quarantined | SlotState::Stopping => {
                continue;
            }
        };
        assert_eq!(s.order(1, unload(not_there, false)), ["order 1 failed: the model is not loaded"], "{state:?}");
        assert_eq!(s.order(2, unload(there, false)), NOTHING, "{state:?}");
    }
}

#[test]
fn stop_succeeds_from_every_state_without_leftover_waiters() {
    for (state, mut s) in in_each_state() {
        assert_eq!(s.state(), state);
        let op = s.call;
        let mut lines = s.handle(Event::Stop { timeout: secs(20.0) });
        if let Some((Call::Load, op)) = op {
            lines.extend(s.late(op, Outcome::Loaded(Ok(()))));
        }
        lines.extend(s.pass(20.0));
        assert_eq!(lines.iter().filter(|line| *line == "stopped").count(), 1, "{state:?}: {lines:?}");
        let told = lines.iter().filter(|line| line.starts_with("fail r2: draining")).count();
        let waited =
            [SlotState::Draining, SlotState::Severing, SlotState::Evicting, SlotState::Loading, SlotState::RollingBack];
        assert_eq!(told, usize::from(waited.contains(&state)), "{state:?}: {lines:?}");
        assert_eq!(s.pass(10_000.0), NOTHING, "{state:?}");
        assert_eq!(s.order(1, load("a")), ["order 1 failed: the worker is shutting down"]);
    }
}
