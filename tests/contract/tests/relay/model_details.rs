//! Limits and capabilities of models in `/v1/models`: passed through, merged over workers, overridden by the settings.

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker::{FakeWorker, core1_registration, new_instance_id, registration};
use serde_json::{Value, json};

use crate::support::{chat, openai_error, wait_for_model};

/// A worker with one model and these details.
async fn worker_with(relay: &Relay, model: &str, details: Value) -> FakeWorker {
    let mut worker = relay.dial().open().await;
    let mut message = core1_registration(&[model], 1, &new_instance_id());
    message["model_details"] = details;
    let ack = worker.register_with(message).await;
    assert_eq!(ack.get("warnings"), None, "{ack}");
    worker.grant(1).await;
    worker
}

/// Returns the entry of a model, without the fields that every model has.
async fn details(relay: &Relay, model: &str) -> Value {
    let mut entry = relay.get(&format!("/v1/models/{model}")).await.with_status(200).json();
    let fields = entry.as_object_mut().expect("an object");
    let own = ["id", "object", "created", "owned_by"].map(|name| fields.remove(name).expect(name));
    assert_eq!((&own[0], &own[1], &own[3]), (&json!(model), &json!("model"), &json!("local")), "{own:?}");
    assert!(own[2].is_u64(), "{own:?}");
    entry
}

async fn wait_for_details(relay: &Relay, model: &str, wanted: &Value) {
    relay.eventually(&format!("{model} has {wanted}"), || async { details(relay, model).await == *wanted }).await;
}

#[tokio::test]
async fn worker_details_are_in_every_list() {
    let relay = Relay::start().await;
    let stated = json!({"max_model_len": 40960, "meta": {"n_ctx": 32768}, "capabilities": ["tools"]});
    let _worker = worker_with(&relay, "m", json!({"m": stated})).await;
    assert_eq!(details(&relay, "m").await, stated);
    for request in [
        Request::get("/v1/models"),
        Request::get("/models"),
        Request::get("/v1/models").header("anthropic-version", "2023-06-01"),
    ] {
        let list = relay.fetch(request).await.with_status(200).json();
        let entry = &list["data"][0];
        assert_eq!((&entry["max_model_len"], &entry["meta"]["n_ctx"]), (&json!(40960), &json!(32768)), "{list}");
    }
}

#[tokio::test]
async fn smallest_figures_of_several_workers_are_listed() {
    let relay = Relay::start().await;
    let large = json!({"max_model_len": 40960, "capabilities": ["tools", "vision"]});
    let small = json!({"max_model_len": 32768, "capabilities": ["tools", "audio"]});
    let _large = worker_with(&relay, "m", json!({"m": large})).await;
    let smaller = worker_with(&relay, "m", json!({"m": small})).await;
    let _silent = relay.worker(&["m"], 1).await;
    assert_eq!(details(&relay, "m").await, json!({"max_model_len": 32768, "capabilities": ["tools"]}));
    smaller.vanish();
    wait_for_details(&relay, "m", &large).await;
}

#[tokio::test]
async fn update_of_details_alone_is_listed() {
    let relay = Relay::start().await;
    let mut worker = worker_with(&relay, "m", json!({"m": {"n_ctx": 8192}})).await;
    worker.send(&json!({"type": "models_update", "models": ["m"], "model_details": {"m": {"n_ctx": 4096}}})).await;
    wait_for_details(&relay, "m", &json!({"n_ctx": 4096})).await;
    worker.update_models(&["m"]).await;
    wait_for_details(&relay, "m", &json!({})).await;
}

#[tokio::test]
async fn worker_without_details_is_listed_as_before() {
    let relay = Relay::start().await;
    let _worker = relay.worker(&["m"], 1).await;
    assert_eq!(details(&relay, "m").await, json!({}));
    let props = relay.get("/props").await.with_status(200).json();
    assert_eq!(props["default_generation_settings"], json!({"params": {}}));
}

#[tokio::test]
async fn hostile_details_are_dropped_without_harm() {
    let relay = Relay::start().await;
    let _honest = worker_with(&relay, "other", json!({"other": {"n_ctx": 7}})).await;
    let long: Vec<String> = (0..60).map(|number| format!("{number:0>60}")).collect();
    let huge: serde_json::Map<_, _> =
        (0..120).map(|number| (format!("m{number}"), json!({"capabilities": long, "architecture": {}}))).collect();
    for hostile in [
        json!(null),
        json!("m"),
        json!([["m"]]),
        json!({"m": "n_ctx"}),
        json!({"m": {"id": "evil", "object": "evil", "created": 1, "owned_by": "evil", "display_name": "evil"}}),
        json!({"m": {"n_ctx": -1, "max_model_len": "1", "context_length": 1e300, "meta": [], "capabilities": "all"}}),
        json!({"m": {"capabilities": long, "supported_parameters": long}}),
        json!({"m": {"capabilities": ["\u{1b}[31m"]}, "\u{202e}": {"n_ctx": 1}}),
        json!({"other": {"n_ctx": 1}}),
        json!(huge),
    ] {
        let mut worker = worker_with(&relay, "m", hostile.clone()).await;
        assert_eq!(details(&relay, "m").await, json!({}), "{hostile}");
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
        pending.reply().await.with_status(200);
        worker.vanish();
        wait_for_model(&relay, "m", false).await;
    }
    assert_eq!(details(&relay, "other").await, json!({"n_ctx": 7}));
}

#[tokio::test]
async fn props_return_smallest_context_length() {
    let relay = Relay::start().await;
    let _one = worker_with(&relay, "one", json!({"one": {"meta": {"n_ctx": 8192, "n_ctx_train": 131_072}}})).await;
    let _two = worker_with(&relay, "two", json!({"two": {"max_model_len": 4096}})).await;
    for (path, length) in [("/props", 4096), ("/props?model=one", 8192), ("/v1/props?model=two", 4096)] {
        let props = relay.get(path).await.with_status(200).json();
        assert_eq!(props["default_generation_settings"]["n_ctx"], length, "{path}");
    }
    openai_error(&relay.get("/props?model=three").await, 404, "invalid_request_error", "model_not_found");
}

#[tokio::test]
async fn details_in_relay_yaml_replace_those_of_workers() {
    let config = |details: &str| {
        format!("providers:\n- name: local\n  workerSecrets: [{{value: {WORKER_SECRET}}}]\n  modelDetails: {details}\n")
    };
    let relay = Relay::builder().config(config("{m: {n_ctx: 2048}}")).start().await;
    let mut worker = relay.dial().open().await;
    let mut message = registration(&["m"], 1);
    message["model_details"] = json!({"m": {"n_ctx": 8192, "max_tokens": 5}});
    worker.register_with(message).await;
    wait_for_details(&relay, "m", &json!({"n_ctx": 2048, "max_tokens": 5})).await;
    relay.replace_file("relay.yaml", &config("{m: {n_ctx: 1024, context_length: 9}}"));
    wait_for_details(&relay, "m", &json!({"n_ctx": 1024, "max_tokens": 5, "context_length": 9})).await;
}
