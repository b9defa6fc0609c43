//! Streamed requests with a worker of the published program: it sends the body first and the status last.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::{Reply, Request},
    relay::Relay,
    worker::{FakeWorker, Job},
};
use serde_json::{Value, json};

use crate::support::{INSTANT, chat_stream, messages_stream};

const REFUSAL: &str =
    r#"{"error":{"message":"maximum context length is 16 tokens","type":"BadRequestError","code":400}}"#;

async fn complete(worker: &mut FakeWorker, job: &Job, status: u16, headers: Value) {
    let complete =
        json!({"type": "response_complete", "request_id": job.id, "status_code": status, "headers": headers});
    worker.send(&complete).await;
}

/// Returns what the client of a stream receives if the worker sends these chunks and then this status.
async fn answered(request: Request, chunks: &[&str], status: u16, headers: Value) -> Reply {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    for chunk in chunks {
        worker.chunk(&job.id, chunk).await;
    }
    complete(&mut worker, &job, status, headers).await;
    pending.reply().await
}

#[tokio::test]
async fn stream_refusal_keeps_status_headers_and_body() {
    for request in [chat_stream("m"), messages_stream("m")] {
        let headers = json!({"content-type": "application/json", "retry-after": "7"});
        let (first, rest) = REFUSAL.split_at(20);
        let reply = answered(request, &[first, rest], 429, headers).await.with_status(429);
        assert_eq!((reply.text().as_str(), reply.aborted), (REFUSAL, false));
        assert_eq!(reply.header("content-type").as_deref(), Some("application/json"));
        assert_eq!(reply.header("retry-after").as_deref(), Some("7"));
    }
}

#[tokio::test]
async fn refusal_without_headers_gets_matching_content_type() {
    for (body, kind) in [(REFUSAL, "application/json"), ("Bad Gateway", "text/plain; charset=utf-8")] {
        let reply = answered(chat_stream("m"), &[body], 502, Value::Null).await.with_status(502);
        assert_eq!((reply.text().as_str(), reply.header("content-type").as_deref()), (body, Some(kind)));
    }
}

#[tokio::test]
async fn error_after_begun_stream_is_last_event() {
    let reply = answered(chat_stream("m"), &["data: 1\n\n"], 500, json!({})).await.with_status(200);
    let text = reply.broken_stream();
    assert!(text.starts_with("data: 1\n\n") && text.contains("the backend returned 500"), "{text}");
}

#[tokio::test]
async fn event_stream_passes_before_its_status() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    for first in ["data: 1\n\n", ": ping\n\n", "event: a\ndata: 1\n\n", "\n\nid: 1\n\n"] {
        let pending = relay.begin(chat_stream("m"));
        let job = worker.expect_request().await;
        let start = Instant::now();
        worker.chunk(&job.id, first).await;
        let mut response = pending.response().await;
        response.read_until(first).await;
        assert!(start.elapsed() < INSTANT, "{first:?} was held");
        complete(&mut worker, &job, 200, json!({})).await;
        assert!(response.read_to_end().await.is_complete());
    }
}

#[tokio::test]
async fn stream_of_another_route_is_not_held() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let body = json!({"model": "m", "stream": true, "messages": []});
    let pending = relay.begin(Request::post("/api/chat", &body));
    let job = worker.expect_request().await;
    let start = Instant::now();
    worker.chunk(&job.id, "{\"done\":false}\n").await;
    pending.response().await.read_until("false").await;
    assert!(start.elapsed() < INSTANT, "lines of JSON are a stream there");
}

#[tokio::test]
async fn held_bytes_pass_when_no_status_comes() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    let start = Instant::now();
    worker.chunk(&job.id, "neither event nor error").await;
    let mut response = pending.response().await;
    response.read_until("neither").await;
    assert!(start.elapsed() >= Duration::from_secs(4), "the bytes were not held");
    assert_eq!(response.status, 200);
}

#[tokio::test]
async fn bytes_over_limit_pass_without_status() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    let start = Instant::now();
    worker.chunk(&job.id, &"x".repeat(100_000)).await;
    pending.response().await.read_at_least(100_000).await;
    assert!(start.elapsed() < INSTANT, "more than the limit was held");
}

#[tokio::test]
async fn held_request_of_lost_worker_is_requeued() {
    let relay = Relay::start().await;
    let mut lost = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = lost.expect_request().await;
    lost.chunk(&job.id, "{\"half").await;
    lost.expect_quiet().await;
    let mut other = relay.worker(&["m"], 1).await;
    lost.vanish();
    let job = other.expect_request().await;
    other.start_stream(&job, "data: whole\n\n").await;
    other.end_stream(&job).await;
    assert_eq!(pending.reply().await.with_status(200).text(), "data: whole\n\n");
}
