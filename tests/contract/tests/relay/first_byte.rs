//! The first byte timeout: a request whose worker sends nothing goes to another worker that has room.

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, chat_stream, openai_error};

async fn relay() -> Relay {
    Relay::builder().env("FIRST_BYTE_TIMEOUT_SECS", "1").env("STREAM_IDLE_TIMEOUT_SECS", "3").start().await
}

#[tokio::test]
async fn silent_worker_loses_its_request_to_another() {
    let relay = relay().await;
    let mut hung = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = hung.expect_request().await;
    let mut other = relay.worker(&["m"], 1).await;
    assert_eq!(hung.expect_cancel(&job.id).await["reason"], "timeout");
    let moved = other.expect_request().await;
    // Too late, and without effect.
    hung.answer(&job, &json!({"from": "hung"})).await;
    other.answer(&moved, &json!({"from": "other"})).await;
    let reply = pending.reply().await.with_status(200);
    assert!(reply.text().contains("other"), "{}", reply.text());
    relay.log().wait_for_line("reason=\"first_byte_timeout\"").await;
    let requeues = relay.metric("modelrelay_requeues_total{provider=\"local\",reason=\"first_byte_timeout\"}").await;
    assert!((requeues - 1.0).abs() < 0.1, "{requeues} requeues");
}

#[tokio::test]
async fn stream_that_has_begun_stays_at_its_worker() {
    let relay = relay().await;
    let mut slow = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = slow.expect_request().await;
    slow.start_stream(&job, "data: 1\n\n").await;
    let _other = relay.worker(&["m"], 1).await;
    // It stalls for longer than the first byte timeout, and then ends like any stalled stream.
    let reply = pending.reply().await;
    assert!(reply.broken_stream().contains("STREAM_IDLE_TIMEOUT_SECS"), "{}", reply.text());
}

#[tokio::test]
async fn only_worker_keeps_its_request() {
    let relay = relay().await;
    let mut hung = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = hung.expect_request().await;
    assert_eq!(hung.expect_cancel(&job.id).await["reason"], "timeout");
    let message = openai_error(&pending.reply().await, 504, "timeout_error", "request_timeout");
    assert!(message.contains("STREAM_IDLE_TIMEOUT_SECS"), "{message}");
}
