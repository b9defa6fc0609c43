//! Swaps as their callers see them, and their reports.

use modelrelay_protocol::message::SlotState;
use prometheus::TextEncoder;

use super::harness::{Stage, config, pass, secs};
use crate::actor::PendingLease;
use crate::config::ModelConfig;

#[tokio::test(start_paused = true)]
async fn two_models_wanted_together_load_one_after_another() {
    let stage = Stage::new(&["a", "b"]).await;
    let (first, second) = (stage.send_request("a"), stage.send_request("b"));
    let serve = |arriving: PendingLease| async {
        let lease = arriving.await.unwrap();
        pass(1.0).await;
        let generation = lease.generation();
        lease.release(true).await;
        generation
    };
    let (first, second) = tokio::join!(serve(first), serve(second));
    assert_eq!((first, second), (1, 2));
    assert_eq!(stage.driver().log(), ["load a", "evict a", "load b"]);
}

#[tokio::test(start_paused = true)]
async fn request_at_idle_ttl_expiry_is_served() {
    let mut config = config(&["a"]);
    config.models[0] = ModelConfig { idle_ttl: Some(secs(60.0)), ..ModelConfig::new("a", 4) };
    let stage = Stage::with(vec![config], false).await;
    stage.send_request("a").await.unwrap().release(true).await;
    let (_, idle) = (stage.driver().log(), tokio::time::Instant::now());
    tokio::time::sleep_until(idle + secs(60.0)).await;
    let lease = stage.send_request("a").await.unwrap();
    // Whichever came first, the request is served, and the slot is not stuck.
    drop(lease);
    pass(59.0).await;
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
    pass(5.0).await;
    assert_eq!((stage.resident().await, stage.state().await), (None, SlotState::Empty));
    assert!(stage.send_request("a").await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn queueing_relay_receives_grants_and_swap_steps() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    assert_eq!((stage.told.granted("a"), stage.told.granted("b")), (Some(4), None));
    stage.demand("b", 3);
    pass(10.0).await;
    assert_eq!((stage.told.granted("a"), stage.told.granted("b")), (None, Some(4)));
    let mut states = stage.told.states();
    states.dedup();
    // An idle resident has nothing to drain.
    assert!(states.ends_with(&[SlotState::Evicting, SlotState::Loading, SlotState::Ready]), "{states:?}");
    let slot = stage.told.slots_now().slots.remove(0);
    assert_eq!((slot.resident.as_deref(), slot.generation), (Some("b"), 2));
}

#[tokio::test(start_paused = true)]
async fn order_results_return_to_forwarding_relay() {
    let stage = Stage::new(&["a", "b"]).await;
    stage.command("1", "load", "a");
    pass(3.0).await;
    stage.command("2", "pin", "a");
    stage.command("3", "load", "b");
    stage.command("4", "unload", "zzz");
    stage.command("5", "polish", "a");
    pass(1.0).await;
    let mut results = stage.told.results();
    results.sort_by(|a, b| a.op_id.cmp(&b.op_id));
    let told: Vec<_> = results.iter().map(|r| (r.op_id.as_str(), r.error.as_deref())).collect();
    assert_eq!(
        told,
        [
            ("1", None),
            ("2", None),
            ("3", Some("model a is pinned; unpin it first")),
            ("4", Some("no slot has model zzz")),
            ("5", Some("unknown command polish: expected load, unload, pin or unpin")),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn swap_appears_in_health_and_metrics() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    pass(20.0).await;
    let other = stage.send_request("b");
    pass(10.0).await;
    let slot = stage.mux.health().await["slots"][0].take();
    assert_eq!((&slot["state"], &slot["drain"]["leases"]), (&"draining".into(), &1.into()));
    let (remaining, length) = (&slot["drain"]["remaining"], &slot["drain"]["deadline"]);
    assert!((19.9..=20.0).contains(&remaining.as_f64().unwrap()), "{slot}");
    assert!((29.9..30.1).contains(&(length.as_f64().unwrap() - slot["drain"]["started"].as_f64().unwrap())), "{slot}");
    // Its client never disconnects.
    let other = other.await.unwrap();
    let slot = stage.mux.health().await["slots"][0].take();
    let swap = &slot["last_swap"];
    assert_eq!((&swap["from"], &swap["to"], &swap["severed"]), (&"a".into(), &"b".into(), &1.into()));
    assert_eq!((&swap["result"], &swap["load_s"]), (&"done".into(), &2.0.into()));
    drop((running, other));
    stage.mux.observe().await;
    let text = TextEncoder::new().encode_to_string(&stage.registry.gather()).unwrap();
    for line in [
        "slot_state{slot=\"gpu0\",state=\"ready\"} 1",
        "slot_state{slot=\"gpu0\",state=\"draining\"} 0",
        "resident_info{model=\"b\",slot=\"gpu0\"} 1",
        "swaps_total{from=\"a\",reason=\"quantum\",result=\"done\",to=\"b\"} 1",
        "swap_phase_seconds_count{phase=\"drain\"} 2",
        "swap_cost_ema_seconds{model=\"b\"} 2",
        "hold_seconds_count{model=\"b\"} 1",
        "waiting{model=\"a\"} 0",
        "leases{model=\"b\"} 0",
        "severed_total 1",
        "swaps_aborted_total 0",
        "linger_hits_total 0",
        "linger_misses_total 0",
        "coalesced_total 0",
        "memory_not_freed_total 0",
        "residency_seconds_count{model=\"a\"} 1",
        "gpu_time_share{activity=\"swapping\",slot=\"gpu0\"}",
    ] {
        assert!(text.contains(&format!("modelrelay_worker_{line}")), "{line} in\n{text}");
    }
    assert!(!text.contains("resident_info{model=\"a\""), "{text}");
}
