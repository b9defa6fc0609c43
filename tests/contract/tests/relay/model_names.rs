//! Aliases without a catalogue, a model for requests without one, and one for unknown names.

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::worker::{FakeWorker, core1_registration, new_instance_id};
use serde_json::{Value, json};

use crate::support::{chat, model_ids, one_provider, openai_error, post_bytes, two_providers, wait_for_model};

/// Returns a request as the worker receives it: the message's model, and the body.
async fn sent(relay: &Relay, worker: &mut FakeWorker, request: Request) -> (Value, String) {
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    (job.message["model"].clone(), String::from_utf8_lossy(&job.body).into_owned())
}

fn post(body: &str) -> Request {
    post_bytes("/v1/chat/completions", body)
}

fn aliased() -> RelayBuilder {
    Relay::builder().env("MODEL_ALIASES", "gpt-4o-mini=qwen, claude=org/coder")
}

#[tokio::test]
async fn alias_without_catalogue_leaves_other_models_served() {
    let relay = Relay::builder().config(one_provider("  aliases: {gpt-4o-mini: qwen}")).start().await;
    let mut worker = relay.worker(&["qwen", "coder"], 1).await;
    let body = r#"{ "model" :"gpt-4o-mini","x":1 }"#;
    let (model, body) = sent(&relay, &mut worker, post(body)).await;
    assert_eq!((model, body), (json!("qwen"), r#"{ "model" :"qwen","x":1 }"#.to_owned()));
    assert_eq!(sent(&relay, &mut worker, chat("coder")).await.0, "coder");
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["coder", "gpt-4o-mini", "qwen"]);
    assert_eq!(relay.get("/v1/models/gpt-4o-mini").await.status, 200);
}

#[tokio::test]
async fn served_model_is_never_shadowed_by_alias() {
    let relay = aliased().start().await;
    let mut worker = relay.worker(&["qwen"], 1).await;
    let mut other = relay.worker(&["gpt-4o-mini"], 1).await;
    assert_eq!(sent(&relay, &mut other, chat("gpt-4o-mini")).await.0, "gpt-4o-mini");
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["gpt-4o-mini", "qwen"]);
    other.send(&json!({"type": "models_update", "models": ["other"]})).await;
    wait_for_model(&relay, "other", true).await;
    assert_eq!(sent(&relay, &mut worker, chat("gpt-4o-mini")).await.0, "qwen");
}

#[tokio::test]
async fn alias_never_shadows_model_of_another_provider() {
    let relay = Relay::builder().config(two_providers("  aliases: {fast: qwen}", "")).start().await;
    let mut local = relay.worker(&["qwen"], 1).await;
    let mut other = relay.dial().provider("other").open().await;
    other.register(&["fast"], 1).await;
    assert_eq!(sent(&relay, &mut other, chat("fast")).await.0, "fast");
    let owners = relay.get("/v1/models/fast").await.json();
    assert_eq!(owners["owned_by"], "other");
    let named = chat("fast").header("x-modelrelay-provider", "local");
    assert_eq!(sent(&relay, &mut local, named).await.0, "qwen");
}

#[tokio::test]
async fn unserved_alias_is_404_naming_its_model() {
    let relay = aliased().start().await;
    let _worker = relay.worker(&["qwen"], 1).await;
    let message = openai_error(&relay.fetch(chat("claude")).await, 404, "invalid_request_error", "model_not_found");
    assert!(message.starts_with("claude is an alias of org/coder, but no provider has"), "{message}");
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["gpt-4o-mini", "qwen"]);
}

#[tokio::test]
async fn key_may_list_alias_or_its_model() {
    let relay = aliased().env("FALLBACK_MODEL", "qwen").env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let mut worker = relay.worker(&["qwen", "org/coder"], 1).await;
    let key = async |models: Value| {
        let key = relay.admin_post("/admin/keys", &json!({"name": "k", "models": models})).await.with_status(201);
        key.json()["secret"].as_str().expect("a secret").to_owned()
    };
    let by_model = key(json!(["qwen"])).await;
    let by_alias = key(json!(["claude"])).await;
    assert_eq!(sent(&relay, &mut worker, chat("gpt-4o-mini").bearer(&by_model)).await.0, "qwen");
    assert_eq!(sent(&relay, &mut worker, chat("claude").bearer(&by_alias)).await.0, "org/coder");
    assert_eq!(relay.fetch(chat("claude").bearer(&by_model)).await.status, 403);
    assert_eq!(relay.fetch(chat("org/coder").bearer(&by_alias)).await.status, 403);
    let listed = async |key: &str| model_ids(&relay.fetch(Request::get("/v1/models").bearer(key)).await.json());
    assert_eq!(listed(&by_model).await, ["gpt-4o-mini", "qwen"]);
    assert_eq!(listed(&by_alias).await, ["claude"]);
    // A key that does not allow the fallback model does not get it.
    assert_eq!(sent(&relay, &mut worker, chat("unheard-of").bearer(&by_model)).await.0, "qwen");
    assert_eq!(relay.fetch(chat("unheard-of").bearer(&by_alias)).await.status, 403);
    worker.expect_quiet().await;
}

#[tokio::test]
async fn request_without_model_gets_default() {
    let relay = aliased().env("DEFAULT_MODEL", "gpt-4o-mini").start().await;
    let mut worker = relay.worker(&["qwen"], 1).await;
    let (model, body) = sent(&relay, &mut worker, post(r#"{"messages": [] }"#)).await;
    assert_eq!((model, body), (json!("qwen"), r#"{"model":"qwen","messages": [] }"#.to_owned()));
    let (_, body) = sent(&relay, &mut worker, post(r#"{"model":null}"#)).await;
    assert_eq!(body, r#"{"model":"qwen"}"#);
    let part =
        |name: &str, value: &str| format!("--b\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
    let form = Request::new("POST", "/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=b")
        .body(part("file", "x") + "--b--\r\n");
    let (_, body) = sent(&relay, &mut worker, form).await;
    assert_eq!(body, part("model", "qwen") + &part("file", "x") + "--b--\r\n");
}

#[tokio::test]
async fn request_without_model_or_default_is_400() {
    let relay = aliased().env("FALLBACK_MODEL", "qwen").start().await;
    let _worker = relay.worker(&["qwen"], 1).await;
    openai_error(&relay.fetch(post("{}")).await, 400, "invalid_request_error", "missing_model");
}

#[tokio::test]
async fn unknown_model_gets_fallback() {
    let relay = aliased().env("FALLBACK_MODEL", "qwen").start().await;
    let mut worker = relay.worker(&["qwen", "coder"], 1).await;
    assert_eq!(sent(&relay, &mut worker, chat("unheard-of")).await.0, "qwen");
    assert_eq!(sent(&relay, &mut worker, chat("coder")).await.0, "coder");
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["coder", "gpt-4o-mini", "qwen"]);
    assert_eq!(relay.get("/v1/models/unheard-of").await.status, 404);
}

#[tokio::test]
async fn aliases_and_fallback_resolve_within_catalogue() {
    let names = "  models: [{id: qwen, aliases: [q]}]\n  aliases: {fast: q}\n  fallbackModel: fast";
    let relay = Relay::builder().config(one_provider(names)).start().await;
    let mut worker = relay.worker(&["qwen"], 1).await;
    assert_eq!(sent(&relay, &mut worker, chat("fast")).await.0, "qwen");
    assert_eq!(sent(&relay, &mut worker, chat("unheard-of")).await.0, "qwen");
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["fast", "q", "qwen"]);
}

#[tokio::test]
async fn changed_aliases_apply_without_restart() {
    let relay = Relay::builder().config(one_provider("  aliases: {fast: qwen}")).start().await;
    let mut worker = relay.worker(&["qwen", "coder"], 1).await;
    assert_eq!(sent(&relay, &mut worker, chat("fast")).await.0, "qwen");
    relay.replace_file("relay.yaml", &one_provider("  aliases: {slow: coder}"));
    wait_for_model(&relay, "slow", true).await;
    assert_eq!(sent(&relay, &mut worker, chat("slow")).await.0, "coder");
    relay.replace_file("relay.yaml", &one_provider("  aliases: {slow: fast, fast: slow}"));
    relay.log().wait_for_line("an alias must refer to a model, not to another alias").await;
    assert_eq!(sent(&relay, &mut worker, chat("slow")).await.0, "coder", "the last good settings count");
}

/// A worker in front of Ollama with these models.
async fn ollama_worker(relay: &Relay, models: &[&str]) -> FakeWorker {
    let mut worker = relay.dial().open().await;
    let mut message = core1_registration(models, 1, &new_instance_id());
    message["naming"] = json!("ollama");
    worker.register_with(message).await;
    worker.grant(1).await;
    worker
}

#[tokio::test]
async fn ollama_worker_gets_its_own_spelling() {
    let relay = Relay::start().await;
    let mut worker = ollama_worker(&relay, &["llama3.2:latest", "qwen3:8b"]).await;
    for (name, meant) in [
        ("llama3.2", "llama3.2:latest"),
        ("Llama3.2:latest", "llama3.2:latest"),
        ("library/llama3.2", "llama3.2:latest"),
        ("QWEN3:8B", "qwen3:8b"),
    ] {
        let (model, body) = sent(&relay, &mut worker, post(&format!(r#"{{ "model" :"{name}"}}"#))).await;
        assert_eq!((model, body), (json!(meant), format!(r#"{{ "model" :"{meant}"}}"#)));
        let shown = relay.get(&format!("/v1/models/{name}")).await.with_status(200).json();
        assert_eq!(shown["id"], meant);
    }
    assert_eq!(model_ids(&relay.get("/v1/models").await.json()), ["llama3.2:latest", "qwen3:8b"]);
    openai_error(&relay.fetch(chat("qwen3")).await, 404, "invalid_request_error", "model_not_found");
}

#[tokio::test]
async fn listed_name_is_never_another_spelling() {
    let relay = Relay::start().await;
    let mut ollama = ollama_worker(&relay, &["qwen:latest"]).await;
    let mut other = relay.worker(&["Qwen"], 1).await;
    assert_eq!(sent(&relay, &mut other, chat("Qwen")).await.0, "Qwen");
    assert_eq!(sent(&relay, &mut ollama, chat("qwen")).await.0, "qwen:latest");
    other.send(&json!({"type": "models_update", "models": ["gone"], "naming": "unknown"})).await;
    wait_for_model(&relay, "gone", true).await;
    openai_error(&relay.fetch(chat("GONE")).await, 404, "invalid_request_error", "model_not_found");
}
