//! Actions of one relay do not affect the grants, demand and promises of others.

use std::sync::Arc;

use modelrelay_protocol::message::{Command, Demand, ModelDemand, RequestClass};

use super::harness::{Sink, Stage, pass};
use crate::actor::{Lease, now};
use crate::board::Peer;
use crate::config::{ModelConfig, SlotConfig};
use crate::event::RelayKey;

/// Two slots that can both hold `a`, each busy with a model that the other does not have.
async fn busy() -> (Stage, (Lease, Lease)) {
    let slot = |id: &str, own: &str| SlotConfig::new(id, vec![ModelConfig::new("a", 4), ModelConfig::new(own, 4)]);
    let stage = Stage::with(vec![slot("gpu0", "b"), slot("gpu1", "c")], false).await;
    let running = (stage.send_request("b").await.unwrap(), stage.send_request("c").await.unwrap());
    (stage, running)
}

fn join(stage: &Stage, peer: Peer) -> (RelayKey, Arc<Sink>) {
    let told = Arc::new(Sink::default());
    (stage.mux.join(peer, Arc::<Sink>::clone(&told)), told)
}

fn demand(stage: &Stage, relay: RelayKey, model: &str, waiting: u32) {
    let models = vec![ModelDemand { id: model.to_owned(), waiting, oldest_ms: 0, sum_ms: 0, ..ModelDemand::default() }];
    stage.mux.handle_demand(relay, &Demand { models });
}

fn wanted(stage: &Stage) -> Vec<u32> {
    stage.mux.slots().slots.iter().map(|slot| slot.wanted).collect()
}

#[tokio::test(start_paused = true)]
async fn relay_regains_unused_share_with_any_message() {
    let stage = Stage::serving("a", &["a"]).await;
    let (other, told) = join(&stage, Peer::Slots1);
    demand(&stage, stage.new, "a", 9);
    demand(&stage, other, "a", 9);
    pass(0.1).await;
    assert_eq!((stage.told.granted("a"), told.granted("a")), (Some(4), Some(0)));
    // Neither sends anything; unused capacity is available to all.
    pass(3.0).await;
    assert_eq!((stage.told.granted("a"), told.granted("a")), (Some(4), Some(4)));
    stage.mux.handle_message(stage.new);
    pass(0.1).await;
    assert_eq!((stage.told.granted("a"), told.granted("a")), (Some(4), Some(0)));
}

#[tokio::test(start_paused = true)]
async fn relays_without_slots_receive_load_of_others() {
    let stage = Stage::serving("a", &["a"]).await;
    stage.mux.leave(stage.new);
    let ((one, _), (_, told)) = (join(&stage, Peer::Core1), join(&stage, Peer::Core1));
    let first = stage.mux.arrive(one, ("a", RequestClass::Normal), now()).await.unwrap();
    let second = stage.mux.arrive(one, ("a", RequestClass::Normal), now()).await.unwrap();
    pass(0.1).await;
    assert_eq!(told.grant_now().others, 2);
    first.release(true).await;
    assert_eq!(told.grant_now().others, 1);
    drop(second);
    pass(0.1).await;
    assert_eq!(told.grant_now().others, 0);
}

#[tokio::test(start_paused = true)]
async fn demand_keeps_its_slot_when_another_relay_leaves() {
    for leaves in [true, false] {
        let slot = |id: &str, models: &[&str]| {
            SlotConfig::new(id, models.iter().map(|model| ModelConfig::new(*model, 4)).collect())
        };
        let stage = Stage::with(vec![slot("gpu0", &["a", "b", "d"]), slot("gpu1", &["a", "c"])], false).await;
        let _running = (stage.send_request("b").await.unwrap(), stage.send_request("c").await.unwrap());
        let (other, _) = join(&stage, Peer::Slots1);
        demand(&stage, other, "d", 1);
        demand(&stage, stage.new, "a", 1);
        pass(0.1).await;
        assert_eq!(wanted(&stage), [1, 1], "each in a slot of its own");
        if leaves {
            stage.mux.leave(other);
        } else {
            stage.mux.handle_leaving(other);
        }
        demand(&stage, stage.new, "a", 1);
        pass(0.1).await;
        assert_eq!(wanted(&stage), [0, 1], "it is not requested of another slot again");
        stage.mux.handle_demand(stage.new, &Demand { models: Vec::new() });
        demand(&stage, stage.new, "a", 1);
        pass(0.1).await;
        assert_eq!(wanted(&stage), [1, 0], "the first slot keeps nothing of the other relay's demand");
    }
}

#[tokio::test(start_paused = true)]
async fn demand_of_departed_relay_is_dropped() {
    for leaves in [true, false] {
        let (stage, running) = busy().await;
        let (other, _) = join(&stage, Peer::Slots1);
        demand(&stage, other, "a", 1);
        pass(0.1).await;
        if leaves {
            stage.mux.leave(other);
        } else {
            stage.mux.handle_leaving(other);
        }
        drop(running);
        pass(60.0).await;
        let residents = stage.mux.slots().slots.into_iter().map(|slot| slot.resident);
        assert_eq!(residents.collect::<Vec<_>>(), [Some("b".to_owned()), Some("c".to_owned())]);
    }
}

#[tokio::test(start_paused = true)]
async fn order_results_survive_departure_of_another_relay() {
    let stage = Stage::new(&["a", "b"]).await;
    let (other, told) = join(&stage, Peer::Slots1);
    let order = |op_id: &str, command: &str| Command {
        op_id: op_id.to_owned(),
        command: command.to_owned(),
        model: "a".to_owned(),
        slot: None,
        mode: None,
    };
    stage.mux.handle_command(stage.new, &order("1", "load"));
    stage.mux.handle_command(other, &order("2", "pin"));
    stage.mux.leave(other);
    pass(5.0).await;
    let ops = |sink: &Sink| sink.results().into_iter().map(|result| (result.op_id, result.ok)).collect::<Vec<_>>();
    assert_eq!((ops(&stage.told), ops(&told)), (vec![("1".to_owned(), true)], vec![]));
}

#[tokio::test(start_paused = true)]
async fn arrived_request_leaves_demand_while_others_wait() {
    let (stage, (b, c)) = busy().await;
    demand(&stage, stage.new, "a", 2);
    pass(0.1).await;
    assert_eq!(wanted(&stage), [1, 0]);
    // One arrives too early, and ends; the other still waits, and goes to whichever slot is free first.
    assert!(stage.send("a").await.is_err());
    drop(c);
    pass(5.0).await;
    assert_eq!(stage.mux.slots().slots[1].resident.as_deref(), Some("a"));
    drop(b);
}

#[tokio::test(start_paused = true)]
async fn served_demand_triggers_no_further_load() {
    let slot = |id: &str, own: &str| SlotConfig::new(id, vec![ModelConfig::new("a", 4), ModelConfig::new(own, 4)]);
    let stage = Stage::with(vec![slot("gpu0", "b"), slot("gpu1", "c")], false).await;
    demand(&stage, stage.new, "a", 1);
    pass(5.0).await;
    stage.send("a").await.unwrap().release(true).await;
    drop(stage.send_request("b").await.unwrap());
    pass(60.0).await;
    let slots = stage.mux.slots().slots;
    let residents: Vec<_> = slots.iter().map(|slot| slot.resident.as_deref()).collect();
    assert_eq!(residents, [Some("b"), None], "no request waits for a any more");
}
