//! Swaps from one model to another, and their failures.

use modelrelay_protocol::message::{SlotModelStatus, SlotState};

use super::harness::{Call, NOTHING, Stage, config, secs};
use crate::config::{Knobs, SlotConfig};
use crate::effect::{Reason, SlotEvent, SwapResult};
use crate::error::LoadFailure;
use crate::event::Outcome;
use crate::machine::{DrainView, Jitter, Requests};
use crate::memory::Reading;

fn with_drain_timeout(seconds: f64) -> SlotConfig {
    SlotConfig { knobs: Knobs { drain_timeout: secs(seconds), ..Knobs::default() }, ..config(&["a", "b", "c"]) }
}

fn with_sizes(sizes: &[(&str, u64)]) -> SlotConfig {
    let mut config = config(&["a", "b", "c"]);
    for model in &mut config.models {
        model.memory = sizes.iter().find(|(id, _)| **id == *model.id).map(|(_, size)| *size);
    }
    config
}

#[test]
fn swap_runs_from_preflight_to_lease_in_order() {
    let mut s = Stage::serving("a", &["a", "b"]);
    assert_eq!(s.arrive(1, "b"), ["preflight b"]);
    assert_eq!(s.state(), SlotState::Ready);
    assert_eq!(s.fits(), ["close a", "evict a"]);
    assert_eq!((s.state(), s.resident(), s.slot().target), (SlotState::Evicting, None, Some("b".into())));
    assert_eq!(s.evicted(), ["memory of a"]);
    assert_eq!(s.freed(true), ["load b Cold"]);
    assert_eq!(s.state(), SlotState::Loading);
    assert_eq!(s.pass(7.0), NOTHING);
    assert_eq!(s.loaded(), ["open b", "lease r1 g2"]);
    assert_eq!((s.state(), s.resident(), s.slot().generation), (SlotState::Ready, Some("b".into()), 2));
    let swaps = s.swaps();
    assert_eq!((swaps.len(), swaps[0].reason, swaps[0].load), (1, Reason::Idle, secs(7.0)));
    let ended = s.news.iter().filter(|news| matches!(news, SlotEvent::ResidencyEnded { .. })).collect::<Vec<_>>();
    assert_eq!(
        ended,
        [&SlotEvent::ResidencyEnded { model: "a".into(), lasted: secs(10.0) }],
        "once, not with each state"
    );
}

#[test]
fn swap_waits_until_last_lease_ends() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "a");
    s.arrive(3, "b");
    assert_eq!(s.pass(6.0), ["preflight b"]);
    assert_eq!(s.fits(), ["close a"]);
    assert_eq!(s.finish(1), NOTHING);
    assert_eq!((s.state(), s.resident()), (SlotState::Draining, Some("a".into())));
    assert_eq!(s.finish(2), ["evict a"]);
}

#[test]
fn drain_timeout_severs_only_remaining_leases() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "a");
    s.arrive(3, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.pass(10.0), NOTHING);
    s.finish(1);
    assert_eq!(s.pass(19.9), NOTHING);
    assert_eq!(s.pass(0.1), ["sever r2"]);
    assert_eq!(s.state(), SlotState::Severing);
    assert_eq!(s.drop_lease(2), ["evict a"], "as soon as its connection is closed");
    s.finish_swap(1.0);
    assert_eq!((s.swaps()[0].severed, s.swaps()[0].drain), (1, secs(30.0)));
}

#[test]
fn severed_lease_has_two_seconds_to_close() {
    let mut s = Stage::serving_with("a", with_drain_timeout(1.0));
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.pass(1.0), ["sever r1"]);
    assert_eq!(s.pass(1.9), NOTHING);
    assert_eq!(s.pass(0.1), ["evict a"]);
}

#[test]
fn drain_timeout_of_zero_severs_at_once() {
    let mut s = Stage::serving_with("a", with_drain_timeout(0.0));
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    assert_eq!(s.fits(), ["close a", "sever r1"]);
}

#[test]
fn request_for_draining_model_does_not_extend_drain() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.pass(6.0);
    s.fits();
    assert_eq!(s.arrive(3, "a"), NOTHING, "it waits, though the model is there and has room");
    assert_eq!(s.finish(1), ["evict a"]);
    s.finish_swap(1.0);
    assert_eq!(s.finish(2), ["preflight a"], "and comes after");
}

#[test]
fn oversized_model_never_disturbs_resident() {
    let mut s = Stage::serving_with("a", with_sizes(&[("b", 100)]));
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.arrive(3, "b");
    s.pass(6.0);
    let reading = Reading { free: Some(10), held: Some(80), ..Reading::default() };
    assert_eq!(s.measured(reading), ["fail r2: insufficient_memory", "fail r3: insufficient_memory"]);
    assert_eq!((s.state(), s.resident()), (SlotState::Ready, Some("a".into())));
    assert_eq!(s.arrive(4, "a"), ["lease r4 g1"], "its gate was never closed");
    let told = s.slot().models.into_iter().find(|model| model.id == "b").unwrap();
    assert_eq!((told.status, told.code.as_deref()), (SlotModelStatus::Failed, Some("insufficient_memory")));
}

#[test]
fn failing_driver_never_disturbs_resident() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    let op = s.op();
    let refusal = Outcome::Preflight(Err("nobody there".into()));
    assert_eq!(s.late(op, refusal), ["fail r1: backend_unavailable"]);
    assert_eq!(s.arrive(2, "a"), ["lease r2 g1"]);
}

#[test]
fn unanswered_preflight_fails_waiting_requests() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    assert_eq!(s.pass(9.9), NOTHING);
    assert_eq!(s.pass(0.1), ["fail r1: backend_unavailable"]);
}

#[test]
fn resident_memory_is_credited_to_successor() {
    let mut s = Stage::serving_with("a", with_sizes(&[("b", 100)]));
    s.arrive(1, "b");
    let reading = Reading { free: Some(10), held: Some(105), ..Reading::default() };
    assert_eq!(s.measured(reading), ["close a", "evict a"]);
}

#[test]
fn measured_size_overrides_declared_size() {
    let mut s = Stage::serving_with("a", with_sizes(&[("a", 10), ("b", 10)]));
    s.arrive(1, "b");
    s.measured(Reading { free: Some(0), held: Some(100), ..Reading::default() });
    s.finish_swap(1.0);
    s.finish(1);
    s.arrive(2, "a");
    let reading = Reading { free: Some(50), held: Some(49), ..Reading::default() };
    assert_eq!(s.measured(reading), ["fail r2: insufficient_memory"], "a takes 100, whatever its operator thinks");
}

#[test]
fn model_filling_nine_tenths_of_device_is_reloaded() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.measured(Reading { free: Some(10), held: Some(90), ..Reading::default() });
    s.finish_swap(1.0);
    s.finish(1);
    s.arrive(2, "a");
    let reading = Reading { free: Some(10), held: Some(90), ..Reading::default() };
    assert_eq!(s.measured(reading), ["close b", "evict b"]);
}

#[test]
fn sleeper_without_weights_has_load_timeout_to_wake() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.put_to_deep_sleep();
    s.finish_swap(1.0);
    s.finish(1);
    s.arrive(2, "a");
    s.fits();
    s.evicted();
    assert_eq!(s.freed(true), ["load a Wake"]);
    assert_eq!(s.pass(200.0), NOTHING);
    assert_eq!(s.loaded(), ["open a", "lease r2 g3"]);
}

#[test]
fn failed_eviction_escalates_to_kill_and_quarantine() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    assert_eq!(s.not_evicted(), ["kill a"]);
    assert_eq!(s.killed(), ["memory of a"]);
    assert_eq!(s.freed(true), ["load b Cold"], "a kill is as good, if the memory is back");

    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.not_evicted();
    assert_eq!(s.not_killed(), ["fail r1: slot_quarantined"]);
    assert_eq!(s.state(), SlotState::Quarantined);
    assert_eq!(s.arrive(2, "a"), ["fail r2: slot_quarantined"]);
    assert_eq!(s.swaps()[0].result, SwapResult::Quarantined);
    assert_eq!(s.pass(1000.0), NOTHING, "only an administrator ends the quarantine");
}

#[test]
fn hanging_eviction_escalates_to_kill_and_quarantine() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    assert_eq!(s.pass(59.9), NOTHING);
    assert_eq!(s.pass(0.1), ["kill a"]);
    assert_eq!(s.pass(60.0), ["fail r1: slot_quarantined"]);
}

#[test]
fn no_load_starts_before_memory_is_freed() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    assert_eq!(s.freed(false), ["kill a"], "what sleeps badly is killed");
    assert_eq!(s.killed(), ["memory of a"]);
    assert_eq!(s.freed(false), ["fail r1: slot_quarantined"]);
    let lost = s.news.iter().filter(|news| matches!(news, SlotEvent::MemoryNotFreed { .. }));
    assert_eq!(lost.count(), 2);
}

#[test]
fn failed_load_restores_former_resident() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.arrive(2, "a");
    s.evicted();
    s.freed(true);
    assert_eq!(s.not_loaded(), ["fail r1: backend_unavailable", "kill b"]);
    assert_eq!(s.killed(), ["memory of b"]);
    assert_eq!(s.freed(true), ["load a Cold"]);
    assert_eq!(s.state(), SlotState::RollingBack);
    assert_eq!(s.loaded(), ["open a", "lease r2 g2"], "who waited for it has only waited");
    assert_eq!(s.swaps()[0].result, SwapResult::LoadFailed);
}

#[test]
fn failed_load_without_rollback_leaves_slot_empty() {
    let knobs = Knobs { rollback: false, ..Knobs::default() };
    let mut s = Stage::serving_with("a", SlotConfig { knobs, ..config(&["a", "b"]) });
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    s.not_loaded();
    s.killed();
    assert_eq!(s.freed(true), NOTHING);
    assert_eq!(s.state(), SlotState::Backoff);

    let mut s = Stage::new(&["a"]);
    assert_eq!(s.arrive(1, "a"), ["preflight a"]);
    assert_eq!(s.fits(), ["load a Cold"]);
    s.not_loaded();
    s.killed();
    assert_eq!(s.freed(true), NOTHING);
    assert_eq!(s.state(), SlotState::Backoff);
}

#[test]
fn failed_rollback_leaves_slot_empty() {
    let mut s = Stage::serving("a", &["a", "b", "c"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    s.not_loaded();
    s.killed();
    s.freed(true);
    s.arrive(2, "a");
    s.arrive(3, "c");
    assert_eq!(s.not_loaded(), ["fail r2: backend_unavailable", "kill a"]);
    assert_eq!(s.killed(), ["memory of a"]);
    assert_eq!(s.freed(true), ["preflight c"], "and those who want something else get it");
    assert_eq!(s.state(), SlotState::Backoff);
    assert_eq!(s.resident(), None);
    assert_eq!(s.finish_swap(1.0), ["load c Cold", "open c", "lease r3 g2"]);
}

#[test]
fn failed_load_fails_all_waiters_without_retry() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    s.arrive(2, "a");
    s.demand(&[("a", 5, 1.0)]);
    s.arrive(3, "a");
    let failed = ["fail r1: backend_unavailable", "fail r2: backend_unavailable", "fail r3: backend_unavailable"];
    assert_eq!(s.not_loaded(), [&failed[..], &["kill a"]].concat());
    assert_eq!(s.finish_swap(0.0), ["memory of a"], "the demand is forgotten too; relays look elsewhere");
    assert_eq!(s.pass(100.0), NOTHING);
}

#[test]
fn request_for_failed_model_fails_fast_during_backoff() {
    let mut s = Stage::new(&["a"]);
    let mut request = 0;
    for backoff in [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] {
        request += 2;
        assert_eq!(s.arrive(request, "a"), ["preflight a"]);
        s.fits();
        s.not_loaded();
        s.finish_swap(0.0);
        assert_eq!(s.pass(backoff - 0.5), NOTHING);
        assert_eq!(s.arrive(request + 1, "a"), [format!("fail r{}: backend_unavailable", request + 1)]);
        let told = s.slot().models.remove(0);
        assert_eq!((told.status, told.retry_ms), (SlotModelStatus::Failed, Some(500)));
        let changes = s.changes;
        assert_eq!(s.pass(0.5), NOTHING);
        assert_eq!(s.slot().models.remove(0).status, SlotModelStatus::Unloaded);
        assert_eq!(s.changes, changes + 1, "and relays learn that it may be tried again");
    }
}

#[test]
fn backoff_resets_after_successful_response() {
    let mut s = Stage::new(&["a"]);
    for request in 1..=3 {
        s.arrive(request, "a");
        s.fits();
        s.not_loaded();
        s.finish_swap(0.0);
        s.pass(60.0);
    }
    s.arrive(4, "a");
    s.finish_swap(1.0);
    s.finish(4);
    s.down(1, crate::event::DownCause::Gone);
    s.freed(true);
    s.arrive(5, "a");
    s.fits();
    s.not_loaded();
    assert_eq!(s.slot().models.remove(0).retry_ms, Some(2000));
}

#[test]
fn backoff_jitter_shortens_by_at_most_one_quarter() {
    let mut waits = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let mut s = Stage::with_jitter(config(&["a"]), Jitter::Seeded(seed));
        s.arrive(1, "a");
        s.fits();
        s.not_loaded();
        waits.insert(s.slot().models.remove(0).retry_ms.unwrap());
    }
    assert!(waits.len() > 40, "{waits:?}");
    assert!(waits.iter().all(|wait| (1500..=2000).contains(wait)), "{waits:?}");
    assert!(waits.first() < Some(&1600) && waits.last() > Some(&1900), "{waits:?}");
}

#[test]
fn another_model_loads_while_one_is_in_backoff() {
    let mut s = Stage::new(&["a", "b"]);
    s.arrive(1, "a");
    s.fits();
    s.not_loaded();
    s.finish_swap(0.0);
    assert_eq!(s.state(), SlotState::Backoff);
    assert_eq!(s.arrive(2, "b"), ["preflight b"]);
    assert_eq!(s.finish_swap(1.0), ["load b Cold", "open b", "lease r2 g1"]);
}

#[test]
fn wrong_model_at_right_address_fails_load() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    let failure = LoadFailure::WrongModel { expected: "a".into(), found: vec!["x".into()] };
    assert_eq!(s.not_loaded_for(failure), ["fail r1: backend_unavailable", "kill a"]);
    let told = s.slot().models.remove(0).message.unwrap();
    assert_eq!(told, "model a could not be loaded: its backend serves another model");
}

#[test]
fn backend_that_ends_while_loading_fails_at_once() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    s.pass(0.2);
    let failure = LoadFailure::Exited("no such file: a.gguf".into());
    assert_eq!(s.not_loaded_for(failure), ["fail r1: backend_unavailable", "kill a"]);
    assert_eq!(s.now, secs(0.2));
}

#[test]
fn overdue_load_is_killed_and_memory_freed() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    s.evicted();
    s.freed(true);
    s.arrive(2, "b");
    assert_eq!(s.pass(299.0), NOTHING);
    assert_eq!(s.cancel(1).len() + s.cancel(2).len(), 0);
    assert_eq!(s.pass(300.9), NOTHING);
    assert_eq!(s.pass(0.1), ["kill b"]);
    assert_eq!(s.killed(), ["memory of b"]);
    assert_eq!(s.freed(true), ["load a Cold"]);
}

#[test]
fn sleeping_model_is_woken_or_started_cold() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "b");
    s.fits();
    assert_eq!(s.put_to_sleep(), ["memory of a"]);
    s.finish_swap(1.0);
    s.finish(1);
    assert_eq!(s.slot().models[0].status, SlotModelStatus::Sleeping);
    s.arrive(2, "a");
    s.fits();
    s.evicted();
    assert_eq!(s.freed(true), ["load a Wake"]);
    assert_eq!(s.pass(60.0), ["kill a"], "waking may take a minute, not ten");
    assert_eq!(s.killed(), ["memory of a"]);
    assert_eq!(s.freed(true), ["load a Cold"], "and no failure was reported");
    assert_eq!(s.loaded(), ["open a", "lease r2 g3"]);
    assert_eq!(s.slot().models[0].status, SlotModelStatus::Resident);
}

#[test]
fn drain_progress_and_waiting_requests_are_visible() {
    let mut s = Stage::serving("a", &["a", "b"]);
    s.arrive(1, "a");
    s.arrive(2, "b");
    s.demand(&[("b", 3, 0.0)]);
    assert_eq!(s.machine.drain(), None);
    s.pass(6.0);
    s.fits();
    s.pass(10.0);
    let drain = s.machine.drain().unwrap();
    let (since, deadline) = (s.at(s.now - secs(10.0)), s.at(s.now + secs(20.0)));
    assert_eq!(drain, DrainView { since, deadline, leases: 1 });
    let requests: Vec<_> = s.machine.requests().map(|(_, requests)| requests).collect();
    let (a, b) = (Requests { held: 0, waiting: 0, leases: 1 }, Requests { held: 1, waiting: 4, leases: 0 });
    assert_eq!(requests, [a, b]);
    assert_eq!(s.slot().eta_ms, Some(22_000), "what is left of the drain, and the load");
}

#[test]
fn held_request_fails_when_its_hold_budget_expires() {
    let mut s = Stage::new(&["a"]);
    s.arrive(1, "a");
    s.fits();
    assert_eq!(s.pass(299.9), NOTHING);
    assert_eq!(s.pass(0.1), ["fail r1: model_loading"]);
    assert_eq!(s.call.map(|(call, _)| call), Some(Call::Load), "the load goes on");
}
