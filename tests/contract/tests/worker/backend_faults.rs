//! Backends that reset, stall, or send wrong or invalid data: the one request fails, and no other is affected.

use modelrelay_harness::fake_backend::{Call, sse};
use modelrelay_harness::fake_relay::{Reply, RequestSpec};
use modelrelay_harness::worker_process::Rig;
use serde_json::json;

/// Sends a request, lets `play` break it, and checks that the link and the backend still work.
async fn ruined<F: Future<Output = ()>>(play: impl FnOnce(Call) -> F) -> Reply {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    play(call).await;
    let reply = rig.link.reply(&request).await;
    rig.still_serves().await;
    rig.worker.process.wait_for_line("backend error").await;
    reply
}

#[tokio::test]
async fn reset_before_first_byte_may_be_retried_elsewhere() {
    let reply = ruined(async |call| call.reset()).await;
    assert_eq!((reply.error_code(), &reply.start), (Some("backend_reset"), &None));
}

#[tokio::test]
async fn close_before_first_byte_may_be_retried_elsewhere() {
    let reply = ruined(async |call| drop(call)).await;
    assert_eq!((reply.error_code(), &reply.start), (Some("backend_reset"), &None));
}

#[tokio::test]
async fn reset_within_head_may_be_retried_elsewhere() {
    let reply = ruined(async |mut call| {
        call.write_raw(b"HTTP/1.1 200 OK\r\ncontent-").await;
        call.reset();
    })
    .await;
    assert_eq!((reply.error_code(), &reply.start), (Some("backend_reset"), &None));
}

#[tokio::test]
async fn reset_during_stream_reports_error_after_received_bytes() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    assert_eq!(rig.link.part(&request).await, sse("first"));
    call.reset();
    let error = rig.link.expect_where("error", |error| error["request_id"] == json!(request.id)).await;
    assert!(error["code"].is_string() && error["message"].is_string(), "{}", error.body);
    rig.still_serves().await;
}

#[tokio::test]
async fn chunked_body_without_end_is_error() {
    let reply = ruined(async |mut call| {
        call.start_stream().await;
        call.chunk(&sse("first")).await;
    })
    .await;
    assert!(reply.error_code().is_some() && reply.start.is_some(), "{}", reply.end);
}

#[tokio::test]
async fn body_shorter_than_its_length_is_error() {
    let reply = ruined(async |mut call| {
        call.head(200, &[("content-length", "100")]).await;
        call.write_raw(b"only this").await;
    })
    .await;
    assert!(reply.error_code().is_some() && reply.start.is_some(), "{}", reply.end);
}

#[tokio::test]
async fn broken_chunk_size_is_error() {
    let reply = ruined(async |mut call| {
        call.start_stream().await;
        call.chunk(&sse("first")).await;
        call.write_raw(b"not-a-size\r\nxx\r\n").await;
    })
    .await;
    assert!(reply.error_code().is_some() && reply.start.is_some(), "{}", reply.end);
}

#[tokio::test]
async fn garbage_instead_of_http_is_error() {
    let reply = ruined(async |mut call| {
        call.write_raw(b"\x16\x03\x01 this is not HTTP\r\n\r\n").await;
    })
    .await;
    assert!(reply.error_code().is_some() && reply.start.is_none(), "{}", reply.end);
}

#[tokio::test]
async fn endless_head_is_error() {
    let reply = ruined(async |mut call| {
        call.write_raw(b"HTTP/1.1 200 OK\r\n").await;
        let line = format!("x-filler: {}\r\n", "y".repeat(8_000));
        while call.write_raw(line.as_bytes()).await {}
    })
    .await;
    assert!(reply.error_code().is_some() && reply.start.is_none(), "{}", reply.end);
}

#[tokio::test]
async fn stalled_backend_does_not_delay_other_requests() {
    let mut rig = Rig::core1().await;
    let stalled = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(&sse("first")).await;
    rig.link.part(&stalled).await;
    rig.still_serves().await;
    call.chunk(&sse("second")).await;
    assert_eq!(rig.link.part(&stalled).await, sse("second"));
    call.end_stream().await;
}

#[tokio::test]
async fn reset_backend_stays_advertised() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    rig.backend.call().await.reset();
    assert_eq!(rig.link.reply(&request).await.error_code(), Some("backend_reset"));
    rig.still_serves().await;
}

#[tokio::test]
async fn kept_connection_closed_by_backend_fails_no_request() {
    let mut rig = Rig::core1().await;
    for _ in 0..10 {
        let request = rig.link.send_request(&RequestSpec::chat("m"));
        let mut call = rig.backend.call().await;
        call.read_body().await;
        call.head(200, &[("content-length", "2")]).await;
        call.write_raw(b"{}").await;
        drop(call);
        let reply = rig.link.reply(&request).await;
        assert_eq!((reply.status, reply.body.as_slice()), (200, &b"{}"[..]));
    }
}

#[tokio::test]
async fn idle_connection_closes_when_backend_closes_it() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.head(200, &[("content-length", "2")]).await;
    call.write_raw(b"{}").await;
    assert!(rig.link.reply(&request).await.is_complete());
    call.hang_up().await;
    call.closed().await;
}

#[tokio::test]
async fn error_contains_request_id_and_reason() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    rig.backend.call().await.reset();
    let end = rig.link.reply(&request).await.end;
    assert_eq!(end["request_id"], json!(request.id));
    assert!(end["message"].as_str().is_some_and(|message| !message.is_empty()), "{end}");
}

#[tokio::test]
async fn length_of_absent_body_is_not_announced() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.write_raw(b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n").await;
    let reply = rig.link.reply(&request).await;
    assert!(reply.is_complete() && reply.body.is_empty(), "{}", reply.end);
    let start = reply.start.expect("a response_start");
    assert!(matches!(start["content_length"].as_u64(), None | Some(0)), "{start}");
}

#[tokio::test]
async fn chunked_encoding_overrides_content_length() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    let head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n";
    call.write_raw(head).await;
    call.chunk(b"longer than five").await;
    call.end_stream().await;
    let reply = rig.link.reply(&request).await;
    let start = reply.start.clone().unwrap_or_default();
    match reply.error_code() {
        // A parser may reject it, because it can be used to smuggle requests.
        Some(code) => assert!(reply.start.is_none(), "{code} after {start}"),
        None => assert_eq!((reply.body.as_slice(), &start["content_length"]), (&b"longer than five"[..], &json!(null))),
    }
}
