//! The races that no other file tests. Tested elsewhere: a (settle), b, c (lease), d, e, o (cancel), g, n, p (crash), i
//! (policy), k, m (orders), l (swap).

use modelrelay_protocol::message::SlotState;

use super::harness::{NEW, NOTHING, Stage};
use crate::event::{Event, Left, Outcome};

// a
#[test]
fn lease_is_counted_before_any_swap_begins() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    assert_eq!(s.arrive(2, "a"), ["lease r2 g1"], "the lease exists before any report");
    assert_eq!(s.fits(), NOTHING, "so the swap that was about to begin sees it");
    assert_eq!(s.state(), SlotState::Ready);
}

// f
#[test]
fn load_completing_at_deadline_before_timer_succeeds() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    s.pass(299.0);
    s.cancel(1);
    s.oversleep(301.5);
    assert_eq!(s.loaded(), ["open a"]);
}

// f
#[test]
fn late_load_completion_is_ignored_during_kill() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    let op = s.op();
    s.cancel(1);
    assert_eq!(s.pass(600.0), ["kill b"]);
    assert_eq!(s.late(op, Outcome::Loaded(Ok(()))), NOTHING);
    s.killed();
    assert_eq!(s.freed(true), ["load a Cold"]);
    assert_eq!(s.loaded(), ["open a"]);
}

// f
#[test]
fn late_load_completion_is_ignored_after_kill() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    let op = s.op();
    s.cancel(1);
    assert_eq!(s.pass(600.0), ["kill b"], "whatever becomes of the load, its backend does not stay");
    s.finish_swap(1.0);
    assert_eq!(s.resident(), Some("a".into()));
    assert_eq!(s.late(op, Outcome::Loaded(Ok(()))), NOTHING);
    assert_eq!(s.arrive(2, "a"), ["lease r2 g2"], "and the resident is not touched");
}

// f
#[test]
fn late_eviction_completion_is_ignored_during_kill() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    let op = s.op();
    assert_eq!(s.pass(60.0), ["kill a"]);
    assert_eq!(s.late(op, Outcome::Evicted(Ok(Left::Asleep))), NOTHING);
    assert_eq!(s.killed(), ["memory of a"]);
    assert_eq!(s.late(op, Outcome::Evicted(Err("no".into()))), NOTHING);
    assert_eq!(s.freed(true), ["load b Cold"]);
}

// h
#[test]
fn exit_events_do_not_fail_running_load() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    assert_eq!(s.down(1, crate::event::DownCause::Gone), NOTHING);
    assert_eq!(s.down(2, crate::event::DownCause::Gone), NOTHING);
    assert_eq!(s.not_loaded(), ["fail r1: backend_unavailable", "kill b"]);
}

// j
#[test]
fn two_targets_load_one_after_another() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    assert_eq!(s.arrive(1, "b"), ["preflight b"]);
    assert_eq!(s.arrive(2, "c"), NOTHING, "one question at a time");
    assert_eq!(s.fits(), ["close a", "evict a"]);
    assert_eq!(s.finish_swap(1.0), ["memory of a", "load b Cold", "open b", "lease r1 g2"]);
    assert_eq!(s.finish(1), ["preflight c"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "lease r2 g3");
}

#[test]
fn superseded_call_results_are_ignored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    let preflight = s.op();
    s.fits();
    let evict = s.op();
    s.evicted();
    s.freed(true);
    let load = s.op();
    for (op, outcome) in [
        (preflight, Outcome::Preflight(Ok(crate::memory::Reading::default()))),
        (evict, Outcome::Evicted(Err("no".into()))),
        (evict, Outcome::ForceEvicted(Err("no".into()))),
        (evict, Outcome::MemoryChecked { freed: false }),
        (load, Outcome::MemoryChecked { freed: false }),
        (evict, Outcome::Loaded(Ok(()))),
    ] {
        assert_eq!(s.late(op, outcome), NOTHING);
    }
    assert_eq!(s.loaded(), ["open b", "lease r1 g2"]);
    assert_eq!(s.late(load, Outcome::Loaded(Err(crate::error::LoadFailure::DiedAtOnce))), NOTHING);
}

// p
#[test]
fn probe_of_former_resident_is_ignored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.handle(Event::ConnectFailed { generation: 1 });
    s.arrive(1, "b");
    s.finish_swap(1.0);
    assert_eq!(s.answer_probe(crate::event::Found::Serving("a".into())), NOTHING);
    assert_eq!(s.resident(), Some("b".into()));
}

// p
#[test]
fn relay_joining_during_swap_is_granted_at_opening() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.handle(Event::RelayLost { relay: NEW });
    s.grants.retain(|(relay, _), _| *relay != NEW);
    s.handle(Event::RelayJoined { relay: NEW, kind: crate::event::LinkKind::Granted });
    assert_eq!(s.granted("a"), None);
    s.finish_swap(1.0);
    assert_eq!(s.granted("b"), Some(3));
}

#[test]
fn clocks_that_go_back_do_no_harm() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    let before = s.now;
    s.now = super::harness::secs(0.0);
    s.arrive(2, "b");
    s.finish(1);
    s.now = before;
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "lease r2 g2");
}
