//! `core1`: bodies as binary messages, and peers that send them incorrectly.

use modelrelay_harness::{
    client::Pending,
    relay::Relay,
    worker::{ANSWER_WINDOW, FakeWorker, Job, PIECE_MAX, response_piece},
};
use serde_json::json;

use crate::support::{chat, chat_stream, openai_error, post_bytes};

/// A relay, a `core1` worker with a running streamed neighbour request, and one more running request.
async fn scene() -> (Relay, FakeWorker, (Pending, Job), (Pending, Job)) {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    let neighbour = relay.begin(chat_stream("m"));
    let neighbour_job = worker.expect_request().await;
    worker.start_stream(&neighbour_job, "data: a\n\n").await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    (relay, worker, (neighbour, neighbour_job), (pending, job))
}

/// Checks that the socket and the neighbour's request still work.
async fn neighbour_is_well(mut worker: FakeWorker, (neighbour, job): (Pending, Job)) {
    worker.stream_on(&job, "data: b\n\n").await;
    worker.end_stream(&job).await;
    let reply = neighbour.reply().await.with_status(200);
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: a\n\ndata: b\n\n", false));
}

#[tokio::test]
async fn request_body_follows_its_message_in_pieces() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "p".repeat(1 << 20));
    let pending = relay.begin(post_bytes("/v1/chat/completions?q=1", &body));
    let job = worker.expect_request().await;
    assert!(job.body == body.as_bytes(), "the body was changed");
    assert_eq!(job.message["content_length"], body.len());
    assert_eq!(job.path(), "/v1/chat/completions?q=1");
    assert_eq!(job.message["model"], "m");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn response_body_of_any_bytes_passes() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let body: Vec<u8> = (0..=255_u8).cycle().take(ANSWER_WINDOW).collect();
    worker.response_start(&job, 206, &[("content-type", "audio/wav"), ("content-encoding", "gzip")]).await;
    worker.pieces(&job, &body[..1]).await;
    worker.send_binary(response_piece(job.stream, b"")).await;
    worker.pieces(&job, &body[1..20_001]).await;
    worker.pieces(&job, &body[20_001..]).await;
    worker.finish(&job).await;
    let reply = pending.reply().await.with_status(206);
    assert!(reply.body == body && !reply.aborted, "the body was changed");
    assert_eq!(reply.header("content-encoding").as_deref(), Some("gzip"));
}

#[tokio::test]
async fn stream_numbers_start_at_one_and_never_repeat() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    for number in 1..=5 {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        assert_eq!(job.stream, number);
        if number == 3 {
            pending.abandon();
            worker.expect_cancel(&job.id).await;
        } else {
            worker.answer(&job, &json!({})).await;
            let _ = pending.reply().await.with_status(200);
        }
    }
}

#[tokio::test]
async fn late_and_foreign_pieces_are_dropped() {
    let (relay, mut worker, neighbour, (pending, job)) = scene().await;
    pending.abandon();
    worker.expect_cancel(&job.id).await;
    worker.pieces(&job, b"late").await;
    worker.send_binary(response_piece(4_000_000_000, b"foreign")).await;
    worker.send_binary(response_piece(0, b"foreign")).await;
    worker.send_binary(vec![1, 0, 0, 0, 0, 1, 9]).await;
    worker.expect_quiet().await;
    neighbour_is_well(worker, neighbour).await;
    drop(relay);
}

#[tokio::test]
async fn short_response_body_fails_that_request_alone() {
    let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
    worker
        .send(&json!({"type": "response_start", "request_id": job.id, "status_code": 200, "headers": [], "content_length": 10}))
        .await;
    worker.pieces(&job, b"12345").await;
    worker.finish(&job).await;
    let reply = pending.reply().await;
    assert!(reply.aborted || reply.status == 502, "a short body ended as complete: {}", reply.status);
    neighbour_is_well(worker, neighbour).await;
}

#[tokio::test]
async fn excessive_content_length_fails_that_request_alone() {
    let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
    worker
        .send(&json!({"type": "response_start", "request_id": job.id, "status_code": 200, "headers": [], "content_length": u64::MAX}))
        .await;
    worker.expect_cancel(&job.id).await;
    let reply = pending.reply().await;
    openai_error(&reply, 502, "server_error", "bad_answer");
    neighbour_is_well(worker, neighbour).await;
}

#[tokio::test]
async fn overlong_response_body_fails_that_request_alone() {
    let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
    worker
        .send(&json!({"type": "response_start", "request_id": job.id, "status_code": 200, "headers": [], "content_length": 3}))
        .await;
    worker.pieces(&job, b"12345").await;
    worker.expect_cancel(&job.id).await;
    worker.finish(&job).await;
    let reply = pending.reply().await;
    assert!(reply.aborted || reply.status == 502, "{}: {}", reply.status, reply.text());
    neighbour_is_well(worker, neighbour).await;
}

#[tokio::test]
async fn pieces_before_response_start_fail_that_request_alone() {
    let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
    worker.pieces(&job, b"too early").await;
    worker.expect_cancel(&job.id).await;
    assert_eq!(pending.reply().await.status, 502);
    neighbour_is_well(worker, neighbour).await;
}

#[tokio::test]
async fn completion_without_response_start_fails_that_request_alone() {
    let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
    worker.finish(&job).await;
    let reply = pending.reply().await;
    assert_eq!(reply.status, 502, "{}", reply.text());
    assert_eq!(reply.json()["error"]["type"], "server_error");
    neighbour_is_well(worker, neighbour).await;
}

#[tokio::test]
async fn second_response_start_fails_that_request_alone() {
    let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
    worker.response_start(&job, 200, &[]).await;
    worker.pieces(&job, b"x").await;
    worker.response_start(&job, 200, &[]).await;
    worker.expect_cancel(&job.id).await;
    assert!(pending.reply().await.aborted);
    neighbour_is_well(worker, neighbour).await;
}

#[tokio::test]
async fn status_out_of_range_fails_that_request_alone() {
    for status in [0, 100, 199, 600, 65_535] {
        let (_relay, mut worker, neighbour, (pending, job)) = scene().await;
        worker
            .send(&json!({"type": "response_start", "request_id": job.id, "status_code": status, "headers": []}))
            .await;
        assert_eq!(pending.reply().await.status, 502, "{status}");
        worker.expect_cancel(&job.id).await;
        neighbour_is_well(worker, neighbour).await;
    }
}

#[tokio::test]
async fn response_before_whole_request_body_is_delivered() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    worker.returns_credit = false;
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "p".repeat(1 << 20));
    let pending = relay.begin(post_bytes("/v1/chat/completions", &body));
    let job = worker.expect_request_head().await;
    worker.answer_with(&job, 400, &[("content-type", "application/json")], b"{\"error\":\"too long\"}").await;
    assert_eq!(pending.reply().await.with_status(400).text(), "{\"error\":\"too long\"}");
    let next = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = next.reply().await.with_status(200);
}

#[tokio::test]
async fn broken_binary_messages_close_socket() {
    let too_long = response_piece(1, &vec![0; PIECE_MAX + 1]);
    for (what, bytes) in [
        ("too short", vec![2, 0, 0, 0]),
        ("empty", vec![]),
        ("of unknown kind", vec![3, 0, 0, 0, 0, 1, 9]),
        ("too long", too_long),
    ] {
        let relay = Relay::start().await;
        let mut worker = relay.core1_worker(&["m"], 1).await;
        worker.send_binary(bytes).await;
        assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()), "{what}");
    }
}

#[tokio::test]
async fn binary_message_without_core1_closes_socket() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    worker.send_binary(response_piece(1, b"x")).await;
    assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()));
}

#[tokio::test]
async fn text_message_over_one_mebibyte_closes_core1_socket() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    worker.send(&json!({"type": "pong", "current_load": 0, "timestamp_unix_ms": 1, "x": "y".repeat(1 << 20)})).await;
    assert_eq!(worker.expect_close().await, (1009, "message too large".to_owned()));
}

#[tokio::test]
async fn error_statuses_and_their_bodies_pass() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.answer_with(&job, 422, &[("content-type", "text/plain")], b"no such voice").await;
    let reply = pending.reply().await;
    assert_eq!((reply.status, reply.text().as_str()), (422, "no such voice"));
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.fail(&job.id, "bad_path", "x").await;
    openai_error(&pending.reply().await, 502, "server_error", "bad_path");
}

#[tokio::test]
async fn response_with_content_length_is_counted_as_completed() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    for body in ["12345", ""] {
        let pending = relay.begin(chat("m"));
        let job = worker.expect_request().await;
        worker
            .send(&json!({"type": "response_start", "request_id": job.id, "status_code": 200, "headers": [],
                "content_length": body.len()}))
            .await;
        worker.pieces(&job, body.as_bytes()).await;
        worker.finish(&job).await;
        let reply = pending.reply().await.with_status(200);
        assert_eq!((reply.text().as_str(), reply.aborted), (body, false));
    }
    relay
        .eventually("both requests are counted", || async {
            relay.admin_json("/admin/stats").await["providers"]["local"]["requests"]
                .as_object()
                .is_some_and(|requests| requests.values().filter_map(serde_json::Value::as_u64).sum::<u64>() == 2)
        })
        .await;
    let stats = relay.admin_json("/admin/stats").await;
    assert_eq!(stats["providers"]["local"]["requests"], json!({"ok": 2}));
    assert_eq!(stats["providers"]["local"]["tokens"]["output"], 4);
    worker.expect_quiet().await;
}
