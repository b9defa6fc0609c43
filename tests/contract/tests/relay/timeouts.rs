//! The request timeout, which covers queue, first byte and stream to its end.

use std::time::{Duration, Instant};

use modelrelay_harness::relay::Relay;
use modelrelay_harness::within;
use serde_json::json;
use tokio::io::AsyncReadExt;

use crate::support::{anthropic_error, chat, chat_stream, messages, openai_error, two_providers};

/// Sends a request to provider `other`, and waits for its request timeout.
async fn other_request_times_out(relay: &Relay) {
    let mut busy = relay.dial().provider("other").open().await;
    busy.register(&["never-answered"], 1).await;
    let reply = relay.fetch(chat("never-answered")).await;
    openai_error(&reply, 504, "timeout_error", "request_timeout");
}

async fn impatient() -> Relay {
    Relay::builder().env("REQUEST_TIMEOUT_SECS", "1").start().await
}

#[tokio::test]
async fn idle_client_connection_ends_after_configured_time() {
    let relay = Relay::builder().env("CLIENT_IDLE_TIMEOUT_SECS", "1").start().await;
    let mut idle = tokio::net::TcpStream::connect(relay.addr()).await.expect("it listens");
    let mut byte = [0];
    let ended = within("the connection's end", relay.log(), idle.read(&mut byte)).await;
    assert!(ended.is_err() || ended.is_ok_and(|read| read == 0));
}

#[tokio::test]
async fn request_timeout_is_504_and_cancels_request() {
    let relay = impatient().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let start = Instant::now();
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "timeout");
    let reply = pending.reply().await;
    assert_eq!(openai_error(&reply, 504, "timeout_error", "request_timeout"), "request timeout");
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
    assert!(start.elapsed() >= Duration::from_millis(900), "too early");
}

#[tokio::test]
async fn request_timeout_is_504_in_anthropic_dialect() {
    let relay = impatient().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(messages("m"));
    worker.expect_request().await;
    let reply = pending.reply().await;
    assert_eq!(anthropic_error(&reply, 504, "timeout_error"), "request timeout");
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
}

#[tokio::test]
async fn request_timeout_frees_slot_of_unresponsive_worker() {
    let relay = impatient().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let first = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.expect_cancel(&job.id).await;
    assert_eq!(first.reply().await.status, 504);
    let second = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = second.reply().await.with_status(200);
}

#[tokio::test]
async fn stream_over_request_timeout_ends_with_error() {
    let relay = impatient().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let reply = pending.reply().await;
    assert_eq!(reply.status, 200);
    let text = reply.broken_stream();
    assert!(text.contains("request_timeout"), "{text}");
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "timeout");
}

async fn wary_of_silence() -> Relay {
    Relay::builder().env("STREAM_IDLE_TIMEOUT_SECS", "1").start().await
}

#[tokio::test]
async fn request_without_response_ends_at_idle_timeout() {
    let relay = wary_of_silence().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let start = Instant::now();
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "timeout");
    let message = openai_error(&pending.reply().await, 504, "timeout_error", "request_timeout");
    assert!(message.contains("sent nothing for 1 s (STREAM_IDLE_TIMEOUT_SECS)"), "{message}");
    assert!(start.elapsed() >= Duration::from_secs(1), "too early");
    relay.log().wait_for_line("the worker sent nothing for 1 s").await;
}

#[tokio::test]
async fn silent_stream_ends_with_error_frame() {
    let relay = wary_of_silence().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let reply = pending.reply().await;
    assert!(reply.broken_stream().contains("STREAM_IDLE_TIMEOUT_SECS"), "{}", reply.text());
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "timeout");
}

#[tokio::test]
async fn active_stream_outlasts_idle_timeout() {
    let relay = wary_of_silence().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 0\n\n").await;
    let start = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(200));
    while start.elapsed() < Duration::from_secs(2) {
        ticks.tick().await;
        worker.stream_on(&job, "data: 1\n\n").await;
    }
    worker.end_stream(&job).await;
    let reply = pending.reply().await.with_status(200);
    assert!(!reply.aborted && !reply.text().contains("error"), "{}", reply.text());
}

#[tokio::test]
async fn idle_timeout_does_not_apply_while_queued() {
    let relay = wary_of_silence().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let (first, second) = (relay.begin(chat("m")), relay.begin(chat("m")));
    let job = worker.expect_request().await;
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "timeout");
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let statuses = [first.reply().await.status, second.reply().await.status];
    assert!(statuses == [504, 200] || statuses == [200, 504], "{statuses:?}");
}

#[tokio::test]
async fn requeue_does_not_restart_request_timeout() {
    let config = two_providers("  requestTimeout: 4s", "  requestTimeout: 2s");
    let relay = Relay::builder().config(config).start().await;
    let mut first = relay.worker(&["m"], 1).await;
    let mut second = relay.dial().open().await;
    let start = Instant::now();
    let pending = relay.begin(chat("m"));
    first.expect_request().await;
    second.register(&["m"], 1).await;
    other_request_times_out(&relay).await;
    first.vanish();
    let job = second.expect_request().await;
    assert_eq!(second.expect_cancel(&job.id).await["reason"], "timeout");
    assert_eq!(pending.reply().await.status, 504);
    let took = start.elapsed();
    assert!(took < Duration::from_millis(5500), "the timeout was restarted: {took:?}");
}

#[tokio::test]
async fn request_timeout_excludes_cold_waiting() {
    let config = two_providers("  requestTimeout: 1s\n  coldModels: [m]", "  requestTimeout: 1s");
    let relay = Relay::builder().config(config).start().await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    // It arrives later, so by then the request timeout of the waiting one has passed.
    other_request_times_out(&relay).await;
    assert!(!pending.is_answered(), "cold waiting ran into the request timeout");
    let mut worker = relay.worker(&["m"], 1).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}
