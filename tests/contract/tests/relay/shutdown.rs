//! SIGTERM: unready, everything on open connections is served, no new connections after the grace period, exit 0.

use std::time::{Duration, Instant};

use modelrelay_harness::client::{Connection, RawConnection, Request};
use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{anthropic_error, chat, chat_stream, messages, openai_error};

#[tokio::test]
async fn idle_relay_exits_at_once() {
    let mut relay = Relay::start().await;
    let start = Instant::now();
    relay.process().terminate().await;
    let status = relay.process().wait_exit().await;
    assert_eq!(status.code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[tokio::test]
async fn idle_workers_are_notified_and_closed() {
    let mut relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut new = relay.core1_worker(&["m"], 1).await;
    relay.process().terminate().await;
    assert_eq!(worker.expect("graceful_shutdown").await["reason"], "relay_shutdown");
    assert_eq!(new.expect("graceful_shutdown").await["reason"], "relay_shutdown");
    assert_eq!(worker.expect_close().await, (1001, "relay shutting down".to_owned()));
    assert_eq!(new.expect_close().await, (1001, "relay shutting down".to_owned()));
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn running_and_waiting_requests_finish() {
    let mut relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let running = relay.begin(chat_stream("m"));
    let first = worker.expect_request().await;
    worker.start_stream(&first, "data: 1\n\n").await;
    let mut response = running.response().await;
    response.read_until("data: 1").await;
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    relay.process().terminate().await;
    relay.log().wait_for_line("shut").await;
    worker.stream_on(&first, "data: 2\n\n").await;
    worker.end_stream(&first).await;
    let reply = response.read_to_end().await;
    assert_eq!((reply.text().as_str(), reply.aborted), ("data: 1\n\ndata: 2\n\n", false));
    let second = worker.expect_request().await;
    worker.answer(&second, &json!({"late": true})).await;
    assert_eq!(waiting.reply().await.with_status(200).json()["late"], true);
    assert_eq!(worker.expect_close().await, (1001, "relay shutting down".to_owned()));
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn draining_relay_is_unready_and_returns_503() {
    let mut relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    relay.eventually("it is ready", || async { relay.get("/readyz").await.status == 200 }).await;
    relay.process().terminate().await;
    relay.eventually("it is unready", || async { relay.get("/readyz").await.status == 503 }).await;
    assert_eq!(relay.get("/livez").await.status, 200);
    let reply = relay.fetch(chat("m")).await;
    let message = openai_error(&reply, 503, "service_unavailable_error", "draining");
    assert!(message.contains("shutting down"), "{message}");
    assert_eq!(reply.header("retry-after").as_deref(), Some("1"));
    assert_eq!(reply.header("connection").as_deref(), Some("close"));
    let reply = relay.fetch(messages("m")).await;
    anthropic_error(&reply, 503, "overloaded_error");
    worker.answer(&job, &json!({})).await;
    let _ = running.reply().await.with_status(200);
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn unready_relay_accepts_requests_during_grace() {
    let mut relay = Relay::builder().env("SHUTDOWN_GRACE_SECS", "3").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    relay.eventually("it is ready", || async { relay.get("/readyz").await.status == 200 }).await;
    relay.process().terminate().await;
    relay.eventually("it is unready", || async { relay.get("/readyz").await.status == 503 }).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn requests_left_at_deadline_get_retryable_error() {
    let mut relay = Relay::builder().env("DRAIN_TIMEOUT_SECS", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let running = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    relay.process().terminate().await;
    for pending in [running, waiting] {
        let reply = pending.reply().await;
        assert_eq!(reply.status, 503, "{}", reply.text());
        assert_ne!(reply.header("x-should-retry").as_deref(), Some("false"));
    }
    loop {
        let message = worker.recv_json().await;
        if message["type"] == "cancel" {
            assert_eq!(message["request_id"], job.id);
            assert_eq!(message["reason"], "server_shutdown");
            break;
        }
    }
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn second_signal_ends_relay_at_once() {
    let mut relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let _running = relay.begin(chat("m"));
    worker.expect_request().await;
    relay.process().terminate().await;
    relay.log().wait_for_line("shut").await;
    let start = Instant::now();
    relay.process().terminate().await;
    relay.process().wait_exit().await;
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
}

#[tokio::test]
async fn connection_is_served_again_after_its_stream() {
    let mut relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut client = Connection::open(relay.addr(), relay.log()).await;
    let (mut response, job) = tokio::join!(client.send(chat_stream("m")), async {
        let job = worker.expect_request().await;
        worker.start_stream(&job, "data: 1\n\n").await;
        job
    });
    response.read_until("data: 1").await;
    relay.process().terminate().await;
    relay.log().wait_for_line("shut").await;
    // The worker is not notified yet, because the client may send another request.
    worker.end_stream(&job).await;
    assert!(response.read_to_end().await.is_complete());
    let (reply, ()) = tokio::join!(async { client.send(chat("m")).await.read_to_end().await }, async {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({"next": true})).await;
    });
    assert_eq!(reply.header("connection").as_deref(), Some("close"));
    assert_eq!(reply.with_status(200).json()["next"], true);
    assert_eq!(worker.expect("graceful_shutdown").await["reason"], "relay_shutdown");
    assert_eq!(worker.expect_close().await, (1001, "relay shutting down".to_owned()));
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn idle_connection_is_served_during_grace() {
    let mut relay = Relay::builder().env("SHUTDOWN_GRACE_SECS", "3").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut client = Connection::open(relay.addr(), relay.log()).await;
    let listed = client.send(Request::get("/v1/models")).await.read_to_end().await.with_status(200);
    assert_eq!(listed.header("connection"), None);
    relay.process().terminate().await;
    relay.log().wait_for_line("shut").await;
    let (reply, ()) = tokio::join!(async { client.send(chat("m")).await.read_to_end().await }, async {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    });
    assert_eq!(reply.with_status(200).header("connection").as_deref(), Some("close"));
    assert_eq!(relay.get("/readyz").await.header("connection").as_deref(), Some("close"));
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn unused_connections_do_not_delay_exit() {
    let mut relay = Relay::start().await;
    let mut idle = RawConnection::open(relay.addr(), relay.log()).await;
    idle.write("GET /livez HTTP/1.1\r\nhost: relay\r\n\r\n").await;
    idle.read_head().await;
    let mut silent = RawConnection::open(relay.addr(), relay.log()).await;
    let start = Instant::now();
    relay.process().terminate().await;
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    idle.read_to_end().await;
    assert_eq!(silent.read_to_end().await, "");
}

#[tokio::test]
async fn unfinished_requests_do_not_delay_exit_past_deadline() {
    let mut relay = Relay::builder().env("DRAIN_TIMEOUT_SECS", "2").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let running = relay.begin(chat_stream("m"));
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let mut response = running.response().await;
    response.read_until("data: 1").await;
    let mut head = RawConnection::open(relay.addr(), relay.log()).await;
    head.write("POST /v1/chat/completions HTTP/1.1\r\nhost:").await;
    let mut body = RawConnection::open(relay.addr(), relay.log()).await;
    body.write("POST /v1/chat/completions HTTP/1.1\r\nhost: relay\r\ncontent-length: 9\r\n\r\n{").await;
    let start = Instant::now();
    relay.process().terminate().await;
    assert!(response.read_to_end().await.text().contains("shutting down"));
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test]
async fn stalled_upload_does_not_keep_workers_uninformed() {
    let mut relay = Relay::builder().env("DRAIN_TIMEOUT_SECS", "1").start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let mut body = RawConnection::open(relay.addr(), relay.log()).await;
    body.write(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: relay\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n",
    )
    .await;
    // The relay now waits for the body.
    assert!(body.read_head().await.contains("100"));
    relay.process().terminate().await;
    assert_eq!(worker.expect("graceful_shutdown").await["reason"], "relay_shutdown");
    assert_eq!(worker.expect_close().await, (1001, "relay shutting down".to_owned()));
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn older_http_client_is_not_kept_during_grace() {
    let mut relay = Relay::builder().env("SHUTDOWN_GRACE_SECS", "2").start().await;
    let mut client = RawConnection::open(relay.addr(), relay.log()).await;
    relay.process().terminate().await;
    relay.log().wait_for_line("shut").await;
    client.write("GET /livez HTTP/1.0\r\nhost: relay\r\nconnection: keep-alive\r\n\r\n").await;
    let head = client.read_head().await.to_ascii_lowercase();
    assert!(head.contains("connection: close") && !head.contains("keep-alive"), "{head}");
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}

#[tokio::test]
async fn unread_response_does_not_delay_exit() {
    let mut relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let unread = relay.begin(chat_stream("m").small_receive_buffer());
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    let unread = unread.response().await;
    worker.stream_on(&job, &format!("data: {}\n\n", "x".repeat(16 << 20))).await;
    worker.end_stream(&job).await;
    relay.process().terminate().await;
    let start = Instant::now();
    assert_eq!(relay.process().wait_exit_within(Duration::from_secs(25)).await.code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    drop(unread);
}

#[tokio::test]
async fn worker_lost_during_shutdown_is_replaced() {
    let mut relay = Relay::start().await;
    let mut first = relay.worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    first.expect_request().await;
    relay.process().terminate().await;
    relay.log().wait_for_line("shut").await;
    first.vanish();
    let mut second = relay.worker(&["m"], 1).await;
    let job = second.expect_request().await;
    second.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    assert_eq!(relay.process().wait_exit().await.code(), Some(0));
}
