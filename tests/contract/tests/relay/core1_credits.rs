//! `core1`: credits bound the bytes in transit, in both directions.

use std::time::Instant;

use modelrelay_harness::{
    relay::Relay,
    worker::{ANSWER_WINDOW, PIECE_MAX, WINDOW, response_piece},
};
use serde_json::json;

use crate::support::{chat, chat_stream, check_instant, post_bytes};

fn large_request(bytes: usize) -> modelrelay_harness::client::Request {
    post_bytes("/v1/chat/completions", format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "p".repeat(bytes)))
}

#[tokio::test]
async fn request_body_stays_within_workers_window() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    worker.returns_credit = false;
    let pending = relay.begin(large_request(1 << 20));
    let job = worker.expect_request_head().await;
    worker.expect_body_bytes(job.stream, WINDOW).await;
    worker.expect_quiet().await;
    assert_eq!(worker.received(job.stream), WINDOW);
    worker.send(&json!({"type": "credit", "stream": job.stream, "bytes": 1000})).await;
    worker.expect_body_bytes(job.stream, WINDOW + 1000).await;
    worker.expect_quiet().await;
    assert_eq!(worker.received(job.stream), WINDOW + 1000, "pieces are cut to the credit left");
    worker.send(&json!({"type": "credit", "stream": job.stream, "bytes": 4 << 20})).await;
    let length = usize::try_from(job.message["content_length"].as_u64().expect("a length")).expect("fits");
    worker.expect_body_bytes(job.stream, length).await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn stream_window_is_set_by_worker() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let mut registration =
        modelrelay_harness::worker::core1_registration(&["m"], 1, &modelrelay_harness::worker::new_instance_id());
    registration["limits"]["stream_window_bytes"] = json!(100_000);
    worker.register_with(registration).await;
    worker.grant(1).await;
    worker.returns_credit = false;
    let _pending = relay.begin(large_request(300_000));
    let job = worker.expect_request_head().await;
    worker.expect_body_bytes(job.stream, 100_000).await;
    worker.expect_quiet().await;
    assert_eq!(worker.received(job.stream), 100_000);
}

#[tokio::test]
async fn body_without_credit_does_not_block_others() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    worker.returns_credit = false;
    let stuck = relay.begin(large_request(1 << 20));
    let stuck_job = worker.expect_request_head().await;
    worker.expect_body_bytes(stuck_job.stream, WINDOW).await;
    let start = Instant::now();
    let pending = relay.begin(large_request(200_000));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    check_instant(start, "the neighbour's request");
    drop(stuck);
}

#[tokio::test]
async fn cancel_ends_body_waiting_for_credit() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    worker.returns_credit = false;
    let pending = relay.begin(large_request(1 << 20));
    let job = worker.expect_request_head().await;
    worker.expect_body_bytes(job.stream, WINDOW).await;
    let start = Instant::now();
    pending.abandon();
    worker.expect_cancel(&job.id).await;
    check_instant(start, "the cancel");
    worker.send(&json!({"type": "credit", "stream": job.stream, "bytes": 1 << 20})).await;
    worker.expect_quiet().await;
    assert_eq!(worker.received(job.stream), WINDOW, "pieces arrived after the cancel");
}

#[tokio::test]
async fn cancel_overtakes_large_bodies() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let victim = relay.begin(chat("m"));
    let victim_job = worker.expect_request().await;
    let _large = relay.begin(large_request(30 << 20));
    let large_job = worker.expect_request_head().await;
    worker.expect_body_bytes(large_job.stream, 1 << 20).await;
    let start = Instant::now();
    victim.abandon();
    worker.expect_cancel(&victim_job.id).await;
    check_instant(start, "the cancel");
    assert!(worker.received(large_job.stream) < 30 << 20, "the cancel was sent after the body");
}

#[tokio::test]
async fn credit_returns_as_client_reads() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "application/octet-stream")]).await;
    let piece = vec![b'x'; PIECE_MAX];
    let mut sent = 0_u64;
    let reader = tokio::spawn(pending.reply());
    // Far more than the window, but never more than was granted.
    while sent < 8 << 20 {
        let needed = (sent + PIECE_MAX as u64).saturating_sub(ANSWER_WINDOW as u64);
        worker.expect_credit(job.stream, needed).await;
        worker.pieces(&job, &piece).await;
        sent += PIECE_MAX as u64;
    }
    worker.finish(&job).await;
    let reply = reader.await.expect("the reader does not panic").with_status(200);
    assert_eq!((reply.body.len() as u64, reply.aborted), (sent, false));
}

#[tokio::test]
async fn stream_exceeding_its_credit_fails_alone() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let neighbour = relay.begin(chat_stream("m"));
    let neighbour_job = worker.expect_request().await;
    worker.start_stream(&neighbour_job, "data: a\n\n").await;
    let pending = relay.begin(chat("m").small_receive_buffer());
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[]).await;
    let response = pending.response().await;
    // The client reads nothing: the kernel's buffers and further credit are far less than this.
    for _ in 0..512 {
        worker.send_binary(response_piece(job.stream, &vec![b'x'; PIECE_MAX])).await;
    }
    worker.expect_cancel(&job.id).await;
    assert!(response.read_to_end().await.aborted);
    worker.end_stream(&neighbour_job).await;
    let reply = neighbour.reply().await.with_status(200);
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: a\n\n", false));
}

#[tokio::test]
async fn credit_for_unknown_stream_is_ignored() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    worker.send(&json!({"type": "credit", "stream": 77, "bytes": 65_536})).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}
