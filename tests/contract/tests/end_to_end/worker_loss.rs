//! Workers that are killed, drained, or fail during a response.

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend, sse};
use modelrelay_harness::worker_process::Stack;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

fn stream(path: &str) -> Request {
    Request::post(path, &json!({"model": "m", "stream": true}))
}

#[tokio::test]
async fn worker_killed_before_first_byte_is_replaced() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream(CHAT));
    let _lost = stack.backend.call().await;
    let other = FakeBackend::start().await;
    other.answer_with(|_, _| Answer::json(200, &json!({"by": "the other"})));
    let _second = Stack::worker_of(&stack.relay, &other).env("WORKER_NAME", "second").start().await;
    stack.relay.wait_for_workers(2).await;
    stack.worker.process.kill().await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"by": "the other"}));
    assert_eq!(other.request_count(CHAT), 1);
}

#[tokio::test]
async fn request_waits_after_only_worker_is_killed() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream(CHAT));
    let _lost = stack.backend.call().await;
    stack.worker.process.kill().await;
    let _again = Stack::worker_of(&stack.relay, &stack.backend).start().await;
    stack.backend.call().await.answer_json(200, &json!({"by": "the next"})).await;
    assert_eq!(client.reply().await.with_status(200).json(), json!({"by": "the next"}));
}

/// Kills the worker after the first event; returns what the client received.
async fn killed_in_the_middle(path: &str) -> String {
    let mut stack = Stack::start().await;
    let other = FakeBackend::start().await;
    let _second = Stack::worker_of(&stack.relay, &other).models("other").start().await;
    let client = stack.relay.begin(stream(path));
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    let mut response = client.response().await;
    response.read_until("first").await;
    stack.worker.process.kill().await;
    let reply = response.read_to_end().await;
    assert_eq!(stack.backend.request_count(path), 1, "a request was sent again after its first byte");
    reply.broken_stream()
}

fn error_of(frame: &str) -> Value {
    let data = frame.lines().find_map(|line| line.strip_prefix("data: ")).expect("a data line");
    serde_json::from_str(data).expect("JSON in the frame")
}

#[tokio::test]
async fn stream_of_killed_worker_ends_with_error() {
    let text = killed_in_the_middle(CHAT).await;
    let frame = text.strip_prefix("data: first\n\n").expect("the stream starts with the received bytes");
    assert!(error_of(frame)["error"]["message"].is_string(), "{frame}");
}

#[tokio::test]
async fn message_of_killed_worker_ends_with_error() {
    let text = killed_in_the_middle(MESSAGES).await;
    let frame = text.strip_prefix("data: first\n\n").expect("the stream starts with the received bytes");
    assert!(frame.starts_with("event: error\n"), "{frame}");
    assert_eq!(error_of(frame)["type"], "error");
}

#[tokio::test]
async fn backend_reset_before_first_byte_is_retried_elsewhere() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream(CHAT));
    let call = stack.backend.call().await;
    let other = FakeBackend::start().await;
    other.answer_with(|_, _| Answer::json(200, &json!({"by": "the other"})));
    let _second = Stack::worker_of(&stack.relay, &other).start().await;
    stack.relay.wait_for_workers(2).await;
    // A registered worker has no grant yet: only a worker with a grant can take over the request.
    let granted = || async { stack.relay.get("/metrics").await.text().contains("modelrelay_worker_slots") };
    stack.relay.eventually("slots in /metrics", granted).await;
    call.reset();
    assert_eq!(client.reply().await.with_status(200).json(), json!({"by": "the other"}));
}

#[tokio::test]
async fn stream_of_reset_backend_ends_with_error() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream(CHAT));
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    let mut response = client.response().await;
    response.read_until("first").await;
    call.reset();
    let reply = response.read_to_end().await;
    let frame = reply
        .broken_stream()
        .strip_prefix("data: first\n\n")
        .expect("the stream starts with the received bytes")
        .to_owned();
    assert!(error_of(&frame)["error"]["message"].is_string(), "{frame}");
}

#[tokio::test]
async fn truncated_unary_response_is_aborted() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(Request::post(CHAT, &json!({"model": "m"})));
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.head(200, &[("content-type", "application/json"), ("transfer-encoding", "chunked")]).await;
    call.chunk(b"{\"half\":").await;
    let mut response = client.response().await;
    response.read_until("half").await;
    call.reset();
    let reply = response.read_to_end().await;
    assert!(reply.aborted && reply.text() == "{\"half\":", "{:?}", reply.text());
}

#[tokio::test]
async fn terminated_worker_finishes_running_requests() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream(CHAT));
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    stack.worker.terminate().await;
    stack.worker.process.wait_for_line("graceful shutdown").await;
    call.chunk(&sse("late")).await;
    call.end_stream().await;
    let reply = client.reply().await;
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: late\n\n", false));
    assert_eq!(stack.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn requests_move_to_other_worker_during_drain() {
    let mut stack = Stack::start().await;
    stack.backend.answer_with(|_, _| Answer::json(200, &json!({})));
    let _second = Stack::worker_of(&stack.relay, &stack.backend).start().await;
    stack.relay.wait_for_workers(2).await;
    stack.worker.terminate().await;
    let clients: Vec<_> = (0..50).map(|_| stack.relay.begin(stream(CHAT))).collect();
    for client in clients {
        client.reply().await.with_status(200);
    }
    assert_eq!(stack.worker.process.wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn worker_reconnects_to_restarted_relay() {
    let Stack { mut relay, worker, backend } = Stack::start().await;
    let addr = relay.addr();
    // Its port is free again only once it is gone.
    relay.process().terminate().await;
    relay.process().wait_exit().await;
    let relay = modelrelay_harness::relay::Relay::builder().env("LISTEN_ADDR", &addr.to_string()).start().await;
    let stack = Stack { relay, worker, backend };
    stack.wait_for_model("m").await;
    stack.backend.answer_with(|_, _| Answer::json(200, &json!({"again": true})));
    assert_eq!(stack.relay.fetch(stream(CHAT)).await.json(), json!({"again": true}));
}
