//! A worker's registration, and how the relay handles it.

use modelrelay_harness::{relay::Relay, worker::registration};
use serde_json::{Value, json};

use crate::support::{chat, openai_error, wait_for_model};

async fn ack_of(relay: &Relay, message: Value) -> Value {
    let mut worker = relay.dial().open().await;
    let ack = worker.register_with(message).await;
    // Kept connected for the rest of the test.
    std::mem::forget(worker);
    ack
}

fn warnings(ack: &Value) -> Vec<String> {
    let warnings = ack["warnings"].as_array().unwrap_or_else(|| panic!("no list of warnings in {ack}"));
    warnings.iter().map(|warning| warning.as_str().expect("a warning is text").to_owned()).collect()
}

async fn refused(message: Value) {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.send(&message).await;
    assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()), "{message}");
}

#[tokio::test]
async fn clean_registration_is_acknowledged_without_warnings() {
    let relay = Relay::start().await;
    let ack = ack_of(&relay, registration(&["llama3-8b", "b/c:d"], 4)).await;
    assert_eq!(ack["models"], json!(["llama3-8b", "b/c:d"]));
    assert_eq!(ack["protocol_version"], "1");
    assert!(ack["worker_id"].as_str().is_some_and(|id| !id.is_empty()));
    assert!(ack["warnings"].as_array().is_none_or(Vec::is_empty), "{ack}");
    relay.log().wait_for_line("worker registered").await;
}

#[tokio::test]
async fn models_are_trimmed_and_deduplicated_in_order() {
    let relay = Relay::start().await;
    let ack = ack_of(&relay, registration(&["  b ", "a", "", "b", "   ", "a\t", "c"], 1)).await;
    assert_eq!(ack["models"], json!(["b", "a", "c"]));
    assert!(!warnings(&ack).is_empty());
}

#[tokio::test]
async fn at_most_256_models_are_accepted() {
    let relay = Relay::start().await;
    let names: Vec<String> = (0..300).map(|number| format!("m{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let ack = ack_of(&relay, registration(&names, 1)).await;
    assert_eq!(ack["models"], json!(names[..256]));
    assert!(!warnings(&ack).is_empty());
}

/// The published worker registers `*` when its backend is down at its start.
#[tokio::test]
async fn older_worker_with_wildcard_receives_refresh_requests() {
    let relay = Relay::builder().env("HEARTBEAT_INTERVAL", "0.5").start().await;
    let mut worker = relay.dial().open().await;
    let ack = worker.register_with(registration(&["*"], 1)).await;
    assert_eq!(ack["models"], json!([]));
    assert_eq!(relay.get("/v1/models").await.json()["data"], json!([]));
    for _ in 0..2 {
        worker.expect("models_refresh").await;
    }
    worker.send(&json!({"type": "models_update", "models": ["m"], "current_load": 0})).await;
    wait_for_model(&relay, "m", true).await;
    let _pending = relay.begin(chat("m"));
    worker.expect_request().await;
}

/// Each empty name would be stored at eight times its two bytes and a comma.
#[tokio::test]
async fn lists_over_one_mebibyte_close_socket() {
    let relay = Relay::start().await;
    let long = vec![""; 500_000];
    let mut worker = relay.dial().open().await;
    worker.send(&registration(&long, 1)).await;
    assert_eq!(worker.expect_close().await, (1009, "message too large".to_owned()));
    let mut old = relay.worker(&["m"], 1).await;
    old.send(&json!({"type": "models_update", "models": long})).await;
    assert_eq!(old.expect_close().await.0, 1002);
}

#[tokio::test]
async fn setting_limits_number_of_models() {
    let relay = Relay::builder().env("MAX_MODELS_PER_WORKER", "2").start().await;
    let ack = ack_of(&relay, registration(&["a", "b", "c"], 1)).await;
    assert_eq!(ack["models"], json!(["a", "b"]));
    assert_eq!(warnings(&ack).len(), 1);
    openai_error(&relay.fetch(chat("c")).await, 404, "invalid_request_error", "model_not_found");
}

#[tokio::test]
async fn overlong_model_name_is_not_accepted() {
    let relay = Relay::start().await;
    let (longest, long) = ("x".repeat(256), "y".repeat(257));
    let ack = ack_of(&relay, registration(&[&longest, &long, "fine"], 1)).await;
    let models = ack["models"].as_array().expect("models");
    assert!(models.contains(&json!(longest)) && models.contains(&json!("fine")));
    assert!(!models.contains(&json!(long)));
    assert!(!warnings(&ack).is_empty());
}

#[tokio::test]
async fn worker_name_is_trimmed_to_128_characters() {
    let relay = Relay::start().await;
    let mut message = registration(&["m"], 1);
    message["worker_name"] = json!("ü".repeat(200));
    let ack = ack_of(&relay, message).await;
    assert_eq!(warnings(&ack).len(), 1);
    assert_eq!(relay.workers().await[0]["worker_name"], "ü".repeat(128));
}

#[tokio::test]
async fn published_protocol_version_is_accepted_and_echoed() {
    let relay = Relay::start().await;
    let mut message = registration(&["m"], 1);
    message["protocol_version"] = json!("2026-04-bridge-v1");
    assert_eq!(ack_of(&relay, message).await["protocol_version"], "2026-04-bridge-v1");
}

#[tokio::test]
async fn absent_protocol_version_is_tolerated() {
    let relay = Relay::start().await;
    let mut message = registration(&["m"], 1);
    message.as_object_mut().expect("an object").remove("protocol_version");
    assert_eq!(ack_of(&relay, message).await["models"], json!(["m"]));
}

#[tokio::test]
async fn setting_refuses_absent_protocol_version() {
    let relay = Relay::builder().env("REQUIRE_PROTOCOL_VERSION", "true").start().await;
    let mut worker = relay.dial().open().await;
    let mut message = registration(&["m"], 1);
    message.as_object_mut().expect("an object").remove("protocol_version");
    worker.send(&message).await;
    assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()));
    ack_of(&relay, registration(&["m"], 1)).await;
}

#[tokio::test]
async fn unknown_protocol_version_is_refused() {
    let mut message = registration(&["m"], 1);
    message["protocol_version"] = json!("999");
    refused(message).await;
}

#[tokio::test]
async fn first_message_must_be_registration() {
    refused(json!({"type": "pong", "current_load": 0, "timestamp_unix_ms": 1})).await;
    refused(json!({"type": "models_update", "models": ["m"], "current_load": 0})).await;
    refused(json!({"type": "from_the_future"})).await;
}

#[tokio::test]
async fn registration_of_wrong_types_is_refused() {
    let mut message = registration(&["m"], 1);
    message["models"] = json!("m");
    refused(message).await;
    let mut message = registration(&["m"], 1);
    message["max_concurrent"] = json!("many");
    refused(message).await;
}

#[tokio::test]
async fn second_registration_is_refused() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    worker.send(&registration(&["m"], 1)).await;
    assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()));
}

#[tokio::test]
async fn malformed_json_closes_socket() {
    let relay = Relay::start().await;
    let mut stranger = relay.dial().open().await;
    stranger.send_text("{not json").await;
    assert_eq!(stranger.expect_close().await, (1002, "worker registration protocol error".to_owned()));
    let mut worker = relay.worker(&["m"], 1).await;
    worker.send_text("{\"type\":").await;
    assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()));
}

#[tokio::test]
async fn models_update_is_sanitized_like_registration() {
    let relay = Relay::builder().env("MAX_MODELS_PER_WORKER", "3").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    worker.update_models(&[" n ", "", "n", "o", "p", "q"]).await;
    wait_for_model(&relay, "n", true).await;
    assert_eq!(relay.workers().await[0]["models"], json!(["n", "o", "p"]));
}

#[tokio::test]
async fn each_worker_gets_its_own_id() {
    let relay = Relay::start().await;
    let mut ids = std::collections::HashSet::new();
    for _ in 0..5 {
        let ack = ack_of(&relay, registration(&["m"], 1)).await;
        assert!(ids.insert(ack["worker_id"].as_str().expect("an id").to_owned()));
    }
}
