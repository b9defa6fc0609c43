//! Waiting for a worker: order, bounds, deadlines, and the absence of polling.

use std::time::Instant;

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{
    anthropic_error, chat, check_instant, check_retry_after, messages, openai_error, tag_of, tagged, two_providers,
    wait_for_model,
};

#[tokio::test]
async fn queued_request_is_dispatched_when_worker_joins() {
    let relay = Relay::start().await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let mut worker = relay.dial().open().await;
    let start = Instant::now();
    worker.register(&["m"], 1).await;
    let job = worker.expect_request().await;
    check_instant(start, "dispatch after a join");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn queued_request_is_dispatched_when_slot_frees() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let first = relay.begin(tagged("m", "first"));
    let running = worker.expect_request().await;
    let second = relay.begin(tagged("m", "second"));
    relay.wait_for_queue_depth("local", 1).await;
    let start = Instant::now();
    worker.answer(&running, &json!({})).await;
    let job = worker.expect_request().await;
    check_instant(start, "dispatch after a completion");
    assert_eq!(tag_of(&job), "second");
    worker.answer(&job, &json!({})).await;
    let _ = first.reply().await.with_status(200);
    let _ = second.reply().await.with_status(200);
}

#[tokio::test]
async fn queued_request_is_dispatched_when_load_drops() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut registration = modelrelay_harness::worker::registration(&["m"], 1);
    registration["current_load"] = json!(1);
    worker.register_with(registration).await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    let start = Instant::now();
    worker.report_load(0).await;
    let job = worker.expect_request().await;
    check_instant(start, "dispatch after a load report");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn queued_request_is_dispatched_when_model_appears() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&[], 1).await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let start = Instant::now();
    worker.update_models(&["other", "m"]).await;
    let job = worker.expect_request().await;
    check_instant(start, "dispatch after a models update");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn queued_requests_are_served_in_arrival_order() {
    let relay = Relay::start().await;
    let mut clients = Vec::new();
    for number in 1..=6_u64 {
        clients.push(relay.begin(tagged("m", &number.to_string())));
        relay.wait_for_queue_depth("local", number).await;
    }
    let mut worker = relay.worker(&["m"], 2).await;
    let mut order = Vec::new();
    for _ in 1..=6 {
        let job = worker.expect_request().await;
        order.push(tag_of(&job));
        worker.answer(&job, &json!({})).await;
    }
    assert_eq!(order, ["1", "2", "3", "4", "5", "6"]);
    for client in clients {
        let _ = client.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn queued_request_does_not_block_other_models() {
    let relay = Relay::start().await;
    let _waiting = relay.begin(tagged("absent", "waits"));
    relay.wait_for_queue_depth("local", 1).await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(tagged("m", "served"));
    let job = worker.expect_request().await;
    assert_eq!(tag_of(&job), "served");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn new_request_does_not_overtake_queued_one() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(tagged("m", "running"));
    let mut job = worker.expect_request().await;
    let mut clients = vec![relay.begin(tagged("m", "0"))];
    relay.wait_for_queue_depth("local", 1).await;
    for number in 1..20 {
        // The slot becomes free and a new request arrives at the same moment.
        clients.push(relay.begin(tagged("m", &number.to_string())));
        worker.answer(&job, &json!({})).await;
        job = worker.expect_request().await;
        assert_eq!(tag_of(&job), (number - 1).to_string());
        relay.wait_for_queue_depth("local", 1).await;
    }
}

#[tokio::test]
async fn full_queue_returns_429_with_retry_after() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "1").start().await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let reply = relay.fetch(chat("m")).await;
    let message = openai_error(&reply, 429, "rate_limit_error", "queue_full");
    assert_eq!(message, "Service temporarily at capacity");
    check_retry_after(&reply);
    let reply = relay.fetch(messages("m")).await;
    assert_eq!(anthropic_error(&reply, 429, "rate_limit_error"), "Service temporarily at capacity");
    check_retry_after(&reply);
    relay.log().wait_for_line("queue full").await;
}

#[tokio::test]
async fn queue_is_bounded_by_bytes() {
    let relay = Relay::builder().env("MAX_QUEUE_BYTES", "1500").start().await;
    let large = "x".repeat(1000);
    let _waiting = relay.begin(tagged("m", &large));
    relay.wait_for_queue_depth("local", 1).await;
    let reply = relay.fetch(tagged("m", &large)).await;
    openai_error(&reply, 429, "rate_limit_error", "queue_full");
    let _small = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 2).await;
}

#[tokio::test]
async fn requests_for_absent_models_leave_room_for_others() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "10").start().await;
    let worker = relay.worker(&["away"], 1).await;
    let mut serving = relay.worker(&["m"], 1).await;
    drop(worker);
    wait_for_model(&relay, "away", false).await;
    let _running = relay.begin(chat("m"));
    serving.expect_request().await;
    let _waiting: Vec<_> = (0..9).map(|_| relay.begin(chat("away"))).collect();
    relay.wait_for_queue_depth("local", 9).await;
    openai_error(&relay.fetch(chat("away")).await, 429, "rate_limit_error", "queue_full");
    let _served = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 10).await;
}

#[tokio::test]
async fn full_queue_accepts_request_that_can_run() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    drop(relay.worker(&["absent"], 1).await);
    wait_for_model(&relay, "absent", false).await;
    let _waiting = relay.begin(chat("absent"));
    relay.wait_for_queue_depth("local", 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn full_queue_does_not_affect_other_providers() {
    let config = two_providers("  queue: {maxLength: 1}\n  models: [{id: a}]", "  models: [{id: b}]");
    let relay = Relay::builder().config(config).start().await;
    let _waiting = relay.begin(chat("a"));
    relay.wait_for_queue_depth("local", 1).await;
    assert_eq!(relay.fetch(chat("a")).await.status, 429);
    let _other = relay.begin(chat("b"));
    relay.wait_for_queue_depth("other", 1).await;
}

#[tokio::test]
async fn queue_timeout_with_busy_worker_is_504() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(chat("m"));
    worker.expect_request().await;
    let reply = relay.fetch(chat("m")).await;
    let message = openai_error(&reply, 504, "timeout_error", "queue_timeout");
    assert_eq!(message, "queue timeout: no worker available within deadline");
    check_retry_after(&reply);
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("true"));
    worker.expect_quiet().await;
    relay.log().wait_for_line("queue timeout").await;
}

#[tokio::test]
async fn queue_timeout_without_any_worker_is_504() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let reply = relay.fetch(messages("m")).await;
    let message = anthropic_error(&reply, 504, "overloaded_error");
    assert_eq!(message, "queue timeout: no worker available within deadline; no worker serves m: see /v1/models");
    check_retry_after(&reply);
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("true"));
    relay.wait_for_queue_depth("local", 0).await;
}

#[tokio::test]
async fn cold_timeout_applies_while_model_is_unserved() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").env("COLD_TIMEOUT_SECS", "9").start().await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    let warm = relay.fetch(chat_for_busy_worker(&relay).await).await;
    assert_eq!(warm.status, 504);
    assert!(!pending.is_answered(), "the timeout of a cold model ended as early as that of a loaded one");
    let mut worker = relay.worker(&["m"], 1).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

/// Returns a request for a model whose only worker is busy: it reaches the queue timeout.
async fn chat_for_busy_worker(relay: &Relay) -> modelrelay_harness::client::Request {
    let mut worker = relay.worker(&["busy"], 1).await;
    let running = relay.begin(chat("busy"));
    worker.expect_request().await;
    // Both stay as they are until the relay ends.
    std::mem::forget((worker, running));
    chat("busy")
}

#[tokio::test]
async fn worker_losing_model_receives_no_further_requests() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["a", "b"], 2).await;
    worker.update_models(&["b"]).await;
    wait_for_model(&relay, "a", false).await;
    let _waiting = relay.begin(chat("a"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
}

#[tokio::test]
async fn multiline_model_name_cannot_forge_log_line() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let _ = relay.fetch(chat("m\nFORGED")).await.with_status(504);
    relay.log().wait_for_line("queue timeout").await;
    relay.log().wait_for_line("response complete").await;
    assert!(!relay.log().lines().iter().any(|line| line.starts_with("FORGED")), "{}", relay.log().dump());
}
