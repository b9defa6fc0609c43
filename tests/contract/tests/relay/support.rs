//! Common parts of the relay's tests: the usual requests, and checks of the relay's own errors.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::{Reply, Request},
    relay::Relay,
    secrecy::PROMPT,
    tls::Certificates,
};
use serde_json::{Value, json};

/// Ten times the limit for "at once": it detects polling, not a busy machine.
pub(crate) const INSTANT: Duration = Duration::from_secs(1);

pub(crate) fn chat(model: &str) -> Request {
    Request::post("/v1/chat/completions", &json!({"model": model, "messages": [{"role": "user", "content": PROMPT}]}))
}

pub(crate) fn chat_stream(model: &str) -> Request {
    Request::post(
        "/v1/chat/completions",
        &json!({"model": model, "stream": true, "messages": [{"role": "user", "content": PROMPT}]}),
    )
}

pub(crate) fn messages(model: &str) -> Request {
    Request::post(
        "/v1/messages",
        &json!({"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": PROMPT}]}),
    )
    .header("anthropic-version", "2023-06-01")
}

pub(crate) fn messages_stream(model: &str) -> Request {
    Request::post(
        "/v1/messages",
        &json!({"model": model, "stream": true, "messages": [{"role": "user", "content": PROMPT}]}),
    )
    .header("anthropic-version", "2023-06-01")
}

pub(crate) fn responses_stream(model: &str) -> Request {
    Request::post("/v1/responses", &json!({"model": model, "stream": true, "input": PROMPT}))
}

/// A recognizable chat request: [`tag_of`] returns `tag`.
pub(crate) fn tagged(model: &str, tag: &str) -> Request {
    Request::post("/v1/chat/completions", &json!({"model": model, "messages": [], "user": tag}))
}

pub(crate) fn tag_of(job: &modelrelay_harness::worker::Job) -> String {
    job.json()["user"].as_str().expect("a tagged request").to_owned()
}

/// A POST of exactly these bytes as JSON.
pub(crate) fn post_bytes(target: &str, body: impl AsRef<[u8]>) -> Request {
    Request::new("POST", target).header("content-type", "application/json").body(body.as_ref().to_vec())
}

/// Checks every member of an OpenAI error and returns its message.
pub(crate) fn openai_error(reply: &Reply, status: u16, kind: &str, code: &str) -> String {
    let body = reply.text();
    assert_eq!(reply.status, status, "{body}");
    assert!(!reply.aborted, "the error's body was cut off");
    assert_eq!(reply.header("content-type").as_deref().map(media_type), Some("application/json".into()));
    let error = &reply.json()["error"];
    assert_eq!(error["type"], kind, "{body}");
    assert_eq!(error["code"], code, "{body}");
    assert!(error.get("param").is_some(), "param is always there, if null: {body}");
    check_ids(reply);
    error["message"].as_str().expect("a message").to_owned()
}

/// Checks every member of an Anthropic error and returns its message.
pub(crate) fn anthropic_error(reply: &Reply, status: u16, kind: &str) -> String {
    let body = reply.text();
    assert_eq!(reply.status, status, "{body}");
    assert!(!reply.aborted, "the error's body was cut off");
    let json = reply.json();
    assert_eq!(json["type"], "error", "{body}");
    assert_eq!(json["error"]["type"], kind, "{body}");
    assert_eq!(json["request_id"].as_str(), reply.header("request-id").as_deref(), "{body}");
    check_ids(reply);
    json["error"]["message"].as_str().expect("a message").to_owned()
}

/// Checks that both request id headers are present and equal.
pub(crate) fn check_ids(reply: &Reply) -> String {
    let id = reply.header("x-request-id").expect("x-request-id on every response");
    assert_eq!(reply.headers.all("x-request-id").len(), 1);
    assert_eq!(reply.headers.all("request-id"), std::slice::from_ref(&id), "both ids are the same");
    assert!(!id.is_empty() && id.len() <= 128);
    id
}

/// Checks that `Retry-After` is an integer from 1 to 60, which every SDK obeys.
pub(crate) fn check_retry_after(reply: &Reply) {
    let value = reply.header("retry-after").expect("Retry-After");
    let seconds: u64 = value.parse().unwrap_or_else(|_| panic!("Retry-After {value:?} is no integer"));
    assert!((1..=60).contains(&seconds), "Retry-After {seconds}");
}

pub(crate) fn media_type(content_type: &str) -> String {
    content_type.split(';').next().unwrap_or_default().trim().to_owned()
}

/// Returns the values of `data[].id` of `/v1/models`.
pub(crate) fn model_ids(list: &Value) -> Vec<String> {
    let data = list["data"].as_array().unwrap_or_else(|| panic!("no data in {list}"));
    data.iter().map(|model| model["id"].as_str().expect("an id").to_owned()).collect()
}

/// Fails unless this took no longer than [`INSTANT`].
pub(crate) fn check_instant(start: Instant, what: &str) {
    let took = start.elapsed();
    assert!(took < INSTANT, "{what} took {took:?}");
}

/// Waits until `/v1/models` lists (or no longer lists) a model: the relay has processed a worker's update.
pub(crate) async fn wait_for_model(relay: &Relay, model: &str, listed: bool) {
    relay
        .eventually(&format!("model {model} listed: {listed}"), || async {
            model_ids(&relay.get("/v1/models").await.json()).iter().any(|id| id == model) == listed
        })
        .await;
}

/// Sends several requests to the admin listener, which has its own connection limit: meanwhile the relay would have
/// responded to a connection of the clients' listener that it does not delay.
pub(crate) async fn other_listener_answers(relay: &Relay, certificates: Option<&Certificates>) {
    let address = relay.admin_addr().await;
    for _ in 0..20 {
        let request = Request::get("/livez").over_tls(certificates.map(Certificates::client));
        let _ = request.fetch(address, relay.log()).await.with_status(200);
    }
}

/// Returns a `relay.yaml` with one provider `local`, the usual secret, and further lines of that provider (indented by
/// two).
pub(crate) fn one_provider(more: &str) -> String {
    format!(
        "providers:\n- name: local\n  workerSecrets: [{{value: {}}}]\n{more}\n",
        modelrelay_harness::relay::WORKER_SECRET
    )
}

/// Returns a `relay.yaml` with two providers, `local` and `other`, that share the usual secret.
pub(crate) fn two_providers(more_of_local: &str, more_of_other: &str) -> String {
    let secret = modelrelay_harness::relay::WORKER_SECRET;
    format!(
        "providers:\n- name: local\n  workerSecrets: [{{value: {secret}}}]\n{more_of_local}\n\
         - name: other\n  workerSecrets: [{{value: {secret}}}]\n{more_of_other}\n"
    )
}
