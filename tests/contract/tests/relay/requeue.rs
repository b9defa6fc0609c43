//! A worker is lost: before the first byte another one serves the request, after it the client learns that the response
//! is broken.

use std::time::Instant;

use modelrelay_harness::{client::Request, relay::Relay, worker::FakeWorker};
use serde_json::{Value, json};

use crate::support::{
    anthropic_error, chat, chat_stream, check_instant, messages, messages_stream, openai_error, responses_stream,
    tag_of, tagged,
};

#[tokio::test]
async fn worker_lost_before_first_byte_is_replaced() {
    let relay = Relay::start().await;
    let mut first = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let lost = first.expect_request().await;
    let mut second = relay.worker(&["m"], 1).await;
    let start = Instant::now();
    first.vanish();
    let job = second.expect_request().await;
    check_instant(start, "the second dispatch");
    assert_eq!(job.body, lost.body);
    assert_ne!(job.id, lost.id, "each attempt has its own id");
    second.answer(&job, &json!({"from": "second"})).await;
    assert_eq!(pending.reply().await.with_status(200).json()["from"], "second");
    relay.log().wait_for_line("request requeued").await;
}

#[tokio::test]
async fn requeued_request_waits_for_worker_to_join() {
    let relay = Relay::start().await;
    let mut first = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let lost = first.expect_request().await;
    first.vanish();
    relay.wait_for_queue_depth("local", 1).await;
    let mut second = relay.core1_worker(&["m"], 1).await;
    let job = second.expect_request().await;
    assert_eq!(job.body, lost.body, "the body is sent whole again");
    second.start_stream(&job, "data: [DONE]\n\n").await;
    second.end_stream(&job).await;
    assert_eq!(pending.reply().await.with_status(200).text(), "data: [DONE]\n\n");
}

#[tokio::test]
async fn request_that_lost_four_workers_is_503() {
    for request in [chat("m"), messages("m")] {
        let anthropic = request.clone();
        let relay = Relay::start().await;
        let pending = relay.begin(anthropic);
        for _ in 0..4 {
            let mut worker = relay.worker(&["m"], 1).await;
            worker.expect_request().await;
            worker.vanish();
        }
        let reply = pending.reply().await;
        let message = if reply.json()["type"] == "error" {
            anthropic_error(&reply, 503, "api_error")
        } else {
            openai_error(&reply, 503, "server_error", "requeue_exhausted")
        };
        assert_eq!(message, "requeue attempts exhausted");
        assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
        relay.log().wait_for_line("requeue exhausted").await;
    }
}

#[tokio::test]
async fn requeue_keeps_deadline_of_first_arrival() {
    let relay = Relay::builder().env("QUEUE_TIMEOUT_SECS", "2").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    worker.expect_request().await;
    // The worker computes until a request that came later has waited for too long.
    let later = relay.fetch(chat("m")).await;
    openai_error(&later, 504, "timeout_error", "queue_timeout");
    let lost = Instant::now();
    worker.vanish();
    let reply = pending.reply().await;
    openai_error(&reply, 504, "timeout_error", "queue_timeout");
    check_instant(lost, "the end of a request whose deadline has passed");
}

#[tokio::test]
async fn requeued_request_keeps_place_in_full_queue() {
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "1").start().await;
    let mut first = relay.worker(&["m"], 1).await;
    let early = relay.begin(tagged("m", "early"));
    first.expect_request().await;
    let late = relay.begin(tagged("m", "late"));
    relay.wait_for_queue_depth("local", 1).await;
    first.vanish();
    relay.wait_for_queue_depth("local", 2).await;
    let mut second = relay.worker(&["m"], 1).await;
    for (expected, client) in [("early", early), ("late", late)] {
        let job = second.expect_request().await;
        assert_eq!(tag_of(&job), expected);
        second.answer(&job, &json!({})).await;
        let _ = client.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn lost_workers_requests_are_requeued_in_order() {
    let relay = Relay::start().await;
    let mut first = relay.worker(&["m"], 3).await;
    let mut clients = Vec::new();
    for tag in ["1", "2", "3"] {
        clients.push(relay.begin(tagged("m", tag)));
        assert_eq!(tag_of(&first.expect_request().await), tag);
    }
    first.vanish();
    relay.wait_for_queue_depth("local", 3).await;
    let mut second = relay.worker(&["m"], 1).await;
    for tag in ["1", "2", "3"] {
        let job = second.expect_request().await;
        assert_eq!(tag_of(&job), tag);
        second.answer(&job, &json!({})).await;
    }
    for client in clients {
        let _ = client.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn request_of_closing_worker_is_requeued() {
    let relay = Relay::start().await;
    let mut first = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    first.expect_request().await;
    first.send_message(tokio_tungstenite::tungstenite::Message::Close(None)).await;
    let mut second = relay.worker(&["m"], 1).await;
    let job = second.expect_request().await;
    second.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn request_of_vanished_client_is_not_requeued() {
    let relay = Relay::start().await;
    let mut first = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = first.expect_request().await;
    pending.abandon();
    first.expect_cancel(&job.id).await;
    first.vanish();
    let mut second = relay.worker(&["m"], 1).await;
    second.expect_quiet().await;
    relay.wait_for_queue_depth("local", 0).await;
}

/// Loses the worker after the first bytes and returns what the client received.
async fn broken_stream(relay: &Relay, mut worker: FakeWorker, request: Request) -> String {
    let mut bystander = relay.worker(&["m"], 1).await;
    // The bystander is kept busy until the stream runs on the other worker.
    bystander.report_load(1).await;
    relay
        .eventually("the bystander's load is known", || async {
            relay.workers().await.iter().any(|worker| worker["reported_load"] == 1)
        })
        .await;
    let pending = relay.begin(request);
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: {\"n\":1}\n\n").await;
    let mut response = pending.response().await;
    response.read_until("\"n\":1").await;
    bystander.report_load(0).await;
    worker.vanish();
    let reply = response.read_to_end().await;
    bystander.expect_quiet().await;
    reply.broken_stream()
}

/// Returns the JSON of the last `data:` line.
fn last_data(text: &str) -> Value {
    let line = text.lines().filter_map(|line| line.strip_prefix("data:")).next_back().expect("a data line");
    serde_json::from_str(line.trim()).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[tokio::test]
async fn broken_chat_stream_ends_with_error() {
    let relay = Relay::start().await;
    let worker = relay.worker(&["m"], 1).await;
    let text = broken_stream(&relay, worker, chat_stream("m")).await;
    let error = &last_data(&text)["error"];
    assert!(error["message"].is_string() && error["type"].is_string() && error["code"].is_string(), "{text}");
    // Agents decide by this text whether to retry.
    assert!(error["message"].as_str().is_some_and(|message| message.starts_with("connection lost: ")), "{text}");
    assert!(text.ends_with("\n\n"), "the frame is whole: {text:?}");
}

#[tokio::test]
async fn broken_core1_stream_ends_with_error() {
    let relay = Relay::start().await;
    let worker = relay.core1_worker(&["m"], 1).await;
    let text = broken_stream(&relay, worker, chat_stream("m")).await;
    assert!(last_data(&text)["error"]["code"].is_string(), "{text}");
}

#[tokio::test]
async fn broken_messages_stream_ends_with_error_event() {
    let relay = Relay::start().await;
    let worker = relay.worker(&["m"], 1).await;
    let text = broken_stream(&relay, worker, messages_stream("m")).await;
    assert!(text.contains("event: error\n"), "{text}");
    let frame = last_data(&text);
    assert_eq!(frame["type"], "error");
    assert!(frame["error"]["type"].is_string() && frame["error"]["message"].is_string(), "{text}");
}

#[tokio::test]
async fn broken_responses_stream_ends_with_nested_form() {
    let relay = Relay::start().await;
    let worker = relay.worker(&["m"], 1).await;
    let text = broken_stream(&relay, worker, responses_stream("m")).await;
    let frame = last_data(&text);
    assert_eq!(frame["type"], "error", "{text}");
    assert!(frame["error"]["message"].is_string() && frame["error"]["code"].is_string(), "{text}");
}

#[tokio::test]
async fn error_event_continues_sequence_numbers() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(responses_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: {\"type\":\"response.created\",\"sequence_number\":4}\n\n").await;
    let mut response = pending.response().await;
    response.read_until("sequence_number").await;
    worker.vanish();
    let frame = last_data(&response.read_to_end().await.text());
    assert_eq!((&frame["type"], &frame["sequence_number"]), (&json!("error"), &json!(5)), "{frame}");
}

#[tokio::test]
async fn stream_cut_inside_event_is_aborted() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.chunk(&job.id, "data: {\"half").await;
    let mut response = pending.response().await;
    response.read_until("half").await;
    worker.vanish();
    let reply = response.read_to_end().await;
    assert!(reply.aborted, "some clients miss the error behind half an event");
    let text = reply.text();
    let frame = text.split("\n\n").find(|frame| frame.contains("\"error\"")).expect("an error frame");
    assert!(
        frame.starts_with("data: {\"error\"") || frame.starts_with("data:{\"error\""),
        "swallowed by a half frame: {text:?}"
    );
}

#[tokio::test]
async fn broken_json_body_is_aborted_after_first_byte() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{\"half\":").await;
    let mut response = pending.response().await;
    response.read_until("half").await;
    worker.vanish();
    let reply = response.read_to_end().await;
    assert!(reply.aborted);
    assert_eq!(reply.text(), "{\"half\":", "a body that is no event stream must not be extended");
}

#[tokio::test]
async fn worker_missing_heartbeats_loses_its_requests() {
    let relay = Relay::builder().env("HEARTBEAT_INTERVAL", "1").start().await;
    let mut hung = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    hung.expect_request().await;
    let mut second = relay.worker(&["m"], 1).await;
    // `hung` is not read from here on; `second` answers pings while it waits.
    let job = second.expect_request().await;
    second.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(hung.expect_close().await, (1000, "worker heartbeat timed out".to_owned()));
    relay.log().wait_for_line("worker heartbeat timed out").await;
}
