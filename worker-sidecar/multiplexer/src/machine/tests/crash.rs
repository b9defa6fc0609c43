//! Backends that die, hang, or are swapped by a third party.

use modelrelay_protocol::message::SlotState;

use super::harness::{NOTHING, OLD, Stage, config};
use crate::config::{Knobs, SlotConfig};
use crate::event::{DownCause, Event, Found};

#[test]
fn resident_dying_idle_is_reloaded_for_next_request() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(9, "a");
    s.finish(9);
    assert_eq!(s.down(1, DownCause::Gone), ["close a", "memory of a"]);
    assert_eq!(s.freed(true), NOTHING);
    assert_eq!(s.state(), SlotState::Empty);
    assert_eq!(s.arrive(1, "a"), ["preflight a"]);
    assert_eq!(s.finish_swap(1.0), ["load a Cold", "open a", "lease r1 g2"]);
}

#[test]
fn resident_dying_before_first_response_backs_off() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.down(1, DownCause::Gone), ["close a", "memory of a"]);
    assert_eq!(s.freed(true), NOTHING);
    assert_eq!(s.state(), SlotState::Backoff);
    assert_eq!(s.arrive(1, "a"), ["fail r1: backend_unavailable"]);
    s.pass(2.0);
    assert_eq!(s.arrive(2, "a"), ["preflight a"]);
}

#[test]
fn dying_resident_ends_leases_and_reloads_for_waiters() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(9, "a");
    s.finish(9);
    for request in 1..=5 {
        s.arrive(request, "a");
    }
    assert_eq!(
        s.down(1, DownCause::Gone),
        [
            "close a",
            "cancel r1: BackendLost",
            "cancel r2: BackendLost",
            "cancel r3: BackendLost",
            "cancel r4: BackendLost",
            "memory of a"
        ]
    );
    assert_eq!(s.drop_lease(1), NOTHING);
    assert_eq!(s.freed(true), ["preflight a"]);
    assert_eq!(s.finish_swap(1.0), ["load a Cold", "open a", "lease r5 g2"]);
}

#[test]
fn resident_dying_on_first_requests_backs_off() {
    let mut s = Stage::serving("a", &["a", "b"]);
    for request in 1..=5 {
        s.arrive(request, "a");
    }
    let lines = s.down(1, DownCause::Gone);
    assert!(lines.contains(&"fail r5: backend_unavailable".to_owned()), "{lines:?}");
    s.freed(true);
    assert_eq!(s.arrive(6, "a"), ["fail r6: backend_unavailable"]);
    s.pass(2.0);
    assert_eq!(s.arrive(7, "a"), ["preflight a"], "but tried again after its back-off");
}

#[test]
fn hanging_backend_is_killed_before_memory_is_reused() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.down(1, DownCause::Unresponsive), ["close a", "kill a"]);
    s.arrive(1, "b");
    assert_eq!(s.killed(), ["memory of a"]);
    assert_eq!(s.freed(true), ["preflight b"]);
}

#[test]
fn resident_dying_during_drain_skips_eviction() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.down(1, DownCause::Gone), ["cancel r1: BackendLost", "memory of a"]);
    assert_eq!(s.freed(true), ["load b Cold"]);
    assert_eq!(s.loaded(), ["open b", "lease r2 g2"]);
}

#[test]
fn resident_dying_while_severed_cancels_leases_once() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.pass(30.0), ["sever r1"]);
    assert_eq!(s.down(1, DownCause::Gone), ["memory of a"]);
    assert_eq!(s.freed(true), ["load b Cold"]);
}

#[test]
fn failed_load_does_not_restore_dead_resident() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    s.down(1, DownCause::Gone);
    s.freed(true);
    s.not_loaded();
    s.killed();
    assert_eq!(s.freed(true), NOTHING);
    assert_eq!(s.state(), SlotState::Backoff);
}

#[test]
fn exit_of_earlier_generation_is_ignored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.finish_swap(1.0);
    assert_eq!(s.down(1, DownCause::Gone), NOTHING);
    assert_eq!(s.state(), SlotState::Ready);
    s.finish(1);
    s.arrive(2, "a");
    s.fits();
    assert_eq!(s.down(2, DownCause::Gone), NOTHING, "it is being unloaded anyway");
}

#[test]
fn restarted_empty_backend_is_detected_within_five_seconds() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.finds = Some(Found::Nothing);
    assert_eq!(s.pass(5.0), ["close a", "kill a"], "what is left of it is ended before its memory is used");
    assert_eq!(s.killed(), ["memory of a"]);
}

#[test]
fn externally_loaded_model_becomes_resident() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.finds = Some(Found::Serving("b".into()));
    assert_eq!(s.pass(5.0), ["cancel r1: BackendLost", "close a", "open b", "lease r2 g2"]);
    s.finds = Some(Found::Serving("stranger".into()));
    assert_eq!(s.pass(5.0), ["close b", "cancel r2: BackendLost", "kill b"], "an unknown model is ended");
}

#[test]
fn model_loaded_before_start_becomes_resident() {
    let mut s = Stage::unstarted(SlotConfig { default: Some("a".into()), ..config(&["a", "b"]) });
    s.handle(Event::Started);
    assert_eq!(s.arrive(1, "b"), NOTHING, "the backend is probed first");
    assert_eq!(s.answer_probe(Found::Serving("b".into())), ["open b", "lease r1 g1"]);
}

#[test]
fn refused_connection_triggers_immediate_probe() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.finds = Some(Found::Nothing);
    assert_eq!(s.handle(Event::ConnectFailed { generation: 7 }), NOTHING, "not of this generation");
    assert_eq!(s.handle(Event::ConnectFailed { generation: 1 }), ["close a", "kill a"]);
}

#[test]
fn backend_found_after_refused_connection_is_announced() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.finds = Some(Found::Serving("a".into()));
    assert_eq!(s.handle(Event::ConnectFailed { generation: 1 }), ["a still serves"]);
    assert_eq!(s.pass(20.0), NOTHING, "it was not missed again");
    s.finds = Some(Found::Silence);
    assert_eq!(s.handle(Event::ConnectFailed { generation: 1 }), NOTHING);
    s.finds = Some(Found::Serving("a".into()));
    assert_eq!(s.pass(5.0), ["a still serves"]);
}

#[test]
fn third_silent_probe_marks_resident_dead() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.finds = Some(Found::Silence);
    assert_eq!(s.pass(10.0), NOTHING);
    s.finds = Some(Found::Serving("a".into()));
    s.pass(5.0);
    s.finds = Some(Found::Silence);
    assert_eq!(s.pass(10.0), NOTHING);
    assert_eq!(s.pass(5.0), ["close a", "kill a"]);
}

#[test]
fn hanging_probes_are_silence_until_third_timeout() {
    let mut s = Stage::unstarted(config(&["a"]));
    s.handle(Event::Started);
    s.arrive(1, "a");
    // Three probes of 20 s, in which four servers may each use their full time, and a second between them.
    assert_eq!(s.pass(61.9), NOTHING);
    assert_eq!(s.pass(0.1), ["preflight a"]);
}

#[test]
fn silence_at_start_does_not_mean_empty_slot() {
    let mut s = Stage::unstarted(config(&["a"]));
    s.handle(Event::Started);
    s.arrive(1, "a");
    assert_eq!(s.answer_probe(Found::Silence), NOTHING);
    assert_eq!(s.pass(1.0), NOTHING);
    assert_eq!(s.answer_probe(Found::Serving("a".into())), ["open a", "lease r1 g1"]);

    let mut s = Stage::unstarted(config(&["a"]));
    s.handle(Event::Started);
    s.arrive(1, "a");
    for _ in 0..2 {
        assert_eq!(s.answer_probe(Found::Silence), NOTHING);
        s.pass(1.0);
    }
    assert_eq!(s.answer_probe(Found::Silence), ["preflight a"], "but probing ends");
}

#[test]
fn link_lost_during_swap_ends_its_requests() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.handle(Event::RelayLost { relay: OLD }), ["cancel r1: RelayLost", "open a"], "and with it the reason");
    assert_eq!(s.drop_lease(1), NOTHING);

    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    assert_eq!(s.handle(Event::RelayLost { relay: OLD }), NOTHING);
    s.freed(true);
    assert_eq!(s.loaded(), ["open b"], "the load completes for relays that reconnect");
}

#[test]
fn drain_waits_for_connections_of_lost_link() {
    let knobs = Knobs { drain_timeout: super::harness::secs(20.0), ..Knobs::default() };
    let mut s = Stage::serving_with("a", SlotConfig { knobs, ..config(&["a", "b"]) });
    s.arrive(1, "a");
    s.demand(&[("b", 1, 0.0)]);
    s.pass(6.0);
    s.fits();
    assert_eq!(s.handle(Event::RelayLost { relay: OLD }), ["cancel r1: RelayLost"]);
    assert_eq!(s.state(), SlotState::Draining);
    assert_eq!(s.drop_lease(1), ["evict a"]);
}

#[test]
fn lost_resident_is_adopted_when_it_returns() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.finish(1);
    s.down(1, DownCause::Gone);
    s.freed(true);
    assert_eq!(s.state(), SlotState::Empty);
    s.pass(5.0);
    assert_eq!(s.answer_probe(Found::Nothing), NOTHING);
    s.pass(5.0);
    assert_eq!(s.answer_probe(Found::Serving("a".into())), ["open a"]);
    assert_eq!(s.arrive(2, "a"), ["lease r2 g2"]);
}

#[test]
fn returned_resident_is_unloaded_for_pending_model() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.finish(1);
    s.down(1, DownCause::Gone);
    s.freed(true);
    s.pass(5.0);
    assert_eq!(s.arrive(2, "b"), ["preflight b"]);
    assert_eq!(s.answer_probe(Found::Serving("a".into())), ["open a", "preflight b"]);
    assert_eq!(s.fits(), ["close a", "evict a"]);
}

#[test]
fn probe_begun_before_resident_died_is_ignored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.finish(1);
    s.handle(Event::ConnectFailed { generation: 1 });
    s.down(1, DownCause::Gone);
    s.freed(true);
    assert_eq!(s.answer_probe(Found::Serving("a".into())), NOTHING);
    assert_eq!(s.state(), SlotState::Empty);
    s.pass(5.0);
    assert_eq!(s.answer_probe(Found::Serving("a".into())), ["open a"], "the backend is probed again");
}

#[test]
fn probe_begun_before_unload_does_not_restore_model() {
    let mut config = config(&["a", "b"]);
    config.models[0].idle_ttl = Some(std::time::Duration::from_secs(11));
    let mut s = Stage::serving_with("a", config);
    s.handle(Event::ConnectFailed { generation: 1 });
    s.oversleep(1.0);
    assert_eq!(s.handle(Event::Tick), ["close a", "evict a"]);
    s.finish_swap(0.0);
    assert_eq!(s.answer_probe(Found::Serving("a".into())), NOTHING);
    assert_eq!(s.state(), SlotState::Empty);
}

#[test]
fn unknown_model_at_start_is_not_adopted() {
    let mut s = Stage::unstarted(config(&["a"]));
    s.handle(Event::Started);
    s.arrive(1, "a");
    assert_eq!(s.answer_probe(Found::Serving("stranger".into())), ["preflight a"]);
    assert_eq!(s.finish_swap(1.0), ["load a Cold", "open a", "lease r1 g1"]);
}

#[test]
fn deliberately_emptied_slot_stops_probing() {
    let mut config = config(&["a", "b"]);
    config.models[0].idle_ttl = Some(std::time::Duration::from_secs(10));
    let mut s = Stage::serving_with("a", config);
    s.evicted();
    s.freed(true);
    s.finds = Some(Found::Serving("a".into()));
    s.pass(1_000.0);
    assert_eq!(s.state(), SlotState::Empty);
}
