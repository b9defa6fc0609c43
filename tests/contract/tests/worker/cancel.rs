//! `cancel`: the backend's connection is closed at once, whatever else is being transferred.

use std::time::{Duration, Instant};

use modelrelay_harness::fake_relay::{Ack, RequestSpec};
use modelrelay_harness::worker_process::Rig;
use serde_json::json;

/// Ten times the 100 ms that the contract specifies: detects polling, not a busy machine.
const AT_ONCE: Duration = Duration::from_secs(1);

#[tokio::test]
async fn cancel_before_first_byte_reaches_backend_immediately() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let mut call = rig.backend.call().await;
    call.read_body().await;
    let cancelled = Instant::now();
    rig.link.cancel(&request.id, "client_disconnect");
    assert!(call.closed().await - cancelled < AT_ONCE);
    rig.worker.process.wait_for_line("cancelled").await;
}

#[tokio::test]
async fn cancel_during_stream_reaches_backend_immediately() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    rig.link.part(&request).await;
    let cancelled = Instant::now();
    rig.link.cancel(&request.id, "timeout");
    assert!(call.closed().await - cancelled < AT_ONCE);
}

#[tokio::test]
async fn cancel_during_upload_reaches_backend_immediately() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::chat("m").body(&vec![b'p'; 32 << 20]));
    let mut call = rig.backend.call().await;
    call.read_some(1 << 20).await;
    let cancelled = Instant::now();
    rig.link.cancel(&request.id, "client_disconnect");
    assert!(call.closed().await - cancelled < AT_ONCE);
}

#[tokio::test]
async fn large_bodies_do_not_delay_cancel() {
    let mut rig = Rig::core1().await;
    let big = vec![b'b'; 32 << 20];
    let upload = rig.link.send_request(&RequestSpec::chat("m").body(&big));
    let mut uploading = rig.backend.call().await;
    let uploading = tokio::spawn(async move {
        while uploading.read_some(1 << 16).await.is_some_and(|bytes| !bytes.is_empty()) {}
        uploading.answer_json(200, &json!("uploaded")).await;
    });
    let download = rig.link.send_request(&RequestSpec::chat("m"));
    let mut downloading = rig.backend.call().await;
    let downloading = tokio::spawn(async move {
        downloading.start_stream().await;
        for block in big.chunks(1 << 16) {
            downloading.chunk(block).await;
        }
        downloading.end_stream().await;
    });
    let victim = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    let cancelled = Instant::now();
    rig.link.cancel(&victim.id, "client_disconnect");
    assert!(call.closed().await - cancelled < AT_ONCE);
    assert_eq!(rig.link.reply(&upload).await.json(), json!("uploaded"));
    assert_eq!(rig.link.reply(&download).await.body.len(), 32 << 20);
    uploading.await.expect("the upload's backend");
    downloading.await.expect("the download's backend");
}

#[tokio::test]
async fn cancelled_request_frees_its_slot_immediately() {
    let mut rig = Rig::with(&Ack::core1(), 1, |worker| worker).await;
    for _ in 0..5 {
        let request = rig.link.send_request(&RequestSpec::chat("m"));
        let _never_answers = rig.backend.call().await;
        rig.link.cancel(&request.id, "timeout");
        rig.still_serves().await;
    }
}

#[tokio::test]
async fn cancel_affects_only_its_own_request() {
    let mut rig = Rig::core1().await;
    let kept = rig.link.send_request(&RequestSpec::chat("m"));
    let kept_call = rig.backend.call().await;
    let victim = rig.link.send_request(&RequestSpec::chat("m"));
    let mut victim_call = rig.backend.call().await;
    rig.link.cancel(&victim.id, "client_disconnect");
    victim_call.closed().await;
    kept_call.answer_json(200, &json!("kept")).await;
    assert_eq!(rig.link.reply(&kept).await.json(), json!("kept"));
}

#[tokio::test]
async fn immediately_cancelled_request_leaves_nothing_behind() {
    let mut rig = Rig::with(&Ack::core1(), 1, |worker| worker).await;
    for _ in 0..20 {
        let request = rig.link.send_request(&RequestSpec::chat("m"));
        rig.link.cancel(&request.id, "client_disconnect");
    }
    rig.still_serves_with_leftovers().await;
}

#[tokio::test]
async fn stream_sends_nothing_after_processed_cancel() {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    rig.link.part(&request).await;
    rig.link.cancel(&request.id, "client_disconnect");
    rig.link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
    rig.link.expect("pong").await;
    rig.link.forget();
    call.chunk(b"data: 2\n\n").await;
    call.closed().await;
    rig.still_serves().await;
    let late = rig.link.reply_within(Duration::ZERO, &request).await;
    assert!(late.is_none_or(|reply| reply.parts.is_empty()), "a piece after the cancel");
}

#[tokio::test]
async fn known_and_unknown_cancel_reasons_are_accepted() {
    let mut rig = Rig::core1().await;
    for reason in ["client_disconnect", "timeout", "graceful_shutdown", "server_shutdown", "invented_tomorrow"] {
        let request = rig.link.send_request(&RequestSpec::chat("m"));
        let mut call = rig.backend.call().await;
        rig.link.cancel(&request.id, reason);
        call.closed().await;
    }
    rig.still_serves().await;
}
