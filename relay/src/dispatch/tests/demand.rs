//! Demand reports to workers that serve several relays.

use super::harness::Provider;
use super::slots::busy;
use crate::dispatch::{Class, Gate, Owner, Weight};

const NOTHING: [&str; 0] = [];

/// A worker with two links and no slot for this relay.
fn busy_worker(models: &[&str]) -> Provider {
    let mut p = Provider::new();
    p.join_core1(1, models);
    p.grant(1, 0, 8, 2);
    p
}

#[test]
fn first_change_is_reported_at_once() {
    let mut p = busy_worker(&["m"]);
    assert_eq!(p.submit(1, "m"), ["demand w1: m 1 0 0"]);
}

#[test]
fn later_changes_are_reported_within_50_ms() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.pass(0.010);
    assert_eq!(p.submit(2, "m"), NOTHING);
    p.pass(0.010);
    assert_eq!(p.submit(3, "m"), NOTHING);
    assert_eq!(p.pass(0.030), ["demand w1: m 3 50 120"]);
    p.pass(0.060);
    assert_eq!(p.cancel(2), ["cancelled r2 Queued: ClientDisconnect", "demand w1: m 2 110 200"]);
}

#[test]
fn change_reverted_in_time_is_not_reported() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.pass(0.010);
    p.submit(2, "m");
    p.cancel(2);
    assert_eq!(p.pass(1.0), NOTHING);
}

#[test]
fn empty_queue_is_reported_as_empty_list() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.pass(1.0);
    assert_eq!(p.cancel(1), ["cancelled r1 Queued: ClientDisconnect", "demand w1:"]);
}

#[test]
fn dispatched_request_updates_reported_demand() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.submit(2, "m");
    p.pass(1.0);
    assert_eq!(p.grant(1, 1, 7, 2), ["send r1 to w1 #1", "demand w1: m 1 1000 1000"], "the last state is reported");
    assert_eq!(p.pass(1.0), NOTHING);
    assert_eq!(p.submit(3, "m"), ["demand w1: m 2 2000 2000"]);
}

#[test]
fn demand_follows_requests_it_reflects() {
    let mut p = busy_worker(&["m"]);
    p.join(2, &["m"], 1);
    p.load(2, 1);
    for key in 1..=3 {
        p.submit(key, "m");
    }
    p.pass(1.0);
    assert_eq!(p.load(2, 0), ["send r1 to w2 #1", "demand w1: m 2 1000 2000"]);
}

#[test]
fn demand_covers_only_requests_worker_can_serve() {
    let mut p = busy_worker(&["a", "b"]);
    p.join_core1(2, &["b", "c"]);
    p.submit_pinned(1, "b", 2);
    p.submit_pinned(2, "b", 1);
    p.submit(3, "c");
    p.submit(4, "a");
    assert_eq!(p.pass(1.0), ["demand w1: a 1 50 50, b 1 50 50"]);
}

#[test]
fn worker_with_single_link_gets_no_demand() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    p.grant(1, 0, 8, 1);
    assert_eq!(p.submit(1, "m"), NOTHING);
    assert_eq!(p.grant(1, 0, 8, 2), ["demand w1: m 1 0 0"]);
    p.grant(1, 0, 8, 1);
    assert_eq!(p.submit(2, "m"), NOTHING);
    assert_eq!(p.next_timeout(), Some(super::harness::secs(30.0)));
}

#[test]
fn draining_worker_gets_no_demand() {
    let mut p = busy_worker(&["m"]);
    p.drain(1);
    assert_eq!(p.submit(1, "m"), NOTHING);
}

#[test]
fn drain_discards_pending_demand_report() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.pass(0.010);
    p.submit(2, "m");
    p.drain(1);
    assert_eq!(p.next_timeout(), Some(super::harness::secs(30.0)));
    assert_eq!(p.pass(1.0), NOTHING);
}

#[test]
fn exhausted_demand_is_renewed_at_usual_pace() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.pass(0.010);
    p.submit(2, "m");
    assert_eq!(p.grant(1, 1, 7, 2), ["send r1 to w1 #1"]);
    assert_eq!(p.pass(0.040), ["demand w1: m 1 40 40"]);
}

#[test]
fn withdrawn_model_leaves_reported_demand() {
    let mut p = busy_worker(&["a", "b"]);
    p.submit(1, "a");
    p.pass(1.0);
    assert_eq!(p.models(1, &["b"]), ["demand w1:"]);
    p.pass(1.0);
    assert_eq!(p.submit(2, "a"), NOTHING);
    assert_eq!(p.models(1, &["a", "b"]), ["demand w1: a 2 2000 2000"]);
}

#[test]
fn worker_gets_current_demand_after_its_refusal() {
    let mut p = Provider::new();
    p.join_core1(1, &["m"]);
    p.grant(1, 1, 0, 2);
    p.submit(1, "m");
    p.join(2, &["m"], 1);
    let refused = p.fail(1, crate::dispatch::AttemptFailure::AtCapacity);
    assert_eq!(refused, ["requeued r1 #1: AtCapacity", "send r1 to w2 #2", "demand w1:"]);
}

#[test]
fn dispatch_of_unreported_model_triggers_demand_report() {
    let mut p = busy_worker(&["a", "b"]);
    p.join(2, &["b"], 1);
    p.submit(1, "b");
    assert_eq!(p.submit(2, "a"), ["demand w1: a 1 0 0"]);
    p.pass(0.010);
    p.lose(2, &[]);
    // The worker has one count for all models: after this request it is zero.
    assert_eq!(p.grant(1, 1, 7, 2), ["send r1 to w1 #2"]);
    assert_eq!(p.pass(0.050), ["demand w1: a 1 50 50"]);
}

#[test]
fn demand_clears_earlier_refusal_once_second_link_joins() {
    let mut p = Provider::new();
    p.join_granted(1, &["m"], 1);
    p.submit(1, "m");
    p.fail(1, crate::dispatch::AttemptFailure::AtCapacity);
    p.cancel(1);
    // The worker counts the refused request as waiting indefinitely, unless demand is reported.
    assert_eq!(p.grant(1, 1, 0, 2), ["demand w1:"]);
}

#[test]
fn grant_triggers_demand_while_requests_wait() {
    let mut p = busy_worker(&["m"]);
    p.submit(1, "m");
    p.pass(1.0);
    // The slot that it reserved for this relay may have passed on before it received the demand.
    assert_eq!(p.grant(1, 0, 8, 2), ["demand w1: m 1 1000 1000"]);
    assert_eq!(p.grant(1, 0, 7, 2), NOTHING);
    assert_eq!(p.pass(1.0), ["demand w1: m 1 1050 1050"]);
}

/// A multiplexer whose gate for `a` is open and full, and which is to load `b`.
fn multiplexer() -> Provider {
    let mut p = Provider::new();
    p.join_slots(1, &["a", "b"], vec![busy(&["a", "b"], 0)]);
    p.gates_of(1, vec![("a".into(), Gate { slots: 1, others: 0, capacity: 1 })]);
    submit_owned(&mut p, 0, "a", ("job", Class::Batch));
    p
}

fn submit_owned(p: &mut Provider, request: u64, model: &str, (key, class): (&str, Class)) -> Vec<String> {
    let owner = Owner { key: Some(key.into()), weight: Weight::default(), class };
    p.submit_with(request, model, |new| new.owner = Some(owner))
}

#[test]
fn multiplexer_gets_highest_class_of_each_model() {
    let mut p = multiplexer();
    submit_owned(&mut p, 1, "a", ("job", Class::Batch));
    submit_owned(&mut p, 2, "b", ("chat", Class::Interactive));
    submit_owned(&mut p, 3, "b", ("job", Class::Batch));
    assert_eq!(p.pass(0.05), ["demand w1: a 1 50 50 Batch #1, b 2 50 100 Interactive"]);
}

#[test]
fn class_alone_triggers_report() {
    let mut p = multiplexer();
    (1..=2).for_each(|request| _ = submit_owned(&mut p, request, "a", ("job", Class::Batch)));
    assert_eq!(p.pass(1.0), ["demand w1: a 2 50 100 Batch"]);
    assert_eq!(submit_owned(&mut p, 3, "a", ("job", Class::Batch)), NOTHING, "two are as good as three");
    assert_eq!(submit_owned(&mut p, 4, "a", ("chat", Class::Interactive)), ["demand w1: a 2 1000 2000 Interactive"]);
}

#[test]
fn models_rank_by_service_of_their_keys() {
    let mut p = multiplexer();
    // The running request is charged to the job, so another key of its class goes first.
    submit_owned(&mut p, 1, "a", ("job", Class::Batch));
    submit_owned(&mut p, 2, "b", ("other", Class::Batch));
    assert_eq!(p.pass(0.05), ["demand w1: a 1 50 50 Batch #1, b 1 50 50 Batch"]);
    submit_owned(&mut p, 3, "a", ("other", Class::Batch));
    assert_eq!(p.pass(0.05), ["demand w1: a 2 100 150 Batch, b 1 100 100 Batch"], "equal");
}

#[test]
fn old_requests_of_lower_class_keep_rank() {
    let mut p = multiplexer();
    submit_owned(&mut p, 1, "a", ("job", Class::Batch));
    p.pass(20.0);
    assert_eq!(submit_owned(&mut p, 2, "b", ("chat", Class::Interactive)).len(), 1);
    submit_owned(&mut p, 3, "a", ("job", Class::Batch));
    let lines = p.pass(0.05);
    assert!(lines[0].starts_with("demand w1: a 2 20050 ") && lines[0].contains("Batch #1, b 1 "), "{lines:?}");
}

#[test]
fn worker_without_slots_gets_no_classes() {
    let mut p = busy_worker(&["a", "b"]);
    submit_owned(&mut p, 1, "a", ("job", Class::Batch));
    submit_owned(&mut p, 2, "b", ("chat", Class::Interactive));
    assert_eq!(p.pass(0.05), ["demand w1: a 1 50 50, b 1 50 50"]);
}
