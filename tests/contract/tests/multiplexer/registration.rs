//! The registration of slots at relays, and rejected settings.

use modelrelay_harness::fake_relay::Ack;
use serde_json::{Value, json};

use crate::rig::{Rig, Slot, chat, slots1, worker_with};

#[tokio::test]
async fn worker_registers_its_slots_and_all_their_models() {
    let mut rig = Rig::start(&slots1(), &Slot::default()).await;
    let register = &rig.link.registration;
    assert_eq!(register["capabilities"], json!(["core1", "slots1", "homes1"]));
    assert_eq!((&register["models"], &register["max_concurrent"]), (&json!(["a", "b"]), &json!(4)));
    let slot = &register["slots"][0];
    assert_eq!((&slot["id"], &slot["state"], &slot["resident"]), (&json!("gpu0"), &json!("empty"), &Value::Null));
    assert_eq!(slot["models"][1]["id"], "b");
    assert_eq!(slot["models"][1]["status"], "unloaded");
    rig.link.expect("slots").await;
    assert_eq!(rig.link.expect("grant").await["models"], json!([]), "every gate is closed until a model is loaded");
}

#[tokio::test]
async fn relay_without_slot_support_receives_no_slots() {
    let mut rig = Rig::start(&Ack::core1(), &Slot::default()).await;
    let grant = rig.link.grant(4).await;
    assert!(grant.body.get("models").is_none_or(Value::is_null), "{}", grant.body);
    let reply = rig.link.exchange(&chat("b")).await;
    assert_eq!(reply.status, 200);
    assert!(rig.link.expect_within(std::time::Duration::ZERO, "slots").await.is_none());
}

#[tokio::test]
async fn too_short_cold_timeout_of_relay_causes_warning() {
    let slow = Slot { knobs: "minResidency: 5m", ..Slot::default() };
    let rig = Rig::start(&slots1(), &slow).await;
    let warning = rig.worker.process.wait_for_line("raise the cold timeout").await;
    assert!(warning.contains("cold_timeout_secs=300"), "{warning}");
    let rig = Rig::start(&slots1(), &Slot::default()).await;
    rig.worker.process.wait_for_line("registered").await;
    assert!(!rig.worker.process.log().contains("cold timeout"), "{}", rig.worker.log());
}

#[tokio::test]
async fn unknown_model_is_rejected_with_available_models() {
    let mut rig = Rig::start(&slots1(), &Slot::default()).await;
    let reply = rig.link.exchange(&chat("c")).await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("model_not_found")));
    assert!(reply.json()["error"]["message"].as_str().is_some_and(|text| text.contains("a, b")), "{}", reply.json());
}

#[tokio::test]
async fn request_at_closed_gate_returns_to_relay() {
    let mut rig = Rig::start(&slots1(), &Slot::default()).await;
    assert_eq!(rig.link.exchange(&chat("a")).await.error_code(), Some("at_capacity"));
}

#[tokio::test]
async fn invalid_setting_is_named_in_one_line() {
    for (from, to, parts) in [
        ("driver: process", "driver: kubernetes", ["multiplexer.slots.gpu0", "kubernetes"]),
        ("\"id\":\"b\"", "\"id\":\"a\"", ["multiplexer.slots.gpu0.models", "\"a\""]),
        ("linger: off", "linger: long", ["multiplexer.linger", "auto, off"]),
        ("multiplexer:", "maxConcurrency: 2\nmultiplexer:", ["maxConcurrency", "multiplexer"]),
    ] {
        let yaml = Slot::default().yaml();
        assert!(yaml.contains(from), "{from} in\n{yaml}");
        let (_config, builder) = worker_with(&yaml.replacen(from, to, 1));
        let mut process = builder.spawn();
        assert_eq!(process.wait_exit().await.code(), Some(1));
        let log = process.log().lines().join("\n");
        assert!(parts.iter().all(|part| log.contains(part)), "{parts:?} in {log}");
        assert_eq!(log.trim().lines().count(), 1, "{log}");
    }
}
