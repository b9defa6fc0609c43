//! The socket while it is open: heartbeats, sizes, and how it ends.

use std::time::{Duration, Instant};

use modelrelay_harness::{client::RawConnection, relay::Relay, worker::Frame};
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

use crate::support::{chat, other_listener_answers, wait_for_model};

async fn quick_hearted() -> Relay {
    Relay::builder().env("HEARTBEAT_INTERVAL", "1").start().await
}

#[tokio::test]
async fn pong_to_periodic_ping_updates_load() {
    let relay = quick_hearted().await;
    let mut worker = relay.worker(&["m"], 9).await;
    for load in 1..=2 {
        let frame = worker.recv().await;
        let Frame::Json(ping) = frame else { panic!("expected a ping, got {frame:?}") };
        assert_eq!(ping["type"], "ping");
        assert!(ping["timestamp_unix_ms"].is_u64(), "{ping}");
        worker.report_load(load).await;
        relay.eventually("the load arrives", || async { relay.workers().await[0]["reported_load"] == load }).await;
    }
    let heartbeat = relay.workers().await[0]["last_heartbeat_at"].clone();
    assert!(heartbeat.is_string(), "{heartbeat}");
}

#[tokio::test]
async fn pings_are_sent_during_constant_traffic() {
    let relay = quick_hearted().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let pending = relay.begin(crate::support::chat_stream("m"));
    let Frame::Json(request) = worker.recv().await else { panic!("expected the request") };
    let id = request["request_id"].as_str().expect("an id").to_owned();
    let mut response = None;
    let mut pending = Some(pending);
    let mut pings = 0;
    let start = Instant::now();
    while pings < 2 {
        assert!(start.elapsed() < Duration::from_secs(9), "{pings} pings in nine seconds");
        worker.chunk(&id, "data: x\n\n").await;
        if let Some(pending) = pending.take() {
            response = Some(pending.response().await);
        }
        let next = tokio::time::timeout(Duration::from_millis(20), worker.recv()).await;
        if let Ok(Frame::Json(message)) = next {
            assert_eq!(message["type"], "ping");
            pings += 1;
        }
    }
    drop(response);
}

#[tokio::test]
async fn silent_worker_is_closed_after_three_intervals() {
    let relay = quick_hearted().await;
    let start = Instant::now();
    let mut worker = relay.worker(&["m"], 1).await;
    relay.log().wait_for_line("worker heartbeat timed out").await;
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(2500), "too early: {took:?}");
    assert!(took < Duration::from_secs(7), "too late: {took:?}");
    assert_eq!(worker.expect_close().await, (1000, "worker heartbeat timed out".to_owned()));
    wait_for_model(&relay, "m", false).await;
}

#[tokio::test]
async fn any_byte_keeps_worker_alive() {
    let relay = quick_hearted().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let start = Instant::now();
    // It responds to no JSON ping, but sends other messages now and then.
    while start.elapsed() < Duration::from_millis(4500) {
        worker.send_message(Message::Ping(vec![1].into())).await;
        let _ = tokio::time::timeout(Duration::from_millis(200), worker.recv()).await;
    }
    assert_eq!(relay.workers().await.len(), 1);
    assert!(!relay.log().contains("worker heartbeat timed out"));
}

#[tokio::test]
async fn message_over_64_mebibytes_closes_socket() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.chunk(&job.id, &"x".repeat((64 << 20) + 1)).await;
    assert_eq!(worker.expect_close().await, (1009, "message too large".to_owned()));
}

#[tokio::test]
async fn drained_idle_worker_is_closed() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let reply = relay.admin("POST", &format!("/admin/workers/{}/drain", worker.worker_id)).await;
    assert_eq!(reply.status, 202, "{}", reply.text());
    let message = worker.expect("graceful_shutdown").await;
    assert!(message["drain_timeout_secs"].is_u64(), "{message}");
    assert_eq!(worker.expect_close().await, (1000, "graceful shutdown complete".to_owned()));
    relay.log().wait_for_line("graceful shutdown").await;
    relay.log().wait_for_line("worker drained").await;
}

#[tokio::test]
async fn drained_worker_only_finishes_running_requests() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 2).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    relay.admin("POST", &format!("/admin/workers/{}/drain", worker.worker_id)).await;
    worker.expect("graceful_shutdown").await;
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    assert_eq!(relay.workers().await[0]["is_draining"], true);
    worker.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    assert_eq!(worker.expect_close().await, (1000, "graceful shutdown complete".to_owned()));
    let mut next = relay.worker(&["m"], 1).await;
    let job = next.expect_request().await;
    next.answer(&job, &json!({})).await;
    let _ = waiting.reply().await.with_status(200);
}

#[tokio::test]
async fn drain_ends_at_its_deadline() {
    let relay = Relay::builder().env("DRAIN_TIMEOUT_SECS", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    relay.admin("POST", &format!("/admin/workers/{}/drain", worker.worker_id)).await;
    assert_eq!(worker.expect("graceful_shutdown").await["drain_timeout_secs"], 1);
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "graceful_shutdown");
    assert_eq!(worker.expect_close().await, (1000, "graceful shutdown timed out".to_owned()));
    // Nothing was sent to the client yet: another worker may serve it.
    let mut next = relay.worker(&["m"], 1).await;
    let job = next.expect_request().await;
    next.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
}

#[tokio::test]
async fn model_refresh_is_requested_over_socket() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let reply = relay.admin("POST", &format!("/admin/workers/{}/refresh", worker.worker_id)).await;
    assert_eq!(reply.status, 202, "{}", reply.text());
    worker.expect("models_refresh").await;
    worker.update_models(&["m", "n"]).await;
    wait_for_model(&relay, "n", true).await;
}

#[tokio::test]
async fn address_with_too_many_links_is_refused() {
    let relay = Relay::builder().env("MAX_CONNECTIONS", "200").start().await;
    let mut workers = Vec::new();
    for _ in 0..64 {
        workers.push(relay.dial().open().await);
    }
    let refusal = relay.dial().refused().await.with_status(503);
    assert!(refusal.text().contains("MAX_CONNECTIONS"), "{}", refusal.text());
    workers.pop();
    relay.eventually("a link is free", async || relay.send(relay.dial().handshake()).await.status == 101).await;
}

#[tokio::test]
async fn worker_links_use_up_listener_connections() {
    let relay = Relay::builder().env("MAX_CONNECTIONS", "2").env("ADMIN_LISTEN_ADDR", "127.0.0.1:0").start().await;
    let _worker = relay.worker(&["m"], 1).await;
    let leaving = relay.worker(&["m"], 1).await;
    let mut third = RawConnection::open(relay.addr(), relay.log()).await;
    third.write("GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    tokio::select! {
        early = third.read_head() => panic!("a third connection was served in addition to two: {early:?}"),
        () = other_listener_answers(&relay, None) => {}
    }
    leaving.vanish();
    let head = third.read_head().await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
}
