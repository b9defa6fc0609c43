//! `worker.yaml` changes under a running worker.

use std::time::Duration;

use serde_json::{Value, json};

use crate::rig::{LONG, Rig, Slot, ask_once_loaded, chat, demand, gate, granted, slots1};

#[tokio::test]
async fn a_model_that_leaves_the_file_is_advertised_no_more_and_capacities_change() {
    let slot = Slot::default();
    let mut rig = Rig::start(&slots1(), &slot).await;
    let asked = ask_once_loaded(&mut rig.link, &chat("a"), "a").await;
    assert_eq!(rig.link.reply(&asked).await.status, 200);
    let yaml = slot.yaml().lines().filter(|line| !line.contains("\"id\":\"b\"")).collect::<Vec<_>>().join("\n");
    rig.rewrite(&yaml.replace("\"maxConcurrency\":4", "\"maxConcurrency\":2"));
    let update = rig.link.message_within(LONG, "models_update", |update| update["models"] == json!(["a"])).await;
    assert!(update.is_some(), "{}", rig.worker.log());
    demand(&rig.link, "a", 1);
    let fewer = rig.link.message_within(LONG, "grant", |grant| granted(grant, "a") == Some(2)).await;
    assert!(fewer.is_some(), "{}", rig.worker.log());
    let asked = rig.link.ask(&chat("a"));
    assert_eq!(rig.link.reply(&asked).await.status, 200);
}

#[tokio::test]
async fn declared_details_are_advertised_for_unloaded_models() {
    let slot = Slot::default().yaml().replace("\"id\":\"b\"", "\"id\":\"b\",\"aliases\":[\"fast\"]");
    let mut rig = Rig::with(&slots1(), &format!("{slot}modelDetails: {{b: {{context_length: 4096}}}}\n")).await;
    let declared = |length: u32| json!({"b": {"context_length": length}, "fast": {"context_length": length}});
    assert_eq!(rig.link.registration["model_details"], declared(4096));
    rig.rewrite(&format!("{slot}modelDetails: {{b: {{context_length: 2048}}}}\n"));
    let is_new = |update: &Value| update["model_details"] == declared(2048);
    let update = rig.link.message_within(LONG, "models_update", is_new).await;
    assert!(update.is_some(), "{}", rig.worker.log());
}

#[tokio::test]
async fn what_a_driver_would_have_to_learn_waits_for_a_restart_and_says_so() {
    let slot = Slot::default();
    let mut rig = Rig::start(&slots1(), &slot).await;
    rig.rewrite(&slot.yaml().replace("\"DEMO_DELAY\":\"1ms\"", "\"DEMO_DELAY\":\"2ms\""));
    rig.worker.process.wait_for_line("needs a restart").await;
    rig.rewrite(&slot.yaml().replace("driver: process", "driver: nonsense"));
    rig.worker.process.wait_for_line("the last good settings stay in force").await;
    demand(&rig.link, "b", 1);
    gate(&mut rig.link, "b").await;
    assert!(!rig.link.closes_within(Duration::ZERO).await);
}
