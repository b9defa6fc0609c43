//! What is there at once is written at once: one flush per batch, not one write per frame.

use modelrelay_harness::{
    client::Request,
    fake_backend::{FakeBackend, sse},
    fake_relay::{Ack, Ask, FakeRelay},
    relay::Relay,
    trace::Trace,
    worker::response_piece,
    worker_process::WorkerProcess,
};
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

use crate::{SOCKETS, recorded, sends_from};

const CHUNKS: usize = 64;

/// "Far fewer" than [`CHUNKS`]: reads and writes may interleave a few times, but not per chunk.
const WRITES: usize = CHUNKS / 4;

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
async fn chunks_that_came_together_go_to_the_client_in_few_writes() {
    let Some(trace) = Trace::new() else { return };
    let relay = Relay::builder().traced(&trace, SOCKETS).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let asked = relay.begin(stream().header("x-request-id", "batch-of-chunks"));
    let job = worker.expect_request().await;
    let head = json!({"type": "response_start", "request_id": job.id, "status_code": 200,
        "headers": [["content-type", "text/event-stream"]]});
    let mut frames = vec![Message::text(head.to_string())];
    frames.extend((0..CHUNKS).map(|number| Message::Binary(response_piece(job.stream, &chunk(number)).into())));
    frames.push(Message::text(json!({"type": "response_complete", "request_id": job.id}).to_string()));
    worker.send_together(frames).await;
    let reply = asked.reply().await.with_status(200);
    assert!(reply.body == whole(), "{:?}", reply.text());
    let writes = recorded(&trace, "the answer", |calls| sends_from(calls, "batch-of-chunks")).await;
    println!("{writes} writes");
    assert!(writes <= WRITES, "{CHUNKS} chunks went to the client in {writes} writes");
}

#[tokio::test]
async fn requests_that_wait_together_go_to_the_worker_in_few_writes() {
    let Some(trace) = Trace::new() else { return };
    let relay = Relay::builder().traced(&trace, SOCKETS).start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], CHUNKS as u64).await;
    let asked: Vec<_> = (0..CHUNKS).map(|_| relay.begin(stream())).collect();
    relay.wait_for_queue_depth("local", CHUNKS as u64).await;
    worker.grant(CHUNKS as u64).await;
    for _ in 0..CHUNKS {
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
    }
    for asked in asked {
        let _ = asked.reply().await.with_status(200);
    }
    // Each request is a text message and a piece; credit and demand go the same way.
    let writes = recorded(&trace, "the requests", |calls| sends_from(calls, "\\\"type\\\":\\\"request\\\"")).await;
    println!("{writes} writes");
    assert!(writes <= CHUNKS / 2, "{} frames went to the worker in {writes} writes", 2 * CHUNKS);
}

#[tokio::test]
async fn chunks_that_came_together_go_to_the_relay_in_few_writes() {
    let Some(trace) = Trace::new() else { return };
    let mut relay = FakeRelay::start().await;
    let mut backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let _worker = worker.traced(&trace, SOCKETS).start().await;
    let mut link = relay.accept_with(&Ack::core1()).await;
    link.ready(&["m"], 1).await;
    let asked = link.ask(&Ask::chat("m"));
    let mut call = backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    let mut chunked = Vec::new();
    for number in 0..CHUNKS {
        let chunk = chunk(number);
        chunked.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        chunked.extend(chunk);
        chunked.extend(b"\r\n");
    }
    chunked.extend(b"0\r\n\r\n");
    call.write_raw(&chunked).await;
    call.keep_alive();
    let reply = link.reply(&asked).await;
    assert!(reply.body == whole(), "{} bytes", reply.body.len());
    // A client's frames are masked: the connection is known by its handshake. Registration, models and grants are in it too.
    let writes = recorded(&trace, "the link", |calls| sends_from(calls, "GET /v1/worker/connect")).await;
    println!("{writes} writes");
    assert!(writes <= WRITES, "{CHUNKS} chunks went to the relay in {writes} writes, registration included");
}
