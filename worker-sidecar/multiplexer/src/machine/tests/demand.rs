//! Requests that wait at relays: they are treated as waiting, and arrive when the gate opens.

use super::harness::{NEW, NOTHING, Stage, secs};
use crate::event::{Event, LinkKind, RelayKey, RequestClass};

const OTHER: RelayKey = RelayKey(2);

#[test]
fn demand_is_granted_as_its_gate_opens() {
    let mut s = Stage::new(&["a", "b"]);
    assert_eq!(s.demand(&[("a", 3, 1.0)]), ["preflight a"]);
    s.fits();
    assert_eq!(s.granted("a"), None);
    assert_eq!(s.loaded(), ["open a"]);
    assert_eq!(s.granted("a"), Some(4));
    assert_eq!(s.granted("b"), None);
    for request in 1..=3 {
        assert_eq!(s.arrive_from(NEW, request, "a"), [format!("lease r{request} g1")]);
    }
}

#[test]
fn closed_gate_revokes_model_grant() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.granted("a"), Some(4));
    s.arrive(1, "b");
    assert_eq!(s.fits(), ["close a", "evict a"]);
    assert_eq!(s.granted("a"), None);
    s.finish_swap(1.0);
    assert_eq!((s.granted("a"), s.granted("b")), (None, Some(3)));
}

#[test]
fn request_crossing_closing_gate_returns_to_relay_demand() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    assert_eq!(s.arrive_from(NEW, 2, "a"), ["fail r2: at_capacity"]);
    let models = s.slot().models.into_iter().map(|model| (model.id, model.wanted)).collect::<Vec<_>>();
    assert_eq!((s.slot().wanted, models), (2, vec![("a".to_owned(), true), ("b".to_owned(), true)]));
    s.finish_swap(1.0);
    s.finish(1);
    assert_eq!(s.finish_swap(1.0), ["close b", "evict b", "memory of b", "load a Cold", "open a"]);
}

#[test]
fn demand_applies_until_its_requests_arrive() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.demand(&[("b", 2, 0.0)]);
    s.finish_swap(1.0);
    s.arrive(1, "a");
    assert_eq!(s.call, None, "b is not idle: two requests are on their way");
    s.arrive_from(NEW, 2, "b");
    s.finish(2);
    assert_eq!(s.call, None);
    s.arrive_from(NEW, 3, "b");
    assert_eq!(s.finish(3), ["preflight a"]);
}

#[test]
fn demand_without_requests_lapses_after_one_second() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.demand(&[("b", 2, 0.0)]);
    s.finish_swap(1.0);
    s.arrive(1, "a");
    assert_eq!(s.pass(0.9), NOTHING);
    assert_eq!(s.pass(0.1), ["preflight a"]);
    assert!(s.machine.requests().all(|(model, requests)| &**model == "a" || requests.waiting == 0));
}

#[test]
fn lapsed_relay_demand_resumes_with_next_message() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.demand(&[("b", 2, 0.0)]);
    s.finish_swap(1.0);
    s.arrive(1, "a");
    assert!(!s.machine.is_listening());
    s.pass(1.0);
    assert!(s.machine.is_listening());
    s.finish_swap(1.0);
    assert_eq!((s.resident(), s.slot().wanted), (Some("a".into()), 0));
    assert_eq!(s.arrive_from(NEW, 2, "a"), ["lease r2 g3"]);
    assert_eq!(s.slot().wanted, 1);
}

#[test]
fn demand_ages_without_new_reports() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.demand(&[("b", 1, 3.0)]);
    s.pass(1.0);
    for request in 2..=4 {
        s.arrive(request, "c");
    }
    s.pass(1.0);
    assert_eq!(s.finish(1), ["preflight b"], "5 s against 3 s");
}

#[test]
fn each_demand_report_replaces_previous_one() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.demand(&[("b", 9, 9.0)]);
    assert_eq!(s.slot().wanted, 1);
    s.demand(&[("c", 1, 1.0), ("stranger", 3, 1.0)]);
    assert_eq!(s.slot().wanted, 1);
    assert_eq!(s.finish(1), ["preflight c"]);
}

#[test]
fn capacity_is_divided_among_old_and_new_relays() {
    let mut s = Stage::new(&["a"]);
    s.handle(Event::RelayJoined { relay: OTHER, kind: LinkKind::Granted });
    for request in 1..=9 {
        s.arrive(request, "a");
    }
    s.demand(&[("a", 9, 0.0)]);
    let lines = s.finish_swap(1.0);
    assert_eq!(lines, ["load a Cold", "open a", "lease r1 g1", "lease r2 g1"]);
    assert_eq!(s.granted("a"), Some(2));
    assert_eq!(s.grants.get(&(OTHER, "a".to_owned())), Some(&0));
}

#[test]
fn demand_for_failed_model_is_ignored() {
    let mut s = Stage::new(&["a"]);
    s.demand(&[("a", 1, 0.0)]);
    s.fits();
    s.not_loaded();
    s.finish_swap(0.0);
    s.demand(&[("a", 1, 1.0)]);
    assert_eq!(s.slot().wanted, 0);
    assert_eq!(s.pass(2.0), NOTHING);
    assert_eq!(s.demand(&[("a", 1, 2.0)]), ["preflight a"], "demand is stated again after a report to the relay");
}

#[test]
fn impossible_request_ages_do_no_harm() {
    let mut s = Stage::serving("a", &["a", "b"]);
    let model = "b".into();
    let (oldest, sum) = (std::time::Duration::MAX, std::time::Duration::MAX);
    let class = RequestClass::Batch;
    let demand = crate::event::Demand { model, waiting: u32::MAX, oldest, sum, class, rank: u32::MAX };
    assert_eq!(s.handle(Event::Demand { relay: NEW, models: vec![demand] }), ["preflight b"]);
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "open b");
}

#[test]
fn demand_for_zero_requests_is_dropped() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.demand(&[("b", 1, 1.0)]);
    s.demand(&[("b", 0, 1.0)]);
    assert_eq!((s.slot().wanted, s.fits()), (0, vec![]));
}

#[test]
fn after_hours_longest_waiting_model_loads_first() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "a");
    s.demand(&[("b", 1, 3.0 * 3600.0), ("c", 1, 2.0 * 3600.0)]);
    assert_eq!(s.finish(1), ["preflight b"]);
}

#[test]
fn leaving_relays_demand_is_dropped_but_requests_complete() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive_from(NEW, 1, "a");
    s.arrive(2, "b");
    s.demand(&[("b", 2, 1.0)]);
    s.pass(6.0);
    s.fits();
    s.cancel(2);
    assert_eq!(s.handle(Event::RelayLeaving { relay: NEW }), ["open a"], "the swap was for its sake");
    assert_eq!(s.demand(&[("b", 2, 1.0)]), NOTHING);
    s.finish(1);
    s.arrive(3, "b");
    s.handle(Event::RelayLeaving { relay: super::harness::OLD });
    assert_eq!(s.finish_swap(1.0).last().unwrap(), "lease r3 g2", "what an old relay has sent is here");
}

#[test]
fn demand_ends_gap_of_its_model_only() {
    let mut s = Stage::serving("a", &["a", "b"]);
    let gaps = |s: &Stage| s.machine.models["a"].gaps.iter().collect::<Vec<_>>();
    s.demand(&[("b", 1, 0.0)]);
    assert!(gaps(&s).is_empty());
    s.demand(&[("a", 1, 0.0)]);
    assert_eq!(gaps(&s), [secs(10.0)]);
}

#[test]
fn demand_at_ending_worker_is_ignored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.handle(Event::Stop { timeout: secs(60.0) });
    s.demand(&[("a", 1, 0.0), ("b", 1, 0.0)]);
    assert!(s.machine.requests().all(|(_, requests)| requests.waiting == 0));
}

#[test]
fn demand_of_relay_without_queue_is_ignored() {
    let mut s = Stage::serving("a", &["a", "b"]);
    let demand = crate::event::Demand {
        model: "b".into(),
        waiting: 1,
        oldest: std::time::Duration::ZERO,
        sum: std::time::Duration::ZERO,
        class: RequestClass::Normal,
        rank: 0,
    };
    assert_eq!(s.handle(Event::Demand { relay: super::harness::OLD, models: vec![demand] }), NOTHING);
}

#[test]
fn newly_idle_slot_reports_nonzero_idle_time() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    assert_eq!(s.slot().idle_ms, 0);
    s.finish(1);
    assert_eq!(s.slot().idle_ms, 1);
}
