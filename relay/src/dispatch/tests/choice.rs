//! The assignment of a load to one of several multiplexers.

use modelrelay_protocol::message::{Slot, SlotState};

use super::harness::{Provider, report, secs};
use super::slots::{busy, empty, failed, idle, loading, sleeping, with};
use crate::dispatch::rules::choice::affinity;
use crate::dispatch::{AttemptFailure, LoadFailure};

const NOTHING: [&str; 0] = [];

/// Workers 1, 2 … with one slot each, which can hold a and b.
fn workers(slots: Vec<Slot>) -> Provider {
    let mut p = Provider::new();
    for (key, slot) in (1..).zip(slots) {
        p.join_slots(key, &["a", "b"], vec![slot]);
    }
    p
}

fn assigned_worker(p: &Provider, model: &str) -> Option<u64> {
    let models = p.dispatch.models(p.instant());
    models.into_iter().find(|entry| *entry.model == *model)?.assigned.map(|worker| worker.0)
}

/// Checks which of two slots is assigned b, whichever worker has which.
fn prefers(better: &Slot, worse: &Slot) {
    for turned in [false, true] {
        let slots = if turned { vec![worse.clone(), better.clone()] } else { vec![better.clone(), worse.clone()] };
        let mut p = workers(slots);
        p.submit(1, "b");
        assert_eq!(assigned_worker(&p, "b"), Some(if turned { 2 } else { 1 }), "{better:?} before {worse:?}");
    }
}

#[test]
fn demand_for_unserved_model_goes_to_one_worker() {
    let mut p = workers(vec![empty(&["a", "b"]), empty(&["a", "b"]), empty(&["a", "b"])]);
    assert_eq!(p.submit(1, "a").len(), 1);
    assert_eq!(p.pass(1.0), NOTHING);
    p.submit(2, "a");
    assert_eq!(p.pass(1.0), NOTHING, "the first change was reported at once");
}

#[test]
fn nearest_slot_is_chosen() {
    let models = ["a", "b"];
    let order = [
        Slot { state: SlotState::Draining, resident: Some("a".to_owned()), ..loading(&models, 9_000) },
        sleeping(idle(&models, 9_000), "b", 3_000),
        empty(&models),
        idle(&models, 9_000),
        idle(&models, 3_000),
        busy(&models, 0),
        busy(&models, 3),
        with(idle(&models, 9_000), "a", |entry| entry.pinned = true),
    ];
    for (place, better) in order.iter().enumerate() {
        for worse in &order[place + 1..] {
            prefers(better, worse);
        }
    }
}

#[test]
fn every_state_on_way_to_model_ranks_equally() {
    let on_its_way = |state| Slot { state, ..loading(&["a", "b"], 1_000) };
    for state in [SlotState::Draining, SlotState::Severing, SlotState::Evicting, SlotState::Loading] {
        prefers(&on_its_way(state), &sleeping(empty(&["a", "b"]), "b", 0));
    }
    let mut away = loading(&["a", "b"], 1_000);
    away.target = Some("c".to_owned());
    prefers(&idle(&["a", "b"], 1), &away);
}

#[test]
fn empty_slot_precedes_sleeper_in_recently_busy_slot() {
    prefers(&empty(&["a", "b"]), &sleeping(idle(&["a", "b"], 8_999), "b", 3_000));
}

#[test]
fn idle_time_grows_after_slot_report() {
    let mut p = workers(vec![idle(&["a", "b"], 5_000)]);
    p.pass(10.0);
    p.join_slots(2, &["a", "b"], vec![idle(&["a", "b"], 14_000)]);
    p.submit(1, "b");
    assert_eq!(assigned_worker(&p, "b"), Some(1));
}

#[test]
fn nearest_of_several_slots_ranks_worker() {
    let mut p = workers(vec![idle(&["a", "b"], 9_000)]);
    p.join_slots(2, &["a", "b"], vec![busy(&["a", "b"], 9), empty(&["b"])]);
    p.submit(1, "b");
    assert_eq!(assigned_worker(&p, "b"), Some(2));
}

#[test]
fn worker_without_report_of_model_is_chosen_last() {
    let mut p = workers(vec![empty(&["a"])]);
    assert_eq!(p.submit(1, "b"), ["demand w1: b 1 0 0"]);
    let mut p = workers(vec![empty(&["a"]), busy(&["a", "b"], 7)]);
    assert_eq!(p.submit(1, "b"), ["demand w2: b 1 0 0"]);
}

#[test]
fn ties_are_broken_by_hash_shared_across_relays() {
    // The first 8 bytes of SHA-256 over instance, a zero byte and model.
    assert_eq!(affinity("i1", "a"), 0x3ec1_ec09_4b12_e417);
    for model in ["a", "b"] {
        let mut p = workers(vec![empty(&["a", "b"]); 3]);
        p.submit(1, model);
        let highest = (1..=3).max_by_key(|key| affinity(&format!("i{key}"), model));
        assert_eq!(assigned_worker(&p, model), highest);
    }
}

/// Two models that would each prefer the same of two workers.
fn rivals() -> (&'static str, &'static str, u64) {
    let favourite = |model: &str| if affinity("i1", model) > affinity("i2", model) { 1 } else { 2 };
    let rival = ["b", "c", "d", "e", "f", "g", "h"].into_iter().find(|model| favourite(model) == favourite("a"));
    ("a", rival.expect("one of seven"), favourite("a"))
}

#[test]
fn slot_chosen_for_one_model_is_not_free() {
    let (one, two, favourite) = rivals();
    let models = [one, two];
    let mut p = Provider::new();
    for key in 1..=2 {
        p.join_slots(key, &models, vec![empty(&models)]);
    }
    p.submit(1, one);
    p.submit(2, two);
    assert_eq!((assigned_worker(&p, one), assigned_worker(&p, two)), (Some(favourite), Some(3 - favourite)));
    // The slot then reports the demand itself, which must not be counted twice.
    let mut p = Provider::new();
    let slots = |first: Slot| vec![first, Slot { id: "gpu1".to_owned(), ..empty(&models) }];
    for key in 1..=2 {
        p.join_slots(key, &models, slots(empty(&models)));
    }
    p.submit(1, one);
    p.slots(favourite, slots(loading(&[two, one], 9_000)));
    p.submit(2, two);
    assert_eq!(assigned_worker(&p, two), Some(favourite), "its other slot is free");
}

#[test]
fn free_slot_is_chosen_before_loading_slot() {
    let mut p = Provider::new();
    let free = Slot { id: "gpu1".to_owned(), ..empty(&["a", "b"]) };
    p.join_slots(1, &["a", "b"], vec![loading(&["a", "b"], 9_000), free]);
    p.join_slots(2, &["b"], vec![sleeping(empty(&["b"]), "b", 0)]);
    p.submit(1, "a");
    p.submit(2, "b");
    assert_eq!((assigned_worker(&p, "a"), assigned_worker(&p, "b")), (Some(1), Some(1)));
}

#[test]
fn choice_stays_when_nearer_worker_joins() {
    let mut p = workers(vec![busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    p.join_slots(2, &["a", "b"], vec![empty(&["a", "b"])]);
    p.slots(2, vec![empty(&["a", "b"])]);
    p.pass(1.0);
    assert_eq!(p.submit(2, "b"), ["demand w1: b 2 1000 1000"]);
    assert_eq!(assigned_worker(&p, "b"), Some(1));
}

/// Another relay has requested b there.
#[test]
fn choice_moves_to_nearer_worker_with_existing_demand() {
    let models = ["a", "b"];
    let wanting_b = |slot: Slot| with(slot, "b", |entry| entry.wanted = true);
    let mut p = workers(vec![busy(&models, 1)]);
    p.submit(1, "b");
    p.join_slots(2, &models, vec![wanting_b(busy(&models, 3))]);
    p.pass(1.0);
    assert_eq!(assigned_worker(&p, "b"), Some(1), "two others are wanted there");
    let nearer = wanting_b(busy(&models, 1));
    assert_eq!(p.slots(2, vec![nearer.clone()]), ["demand w1:", "demand w2: b 1 1000 1000"]);
    // A worker that has begun to load goes before all others.
    p.pass(1.0);
    assert_eq!(p.slots(1, vec![loading(&models, 9_000)]), ["demand w1: b 1 2000 2000", "demand w2:"]);
    p.slots(2, vec![nearer]);
    assert_eq!(assigned_worker(&p, "b"), Some(1));
}

#[test]
fn choice_is_reviewed_on_worker_report_not_request() {
    let models = ["a", "b"];
    let mut p = workers(vec![busy(&models, 1)]);
    p.submit(1, "b");
    let nearer = with(busy(&models, 1), "b", |entry| entry.wanted = true);
    p.join_slots(2, &models, vec![nearer.clone()]);
    p.submit(2, "b");
    assert_eq!(assigned_worker(&p, "b"), Some(1));
    p.slots(2, vec![nearer]);
    assert_eq!(assigned_worker(&p, "b"), Some(2));
}

#[test]
fn choice_does_not_return_to_timed_out_worker() {
    let mut p = workers(vec![loading(&["a", "b"], 1_000), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    p.pass(61.0);
    p.slots(1, vec![loading(&["a", "b"], 1_000)]);
    assert_eq!(assigned_worker(&p, "b"), Some(2), "it is still loading");
}

#[test]
fn model_opening_elsewhere_ends_choice() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    p.pass(1.0);
    assert_eq!(p.gates(2, &[("b", 0)]), ["demand w1:", "demand w2: b 1 1000 1000"]);
    assert_eq!(assigned_worker(&p, "b"), None);
}

#[test]
fn requests_go_to_chosen_worker_once_gate_opens() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    p.submit(2, "b");
    p.pass(1.0);
    assert_eq!(p.gates(1, &[("b", 1)]), ["send r1 to w1 #1", "demand w1: b 1 1000 1000"]);
}

#[test]
fn choice_ends_when_no_request_waits() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.submit(1, "b");
    p.pass(1.0);
    assert_eq!(p.cancel(1), ["cancelled r1 Queued: ClientDisconnect", "demand w1:"]);
    assert_eq!(p.next_timeout(), None);
}

#[test]
fn choice_moves_from_failed_worker() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    p.pass(1.0);
    let lines = p.slots(1, vec![failed(empty(&["a", "b"]), "b", "backend_unavailable", Some(4_000))]);
    assert_eq!(lines, ["demand w1:", "demand w2: b 1 1000 1000"]);
}

#[test]
fn choice_moves_from_draining_or_lost_worker() {
    for leaves in [false, true] {
        let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
        p.submit(1, "b");
        let lines = if leaves { p.lose(1, &[]) } else { p.drain(1) };
        assert_eq!(lines.last().map(String::as_str), Some("demand w2: b 1 0 0"));
    }
}

#[test]
fn choice_moves_from_worker_that_withdraws_model() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    assert_eq!(p.models(1, &["a"]), ["demand w2: b 1 0 0"]);
}

#[test]
fn inactive_worker_loses_choice_after_minute() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    assert_eq!(p.pass(59.9), NOTHING);
    assert_eq!(p.pass(0.1), ["demand w1:", "demand w2: b 1 60000 60000"]);
    assert_eq!(p.pass(60.0), ["demand w1: b 1 120000 120000", "demand w2:"]);
}

#[test]
fn only_worker_stays_chosen_indefinitely() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.submit(1, "b");
    assert_eq!(p.pass(200.0), NOTHING, "it knows");
    assert_eq!(assigned_worker(&p, "b"), Some(1));
}

#[test]
fn slow_load_is_awaited_twice_its_first_estimate() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    p.pass(1.0);
    p.slots(1, vec![loading(&["a", "b"], 50_000)]);
    p.slots(1, vec![loading(&["a", "b"], 500_000)]);
    p.pass(98.0);
    assert_eq!(assigned_worker(&p, "b"), Some(1));
    p.pass(1.0);
    assert_eq!(assigned_worker(&p, "b"), Some(2));
}

#[test]
fn failed_worker_is_chosen_again_after_retry_time() {
    let mut p =
        workers(vec![failed(empty(&["a", "b"]), "b", "insufficient_memory", Some(4_000)), busy(&["a", "b"], 0)]);
    p.submit(1, "b");
    assert_eq!(assigned_worker(&p, "b"), Some(2));
    p.cancel(1);
    p.pass(4.0);
    p.submit(2, "b");
    assert_eq!(assigned_worker(&p, "b"), Some(1));
}

#[test]
fn requests_end_at_once_when_all_have_failed() {
    let mut p = workers(vec![empty(&["a", "b"]), empty(&["a", "b"])]);
    p.submit(1, "b");
    p.submit(2, "a");
    p.slots(1, vec![failed(empty(&["a", "b"]), "b", "insufficient_memory", Some(9_000))]);
    let lines = p.slots(2, vec![failed(empty(&["a", "b"]), "b", "backend_unavailable", Some(4_000))]);
    let failure = "fail r1: ModelFailed { worker: WorkerKey(2), code: BackendUnavailable, retry_after: Some(4s) }";
    assert_eq!(lines[0], failure, "the one that tries again first");
    assert_eq!(p.message, "no b here");
    assert_eq!(p.dispatch.queue_len(), 1, "nothing else ends");
}

#[test]
fn requests_fail_at_once_until_worker_retries_load() {
    let mut p = workers(vec![failed(empty(&["a", "b"]), "b", "insufficient_memory", Some(4_000))]);
    p.pass(1.0);
    let failure = "fail r1: ModelFailed { worker: WorkerKey(1), code: InsufficientMemory, retry_after: Some(3s) }";
    assert_eq!(p.submit(1, "b"), [failure]);
    p.pass(3.0);
    assert_eq!(p.submit(2, "b"), ["demand w1: b 1 0 0"]);
}

#[test]
fn quarantined_slot_fails_requests_indefinitely() {
    let mut p = workers(vec![Slot { state: SlotState::Quarantined, ..empty(&["a", "b"]) }]);
    p.pass(1000.0);
    let failure = "fail r1: ModelFailed { worker: WorkerKey(1), code: SlotQuarantined, retry_after: None }";
    assert_eq!(p.submit(1, "b"), [failure]);
    assert!(p.message.contains("gpu0"), "{}", p.message);
}

#[test]
fn one_failed_slot_does_not_fail_worker() {
    let broken = failed(empty(&["a", "b"]), "b", "backend_unavailable", None);
    let mut p = workers(vec![]);
    p.join_slots(1, &["a", "b"], vec![broken, busy(&["a", "b"], 0)]);
    assert_eq!(p.submit(1, "b"), ["demand w1: b 1 0 0"]);
}

#[test]
fn unknown_failure_code_becomes_backend_unavailable() {
    let mut p = workers(vec![failed(empty(&["a", "b"]), "b", "moon_phase", None)]);
    let failure = "fail r1: ModelFailed { worker: WorkerKey(1), code: BackendUnavailable, retry_after: None }";
    assert_eq!(p.submit(1, "b"), [failure]);
}

#[test]
fn stopping_worker_is_not_chosen_and_requests_wait() {
    let mut p = workers(vec![Slot { state: SlotState::Stopping, ..empty(&["a", "b"]) }]);
    assert_eq!(p.submit(1, "b"), NOTHING);
    assert_eq!(p.dispatch.queue_len(), 1);
}

#[test]
fn stopping_worker_fails_no_request_despite_earlier_failure() {
    let failing = failed(empty(&["a", "b"]), "b", "backend_unavailable", Some(1_000));
    let mut p = workers(vec![Slot { state: SlotState::Stopping, ..failing }]);
    p.submit(1, "b");
    p.pass(2.0);
    p.submit(2, "b");
    assert_eq!(p.dispatch.queue_len(), 2, "it will load nothing, and another worker may come");
}

#[test]
fn demand_is_sent_again_after_load_failure() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.submit(1, "b");
    p.pass(1.0);
    let failing = failed(empty(&["a", "b"]), "b", "backend_unavailable", Some(0));
    assert_eq!(p.slots(1, vec![failing]), ["demand w1: b 1 1000 1000"]);
}

#[test]
fn demand_is_sent_again_after_model_returns() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.submit(1, "b");
    p.models(1, &["a"]);
    let failing = failed(empty(&["a", "b"]), "b", "backend_unavailable", Some(0));
    p.slots(1, vec![failing, empty(&["a", "b"])]);
    p.models(1, &["a", "b"]);
    assert_eq!(p.pass(0.05), ["demand w1: b 1 50 50"]);
}

#[test]
fn no_choice_while_plain_worker_serves_model() {
    for core1 in [false, true] {
        let mut p = workers(vec![empty(&["a", "b"])]);
        if core1 {
            p.join_core1(2, &["b"]);
        } else {
            p.join(2, &["b"], 1);
            p.load(2, 1);
        }
        assert_eq!(p.submit(1, "b"), NOTHING, "it waits warm");
        assert_eq!(p.next_timeout(), Some(secs(30.0)));
    }
}

#[test]
fn request_waits_for_busy_worker_when_loads_fail() {
    let mut p = workers(vec![failed(empty(&["a", "b"]), "b", "insufficient_memory", None)]);
    p.join(2, &["b"], 1);
    p.load(2, 1);
    assert_eq!(p.submit(1, "b"), NOTHING);
    assert_eq!(p.load(2, 0), ["send r1 to w2 #1"]);
}

#[test]
fn pinned_request_waits_at_open_gate_despite_failure() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.gates(1, &[("b", 0)]);
    p.slots(1, vec![failed(idle(&["b", "a"], 0), "b", "insufficient_memory", None)]);
    assert_eq!(p.submit_pinned(1, "b", 1), ["demand w1: b 1 0 0"]);
    assert_eq!(p.gates(1, &[("b", 1)])[0], "send r1 to w1 #1");
}

#[test]
fn open_gate_is_preferred_to_load() {
    let mut p = workers(vec![empty(&["a", "b"]), busy(&["b", "a"], 0)]);
    p.gates(2, &[("b", 4)]);
    assert_eq!(p.submit(1, "b"), ["send r1 to w2 #1"]);
}

#[test]
fn request_unfit_for_open_worker_triggers_load() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.join(2, &["b"], 1);
    assert_eq!(p.submit_core1(1, "b"), ["demand w1: b 1 0 0"]);
}

#[test]
fn request_failed_at_open_worker_triggers_load() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.join(2, &["b"], 1);
    p.submit(1, "b");
    assert_eq!(p.fail(1, AttemptFailure::BackendReset), ["requeued r1 #1: BackendReset", "demand w1: b 1 0 0"]);
}

#[test]
fn demand_of_pinned_request_goes_to_its_worker() {
    let mut p = workers(vec![busy(&["a", "b"], 9), empty(&["a", "b"])]);
    assert_eq!(p.submit_pinned(1, "b", 1), ["demand w1: b 1 0 0"]);
    assert_eq!(assigned_worker(&p, "b"), None);
    let failing = failed(empty(&["a", "b"]), "b", "backend_unavailable", None);
    let failure = "fail r1: ModelFailed { worker: WorkerKey(1), code: BackendUnavailable, retry_after: None }";
    assert_eq!(p.slots(1, vec![failing])[0], failure);
}

#[test]
fn failed_load_for_request_is_tried_elsewhere() {
    let mut p = workers(vec![busy(&["a", "b"], 0), busy(&["a", "b"], 0)]);
    p.gates(1, &[("b", 1)]);
    p.submit(1, "b");
    let (code, retry_after, report) = (LoadFailure::BackendUnavailable, None, report("x"));
    let lines = p.fail(1, AttemptFailure::LoadFailed { code, retry_after, report });
    assert_eq!(lines, ["requeued r1 #1: LoadFailed", "demand w2: b 1 0 0"]);
}

#[test]
fn later_changes_are_reported_every_50_ms() {
    let mut p = workers(vec![empty(&["a", "b"])]);
    p.submit(1, "b");
    p.pass(0.010);
    assert_eq!(p.submit(2, "b"), NOTHING);
    assert_eq!(p.pass(0.040), ["demand w1: b 2 50 90"]);
}
