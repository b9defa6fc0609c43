//! Data that is available at once is written at once: one flush per batch, not one write per frame.

use modelrelay_harness::{
    client::Request,
    fake_backend::{FakeBackend, sse},
    fake_relay::{Ack, FakeRelay, RequestSpec},
    relay::Relay,
    trace::{Call, Trace},
    worker::{Job, response_piece},
    worker_process::WorkerProcess,
};
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

use crate::{SOCKETS, recorded, sends_from};

const CHUNKS: usize = 64;

/// "Far fewer" than [`CHUNKS`]. On a busy machine reading and writing may alternate, so the best of [`ATTEMPTS`] is
/// used.
const WRITES: usize = CHUNKS / 4;
const ATTEMPTS: usize = 3;

fn chunk(number: usize) -> Vec<u8> {
    sse(&format!("{{\"n\":{number}}}"))
}

fn whole() -> Vec<u8> {
    (0..CHUNKS).flat_map(chunk).collect()
}

fn stream() -> Request {
    Request::post("/v1/chat/completions", &json!({"model": "m", "stream": true}))
}

#[tokio::test]
async fn chunks_received_together_reach_client_in_few_writes() {
    let Some(trace) = Trace::new() else { return };
    let relay = Relay::builder().traced(&trace, SOCKETS).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut fewest = usize::MAX;
    for attempt in 0..ATTEMPTS {
        let mark = format!("batch-of-chunks-{attempt}");
        let request = relay.begin(stream().header("x-request-id", &mark));
        let job = worker.expect_request().await;
        worker.send_together(streamed_answer(&job)).await;
        let reply = request.reply().await.with_status(200);
        assert!(reply.body == whole(), "{:?}", reply.text());
        let writes = recorded(&trace, "the answer", |calls| sends_from(calls, &mark)).await;
        fewest = fewest.min(writes);
    }
    assert!(fewest <= WRITES, "{CHUNKS} chunks reached the client in {fewest} writes");
}

#[tokio::test]
async fn queued_requests_reach_worker_in_few_writes() {
    let Some(trace) = Trace::new() else { return };
    let relay = Relay::builder().traced(&trace, SOCKETS).start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], CHUNKS as u64).await;
    let requests: Vec<_> = (0..CHUNKS).map(|_| relay.begin(stream())).collect();
    relay.wait_for_queue_depth("local", CHUNKS as u64).await;
    worker.grant(CHUNKS as u64).await;
    for _ in 0..CHUNKS {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    }
    for request in requests {
        let _ = request.reply().await.with_status(200);
    }
    // Each request is a text message and a piece; credit and demand use the same socket.
    let writes = recorded(&trace, "the requests", |calls| sends_from(calls, "\\\"type\\\":\\\"request\\\"")).await;
    assert!(writes <= CHUNKS / 2, "{} frames reached the worker in {writes} writes", 2 * CHUNKS);
}

#[tokio::test]
async fn chunks_received_together_reach_relay_in_few_writes() {
    let Some(trace) = Trace::new() else { return };
    let mut relay = FakeRelay::start().await;
    let mut backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let _worker = worker.traced(&trace, SOCKETS).start().await;
    let mut link = relay.accept_with(&Ack::core1()).await;
    link.ready(&["m"], 1).await;
    // A client's frames are masked: the connection is recognized by its handshake.
    let link_sends = |calls: &[Call]| sends_from(calls, "GET /v1/worker/connect");
    let mut fewest = usize::MAX;
    for _ in 0..ATTEMPTS {
        let before = recorded(&trace, "the link", link_sends).await;
        let request = link.send_request(&RequestSpec::chat("m"));
        let mut call = backend.call().await;
        call.read_body().await;
        call.start_stream().await;
        call.write_raw(&chunked()).await;
        call.keep_alive();
        let reply = link.reply(&request).await;
        assert!(reply.body == whole(), "{} bytes", reply.body.len());
        // Credit for the request's body and a grant may be among them.
        fewest = fewest.min(recorded(&trace, "the link", link_sends).await - before);
    }
    assert!(fewest <= WRITES, "{CHUNKS} chunks reached the relay in {fewest} writes");
}

/// Returns the messages of a whole response in chunks.
fn streamed_answer(job: &Job) -> Vec<Message> {
    let head = json!({"type": "response_start", "request_id": job.id, "status_code": 200,
        "headers": [["content-type", "text/event-stream"]]});
    let pieces = (0..CHUNKS).map(|number| Message::Binary(response_piece(job.stream, &chunk(number)).into()));
    let end = json!({"type": "response_complete", "request_id": job.id});
    let head = std::iter::once(Message::text(head.to_string()));
    head.chain(pieces).chain(std::iter::once(Message::text(end.to_string()))).collect()
}

/// Returns the complete chunked encoding as a backend writes it.
fn chunked() -> Vec<u8> {
    let mut bytes = Vec::new();
    for chunk in (0..CHUNKS).map(chunk) {
        bytes.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        bytes.extend(chunk);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"0\r\n\r\n");
    bytes
}
