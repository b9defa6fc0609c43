//! Several slots as one worker.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{Command, ModelGrant};

use super::harness::{Sink, Stage, config, pass};
use crate::multiplexer::actor::now;
use crate::multiplexer::board::Peer;
use crate::multiplexer::config::{ModelConfig, SlotConfig};
use crate::multiplexer::error::{LoadFailure, SlotError};
use crate::multiplexer::slots::Refusal;

/// Two slots: both have `a`, only the second has `b`, which takes eight at once.
async fn two() -> Stage {
    let second = SlotConfig::new("gpu1", vec![ModelConfig::new("a", 4), ModelConfig::new("b", 8)]);
    Stage::with(vec![config(&["a"]), second], false).await
}

#[tokio::test(start_paused = true)]
async fn capacities_models_and_snapshots_are_put_together() {
    let stage = two().await;
    assert_eq!((stage.mux.capacity(), stage.mux.models()), (12, vec!["a".to_owned(), "b".to_owned()]));
    let ids: Vec<_> = stage.mux.slots().slots.into_iter().map(|slot| slot.id).collect();
    assert_eq!(ids, ["gpu0", "gpu1"]);
    drop((stage.ask("a").await.unwrap(), stage.ask("b").await.unwrap()));
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
async fn grants_of_a_model_that_two_slots_hold_are_summed_and_both_are_used() {
    let stage = two().await;
    stage.command("1", "load", "a");
    pass(0.1).await;
    let error = stage.told.results().pop().and_then(|result| result.error);
    assert_eq!(error.as_deref(), Some("model a is in slots gpu0, gpu1: name one"));
    for slot in ["gpu0", "gpu1"] {
        let command = Command {
            op_id: slot.into(),
            command: "load".into(),
            model: "a".into(),
            slot: Some(slot.into()),
            mode: None,
        };
        stage.mux.handle_command(stage.new, &command);
    }
    pass(5.0).await;
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
async fn demand_that_no_slot_can_serve_yet_makes_one_slot_load() {
    let stage = two().await;
    stage.demand("a", 3);
    pass(5.0).await;
    let logs: Vec<_> = stage.drivers.iter().flat_map(|driver| driver.log()).collect();
    assert_eq!(logs, ["load a"]);
    // As little as three requests of a relay that keeps none itself.
    let stage = two().await;
    let _waiting = [stage.ask("a"), stage.ask("a"), stage.ask("a")];
    pass(5.0).await;
    let logs: Vec<_> = stage.drivers.iter().flat_map(|driver| driver.log()).collect();
    assert_eq!(logs, ["load a"]);
}

#[tokio::test(start_paused = true)]
async fn a_relay_that_knows_grants_but_no_slots_may_send_what_can_run_and_waits_here() {
    let stage = two().await;
    let told = Arc::new(Sink::default());
    let relay = stage.mux.join(Peer::Core1, Arc::<Sink>::clone(&told));
    let grant = told.grant_now();
    assert_eq!((grant.slots, grant.others, grant.capacity, grant.links), (12, 0, 12, 3));
    assert_eq!(grant.models, None);
    let lease = stage.mux.arrive(relay, "b", now()).await.unwrap();
    let _other = stage.ask("b").await.unwrap();
    assert_eq!((told.grant_now().others, lease.generation()), (1, 1));
    stage.mux.leave(stage.new);
    assert_eq!(told.grant_now().links, 2);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_no_slot_has_is_refused_by_name() {
    let stage = two().await;
    let error = stage.ask("c").await.unwrap_err();
    assert_eq!(error.to_string(), "no slot has model c; there are a, b");
}

#[test]
fn a_relay_is_told_a_code_where_it_can_act_on_it_and_else_the_whole_answer() {
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
