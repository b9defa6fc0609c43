//! Requests that are no longer wanted, in each state of the slot. They are cancelled by dropping their future.

use std::sync::Arc;

use modelrelay_protocol::message::{RequestClass, SlotState};

use super::harness::{Play, Sink, Stage, config, pass, secs};
use crate::actor::now;
use crate::board::Peer;
use crate::effect::LeaseEnd;
use crate::error::SlotError;

#[tokio::test(start_paused = true)]
async fn cancelled_request_frees_capacity_before_lease_returns() {
    let stage = Stage::serving("a", &["a"]).await;
    let (mut tickets, mut leases) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let arriving = stage.mux.arrive(stage.new, ("a", RequestClass::Normal), now());
        tickets.push(arriving.ticket());
        leases.push(arriving.await.unwrap());
    }
    assert_eq!(stage.send("a").await.unwrap_err(), SlotError::AtCapacity);
    tickets.pop().unwrap().cancel();
    leases.push(stage.send("a").await.unwrap());
    assert_eq!(stage.counts().await, (5, 0));
    assert_eq!(stage.send("a").await.unwrap_err(), SlotError::AtCapacity, "it makes room once");
}

#[tokio::test(start_paused = true)]
async fn gate_reopens_when_last_waiter_leaves_before_commit() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    pass(20.0).await;
    let other = stage.send_request("b");
    pass(1.0).await;
    assert_eq!((stage.state().await, stage.told.granted("a")), (SlotState::Draining, None));
    drop(other);
    pass(0.01).await;
    assert_eq!((stage.state().await, stage.told.granted("a")), (SlotState::Ready, Some(3)));
    drop(running);
    assert_eq!(stage.driver().log(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn request_of_lost_link_fails_instead_of_waiting() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    stage.driver().play("evict a", Play::Never);
    let other = stage.send_request("b");
    pass(0.1).await;
    stage.mux.leave(stage.old);
    let ended = tokio::time::timeout(secs(1.0), other).await;
    assert!(matches!(ended, Ok(Err(SlotError::AtCapacity))), "{ended:?}");
}

// A request that was cancelled is already lost, so there is no way back.
#[tokio::test(start_paused = true)]
async fn severing_swap_completes_without_waiters() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    pass(20.0).await;
    let other = stage.send_request("b");
    pass(31.0).await;
    assert_eq!(stage.state().await, SlotState::Severing);
    drop(other);
    assert_eq!(running.cancelled().await, LeaseEnd::Swap);
    drop(running);
    pass(10.0).await;
    assert_eq!((stage.resident().await.as_deref(), stage.counts().await), (Some("b"), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn started_eviction_completes_without_waiters() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let other = stage.send_request("b");
    pass(0.5).await;
    assert_eq!(stage.state().await, SlotState::Evicting);
    drop(other);
    pass(10.0).await;
    assert_eq!(stage.driver().log(), ["evict a", "load b"]);
    assert_eq!((stage.resident().await.as_deref(), stage.counts().await), (Some("b"), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn load_completes_after_its_only_waiter_leaves() {
    let stage = Stage::new(&["a"]).await;
    let arriving = stage.send_request("a");
    pass(1.0).await;
    drop(arriving);
    pass(2.0).await;
    assert_eq!(stage.driver().log(), ["load a"]);
    assert_eq!((stage.resident().await.as_deref(), stage.counts().await), (Some("a"), (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn new_request_uses_abandoned_load() {
    let stage = Stage::new(&["a"]).await;
    let arriving = stage.send_request("a");
    pass(1.0).await;
    drop(arriving);
    let began = tokio::time::Instant::now();
    let lease = stage.send_request("a").await.unwrap();
    assert!(began.elapsed() < secs(1.1), "{:?}", began.elapsed());
    assert_eq!((stage.driver().log(), lease.generation()), (vec!["load a".to_owned()], 1));
}

#[tokio::test(start_paused = true)]
async fn dropped_future_cancels_its_request() {
    let stage = Stage::new(&["a"]).await;
    stage.driver().play("load a", Play::Never);
    assert!(tokio::time::timeout(secs(5.0), stage.send_request("a")).await.is_err());
    assert_eq!(stage.counts().await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn link_lost_during_swap_ends_its_requests() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    pass(20.0).await;
    let (first, second) = (stage.send_request("b"), stage.send_request("b"));
    pass(1.0).await;
    assert_eq!((stage.state().await, stage.counts().await), (SlotState::Draining, (1, 2)));
    stage.mux.leave(stage.old);
    assert_eq!(running.cancelled().await, LeaseEnd::RelayLost);
    drop((running, first, second));
    pass(1.0).await;
    assert_eq!(stage.counts().await, (0, 0));
    // No request for b is left, and it was not too late.
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
    // Requests of a lost link are rejected and leave nothing behind.
    assert_eq!(stage.send_request("a").await.unwrap_err(), SlotError::AtCapacity);
}

#[tokio::test(start_paused = true)]
async fn leaving_relays_demand_is_dropped_but_requests_complete() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send("a").await.unwrap();
    stage.demand("b", 2);
    stage.mux.handle_leaving(stage.new);
    pass(30.0).await;
    assert_eq!((stage.resident().await.as_deref(), stage.counts().await), (Some("a"), (1, 0)));
    assert!(tokio::time::timeout(secs(60.0), running.cancelled()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn link_returning_during_swap_receives_current_state() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    stage.demand("b", 2);
    pass(1.5).await;
    stage.mux.leave(stage.new);
    let told = Arc::new(Sink::default());
    let again = stage.mux.join(Peer::Slots1, Arc::<Sink>::clone(&told));
    let slot = told.slots_now().slots.remove(0);
    assert_eq!((slot.state, slot.target.as_deref()), (SlotState::Loading, Some("b")));
    assert_eq!(told.grant_now().models, Some(vec![]));
    pass(5.0).await;
    assert_eq!((told.granted("b"), told.granted("a")), (Some(4), None));
    assert!(stage.mux.arrive(again, ("b", RequestClass::Normal), now()).await.is_ok());
    // The lost link's grants are not repeated.
    assert_eq!(stage.told.granted("b"), None);
}

#[tokio::test(start_paused = true)]
async fn resident_removed_from_configuration_drains_and_unloads() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    assert!(stage.mux.reconfigure(config(&["b"]), &[]));
    pass(1.0).await;
    assert_eq!(stage.state().await, SlotState::Draining);
    assert!(matches!(stage.send_request("a").await.unwrap_err(), SlotError::UnknownModel { .. }));
    drop(running);
    pass(2.0).await;
    assert_eq!((stage.driver().log(), stage.resident().await), (vec!["evict a".to_owned()], None));
    assert_eq!(stage.mux.models(), ["b"]);
    assert!(stage.send_request("b").await.is_ok());
}
