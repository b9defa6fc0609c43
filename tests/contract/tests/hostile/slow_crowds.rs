//! Two thousand peers that never finish, and their effect on a normal client.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use modelrelay_harness::{
    client::{RawConnection, Request, Response},
    relay::Relay,
    usage::may_open,
    worker::{ANSWER_WINDOW, FakeWorker},
};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::neighbour::Neighbour;

/// One for each connection here, and some for the rest.
const OPEN_FILES: u64 = 2500;

const CROWD: usize = 2000;

const QUESTIONS: usize = 2000;

/// In addition to twice the earlier time: the noise of a busy machine.
const NOISE: Duration = Duration::from_millis(50);

/// The maximum cost of a connection that only begins its headers.
const HEADER_BYTES: u64 = 24 << 10;

/// The maximum cost of a client that does not read: twice the window of its response (as received, and as written), and
/// a connection.
const READER_BYTES: u64 = 2 * ANSWER_WINDOW as u64 + HEADER_BYTES;

fn check(what: &str, before: (Duration, Duration), during: (Duration, Duration), cost: u64, bound: u64) {
    eprintln!(
        "{what}: p99 {:?} before, {:?} with {CROWD}; slowest {:?} and {:?}; {} KiB each",
        before.0,
        during.0,
        before.1,
        during.1,
        cost / CROWD as u64 / 1024
    );
    assert!(during.0 <= 2 * before.0 + NOISE, "p99 {:?} with {what}, {:?} before", during.0, before.0);
    assert!(cost < bound, "{what} cost {cost} bytes; the limit is {bound}");
}

/// Sends headers one byte at a time on each connection, round after round, until stopped. Returns the number of rounds.
async fn dribble(mut crowd: Vec<RawConnection>, enough: Arc<AtomicBool>) -> (Vec<RawConnection>, usize) {
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: slow\r\nx-slow: ".as_bytes();
    let mut rounds = 0;
    while !enough.load(Ordering::Relaxed) {
        let byte = head.get(rounds).copied().unwrap_or(b'a');
        // Spread over a fifth of a second or two, like a crowd of independent clients.
        for some in crowd.chunks_mut(CROWD / 200) {
            for slow in some {
                slow.write([byte]).await;
            }
            #[expect(clippy::disallowed_methods, reason = "the pace of the crowd is the subject")]
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        rounds += 1;
    }
    (crowd, rounds)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_slow_headers_do_not_delay_others() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let relay = Relay::start().await;
    let mut neighbour = Neighbour::of(&relay).await;
    let before = neighbour.send_requests(QUESTIONS).await;
    let memory = relay.usage().resident_bytes;
    let mut crowd = Vec::new();
    for _ in 0..CROWD {
        crowd.push(RawConnection::open(relay.addr(), relay.log()).await);
    }
    let enough = Arc::new(AtomicBool::new(false));
    let crowd = tokio::spawn(dribble(crowd, Arc::clone(&enough)));
    let during = neighbour.send_requests(QUESTIONS).await;
    enough.store(true, Ordering::Relaxed);
    let (crowd, rounds) = crowd.await.expect("the crowd does not panic");
    assert!(rounds > 0, "no byte was sent in parallel with the requests");
    let cost = relay.usage().peak_bytes.saturating_sub(memory);
    check("slow headers", before, during, cost, CROWD as u64 * HEADER_BYTES);
    drop(crowd);
    neighbour.send_request().await;
}

/// Sends each request of the crowd one window of its response, without an end.
async fn answer_begins(mut worker: FakeWorker, given: tokio::sync::mpsc::Sender<()>) {
    let window = vec![b'x'; ANSWER_WINDOW];
    for _ in 0..CROWD {
        let job = worker.expect_request().await;
        worker.response_start(&job, 200, &[("content-type", "text/event-stream")]).await;
        worker.pieces(&job, &window).await;
        let _ = given.send(()).await;
    }
    // All further messages are read, mainly heartbeats.
    loop {
        worker.recv_json().await;
    }
}

async fn readers(relay: &Relay) -> (Vec<Response>, JoinHandle<()>) {
    let worker = relay.core1_worker(&["slow"], CROWD as u64).await;
    let (given, mut gives) = tokio::sync::mpsc::channel(CROWD);
    let worker = tokio::spawn(answer_begins(worker, given));
    let request =
        Request::post("/v1/chat/completions", &json!({"model": "slow", "stream": true})).small_receive_buffer();
    let mut requests = Vec::new();
    for _ in 0..CROWD {
        requests.push(relay.begin(request.clone()));
        if requests.len() % 50 == 0 {
            for _ in 0..50 {
                gives.recv().await.expect("the worker lives");
            }
        }
    }
    let mut responses = Vec::new();
    for request in requests {
        responses.push(request.response().await);
    }
    (responses, worker)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_slow_readers_do_not_delay_others() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let relay = Relay::builder().env("MAX_QUEUE_LEN", "4000").start().await;
    let mut neighbour = Neighbour::of(&relay).await;
    let before = neighbour.send_requests(QUESTIONS).await;
    let memory = relay.usage().resident_bytes;
    let (mut responses, worker) = readers(&relay).await;
    let slowly = tokio::spawn(async move {
        // Each reads a little in turn, so that all their windows move a little.
        for response in &mut responses {
            response.read_at_least(1).await;
            #[expect(clippy::disallowed_methods, reason = "the pace of the crowd is the subject")]
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        responses
    });
    let during = neighbour.send_requests(QUESTIONS).await;
    let responses = slowly.await.expect("every client could read");
    let cost = relay.usage().peak_bytes.saturating_sub(memory);
    check("slow readers", before, during, cost, CROWD as u64 * READER_BYTES);
    worker.abort();
    drop(responses);
    relay
        .eventually("all are gone", || async { relay.admin_json("/admin/requests").await["requests"] == json!([]) })
        .await;
    neighbour.send_request().await;
}
