//! Clients that read slowly or not at all, and bounded memory.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::RawConnection,
    relay::Relay,
    worker::{ANSWER_WINDOW, FakeWorker, Job, PIECE_MAX},
};
use serde_json::json;
use tokio::task::JoinSet;

use crate::support::{INSTANT, chat, chat_stream, post_bytes};

/// Sends pieces for as long as credit arrives; returns the number of bytes sent when it stopped.
async fn send_until_credit_ends(worker: &mut FakeWorker, job: &Job) -> u64 {
    let (piece, size) = (vec![b'x'; PIECE_MAX], PIECE_MAX as u64);
    let mut sent = 0;
    loop {
        let needed = (sent + size).saturating_sub(ANSWER_WINDOW as u64);
        let credit = tokio::time::timeout(Duration::from_millis(700), worker.expect_credit(job.stream, needed)).await;
        if credit.is_err() {
            return sent;
        }
        worker.pieces(job, &piece).await;
        sent += size;
        assert!(sent < 64 << 20, "unlimited credit for a client that does not read");
    }
}

#[tokio::test]
async fn stalled_client_stops_only_its_own_stream() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let slow = relay.begin(chat_stream("m").small_receive_buffer());
    let slow_job = worker.expect_request().await;
    worker.response_start(&slow_job, 200, &[("content-type", "text/event-stream")]).await;
    let response = slow.response().await;
    // The kernel's buffers come on top of what the relay may hold, and are no sign of a client that reads fast.
    let sent = send_until_credit_ends(&mut worker, &slow_job).await;
    assert!(sent <= 1 << 20, "{sent} bytes were accepted for a client that does not read");
    let quick = relay.begin(chat_stream("m"));
    let quick_job = worker.expect_request().await;
    worker.start_stream(&quick_job, "data: 1\n\n").await;
    let mut quick = quick.response().await;
    for number in 2..50 {
        let start = Instant::now();
        worker.stream_on(&quick_job, &format!("data: {number}\n\n")).await;
        quick.read_until(&format!("data: {number}\n\n")).await;
        assert!(start.elapsed() < INSTANT, "slowed by a neighbour");
    }
    worker.end_stream(&quick_job).await;
    assert!(quick.read_to_end().await.is_complete());
    worker.finish(&slow_job).await;
    let reply = response.read_to_end().await;
    assert_eq!((reply.body.len() as u64, reply.aborted), (sent, false), "a slow client that still reads is not cut");
}

#[tokio::test]
async fn older_workers_stream_is_cut_over_unread_limit() {
    let relay = Relay::builder().env("MAX_UNREAD_BYTES", "1Mi").start().await;
    let mut worker = relay.worker(&["m"], 2).await;
    let slow = relay.begin(chat_stream("m").small_receive_buffer());
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let response = slow.response().await;
    let chunk = format!("data: {}\n\n", "x".repeat(256 << 10));
    for _ in 0..128 {
        worker.stream_on(&job, &chunk).await;
    }
    worker.expect_cancel(&job.id).await;
    assert!(response.read_to_end().await.broken_stream().contains("slow_client"));
    let next = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = next.reply().await.with_status(200);
}

#[tokio::test]
async fn disconnect_of_stalled_client_frees_its_stream() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let slow = relay.begin(chat_stream("m").small_receive_buffer());
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "text/event-stream")]).await;
    let response = slow.response().await;
    send_until_credit_ends(&mut worker, &job).await;
    drop(response);
    worker.expect_cancel(&job.id).await;
    let next = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = next.reply().await.with_status(200);
}

#[tokio::test]
async fn stalled_client_loses_its_slot_after_idle_timeout() {
    let relay = Relay::builder().env("STREAM_IDLE_TIMEOUT_SECS", "3").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let slow = relay.begin(chat_stream("m").small_receive_buffer());
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, &[("content-type", "text/event-stream")]).await;
    let response = slow.response().await;
    send_until_credit_ends(&mut worker, &job).await;
    worker.expect_cancel(&job.id).await;
    relay.log().wait_for_line("the client read nothing for 3 s (STREAM_IDLE_TIMEOUT_SECS)").await;
    let next = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = next.reply().await.with_status(200);
    assert!(response.read_to_end().await.aborted);
}

#[tokio::test]
async fn full_memory_budget_refuses_request_before_body() {
    let relay = Relay::builder().env("MAX_BUFFERED_BYTES", "1Mi").env("MAX_REQUEST_BYTES", "1Mi").start().await;
    let _waiting = relay
        .begin(post_bytes("/v1/chat/completions", format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "y".repeat(700_000))));
    relay.wait_for_queue_depth("local", 1).await;
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 700000\r\n\r\n").await;
    // Not one byte of the body was sent.
    let answer = raw.read_head().await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.to_lowercase().contains("retry-after: 1\r\n"), "{answer}");
    let text = if answer.contains("overloaded") { answer } else { raw.read_to_end().await };
    assert!(text.contains("\"overloaded\""), "{text}");
}

#[tokio::test]
async fn stalled_uploads_leave_room_for_others() {
    let relay = Relay::builder().env("MAX_BUFFERED_BYTES", "64Mi").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut announced = Vec::new();
    for _ in 0..32 {
        let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
        raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 33554432\r\n\r\n{").await;
        announced.push(raw);
    }
    for _ in 0..20 {
        let pending = relay.begin(post_bytes("/v1/chat/completions", r#"{"model":"m"}"#));
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
        pending.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn memory_budget_is_released() {
    let relay = Relay::builder().env("MAX_BUFFERED_BYTES", "1Mi").env("MAX_REQUEST_BYTES", "1Mi").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let large = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "y".repeat(700_000));
    for round in 0..5 {
        let pending = relay.begin(post_bytes("/v1/chat/completions", large.clone()));
        let job = worker.expect_request().await;
        if round % 2 == 0 {
            worker.answer(&job, &json!({})).await;
            let _ = pending.reply().await.with_status(200);
        } else {
            pending.abandon();
            worker.expect_cancel(&job.id).await;
        }
    }
}

#[tokio::test]
async fn many_unfinished_uploads_are_refused_rather_than_held() {
    let relay = Relay::builder().env("MAX_BUFFERED_BYTES", "1Mi").env("MAX_REQUEST_BYTES", "256Ki").start().await;
    let mut heads = JoinSet::new();
    for _ in 0..16 {
        let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
        raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n").await;
        raw.write(vec![b' '; 100_000]).await;
        heads.spawn(async move {
            let head = raw.read_head().await;
            (raw, head)
        });
    }
    // The budget is for ten, and most of the rest is enough.
    for _ in 0..4 {
        let (_raw, head) = heads.join_next().await.expect("sixteen uploads").expect("a response");
        assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    }
    heads.shutdown().await;
    // Too large to fit alongside the reservations of the unfinished uploads.
    let large = " ".repeat(250_000) + "{}";
    relay
        .eventually("the budget is free again", || async {
            relay.fetch(post_bytes("/v1/chat/completions", &large)).await.status == 400
        })
        .await;
}
