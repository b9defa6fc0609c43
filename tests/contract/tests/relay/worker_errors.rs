//! `error` messages of workers, by code, and peers that cannot carry a request.

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{anthropic_error, chat, chat_stream, messages, openai_error, post_bytes};

#[tokio::test]
async fn other_worker_error_is_502_with_its_message() {
    for core1 in [false, true] {
        let relay = Relay::start().await;
        let mut worker = if core1 { relay.core1_worker(&["m"], 1).await } else { relay.worker(&["m"], 1).await };
        for code in ["response_too_large", "bad_path", "something_new"] {
            let pending = relay.begin(chat("m"));
            let job = worker.expect_request().await;
            worker.fail(&job.id, code, "the reason").await;
            let message = openai_error(&pending.reply().await, 502, "server_error", code);
            assert_eq!(message, "the reason");
        }
        let pending = relay.begin(messages("m"));
        let job = worker.expect_request().await;
        worker.fail(&job.id, "bad_path", "the reason").await;
        assert_eq!(anthropic_error(&pending.reply().await, 502, "api_error"), "the reason");
    }
}

#[tokio::test]
async fn error_without_request_id_is_harmless() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.send(&json!({"type": "error", "code": "odd", "message": "unknown"})).await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn request_of_unreachable_backend_goes_to_another_worker() {
    for code in ["backend_unreachable", "backend_reset"] {
        let relay = Relay::start().await;
        let mut broken = relay.core1_worker(&["m"], 1).await;
        let pending = relay.begin(chat("m"));
        let job = broken.expect_request().await;
        let mut sound = relay.core1_worker(&["m"], 1).await;
        broken.fail(&job.id, code, "connection refused").await;
        let job = sound.expect_request().await;
        sound.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn unreachable_backends_everywhere_end_in_502() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "1").start().await;
    let mut only = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = only.expect_request().await;
    only.fail(&job.id, "backend_unreachable", "connection refused").await;
    let reply = pending.reply().await;
    openai_error(&reply, 502, "server_error", "backend_unreachable");
    assert_eq!(reply.header("retry-after").as_deref(), Some("1"));
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("true"));
    only.expect_quiet().await;
    only.update_models(&["m"]).await;
    let pending = relay.begin(messages("m"));
    let job = only.expect_request().await;
    only.fail(&job.id, "backend_unreachable", "connection refused").await;
    anthropic_error(&pending.reply().await, 502, "api_error");
}

#[tokio::test]
async fn failed_worker_gets_request_after_advertising_model_again() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.update_models(&[]).await;
    worker.fail(&job.id, "backend_unreachable", "connection refused").await;
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    worker.update_models(&["m"]).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn four_unreachable_backends_use_up_attempts() {
    let relay = Relay::start().await;
    let pending = relay.begin(chat("m"));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let mut worker = relay.core1_worker(&["m"], 1).await;
        let job = worker.expect_request().await;
        worker.fail(&job.id, "backend_unreachable", "connection refused").await;
        workers.push(worker);
    }
    openai_error(&pending.reply().await, 502, "server_error", "backend_unreachable");
}

#[tokio::test]
async fn failed_load_tries_another_worker_then_503() {
    for (code, kind, anthropic) in [
        ("insufficient_memory", "service_unavailable_error", "overloaded_error"),
        ("backend_unavailable", "service_unavailable_error", "overloaded_error"),
        ("slot_quarantined", "server_error", "api_error"),
    ] {
        let relay = Relay::start().await;
        let mut one = relay.core1_worker(&["m"], 1).await;
        let mut two = relay.core1_worker(&["m"], 1).await;
        for request in [chat("m"), messages("m")] {
            let pending = relay.begin(request);
            for _ in 0..2 {
                tokio::select! {
                    job = one.expect_request() => one.fail(&job.id, code, "needs 24 GiB, has 8 GiB").await,
                    job = two.expect_request() => two.fail(&job.id, code, "needs 24 GiB, has 8 GiB").await,
                }
            }
            let reply = pending.reply().await;
            if reply.json()["type"] == "error" {
                anthropic_error(&reply, 503, anthropic);
            } else {
                openai_error(&reply, 503, kind, code);
            }
        }
    }
}

#[tokio::test]
async fn worker_back_off_becomes_retry_after() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let error = json!({"type": "error", "request_id": job.id, "code": "backend_unavailable", "message": "no such file",
        "retry_after_ms": 4000});
    worker.send(&error).await;
    let reply = pending.reply().await;
    let message = openai_error(&reply, 503, "service_unavailable_error", "backend_unavailable");
    assert!(message.contains("no such file"), "{message}");
    assert_eq!(reply.header("retry-after").as_deref(), Some("4"));
}

#[tokio::test]
async fn request_severed_by_four_swaps_is_503() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    for _ in 0..4 {
        let job = worker.expect_request().await;
        worker.fail(&job.id, "severed_by_swap", "the model was evicted").await;
    }
    let reply = pending.reply().await;
    openai_error(&reply, 503, "service_unavailable_error", "severed_by_swap");
    assert_eq!(reply.header("retry-after").as_deref(), Some("1"));
}

#[tokio::test]
async fn stream_failed_by_worker_ends_with_error() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut other = relay.core1_worker(&["other"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let mut response = pending.response().await;
    response.read_until("data: 1").await;
    other.update_models(&["other", "m"]).await;
    worker.fail(&job.id, "backend_reset", "connection reset").await;
    let reply = response.read_to_end().await;
    assert!(reply.broken_stream().contains("backend_reset"), "{}", reply.text());
    other.expect_quiet().await;
}

#[tokio::test]
async fn worker_failing_one_request_serves_others() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let neighbour = relay.begin(chat_stream("m"));
    let stream = worker.expect_request().await;
    worker.start_stream(&stream, "data: a\n\n").await;
    let failing = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.fail(&job.id, "bad_path", "no").await;
    assert_eq!(failing.reply().await.status, 502);
    worker.stream_on(&stream, "data: b\n\n").await;
    worker.end_stream(&stream).await;
    assert_eq!(neighbour.reply().await.with_status(200).text(), "data: a\n\ndata: b\n\n");
}

#[tokio::test]
async fn non_utf8_request_without_new_worker_is_501() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut registration = modelrelay_harness::worker::registration(&["m"], 1);
    registration["version"] = json!("0.2.7");
    worker.register_with(registration).await;
    let body = b"{\"model\":\"m\",\"x\":\"\xff\"}";
    let reply = relay.fetch(post_bytes("/v1/chat/completions", body)).await;
    let message = openai_error(&reply, 501, "invalid_request_error", "worker_too_old");
    assert!(message.contains("0.2.7"), "{message}");
    let reply = relay.fetch(post_bytes("/v1/messages", body)).await;
    anthropic_error(&reply, 501, "invalid_request_error");
    worker.expect_quiet().await;
}

#[tokio::test]
async fn non_utf8_request_goes_to_new_worker() {
    let relay = Relay::start().await;
    let mut old = relay.worker(&["m"], 5).await;
    let mut new = relay.core1_worker(&["m"], 5).await;
    for _ in 0..3 {
        let pending = relay.begin(post_bytes("/v1/chat/completions", b"{\"model\":\"m\",\"x\":\"\xff\"}"));
        let job = new.expect_request().await;
        new.answer(&job, &json!({})).await;
        let _ = pending.reply().await.with_status(200);
    }
    old.expect_quiet().await;
}

#[tokio::test]
async fn prompt_over_old_workers_frame_limit_is_413() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "a".repeat(17 << 20));
    let reply = relay.fetch(post_bytes("/v1/chat/completions", body)).await;
    openai_error(&reply, 413, "invalid_request_error", "request_too_large");
    worker.expect_quiet().await;
}

#[tokio::test]
async fn worker_error_without_message_gets_default_message() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    for code in ["bad_path", "insufficient_memory"] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker.fail(&job.id, code, "").await;
        let reply = pending.reply().await.json();
        assert_eq!(reply["error"]["code"], code, "{reply}");
        assert!(reply["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{reply}");
    }
}

#[tokio::test]
async fn failed_load_is_reported_despite_later_refusal() {
    let relay = Relay::start().await;
    let mut first = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = first.expect_request().await;
    let mut second = relay.core1_worker(&["m"], 1).await;
    first.fail(&job.id, "insufficient_memory", "needs 24 GiB").await;
    let job = second.expect_request().await;
    second.grant_of(0, 1, 1, 2).await;
    second.fail(&job.id, "at_capacity", "full").await;
    relay.wait_for_queue_depth("local", 1).await;
    second.vanish();
    let reply = pending.reply().await.json();
    assert_eq!(reply["error"]["code"], "insufficient_memory", "{reply}");
    assert_eq!(reply["error"]["message"], "needs 24 GiB");
}
