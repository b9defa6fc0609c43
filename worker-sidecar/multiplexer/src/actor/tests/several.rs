//! Several slots as one worker.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{Command, Demand, ModelDemand, ModelGrant, RequestClass};

use super::harness::{Play, Sink, Stage, config, pass};
use crate::actor::now;
use crate::board::Peer;
use crate::config::{ModelConfig, SlotConfig};
use crate::error::{LoadFailure, SlotError};
use crate::slots::Refusal;

/// Two slots: both have `a`, only the second has `b`, with a capacity of eight.
async fn two() -> Stage {
    let second = SlotConfig::new("gpu1", vec![ModelConfig::new("a", 4), ModelConfig::new("b", 8)]);
    Stage::with(vec![config(&["a"]), second], false).await
}

#[tokio::test(start_paused = true)]
async fn capacities_models_and_snapshots_are_merged() {
    let stage = two().await;
    assert_eq!((stage.mux.capacity(), stage.mux.models()), (12, vec!["a".to_owned(), "b".to_owned()]));
    let ids: Vec<_> = stage.mux.slots().slots.into_iter().map(|slot| slot.id).collect();
    assert_eq!(ids, ["gpu0", "gpu1"]);
    drop((stage.send_request("a").await.unwrap(), stage.send_request("b").await.unwrap()));
    pass(1.0).await;
    let slots = stage.told.slots_now().slots;
    let residents: Vec<_> = slots.iter().map(|slot| slot.resident.as_deref()).collect();
    assert_eq!(residents, [Some("a"), Some("b")], "each slot took one, and nothing was swapped");
    let grant = stage.told.grant_now();
    let models = [("a", 4, 4), ("b", 8, 8)].map(|(id, slots, capacity)| ModelGrant {
        id: id.to_owned(),
        slots,
        others: 0,
        capacity,
    });
    assert_eq!(grant.models, Some(models.to_vec()));
    assert_eq!((grant.slots, grant.capacity, grant.links), (12, 12, 2));
}

#[tokio::test(start_paused = true)]
async fn grants_of_model_in_two_slots_are_summed() {
    let stage = two().await;
    stage.command("1", "load", "a");
    pass(0.1).await;
    let error = stage.told.results().pop().and_then(|result| result.error);
    assert_eq!(error.as_deref(), Some("model a is in slots gpu0, gpu1: specify one"));
    load_a_in_both(&stage).await;
    assert_eq!(stage.told.granted("a"), Some(8));
    let mut leases = Vec::new();
    for _ in 0..8 {
        leases.push(stage.send("a").await.unwrap());
    }
    assert_eq!(stage.send("a").await.unwrap_err(), SlotError::AtCapacity);
    let running: Vec<_> = stage.mux.reports().await.iter().map(|report| report.requests[0].1.leases).collect();
    assert_eq!(running, [4, 4]);
}

#[tokio::test(start_paused = true)]
async fn lease_names_its_slot() {
    let stage = two().await;
    assert_eq!((stage.send_request("a").await.unwrap().slot(), stage.send_request("b").await.unwrap().slot()), (0, 1));
}

async fn load_a_in_both(stage: &Stage) {
    for slot in ["gpu0", "gpu1"] {
        let (op_id, command, model) = (slot.to_owned(), "load".to_owned(), "a".to_owned());
        let command = Command { op_id, command, model, slot: Some(slot.to_owned()), mode: None };
        stage.mux.handle_command(stage.new, &command);
    }
    pass(5.0).await;
}

/// Two slots of these capacities with the model `a` resident in both.
async fn both_serve_a(first: u32, second: u32) -> Stage {
    let slot = |id: &str, capacity| SlotConfig::new(id, vec![ModelConfig::new("a", capacity)]);
    let stage = Stage::with(vec![slot("gpu0", first), slot("gpu1", second)], false).await;
    load_a_in_both(&stage).await;
    stage
}

#[tokio::test(start_paused = true)]
async fn held_requests_run_in_slots_with_capacity() {
    let stage = both_serve_a(1, 4).await;
    let mut leases = Vec::new();
    for _ in 0..5 {
        let lease = tokio::time::timeout(Duration::from_secs(1), stage.send_request("a")).await;
        leases.push(lease.expect("there is room for it").unwrap());
    }
    let held = |slot| leases.iter().filter(|lease| lease.slot() == slot).count();
    assert_eq!((held(0), held(1)), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn relay_uses_its_grants_across_slots() {
    let stage = both_serve_a(2, 8).await;
    let told = Arc::new(Sink::default());
    let other = stage.mux.join(Peer::Slots1, Arc::<Sink>::clone(&told));
    let mut leases = Vec::new();
    for _ in 0..10 {
        leases.push(stage.mux.arrive(other, ("a", RequestClass::Normal), now()).await.unwrap());
    }
    for relay in [stage.new, other] {
        stage.demand_of(relay, "a", 20);
    }
    for lease in leases {
        lease.release(true).await;
    }
    assert_eq!((stage.told.granted("a"), told.granted("a")), (Some(5), Some(5)), "one of two and four of eight");
    let mut leases = Vec::new();
    for _ in 0..5 {
        leases.push(stage.send("a").await.unwrap());
    }
    let held = |slot| leases.iter().filter(|lease| lease.slot() == slot).count();
    assert_eq!((held(0), held(1)), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn unserved_demand_makes_exactly_one_slot_load() {
    let stage = two().await;
    stage.demand("a", 3);
    pass(5.0).await;
    let logs: Vec<_> = stage.drivers.iter().flat_map(|driver| driver.log()).collect();
    assert_eq!(logs, ["load a"]);
    // The same holds for three requests of a relay without a queue.
    let stage = two().await;
    let _waiting = [stage.send_request("a"), stage.send_request("a"), stage.send_request("a")];
    pass(5.0).await;
    let logs: Vec<_> = stage.drivers.iter().flat_map(|driver| driver.log()).collect();
    assert_eq!(logs, ["load a"]);
}

#[tokio::test(start_paused = true)]
async fn demand_stays_until_another_slot_is_nearer() {
    let slot = |id: &str, own: &str| SlotConfig::new(id, vec![ModelConfig::new("a", 4), ModelConfig::new(own, 4)]);
    let stage = Stage::with(vec![slot("gpu0", "b"), slot("gpu1", "c")], false).await;
    let _running = (stage.send_request("b").await.unwrap(), stage.send_request("c").await.unwrap());
    let other = stage.mux.join(Peer::Slots1, Arc::new(Sink::default()));
    for relay in [stage.new, stage.new, other, stage.new, other] {
        stage.demand_of(relay, "a", 1);
        pass(0.1).await;
        let wanted: Vec<_> = stage.mux.slots().slots.iter().map(|slot| slot.wanted > 0).collect();
        assert_eq!(wanted, [true, false]);
    }
}

#[tokio::test(start_paused = true)]
async fn longest_idle_slot_loads_first_and_pinned_last() {
    let slot = |id: &str, own: &str| SlotConfig::new(id, vec![ModelConfig::new("a", 4), ModelConfig::new(own, 4)]);
    let stage = Stage::with(vec![slot("gpu0", "b"), slot("gpu1", "c"), slot("gpu2", "d")], false).await;
    drop(stage.send_request("b").await.unwrap());
    stage.command("pin", "pin", "b");
    pass(60.0).await;
    drop(stage.send_request("d").await.unwrap());
    pass(10.0).await;
    drop(stage.send_request("c").await.unwrap());
    pass(10.0).await;
    stage.demand("a", 1);
    pass(10.0).await;
    let slots = stage.mux.slots().slots;
    let residents: Vec<_> = slots.iter().map(|slot| slot.resident.as_deref()).collect();
    assert_eq!(residents, [Some("b"), Some("c"), Some("a")]);
}

#[tokio::test(start_paused = true)]
async fn core1_relay_requests_run_or_wait_in_worker() {
    let stage = two().await;
    let told = Arc::new(Sink::default());
    let relay = stage.mux.join(Peer::Core1, Arc::<Sink>::clone(&told));
    let grant = told.grant_now();
    assert_eq!((grant.slots, grant.others, grant.capacity, grant.links), (12, 0, 12, 3));
    assert_eq!(grant.models, None);
    let lease = stage.mux.arrive(relay, ("b", RequestClass::Normal), now()).await.unwrap();
    let _other = stage.send_request("b").await.unwrap();
    assert_eq!((told.grant_now().others, lease.generation()), (1, 1));
    stage.mux.leave(stage.new);
    assert_eq!(told.grant_now().links, 2);
}

#[tokio::test(start_paused = true)]
async fn model_in_no_slot_is_refused_by_name() {
    let stage = two().await;
    let error = stage.send_request("c").await.unwrap_err();
    assert_eq!(error.to_string(), "no slot has model c; available: a, b");
}

#[test]
fn relay_receives_code_or_else_complete_response() {
    let retry_after = Duration::from_millis(1500);
    let failure = LoadFailure::DiedAtOnce;
    let failed = SlotError::LoadFailed { model: "a".into(), failure, retry_after };
    for peer in [Peer::Core1, Peer::Slots1] {
        let Refusal::Code(told) = Refusal::new(&failed, peer) else { panic!("a code") };
        assert_eq!((told.code.as_str(), told.retry_after_ms), ("backend_unavailable", Some(1500)));
        assert!(
            matches!(Refusal::new(&SlotError::Severed, peer), Refusal::Code(told) if told.code == "severed_by_swap")
        );
        let unknown = SlotError::UnknownModel { model: "c".into(), known: vec![] };
        assert!(matches!(Refusal::new(&unknown, peer), Refusal::Answer(told) if told.status() == 404));
    }
    assert!(matches!(Refusal::new(&failed, Peer::Old), Refusal::Answer(told) if told.status() == 503));
    assert!(
        matches!(Refusal::new(&SlotError::Draining, Peer::Old), Refusal::Answer(told) if told.code() == "draining")
    );
}

fn demand(models: &[&str]) -> Demand {
    let stated =
        |id: &&str| ModelDemand { id: (*id).to_owned(), waiting: 1, oldest_ms: 0, sum_ms: 0, ..ModelDemand::default() };
    Demand { models: models.iter().map(stated).collect() }
}

/// Three empty slots, each with all of three models.
async fn three_of_three() -> Stage {
    let slot = |id: &str| SlotConfig::new(id, ["m", "n", "o"].map(|id| ModelConfig::new(id, 4)).to_vec());
    Stage::with(["gpu0", "gpu1", "gpu2"].map(slot).to_vec(), false).await
}

fn targets(stage: &Stage) -> Vec<Option<String>> {
    stage.mux.slots().slots.into_iter().map(|slot| slot.target).collect()
}

#[tokio::test(start_paused = true)]
async fn models_wanted_together_load_in_separate_slots() {
    let each = ["m", "n", "o"].map(|id| Some(id.to_owned()));
    let stage = three_of_three().await;
    stage.mux.handle_demand(stage.new, &demand(&["m", "n", "o"]));
    pass(0.1).await;
    assert_eq!(targets(&stage), each);
    // One demand arrives at once, and the others some milliseconds later.
    let stage = three_of_three().await;
    stage.mux.handle_demand(stage.new, &demand(&["m"]));
    stage.mux.handle_demand(stage.new, &demand(&["m", "n", "o"]));
    pass(0.1).await;
    assert_eq!(targets(&stage), each);
    // Requests of a relay without a queue.
    let stage = three_of_three().await;
    let _waiting = ["m", "n", "o"].map(|id| stage.send_request(id));
    pass(0.1).await;
    assert_eq!(targets(&stage), each);
}

#[tokio::test(start_paused = true)]
async fn imminent_load_is_not_started_in_another_slot() {
    let slot =
        |id: &str, models: &[&str]| SlotConfig::new(id, models.iter().map(|id| ModelConfig::new(*id, 4)).collect());
    let stage = Stage::with(vec![slot("gpu0", &["m", "o"]), slot("gpu1", &["m"])], false).await;
    stage.mux.handle_demand(stage.new, &demand(&["m"]));
    stage.mux.handle_demand(stage.new, &demand(&["m", "o"]));
    stage.mux.handle_demand(stage.new, &demand(&["m", "o"]));
    pass(0.1).await;
    assert_eq!(targets(&stage), [Some("m".to_owned()), None]);
}

#[tokio::test(start_paused = true)]
async fn models_wanted_together_spread_over_busy_slots() {
    let slot = |id: &str, own: &str| SlotConfig::new(id, [own, "m", "n"].map(|id| ModelConfig::new(id, 4)).to_vec());
    let stage = Stage::with(vec![slot("gpu0", "a"), slot("gpu1", "b")], false).await;
    let _running = (stage.send_request("a").await.unwrap(), stage.send_request("b").await.unwrap());
    stage.mux.handle_demand(stage.new, &demand(&["m", "n"]));
    pass(0.1).await;
    let wanted: Vec<_> = stage.mux.slots().slots.iter().map(|slot| slot.wanted).collect();
    assert_eq!(wanted, [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn waiting_demand_moves_to_newly_idle_slot() {
    let slot = |id: &str, own: &str| SlotConfig::new(id, vec![ModelConfig::new("a", 4), ModelConfig::new(own, 4)]);
    let stage = Stage::with(vec![slot("gpu0", "b"), slot("gpu1", "c")], false).await;
    let (_running, ends) = (stage.send_request("b").await.unwrap(), stage.send_request("c").await.unwrap());
    stage.mux.handle_demand(stage.new, &demand(&["a"]));
    pass(0.1).await;
    let wanted = || stage.mux.slots().slots.iter().map(|slot| slot.wanted).collect::<Vec<_>>();
    assert_eq!(wanted(), [1, 0]);
    drop(ends);
    pass(0.1).await;
    assert_eq!((targets(&stage), wanted()[0]), (vec![None, Some("a".to_owned())], 0));
    pass(5.0).await;
    assert_eq!(stage.told.granted("a"), Some(4));
    // No demand is left at the slot where it waited first.
    stage.mux.handle_demand(stage.new, &demand(&[]));
    pass(60.0).await;
    assert_eq!(stage.mux.slots().slots[0].resident.as_deref(), Some("b"));
}

#[tokio::test(start_paused = true)]
async fn ending_worker_returns_held_requests_to_capable_relays() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let _running = stage.send_request("a").await.unwrap();
    let told = Arc::new(Sink::default());
    let relay = stage.mux.join(Peer::Core1, Arc::<Sink>::clone(&told));
    let (queued, keeps) = (stage.mux.arrive(relay, ("b", RequestClass::Normal), now()), stage.send_request("b"));
    let runs = stage.mux.arrive(relay, ("a", RequestClass::Normal), now()).await.unwrap();
    stage.mux.give_back_held();
    let given_back = tokio::time::timeout(Duration::from_millis(100), queued).await;
    assert_eq!(given_back.expect("at once").unwrap_err(), SlotError::Draining);
    pass(0.1).await;
    assert_eq!(stage.counts().await, (2, 1), "what runs, and what has nowhere else to go, stays");
    drop((runs, keeps));
}

#[tokio::test(start_paused = true)]
async fn slot_snapshots_age_between_updates() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let before = stage.mux.slots().slots.swap_remove(0);
    pass(7.0).await;
    let after = stage.mux.slots().slots.swap_remove(0);
    assert_eq!((after.since_ms - before.since_ms, after.idle_ms - before.idle_ms), (7000, 7000));
    // A busy slot stays busy, and the estimate shrinks until it is overdue.
    stage.driver().play("load b", Play::Never);
    let _loads = stage.send_request("b");
    pass(0.1).await;
    let before = stage.mux.slots().slots.swap_remove(0);
    pass(0.5).await;
    let after = stage.mux.slots().slots.swap_remove(0);
    assert_eq!((before.idle_ms, after.idle_ms), (0, 0));
    assert_eq!(before.eta_ms.zip(after.eta_ms).map(|(before, after)| before - after), Some(500));
    pass(60.0).await;
    assert_eq!(stage.mux.slots().slots[0].eta_ms, Some(0));
}
