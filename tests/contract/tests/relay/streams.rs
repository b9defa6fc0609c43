//! Streams pass unchanged, in order and promptly, and end as the backend ended them.

use modelrelay_harness::{client::Request, relay::Relay};
use serde_json::json;

use crate::support::{chat, chat_stream, messages_stream};

#[tokio::test]
async fn each_chunk_reaches_client_before_next_chunk() {
    for core1 in [false, true] {
        let relay = Relay::start().await;
        let mut worker = if core1 { relay.core1_worker(&["m"], 1).await } else { relay.worker(&["m"], 1).await };
        let pending = relay.begin(chat_stream("m"));
        let job = worker.expect_request().await;
        worker.start_stream(&job, "data: 0\n\n").await;
        let mut response = pending.response().await;
        for number in 1..20 {
            response.read_until(&format!("data: {}\n\n", number - 1)).await;
            worker.stream_on(&job, &format!("data: {number}\n\n")).await;
        }
        worker.end_stream(&job).await;
        let reply = response.read_to_end().await;
        let expected: String = (0..20).map(|number| format!("data: {number}\n\n")).collect();
        assert_eq!((reply.text(), reply.aborted), (expected, false));
    }
}

#[tokio::test]
async fn stream_bytes_are_unchanged_at_any_piece_size() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let stream = ": comment\r\n\r\nevent: x\ndata: {\"t\":\"grüße 😀\"}\n\nid: 7\nretry: 9\ndata:no-space\n\n\n\ndata: \x00\u{7f}\n\n";
    for size in [1, 2, 3, 7] {
        let pending = relay.begin(chat_stream("m"));
        let job = worker.expect_request().await;
        worker.response_start(&job, 200, &[("content-type", "text/event-stream; charset=utf-8")]).await;
        for piece in stream.as_bytes().chunks(size) {
            worker.pieces(&job, piece).await;
        }
        worker.finish(&job).await;
        let reply = pending.reply().await;
        assert_eq!(reply.body, stream.as_bytes(), "cut by {size}");
        assert!(!reply.aborted);
        assert_eq!(reply.header("content-type").as_deref(), Some("text/event-stream; charset=utf-8"));
    }
}

#[tokio::test]
async fn done_event_is_never_added() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: {}\n\n").await;
    worker.end_stream(&job).await;
    assert_eq!(pending.reply().await.text(), "data: {}\n\n");
}

#[tokio::test]
async fn stream_without_chunks_completes_empty() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.complete_stream(&job.id).await;
    let reply = pending.reply().await;
    assert_eq!((reply.status, reply.body.len(), reply.aborted), (200, 0, false));
}

#[tokio::test]
async fn event_of_one_megabyte_passes() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    let event = format!("data: {}\n\n", "e".repeat(1 << 20));
    worker.start_stream(&job, &event).await;
    worker.end_stream(&job).await;
    assert!(pending.reply().await.text() == event, "the event was changed");
}

#[tokio::test]
async fn response_of_twenty_megabytes_passes() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let body = format!("{{\"x\":\"{}\"}}", "a".repeat(20 << 20));
    worker.answer_with(&job, 200, &[("content-type", "application/json")], body.as_bytes()).await;
    let reply = pending.reply().await.with_status(200);
    assert!(!reply.aborted && reply.body == body.as_bytes(), "{} of {} bytes", reply.body.len(), body.len());
}

#[tokio::test]
async fn stream_over_size_limit_ends_with_error() {
    let relay = Relay::builder().env("MAX_STREAM_BYTES", "10000").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    let event = format!("data: {}\n\n", "e".repeat(3000));
    worker.start_stream(&job, &event).await;
    for _ in 0..5 {
        worker.stream_on(&job, &event).await;
    }
    let reply = pending.reply().await;
    assert!(reply.broken_stream().contains("response_too_large"), "another error");
    assert!(reply.body.len() < 12_000, "received {} bytes", reply.body.len());
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "client_disconnect");
}

#[tokio::test]
async fn keep_alives_are_sent_while_stream_waits() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "1").env("QUEUE_TIMEOUT_SECS", "9").start().await;
    let mut chat = relay.send(chat_stream("m")).await;
    assert_eq!(chat.status, 200);
    let text = chat.read_until("\n\n").await;
    assert!(text.starts_with(':'), "an SSE comment: {text:?}");
    let mut messages = relay.send(messages_stream("m")).await;
    let text = messages.read_until("\n\n").await;
    assert!(text.contains("event: ping") && text.contains("\"ping\""), "{text:?}");
    let mut worker = relay.worker(&["m"], 2).await;
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: real\n\n").await;
    worker.end_stream(&job).await;
    let reply = chat.read_to_end().await;
    assert!(reply.text().ends_with("data: real\n\n") && !reply.aborted, "{}", reply.text());
}

#[tokio::test]
async fn failure_after_keep_alive_is_error_frame() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "1").env("QUEUE_TIMEOUT_SECS", "2").start().await;
    let reply = relay.fetch(chat_stream("m")).await;
    assert_eq!(reply.status, 200);
    assert!(reply.broken_stream().contains("queue_timeout"), "{}", reply.text());
}

#[tokio::test]
async fn kept_connection_serves_several_requests() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut connection = modelrelay_harness::client::Connection::open(relay.addr(), relay.log()).await;
    for number in 0..3 {
        let (response, ()) = tokio::join!(connection.send(chat("m")), async {
            let job = worker.expect_request().await;
            worker.answer(&job, &json!({"n": number})).await;
        });
        assert_eq!(response.read_to_end().await.json()["n"], number);
    }
}

#[tokio::test]
async fn plain_response_after_keep_alive_is_failure() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut response = relay.send(chat_stream("m")).await;
    let _ = response.read_until("\n\n").await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({"not": "a stream"})).await;
    let reply = response.read_to_end().await;
    assert!(reply.broken_stream().contains("the backend returned 200 instead of a stream"), "{}", reply.text());
    // The backend failed; the client did not disconnect.
    relay.log().wait_for_line("outcome=\"upstream_error\" code=200").await;
}

#[tokio::test]
async fn keep_alives_are_sent_between_crlf_events() {
    let relay = Relay::builder().env("STREAM_KEEPALIVE_SECS", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: a\r\n\r\n").await;
    let mut response = pending.response().await;
    let _ = response.read_until("\r\n\r\n: keepalive\n\n").await;
    worker.stream_on(&job, "data: b\r\n").await;
    worker.stream_on(&job, "\r\n").await;
    worker.end_stream(&job).await;
    assert!(response.read_to_end().await.text().ends_with("data: b\r\n\r\n"));
}

#[tokio::test]
async fn broken_stream_of_another_route_is_aborted() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let body = json!({"model": "m", "input": "x", "stream_format": "sse"});
    let pending = relay.begin(Request::post("/v1/audio/speech", &body));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    worker.fail(&job.id, "backend_reset", "connection reset").await;
    let reply = pending.reply().await;
    assert!(reply.aborted && reply.error_frame().is_some(), "its clients are unknown: {}", reply.text());
}

#[tokio::test]
async fn broken_compressed_stream_is_aborted_without_error_frame() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "text/event-stream"), ("content-encoding", "gzip")]).await;
    worker.pieces(&job, b"\x1f\x8b").await;
    worker.fail(&job.id, "backend_reset", "connection reset").await;
    let reply = pending.reply().await;
    assert_eq!((reply.body.as_slice(), reply.aborted), (&b"\x1f\x8b"[..], true));
}

#[tokio::test]
async fn connection_stays_usable_after_broken_stream() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut connection = modelrelay_harness::client::Connection::open(relay.addr(), relay.log()).await;
    let (response, ()) = tokio::join!(connection.send(chat_stream("m")), async {
        let job = worker.expect_request().await;
        worker.start_stream(&job, "data: 1\n\n").await;
        worker.fail(&job.id, "backend_reset", "connection reset").await;
    });
    assert!(response.read_to_end().await.broken_stream().contains("backend_reset"));
    let (response, ()) = tokio::join!(connection.send(chat("m")), async {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    });
    let _ = response.read_to_end().await.with_status(200);
}
