//! Clients that disconnect at every byte: of their request, and of the response that they read.

use std::time::Duration;

use modelrelay_harness::{
    client::RawConnection,
    process::Log,
    relay::Relay,
    worker::{FakeWorker, Job},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const SSE: &[(&str, &str)] = &[("content-type", "text/event-stream")];

/// The number of offsets in a large request.
const SAMPLES: usize = 64;
const LARGE_BYTES: usize = 1 << 20;

/// A complete request with headers and a body of about this size.
fn request(body_bytes: usize) -> Vec<u8> {
    let body = json!({"model": "m", "stream": true, "user": "u".repeat(body_bytes)}).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes()
}

/// The same in chunks, whose framing has more places to break at.
fn chunked_request() -> Vec<u8> {
    let body = json!({"model": "m", "stream": true}).to_string();
    let (one, two) = body.split_at(9);
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n\
         {:x}\r\n{one}\r\n{:x};a=b\r\n{two}\r\n0\r\nx-trailer: 1\r\n\r\n",
        one.len(),
        two.len()
    )
    .into_bytes()
}

/// Checks that nothing is left of any client: no request, no byte, no queue, no more descriptors than before.
async fn nothing_is_left(relay: &Relay, descriptors: usize) {
    relay
        .eventually("no state is left of the vanished clients", || async {
            relay.admin_json("/admin/requests").await["requests"] == json!([])
                && relay.metric("modelrelay_buffered_bytes ").await == 0.0
                && relay.admin_json("/admin/stats").await["queue_depth"]["local"] == 0
                && relay.workers().await[0]["in_flight_count"] == 0
                && open_files(relay) <= descriptors
        })
        .await;
}

fn open_files(relay: &Relay) -> usize {
    relay.usage().open_files
}

/// Checks that the next client is served.
async fn is_answered(relay: &Relay, worker: &mut FakeWorker) {
    let request =
        relay.begin(modelrelay_harness::client::Request::post("/v1/chat/completions", &json!({"model": "m"})));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({"answer": 42})).await;
    assert_eq!(request.reply().await.with_status(200).json()["answer"], 42);
}

/// Sends `request` up to each of `offsets` and disconnects. Only complete requests may reach the worker.
async fn disconnect_mid_request(
    relay: &Relay,
    worker: &mut FakeWorker,
    request: &[u8],
    offsets: impl Iterator<Item = usize>,
) {
    for offset in offsets {
        let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
        raw.write(&request[..offset]).await;
        if offset < request.len() {
            drop(raw);
            continue;
        }
        let job = worker.expect_request().await;
        drop(raw);
        assert_eq!(worker.expect_cancel(&job.id).await["reason"], "client_disconnect");
    }
    // If any of the others had been sent to the worker, it would have arrived before this.
    worker.expect_quiet().await;
}

async fn warm() -> (Relay, FakeWorker, usize) {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    is_answered(&relay, &mut worker).await;
    // One more, for the connection of this check.
    let descriptors = open_files(&relay) + 1;
    (relay, worker, descriptors)
}

#[tokio::test]
async fn client_disconnect_at_any_request_byte_leaks_nothing() {
    let (relay, mut worker, descriptors) = warm().await;
    for request in [request(10), chunked_request()] {
        disconnect_mid_request(&relay, &mut worker, &request, 0..=request.len()).await;
        eprintln!("vanished at each of {} bytes", request.len());
    }
    nothing_is_left(&relay, descriptors).await;
    is_answered(&relay, &mut worker).await;
}

#[tokio::test]
async fn client_disconnect_during_large_request_leaks_nothing() {
    let (relay, mut worker, descriptors) = warm().await;
    let request = request(LARGE_BYTES);
    // Different positions in every buffer: 4,099 and 65,537 are prime.
    let offsets = (0..SAMPLES)
        .map(|at| (at * 65_537 + at * at * 4_099) % request.len())
        .chain([request.len() - 1, request.len()]);
    disconnect_mid_request(&relay, &mut worker, &request, offsets).await;
    nothing_is_left(&relay, descriptors).await;
    is_answered(&relay, &mut worker).await;
}

/// Reads exactly this number of bytes.
async fn read_exactly(stream: &mut TcpStream, count: usize, log: &Log) -> Vec<u8> {
    let mut bytes = vec![0; count];
    modelrelay_harness::within("the requested part of the response", log, stream.read_exact(&mut bytes))
        .await
        .expect("it is sent");
    bytes
}

/// Sends a request, which gets two events of an endless stream.
async fn open_stream(relay: &Relay, worker: &mut FakeWorker) -> (TcpStream, Job) {
    let mut stream = TcpStream::connect(relay.addr()).await.expect("the relay accepts connections");
    stream.write_all(&request(10)).await.expect("the relay reads");
    let job = worker.expect_request().await;
    worker.response_start(&job, 200, SSE).await;
    worker.pieces(&job, b"data: one\n\n").await;
    worker.pieces(&job, b"data: two\n\n").await;
    (stream, job)
}

/// Does so, reads `count` bytes and disconnects.
async fn vanish_while_reading(relay: &Relay, worker: &mut FakeWorker, count: usize) {
    let (mut stream, job) = open_stream(relay, worker).await;
    read_exactly(&mut stream, count, relay.log()).await;
    drop(stream);
    assert_eq!(worker.expect_cancel(&job.id).await["reason"], "client_disconnect");
}

/// Returns the length of that response.
async fn answer_length(relay: &Relay, worker: &mut FakeWorker) -> usize {
    let (mut stream, job) = open_stream(relay, worker).await;
    let mut text = Vec::new();
    while !text.ends_with(b"data: two\n\n\r\n") {
        text.extend(read_exactly(&mut stream, 1, relay.log()).await);
        assert!(text.len() < 10_000, "{}", String::from_utf8_lossy(&text));
    }
    drop(stream);
    worker.expect_cancel(&job.id).await;
    text.len()
}

#[tokio::test]
async fn client_disconnect_at_any_stream_byte_leaks_nothing() {
    let (relay, mut worker, descriptors) = warm().await;
    let length = answer_length(&relay, &mut worker).await;
    // Two chunks that arrive together may be written as one, which saves the framing of one.
    let shortest = length - "\r\nb\r\n".len();
    for count in 0..=shortest {
        vanish_while_reading(&relay, &mut worker, count).await;
    }
    eprintln!("vanished at each of {shortest} bytes");
    nothing_is_left(&relay, descriptors).await;
    is_answered(&relay, &mut worker).await;
    let cancelled = relay.metric("modelrelay_cancellations_total{").await;
    assert!(cancelled >= shortest as f64, "{cancelled} of {shortest} were counted as cancelled");
}

/// Clients that disconnect at random moments of whole exchanges, many at once.
#[tokio::test]
async fn simultaneous_client_disconnects_leak_nothing() {
    let (relay, mut worker, descriptors) = warm().await;
    let request = request(10);
    for round in 0..20_u64 {
        let mut crowd = Vec::new();
        for _ in 0..20 {
            let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
            raw.write(&request).await;
            crowd.push(raw);
        }
        #[expect(clippy::disallowed_methods, reason = "they leave at different moments of an exchange")]
        tokio::time::sleep(Duration::from_millis(round % 5)).await;
        drop(crowd);
        // Some reached the worker, some waited in the queue. The worker responds to none and reads its messages until
        // all are gone.
        let gone = relay.eventually("all requests are gone", async || {
            relay.admin_json("/admin/requests").await["requests"] == json!([])
        });
        let reads = async {
            loop {
                worker.recv().await;
            }
        };
        tokio::select! {
            () = gone => {}
            () = reads => {}
        }
    }
    drop(worker);
    relay.wait_for_workers(0).await;
    let mut worker = relay.core1_worker(&["m"], 4).await;
    nothing_is_left(&relay, descriptors).await;
    is_answered(&relay, &mut worker).await;
}
