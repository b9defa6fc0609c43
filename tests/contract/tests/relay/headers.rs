//! Header fields, to the backend and back.

use modelrelay_harness::{
    client::Request,
    relay::{ADMIN_TOKEN, Relay},
    worker::{FakeWorker, Job},
};
use serde_json::{Map, json};

use crate::support::{chat, chat_stream, check_ids};

/// Sends a chat request for model `m` with more headers and returns it as the worker receives it.
async fn job_of(relay: &Relay, worker: &mut FakeWorker, request: Request) -> Job {
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    job
}

#[tokio::test]
async fn listed_request_headers_reach_worker() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let listed = [
        ("accept", "application/json"),
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "tools-2024"),
        ("openai-organization", "org-1"),
        ("openai-project", "proj-1"),
        ("openai-beta", "assistants=v2"),
        ("x-request-id", "my-own.id_7"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("tracestate", "a=b"),
        ("baggage", "k=v"),
        ("idempotency-key", "once"),
        ("x-session-id", "s-1"),
        ("x-session-affinity", "s-1"),
        ("authorization", "Bearer sk-of-the-backend"),
        ("x-api-key", "sk-ant-of-the-backend"),
    ];
    let request = listed.iter().fold(chat("m"), |request, (name, value)| request.header(name, value));
    let job = job_of(&relay, &mut worker, request).await;
    for (name, value) in listed {
        assert_eq!(job.header(name), Some(value), "{name}");
    }
    assert_eq!(job.header("content-type"), Some("application/json"));
}

#[tokio::test]
async fn unlisted_request_headers_are_dropped() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let unlisted = [
        "accept-encoding",
        "cookie",
        "user-agent",
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-stainless-lang",
        "x-stainless-retry-count",
        "x-conversation-id",
        "te",
        "keep-alive",
        "proxy-authorization",
        "x-worker-secret",
        "x-modelrelay-drain-token",
        "forwarded",
        "x-anything",
    ];
    let request = unlisted.iter().fold(chat("m"), |request, name| request.header(name, "1"));
    let job = job_of(&relay, &mut worker, request).await;
    for name in unlisted.into_iter().chain(["host", "content-length", "connection", "transfer-encoding"]) {
        assert_eq!(job.header(name), None, "{name}");
    }
}

#[tokio::test]
async fn setting_adds_request_headers() {
    let relay = Relay::builder().env("REQUEST_HEADERS", "User-Agent, x-tenant").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let request = chat("m").header("user-agent", "agent/1").header("x-tenant", "t-1").header("x-other", "1");
    let job = job_of(&relay, &mut worker, request).await;
    assert_eq!((job.header("user-agent"), job.header("x-tenant")), (Some("agent/1"), Some("t-1")));
    assert_eq!(job.header("x-other"), None);
    let job = job_of(&relay, &mut worker, chat("m").header("x-tenant", "Bearer mr-id-secret")).await;
    assert_eq!(job.header("x-tenant"), None, "a key of the relay was forwarded");
}

#[tokio::test]
async fn repeated_request_headers_are_joined() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let request = chat("m").header("anthropic-beta", "one").header("anthropic-beta", "two");
    let job = job_of(&relay, &mut worker, request).await;
    assert_eq!(job.header("anthropic-beta"), Some("one, two"));
}

#[tokio::test]
async fn relay_keys_are_never_forwarded() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let request = chat("m").header("authorization", "Bearer mr-abc-def").header("x-api-key", "mr-abc-def");
    let job = job_of(&relay, &mut worker, request).await;
    assert_eq!((job.header("authorization"), job.header("x-api-key")), (None, None));
    let job = job_of(&relay, &mut worker, chat("m").header("authorization", "bearer  mr-abc-def")).await;
    assert_eq!(job.header("authorization"), None, "nor in any other spelling");
}

#[tokio::test]
async fn admin_token_is_not_forwarded() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for scheme in ["Bearer ", "Bearer\t", "bearer  ", "Token ", "", "Bearer sk-other, Bearer "] {
        let request = chat("m").header("authorization", format!("{scheme}{ADMIN_TOKEN}"));
        let job = job_of(&relay, &mut worker, request).await;
        assert_eq!(job.header("authorization"), None, "a worker received a secret of the relay after {scheme:?}");
    }
}

#[tokio::test]
async fn only_listed_response_headers_are_returned() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let mut headers = Map::new();
    for (name, value) in [
        ("content-type", "application/x-odd; v=1"),
        ("x-ratelimit-remaining-requests", "7"),
        ("x-custom", "dropped"),
        ("connection", "close, x-named"),
        ("keep-alive", "timeout=5"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
        ("proxy-authenticate", "Basic"),
        ("trailer", "x"),
        ("content-length", "9999"),
        ("bad name", "x"),
        ("x-bad-value", "a\u{1}b\n"),
    ] {
        headers.insert(name.into(), json!(value));
    }
    worker.complete(&job.id, 200, headers, "hello").await;
    let reply = pending.reply().await.with_status(200);
    assert_eq!((reply.text().as_str(), reply.aborted), ("hello", false));
    assert_eq!(reply.header("content-type").as_deref(), Some("application/x-odd; v=1"));
    assert_eq!(reply.header("x-ratelimit-remaining-requests").as_deref(), Some("7"));
    for name in ["x-custom", "keep-alive", "upgrade", "proxy-authenticate", "trailer", "x-bad-value"] {
        assert_eq!(reply.header(name), None, "{name}");
    }
    assert_ne!(reply.header("content-length").as_deref(), Some("9999"));
}

#[tokio::test]
async fn bodiless_statuses_have_no_body() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    for (status, body) in [(204, ""), (205, "dropped"), (205, "")] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker.answer_with(&job, status, &[], body.as_bytes()).await;
        let reply = pending.reply().await.with_status(status);
        assert_eq!((reply.text().as_str(), reply.aborted), ("", false), "{status}");
        if status == 204 {
            assert_eq!(reply.header("content-length"), None);
        }
    }
    let (id, missing) = (relay.admin_post("/admin/keys", &json!({"name": "k"})).await.json()["id"].clone(), "");
    let path = format!("/admin/keys/{}", id.as_str().unwrap_or(missing));
    assert_eq!(relay.admin("DELETE", &path).await.with_status(204).header("content-length"), None);
}

#[tokio::test]
async fn repeated_response_headers_stay_repeated() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let headers = [("vary", "accept"), ("openai-note", "one"), ("vary", "origin"), ("openai-note", "two")];
    worker.answer_with(&job, 200, &headers, b"{}").await;
    let reply = pending.reply().await;
    assert_eq!(reply.headers.all("vary"), ["accept", "origin"]);
    assert_eq!(reply.headers.all("openai-note"), ["one", "two"]);
}

#[tokio::test]
async fn request_id_of_client_is_kept() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m").header("x-request-id", "Mine-1._"));
    let job = worker.expect_request().await;
    worker.answer_with(&job, 200, &[("x-request-id", "the-backends"), ("request-id", "the-backends")], b"{}").await;
    assert_eq!(check_ids(&pending.reply().await), "Mine-1._");
}

#[tokio::test]
async fn invalid_request_id_is_replaced() {
    let relay = Relay::start().await;
    let long = "x".repeat(129);
    for id in ["with space", "a/b", "ü", "a,b", long.as_str()] {
        let reply = relay.fetch(Request::get("/v1/models").header("x-request-id", id)).await;
        assert_ne!(check_ids(&reply), id);
    }
    let longest = "x".repeat(128);
    let reply = relay.fetch(Request::get("/v1/models").header("x-request-id", &longest)).await;
    assert_eq!(check_ids(&reply), longest);
}

#[tokio::test]
async fn every_response_carries_unique_ids() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 2).await;
    let mut ids = std::collections::HashSet::new();
    for request in [Request::get("/v1/models"), Request::get("/nope"), Request::get("/health"), chat("")] {
        assert!(ids.insert(check_ids(&relay.fetch(request).await)), "an id was used twice");
    }
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    worker.end_stream(&job).await;
    assert!(ids.insert(check_ids(&pending.reply().await)), "an id was used twice");
}

#[tokio::test]
async fn no_cors_headers_unless_configured() {
    let relay = Relay::start().await;
    let reply = relay.fetch(Request::get("/v1/models").header("origin", "https://example.org")).await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn first_chunk_of_older_worker_starts_event_stream() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.chunk(&job.id, "data: {}\n\n").await;
    let response = pending.response().await;
    assert_eq!(response.status, 200);
    assert!(response.headers.first("content-type").is_some_and(|value| value.starts_with("text/event-stream")));
    assert_eq!(response.headers.first("content-length"), None);
}
