//! `core1`: the number of body bytes in transit, and unexpected pieces.

use std::time::Duration;

use bytes::Bytes;
use modelrelay_harness::fake_backend::Call;
use modelrelay_harness::fake_relay::{
    Event, REQUEST_PIECE, RESPONSE_PIECE, RelayLink, RequestSpec, SentRequest, WINDOW, piece,
};
use modelrelay_harness::worker_process::Rig;
use serde_json::json;
use tokio_tungstenite::tungstenite::Message as Frame;

/// Long enough to show that nothing more arrives, where there is no observable event.
const QUIET: Duration = Duration::from_millis(300);

/// Responds with an endless stream of bytes.
async fn endless(rig: &mut Rig) -> tokio::task::JoinHandle<Call> {
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    tokio::spawn(async move {
        while call.chunk(&[b'x'; 16_384]).await {}
        call
    })
}

/// Reads pieces until `bytes` have come.
async fn receive(link: &mut RelayLink, request: &SentRequest, bytes: u64) {
    let mut got = 0;
    while got < bytes {
        got += link.part(request).await.len() as u64;
    }
    assert_eq!(got, bytes, "more than the credit allows");
}

/// True if another piece arrives soon.
async fn has_more(link: &mut RelayLink) -> bool {
    let piece = link.next_where(QUIET, |event| matches!(event, Event::Piece { .. })).await;
    piece.is_some()
}

#[tokio::test]
async fn sent_bytes_never_exceed_credit() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let _endless = endless(&mut rig).await;
    receive(&mut rig.link, &request, WINDOW).await;
    assert!(!has_more(&mut rig.link).await);
    assert_eq!(rig.link.received_bytes(), WINDOW);
    rig.link.credit(request.stream, 1_000);
    receive(&mut rig.link, &request, 1_000).await;
    rig.link.credit(request.stream, 100_000);
    receive(&mut rig.link, &request, 100_000).await;
    assert!(!has_more(&mut rig.link).await);
    assert_eq!(rig.link.received_bytes(), WINDOW + 101_000);
}

#[tokio::test]
async fn request_may_set_smaller_window() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    let request = rig.link.send_request(&RequestSpec::stream("m").window(65_536));
    let _endless = endless(&mut rig).await;
    receive(&mut rig.link, &request, 65_536).await;
    assert!(!has_more(&mut rig.link).await);
    assert_eq!(rig.link.received_bytes(), 65_536);
}

#[tokio::test]
async fn stream_without_credit_slows_no_other() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    let stuck = rig.link.send_request(&RequestSpec::stream("m"));
    let _endless = endless(&mut rig).await;
    receive(&mut rig.link, &stuck, WINDOW).await;
    rig.still_serves().await;
    let other = rig.link.send_request(&RequestSpec::stream("m"));
    let _other = endless(&mut rig).await;
    receive(&mut rig.link, &other, WINDOW).await;
}

#[tokio::test]
async fn stream_without_credit_stops_reading_from_its_backend() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    let block = vec![b'x'; 1 << 20];
    let mut written = 0;
    while tokio::time::timeout(QUIET * 3, call.chunk(&block)).await.is_ok() {
        written += 1;
        assert!(written < 64, "64 MiB were read for a client that does not read");
    }
    receive(&mut rig.link, &request, WINDOW).await;
}

/// A client that sends everything before it reads would wait indefinitely, and so would its backend.
#[tokio::test]
async fn body_continues_while_response_waits_for_credit() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    let body = vec![b'p'; 8 << 20];
    let request = rig.link.send_request(&RequestSpec::stream("m").body(&body));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(&vec![b'x'; 2 * usize::try_from(WINDOW).expect("a small number")]).await;
    receive(&mut rig.link, &request, WINDOW).await;
    assert_eq!(call.read_body().await.len(), body.len());
}

#[tokio::test]
async fn stream_without_credit_can_be_cancelled() {
    let mut rig = Rig::core1().await;
    rig.link.withhold_credit();
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let endless = endless(&mut rig).await;
    receive(&mut rig.link, &request, WINDOW).await;
    rig.link.cancel(&request.id, "client_disconnect");
    tokio::time::timeout(Duration::from_secs(1), endless).await.expect("an aborted backend").expect("no panic");
}

#[tokio::test]
async fn request_credit_returns_as_backend_reads() {
    let mut rig = Rig::core1().await;
    let body = vec![b'p'; 8 << 20];
    let request = rig.link.send_request(&RequestSpec::chat("m").body(&body));
    let mut call = rig.backend.call().await;
    assert_eq!(call.read_body().await.len(), body.len());
    call.answer_json(200, &json!({})).await;
    assert_eq!(rig.link.reply(&request).await.status, 200);
}

#[tokio::test]
async fn backend_not_reading_limits_credit() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m").body(&vec![b'p'; 64 << 20]));
    let _unread = rig.backend.call().await;
    let mut credited = 0;
    while let Some(credit) = rig.link.expect_within(QUIET * 3, "credit").await {
        assert_eq!(credit["stream"], json!(request.stream));
        credited += credit["bytes"].as_u64().expect("a number of bytes");
        // 4 MiB outstanding, and the content of the kernel's socket buffers.
        assert!(credited < 24 << 20, "{credited} bytes were credited for a backend that does not read");
    }
}

#[tokio::test]
async fn upload_unread_by_its_backend_slows_no_other() {
    let mut rig = Rig::core1().await;
    rig.link.send_request(&RequestSpec::chat("m").body(&vec![b'p'; 64 << 20]));
    let _unread = rig.backend.call().await;
    rig.still_serves().await;
}

#[tokio::test]
async fn overrunning_credit_fails_only_that_request() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request_head(&RequestSpec::chat("m").claiming(64 << 20));
    let _unread = rig.backend.call().await;
    for _ in 0..1024 {
        rig.link.send_frame(Frame::Binary(piece(REQUEST_PIECE, request.stream, &[b'p'; 65_536])));
    }
    let reply = rig.link.reply(&request).await;
    assert!(reply.error_code().is_some(), "{}", reply.end);
    rig.still_serves().await;
}

#[tokio::test]
async fn body_exceeding_announced_length_fails_only_that_request() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m").body(b"twenty bytes of body").claiming(10));
    let reply = rig.link.reply(&request).await;
    assert!(reply.error_code().is_some(), "{}", reply.end);
    rig.still_serves_with_leftovers().await;
}

#[tokio::test]
async fn pieces_and_credit_for_unknown_streams_are_ignored() {
    let mut rig = Rig::core1().await;
    for kind in [REQUEST_PIECE, RESPONSE_PIECE] {
        rig.link.send_frame(Frame::Binary(piece(kind, 4_000_000_000, b"unknown")));
    }
    rig.link.credit(4_000_000_000, 65_536);
    rig.link.cancel("unknown", "timeout");
    rig.still_serves().await;
}

#[tokio::test]
async fn pieces_crossing_cancel_are_ignored() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request_head(&RequestSpec::chat("m").claiming(100_000));
    let mut call = rig.backend.call().await;
    rig.link.cancel(&request.id, "client_disconnect");
    call.closed().await;
    rig.link.send_frame(Frame::Binary(piece(REQUEST_PIECE, request.stream, &[1; 50_000])));
    rig.still_serves().await;
}

#[tokio::test]
async fn pieces_after_response_are_ignored() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    rig.backend.call().await.answer_json(200, &json!({})).await;
    rig.link.reply(&request).await;
    rig.link.send_frame(Frame::Binary(piece(REQUEST_PIECE, request.stream, b"late")));
    rig.still_serves().await;
}

async fn closes_with(frame: Frame, code: u16) {
    let mut rig = Rig::core1().await;
    rig.link.send_frame(frame);
    assert_eq!(rig.link.closed().await.0, Some(code));
}

#[tokio::test]
async fn binary_message_with_short_header_closes_with_1002() {
    closes_with(Frame::Binary(Bytes::from_static(&[1, 0, 0, 0, 1])), 1002).await;
}

#[tokio::test]
async fn binary_message_of_unknown_kind_closes_with_1002() {
    closes_with(Frame::Binary(piece(3, 1, b"x")), 1002).await;
}

#[tokio::test]
async fn piece_over_64_kib_closes_with_1002() {
    closes_with(Frame::Binary(piece(REQUEST_PIECE, 1, &[0; 65_537])), 1002).await;
}

#[tokio::test]
async fn binary_message_without_capability_closes_with_1002() {
    let mut rig = Rig::old().await;
    rig.link.send_frame(Frame::Binary(piece(REQUEST_PIECE, 1, b"x")));
    assert_eq!(rig.link.closed().await.0, Some(1002));
}

#[tokio::test]
async fn text_message_over_one_megabyte_closes_with_1009() {
    let padding = "x".repeat((1 << 20) + 1);
    closes_with(Frame::text(json!({"type": "padding", "padding": padding}).to_string()), 1009).await;
}

#[tokio::test]
async fn old_relay_may_send_large_text_messages() {
    let mut rig = Rig::old().await;
    let body = "p".repeat(8 << 20);
    let request = rig.link.send_request(&RequestSpec::chat("m").body(body.as_bytes()));
    let mut call = rig.backend.call().await;
    assert!(call.read_body().await == body.as_bytes(), "the body was changed");
    call.answer_json(200, &json!({})).await;
    assert_eq!(rig.link.reply(&request).await.status, 200);
}
