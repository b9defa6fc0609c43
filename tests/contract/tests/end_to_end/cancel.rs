//! A client that disconnects, seen from the backend.

use std::time::{Duration, Instant};

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, sse};
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

/// Ten times the 100 ms that the contract specifies: detects polling, not a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);

fn stream() -> Request {
    Request::post(CHAT, &json!({"model": "m", "stream": true}))
}

#[tokio::test]
async fn client_leaving_before_first_byte_frees_backend_immediately() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream());
    let mut call = stack.backend.call().await;
    call.read_body().await;
    let left = Instant::now();
    client.abandon();
    assert!(call.closed().await - left < AT_ONCE);
}

#[tokio::test]
async fn client_leaving_during_stream_frees_backend_immediately() {
    let mut stack = Stack::start().await;
    let client = stack.relay.begin(stream());
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    let mut response = client.response().await;
    response.read_until("first").await;
    let left = Instant::now();
    drop(response);
    assert!(call.closed().await - left < AT_ONCE);
}

#[tokio::test]
async fn client_leaving_frees_its_slot() {
    let mut stack = Stack::with(|relay| relay, |worker| worker.concurrency(1)).await;
    for _ in 0..5 {
        let client = stack.relay.begin(stream());
        let mut call = stack.backend.call().await;
        let next = stack.relay.begin(stream());
        client.abandon();
        call.closed().await;
        stack.backend.call().await.answer_json(200, &json!({})).await;
        next.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn large_bodies_do_not_delay_cancel() {
    let mut stack = Stack::start().await;
    let body = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "p".repeat((32 << 20) - 64));
    let upload = stack.relay.begin(Request::new("POST", "/v1/completions").body(body));
    let mut uploading = stack.backend.call().await;
    let uploading = tokio::spawn(async move {
        while uploading.read_some(1 << 16).await.is_some_and(|bytes| !bytes.is_empty()) {}
        uploading.answer_json(200, &json!({})).await;
    });
    let download = stack.relay.begin(stream());
    let downloading = stack.backend.call().await;
    let downloading =
        tokio::spawn(async move { downloading.answer(&Answer::new(200, &[], &vec![b'x'; 32 << 20])).await });
    let victim = stack.relay.begin(stream());
    let mut call = stack.backend.call().await;
    call.read_body().await;
    let download = tokio::spawn(download.reply());
    let left = Instant::now();
    victim.abandon();
    assert!(call.closed().await - left < AT_ONCE);
    assert_eq!(download.await.expect("the download's client").body.len(), 32 << 20);
    upload.reply().await.with_status(200);
    uploading.await.expect("the upload's backend");
    downloading.await.expect("the download's backend");
}

#[tokio::test]
async fn timed_out_request_is_cancelled_at_backend() {
    let mut stack = Stack::with(|relay| relay.env("REQUEST_TIMEOUT_SECS", "1"), |worker| worker).await;
    let client = stack.relay.begin(stream());
    let mut call = stack.backend.call().await;
    call.closed().await;
    let reply = client.reply().await;
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (504, &json!("request_timeout")));
}

#[tokio::test]
async fn timed_out_stream_ends_with_error() {
    let mut stack = Stack::with(|relay| relay.env("REQUEST_TIMEOUT_SECS", "1"), |worker| worker).await;
    let client = stack.relay.begin(stream());
    let mut call = stack.backend.call().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    let reply = client.reply().await;
    let text = reply.broken_stream();
    assert!(text.starts_with("data: first\n\ndata: {\"error\""), "{text:?}");
    call.closed().await;
}
