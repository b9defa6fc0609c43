//! `worker.yaml` changes under a running worker.

use std::time::Duration;

use modelrelay_harness::process::path_of;
use serde_json::{Value, json};

use crate::rig::{LONG, Rig, Slot, chat, demand, gate, granted, request_once_loaded, slots1, stream, text};

#[tokio::test]
async fn removed_model_is_withdrawn_and_capacities_change() {
    let slot = Slot::default();
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &chat("a"), "a").await;
    assert_eq!(rig.link.reply(&request).await.status, 200);
    let yaml = slot.yaml().lines().filter(|line| !line.contains("\"id\":\"b\"")).collect::<Vec<_>>().join("\n");
    rig.rewrite(&yaml.replace("\"maxConcurrency\":4", "\"maxConcurrency\":2"));
    let update = rig.link.message_within(LONG, "models_update", |update| update["models"] == json!(["a"])).await;
    assert!(update.is_some(), "{}", rig.worker.log());
    demand(&rig.link, "a", 1);
    let fewer = rig.link.message_within(LONG, "grant", |grant| granted(grant, "a") == Some(2)).await;
    assert!(fewer.is_some(), "{}", rig.worker.log());
    let request = rig.link.send_request(&chat("a"));
    assert_eq!(rig.link.reply(&request).await.status, 200);
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

/// Returns the slot's file with another command for `a`, which prints `second life` first.
fn with_other_command(yaml: &str) -> String {
    let program = path_of("modelrelay-worker").to_string_lossy().into_owned();
    let other = json!(["sh", "-c", "echo second life; exec \"$0\" demo --listen 127.0.0.1:${PORT}", program]);
    let command = json!([program, "demo", "--listen", "127.0.0.1:${PORT}"]).to_string();
    yaml.replacen(&command, &other.to_string(), 1)
}

fn without(yaml: &str, model: &str) -> String {
    let id = format!("\"id\":\"{model}\"");
    yaml.lines().filter(|line| !line.contains(&id)).collect::<Vec<_>>().join("\n")
}

fn slow() -> Slot {
    Slot { delay: "300ms", ..Slot::default() }
}

#[tokio::test]
async fn added_model_is_loaded_after_running_stream() {
    let slot = slow();
    let mut rig = Rig::with(&slots1(), &without(&slot.yaml(), "b")).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    rig.rewrite(&slot.yaml());
    let update = rig.link.message_within(LONG, "models_update", |update| update["models"] == json!(["a", "b"])).await;
    assert!(update.is_some(), "{}", rig.worker.log());
    demand(&rig.link, "b", 1);
    let reply = rig.link.reply_within(LONG, &request).await.expect("the stream ends");
    assert!(reply.is_complete() && text(&reply).ends_with("data: [DONE]\n\n"), "{} {}", reply.end, text(&reply));
    gate(&mut rig.link, "b").await;
    let request = rig.link.send_request(&chat("b"));
    assert_eq!(rig.link.reply_within(LONG, &request).await.expect("a response").status, 200, "{}", rig.worker.log());
}

#[tokio::test]
async fn removed_model_ends_its_stream_and_is_unloaded() {
    let slot = slow();
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &stream("a"), "a").await;
    rig.link.part(&request).await;
    rig.rewrite(&without(&slot.yaml(), "a"));
    let update = rig.link.message_within(LONG, "models_update", |update| update["models"] == json!(["b"])).await;
    assert!(update.is_some(), "{}", rig.worker.log());
    let reply = rig.link.reply_within(LONG, &request).await.expect("the stream ends");
    assert!(reply.is_complete() && text(&reply).ends_with("data: [DONE]\n\n"), "{} {}", reply.end, text(&reply));
    let is_empty = |slots: &Value| slots["slots"][0]["state"] == "empty" && slots["slots"][0]["models"][0]["id"] == "b";
    assert!(rig.link.message_within(LONG, "slots", is_empty).await.is_some(), "{}", rig.worker.log());
    let request = rig.link.send_request(&chat("a"));
    assert_eq!(rig.link.reply(&request).await.status, 404);
}

#[tokio::test]
async fn changed_command_is_used_from_next_load() {
    let slot = Slot::default();
    let mut rig = Rig::start(&slots1(), &slot).await;
    let request = request_once_loaded(&mut rig.link, &chat("a"), "a").await;
    assert_eq!(rig.link.reply(&request).await.status, 200);
    rig.rewrite(&with_other_command(&slot.yaml()));
    rig.worker.process.wait_for_line("changed the models of a slot").await;
    let request = rig.link.send_request(&chat("a"));
    assert_eq!(rig.link.reply(&request).await.status, 200, "the loaded model must stay");
    assert!(!rig.worker.log().contains("second life"), "{}", rig.worker.log());
    for model in ["b", "a"] {
        let request = request_once_loaded(&mut rig.link, &chat(model), model).await;
        assert_eq!(rig.link.reply(&request).await.status, 200, "{}", rig.worker.log());
    }
    rig.worker.process.wait_for_line("second life").await;
}

#[tokio::test]
async fn corrected_command_is_tried_at_next_request() {
    let slot = Slot::default();
    let broken = with_other_command(&slot.yaml()).replacen("second life;", "broken; exit 3;", 1);
    let mut rig = Rig::with(&slots1(), &broken).await;
    demand(&rig.link, "a", 1);
    let failed = |slots: &Value| slots["slots"][0]["models"][0]["status"] == "failed";
    assert!(rig.link.message_within(LONG, "slots", failed).await.is_some(), "{}", rig.worker.log());
    rig.rewrite(&with_other_command(&slot.yaml()));
    rig.worker.process.wait_for_line("changed the models of a slot").await;
    demand(&rig.link, "a", 1);
    rig.worker.process.wait_for_line("second life").await;
    gate(&mut rig.link, "a").await;
}

#[tokio::test]
async fn fixed_settings_wait_for_next_start() {
    let slot = Slot::default();
    let mut rig = Rig::start(&slots1(), &slot).await;
    rig.rewrite(&slot.yaml().replace("driver: process", "driver: process\n    devices: ['7']"));
    let line = rig.worker.process.wait_for_line("requires a restart; keeping the previous value").await;
    assert!(line.contains("gpu0") && line.contains("devices"), "{line}");
    rig.rewrite(&slot.yaml().replace("id: gpu0", "id: gpu1"));
    rig.worker.process.wait_for_line("a new slot; restart the worker to use it").await;
    rig.rewrite(&slot.yaml().replace("driver: process", "driver: nonsense"));
    rig.worker.process.wait_for_line("worker.yaml reload failed; keeping previous configuration").await;
    demand(&rig.link, "b", 1);
    gate(&mut rig.link, "b").await;
    assert!(!rig.link.closes_within(Duration::ZERO).await);
}
