//! The log lines that the runbook refers to.

use modelrelay_harness::{client::Request, relay::Relay};
use serde_json::json;

use crate::support::{chat, openai_error};

#[tokio::test]
async fn refused_requests_are_logged() {
    let relay = Relay::builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let wrong_key = |request: Request| request.bearer("wrong");
    for (request, id, route, status) in [
        (wrong_key(Request::get("/v1/models?secret=x")), "q-models", "/v1/models", 401),
        (wrong_key(Request::get("/v1/models/m")), "q-model", "/v1/models/{id}", 401),
        (wrong_key(chat("m")), "q-chat", "/v1/chat/completions", 401),
        (Request::post("/v1/nothing-here", &json!({})), "q-path", "", 404),
        (Request::get("/v1/chat/completions"), "q-method", "/v1/chat/completions", 405),
    ] {
        let reply = relay.fetch(request.header("x-request-id", id)).await;
        assert_eq!(reply.status, status, "{id}");
        let line = relay.log().wait_for_line(&format!("request refused request_id=\"{id}\"")).await;
        for part in ["INFO", route, &format!("status={status}")] {
            assert!(line.contains(part), "no {part} in {line}");
        }
    }
}

#[tokio::test]
async fn logged_worker_request_id_contains_client_id() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let _pending = relay.begin(chat("m").header("x-request-id", "q-1"));
    let job = worker.expect_request().await;
    assert!(job.id.starts_with("r-") && job.id.ends_with("-q-1"), "{}", job.id);
    let line = relay.log().wait_for_line(&format!("wire_id=\"{}\"", job.id)).await;
    assert!(line.contains("request dispatched request_id=\"q-1\""), "{line}");
}

#[tokio::test]
async fn queue_time_after_requeue_is_logged() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "2").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.fail(&job.id, "backend_unreachable", "connection refused").await;
    assert_eq!(pending.reply().await.status, 502);
    let line = relay.log().wait_for_line("response complete").await;
    let (_, rest) = line.split_once("queue_ms=").expect("queue_ms");
    let queued: u64 = rest.split(' ').next().and_then(|number| number.parse().ok()).expect("a number");
    assert!((1_000..10_000).contains(&queued), "{line}");
}

#[tokio::test]
async fn queue_timeout_names_workers_without_models() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let _worker = relay.core1_worker(&[], 1).await;
    let reply = relay.fetch(chat("m")).await;
    let message = openai_error(&reply, 504, "timeout_error", "queue_timeout");
    assert!(
        message.ends_with("; a connected worker lists no models: its backend is down or has no models"),
        "{message}"
    );
}

#[tokio::test]
async fn key_sent_as_model_is_not_logged() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").env("LOG_LEVEL", "debug").start().await;
    let key = "mr-f7ipcwmraanq-mqx2fcp3hkw6d7kq282xw5qf7ncmq72k";
    relay.log().secrets().plant(key);
    assert_eq!(relay.fetch(chat(key)).await.status, 504);
    let line = relay.log().wait_for_line("response complete").await;
    assert!(line.contains("(looks like a key)"), "{line}");
    assert_eq!(relay.get(&format!("/v1/models/{key}")).await.status, 404);
    relay.log().wait_for_line("route=\"/v1/models/{id}\"").await;
    assert!(!relay.log().contains(key), "{}", relay.log().dump());
}

#[tokio::test]
async fn killed_worker_is_logged_as_connection_lost() {
    let relay = Relay::start().await;
    let worker = relay.core1_worker(&["m"], 1).await;
    worker.vanish();
    let line = relay.log().wait_for_line("worker disconnected").await;
    assert!(line.contains("reason=\"connection_lost\""), "{line}");
}

/// Lines that a pipe of 64 KiB and the lines that the relay holds back cannot take.
const FLOOD_OF_REQUESTS: usize = 600;

#[tokio::test]
async fn unread_log_stops_no_request() {
    let relay = Relay::builder().env("LOG_LEVEL", "debug").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let unread = relay.log().stop_reading().await;
    for _ in 0..FLOOD_OF_REQUESTS {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
    drop(unread);
    relay.log().wait_for_line("response complete").await;
}
