//! Several providers from `relay.yaml`.

use modelrelay_harness::{client::Request, relay::Relay, worker::FakeWorker};
use serde_json::json;

use crate::support::{anthropic_error, chat, messages, model_ids, openai_error, two_providers};

async fn worker_of(relay: &Relay, provider: &str, models: &[&str]) -> FakeWorker {
    let mut worker = relay.dial().provider(provider).open().await;
    worker.register(models, 4).await;
    worker
}

#[tokio::test]
async fn model_in_two_catalogues_goes_to_first() {
    let config = two_providers("  models: [{id: shared}]", "  models: [{id: shared}, {id: own}]");
    let relay = Relay::builder().config(config).start().await;
    let mut local = worker_of(&relay, "local", &["shared"]).await;
    let mut other = worker_of(&relay, "other", &["shared", "own"]).await;
    let _one = relay.begin(chat("shared"));
    local.expect_request().await;
    let _two = relay.begin(chat("own"));
    assert_eq!(other.expect_request().await.message["model"], "own");
}

#[tokio::test]
async fn catalogue_precedes_advertised_models() {
    let relay = Relay::builder().config(two_providers("", "  models: [{id: m}]")).start().await;
    let mut local = worker_of(&relay, "local", &["m", "advertised"]).await;
    let mut other = worker_of(&relay, "other", &["m"]).await;
    let _one = relay.begin(chat("m"));
    other.expect_request().await;
    let _two = relay.begin(chat("advertised"));
    assert_eq!(local.expect_request().await.message["model"], "advertised");
}

#[tokio::test]
async fn header_selects_provider() {
    let relay = Relay::builder().config(two_providers("", "")).start().await;
    let mut local = worker_of(&relay, "local", &["m"]).await;
    let mut other = worker_of(&relay, "other", &["m"]).await;
    let _one = relay.begin(chat("m").header("x-modelrelay-provider", "other"));
    assert_eq!(other.expect_request().await.header("x-modelrelay-provider"), None);
    let _two = relay.begin(chat("m"));
    local.expect_request().await;
}

#[tokio::test]
async fn unknown_provider_in_header_is_404() {
    let relay = Relay::start().await;
    let reply = relay.fetch(chat("m").header("x-modelrelay-provider", "nowhere")).await;
    openai_error(&reply, 404, "invalid_request_error", "provider_not_found");
    let reply = relay.fetch(messages("m").header("x-modelrelay-provider", "nowhere")).await;
    anthropic_error(&reply, 404, "not_found_error");
}

#[tokio::test]
async fn unserved_model_with_several_providers_is_404() {
    let relay = Relay::builder().config(two_providers("", "")).start().await;
    openai_error(&relay.fetch(chat("m")).await, 404, "invalid_request_error", "model_not_found");
}

#[tokio::test]
async fn workers_serve_only_their_providers_queue() {
    let relay = Relay::builder().config(two_providers("  models: [{id: m}]", "")).start().await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let mut other = worker_of(&relay, "other", &["m"]).await;
    other.expect_quiet().await;
    let mut local = worker_of(&relay, "local", &["m"]).await;
    local.expect_request().await;
}

#[tokio::test]
async fn disabled_provider_is_503() {
    let config = two_providers("  enabled: false\n  models: [{id: m}]", "");
    let relay = Relay::builder().config(config).start().await;
    let reply = relay.fetch(chat("m")).await;
    let message = openai_error(&reply, 503, "service_unavailable_error", "provider_disabled");
    assert_eq!(message, "Provider is currently disabled");
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
    let reply = relay.fetch(messages("m")).await;
    assert_eq!(anthropic_error(&reply, 503, "overloaded_error"), "Provider is currently disabled");
}

#[tokio::test]
async fn limits_apply_per_provider() {
    let config = two_providers(
        "  queue: {maxLength: 7, maxBytes: 1Mi, timeout: 500ms}\n  requestTimeout: 1h30m\n  maxModelsPerWorker: 1",
        "  queue: {timeout: 9s, coldTimeout: 9s}",
    );
    let relay = Relay::builder().config(config).start().await;
    let mut local = worker_of(&relay, "local", &["a", "dropped"]).await;
    let _other = worker_of(&relay, "other", &["b"]).await;
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["a", "b"]);
    let running: Vec<_> = (0..4).map(|_| relay.begin(chat("a"))).collect();
    for _ in 0..4 {
        local.expect_request().await;
    }
    let reply = relay.fetch(chat("a")).await;
    openai_error(&reply, 504, "timeout_error", "queue_timeout");
    drop(running);
}

#[tokio::test]
async fn cold_model_requests_wait_for_cold_timeout() {
    let config =
        two_providers("  coldModels: [sleeping]\n  queue: {timeout: 1s, coldTimeout: 9s}", "  queue: {timeout: 1s}");
    let relay = Relay::builder().config(config).start().await;
    let mut other = worker_of(&relay, "other", &["warm"]).await;
    let running: Vec<_> = (0..4).map(|_| relay.begin(chat("warm"))).collect();
    for _ in 0..running.len() {
        other.expect_request().await;
    }
    let pending = relay.begin(chat("sleeping"));
    relay.wait_for_queue_depth("local", 1).await;
    // It arrives later and waits as long as the other one would if its model were not cold.
    let reply = relay.fetch(chat("warm")).await;
    openai_error(&reply, 504, "timeout_error", "queue_timeout");
    assert!(!pending.is_answered(), "the queue timeout ran while the model was cold");
    let mut worker = worker_of(&relay, "local", &["sleeping", "not-in-any-catalogue"]).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    let list = relay.get("/v1/models").await.json();
    assert!(model_ids(&list).contains(&"not-in-any-catalogue".to_owned()), "coldModels are no catalogue");
}

#[tokio::test]
async fn serving_provider_precedes_one_with_cold_model() {
    let config = two_providers("  coldModels: [m]\n  queue: {coldTimeout: 9s}", "");
    let relay = Relay::builder().config(config).start().await;
    let mut other = worker_of(&relay, "other", &["m"]).await;
    let owner = async || {
        let list = relay.get("/v1/models").await.json();
        list["data"].as_array().unwrap().iter().find(|model| model["id"] == "m").unwrap()["owned_by"].clone()
    };
    let pending = relay.begin(chat("m"));
    let job = other.expect_request().await;
    other.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(owner().await, "other");
    // Once no worker serves it, a request waits where it may wake one.
    drop(other);
    relay.wait_for_workers(0).await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    assert_eq!(owner().await, "local");
    drop(pending);
}

#[tokio::test]
async fn environment_defines_one_provider_of_any_name() {
    let relay = Relay::builder().env("PROVIDER_NAME", "home").start().await;
    assert_eq!(relay.dial().refused().await.status, 404);
    let mut worker = worker_of(&relay, "home", &["m"]).await;
    let pending = relay.begin(Request::post("/v1/completions", &json!({"model": "m"})));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn configuration_file_overrides_environment_with_warning() {
    let relay = Relay::builder()
        .config(two_providers("", ""))
        .env("WORKER_SECRET", "of-the-environment")
        .env("PROVIDER_NAME", "home")
        .start()
        .await;
    assert_eq!(relay.dial().secret("of-the-environment").refused().await.status, 401);
    assert_eq!(relay.dial().provider("home").refused().await.status, 404);
    relay.log().wait_for_line("WORKER_SECRET").await;
    assert!(!relay.log().contains("of-the-environment"));
}
