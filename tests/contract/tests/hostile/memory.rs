//! All that peers can make the relay hold is inside `MAX_BUFFERED_BYTES`: each way in by itself, and all of them at once. An honest
//! request is answered beside them, and the metric says what is held.

use modelrelay_harness::client::{Pending, RawConnection, Reply, Request, Response};
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker::FakeWorker;
use serde_json::{Map, json};
use tokio_tungstenite::tungstenite::Message;

use crate::unfinished::begun;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The relay's memory for others, as `MAX_BUFFERED_BYTES` takes it.
async fn relay(mib: usize) -> Relay {
    let builder = Relay::builder().env("MAX_BUFFERED_BYTES", &format!("{mib}Mi")).env("MAX_REQUEST_BYTES", "2Mi");
    builder.env("STREAM_KEEPALIVE_SECS", "0").start().await
}

async fn held(relay: &Relay) -> usize {
    let held = relay.metric("modelrelay_buffered_bytes ").await;
    let limit = relay.metric("modelrelay_buffered_bytes_limit ").await;
    assert!(held <= limit, "{held} bytes are held, {limit} at most");
    held as usize
}

async fn is_free(relay: &Relay) {
    relay.eventually("nothing is held", async || held(relay).await == 0).await;
}

fn ask(relay: &Relay, model: &str, stream: bool) -> Pending {
    let body = json!({"model": model, "messages": [], "stream": stream});
    relay.begin(Request::post("/v1/chat/completions", &body).small_receive_buffer())
}

/// A client that reads is answered, whole and streamed.
async fn check_honest(relay: &Relay, worker: &mut FakeWorker) {
    let pending = ask(relay, "honest", false);
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({"fine": true})).await;
    assert_eq!(pending.reply().await.with_status(200).json()["fine"], true);
    let pending = ask(relay, "honest", true);
    let job = worker.expect_request().await;
    worker.start_stream(&job, "data: 1\n\n").await;
    worker.end_stream(&job).await;
    let reply = pending.reply().await.with_status(200);
    assert!(!reply.aborted && reply.text().starts_with("data: 1\n\n"), "{}", reply.text());
}

fn check_overloaded(reply: &Reply) {
    assert_eq!(reply.json()["error"]["code"], "overloaded", "{}", reply.text());
    assert!(reply.text().contains("MAX_BUFFERED_BYTES"), "{}", reply.text());
}

/// Clients that read nothing of streams of so many pieces of 64 KiB, which an older worker sends without being asked.
async fn leave_streams_unread(relay: &Relay, worker: &mut FakeWorker, streams: usize, pieces: usize) -> Vec<Response> {
    let piece = format!("data: {}\n\n", "x".repeat(64 * KIB - 8));
    let (mut asked, mut jobs) = (Vec::new(), Vec::new());
    for _ in 0..streams {
        asked.push(ask(relay, "m", true));
        jobs.push(worker.expect_request().await);
    }
    for job in &jobs {
        for _ in 0..pieces {
            worker.chunk(&job.id, &piece).await;
        }
    }
    let mut unread = Vec::new();
    for asked in asked {
        unread.push(asked.response().await);
    }
    unread
}

/// Whole responses of older workers, one each.
async fn answer_whole(relay: &Relay, workers: usize, bytes: usize) -> Vec<Pending> {
    let (mut asked, body) = (Vec::new(), "x".repeat(bytes));
    for _ in 0..workers {
        let mut worker = relay.worker(&["whole"], 1).await;
        asked.push(ask(relay, "whole", false));
        let job = worker.expect_request().await;
        worker.complete(&job.id, 200, Map::new(), &body).await;
        worker.vanish();
    }
    asked
}

/// Response heads of so many bytes, whose bodies do not come.
async fn send_heads(relay: &Relay, worker: &mut FakeWorker, heads: usize, bytes: usize) -> Vec<Pending> {
    let (mut asked, mut jobs, value) = (Vec::new(), Vec::new(), "x".repeat(bytes));
    for _ in 0..heads {
        asked.push(ask(relay, "heads", false));
        jobs.push(worker.expect_request().await);
    }
    for job in &jobs {
        worker.response_start(job, 200, &[("openai-processing-ms", &value)]).await;
    }
    asked
}

/// Connections with a request's head of so many bytes that goes on.
async fn begin_heads(relay: &Relay, connections: usize, bytes: usize) -> Vec<RawConnection> {
    let (mut open, head) = (Vec::new(), format!("GET /health HTTP/1.1\r\nhost: x\r\nx-long: {}", "x".repeat(bytes)));
    for _ in 0..connections {
        let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
        raw.write(&head).await;
        open.push(raw);
    }
    open
}

#[tokio::test]
async fn unread_streams_stay_in_the_budget() {
    let relay = relay(16).await;
    let mut honest = relay.core1_worker(&["honest"], 1).await;
    let mut worker = relay.worker(&["m"], 32).await;
    let before = relay.usage().resident_bytes;
    let unread = leave_streams_unread(&relay, &mut worker, 32, 48).await;
    relay.eventually("much is held", async || held(&relay).await > 8 * MIB).await;
    let cost = relay.usage().peak_bytes - before;
    eprintln!("{} KiB for {} KiB of streams", cost / KIB as u64, 32 * 48 * 64);
    assert!(cost < 32 * MIB as u64, "{cost} bytes");
    check_honest(&relay, &mut honest).await;
    drop(unread);
    is_free(&relay).await;
}

#[tokio::test]
async fn whole_responses_stay_in_the_budget() {
    let relay = relay(64).await;
    let mut honest = relay.core1_worker(&["honest"], 1).await;
    let before = relay.usage().resident_bytes;
    let unread = answer_whole(&relay, 12, 20 * MIB).await;
    relay.eventually("two are held", async || held(&relay).await > 40 * MIB).await;
    let cost = relay.usage().peak_bytes - before;
    eprintln!("{} MiB for {} MiB of responses", cost / MIB as u64, 12 * 20);
    // Two of them, and one on its way: its message, and its text.
    assert!(cost < 120 * MIB as u64, "{cost} bytes");
    check_honest(&relay, &mut honest).await;
    drop(unread);
    is_free(&relay).await;
}

#[tokio::test]
async fn response_heads_stay_in_the_budget() {
    let relay = relay(4).await;
    let mut honest = relay.core1_worker(&["honest"], 1).await;
    let mut worker = relay.core1_worker(&["heads"], 100).await;
    let mut asked = send_heads(&relay, &mut worker, 100, 60 * KIB).await;
    check_overloaded(&asked.pop().expect("the last of them").reply().await.with_status(503));
    assert!(held(&relay).await > 3 * MIB);
    check_honest(&relay, &mut honest).await;
    drop(asked);
    is_free(&relay).await;
}

#[tokio::test]
async fn unfinished_request_heads_stay_in_the_budget() {
    let relay = relay(16).await;
    let mut honest = relay.core1_worker(&["honest"], 1).await;
    let before = relay.usage().resident_bytes;
    let mut open = begin_heads(&relay, 400, 60 * KIB).await;
    assert_eq!(open.pop().expect("the last of them").read_to_end().await, "");
    assert!(held(&relay).await > 12 * MIB);
    let cost = relay.usage().peak_bytes - before;
    eprintln!("{} KiB for {} KiB of heads", cost / KIB as u64, 400 * 60);
    assert!(cost < 40 * MIB as u64, "{cost} bytes");
    check_honest(&relay, &mut honest).await;
    drop(open);
    is_free(&relay).await;
}

#[tokio::test]
async fn all_ways_at_once_stay_in_the_budget() {
    let relay = relay(64).await;
    let mut honest = relay.core1_worker(&["honest"], 1).await;
    let mut streaming = relay.worker(&["m"], 32).await;
    let mut heading = relay.core1_worker(&["heads"], 100).await;

    let heads = begin_heads(&relay, 200, 60 * KIB).await;
    let streams = leave_streams_unread(&relay, &mut streaming, 16, 16).await;
    let response_heads = send_heads(&relay, &mut heading, 100, 60 * KIB).await;
    let mut uploads = Vec::new();
    for _ in 0..32 {
        let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
        raw.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000\r\n\r\n").await;
        raw.write(vec![b' '; MIB]).await;
        uploads.push(raw);
    }
    let mut messages = Vec::new();
    for _ in 0..8 {
        let mut worker = relay.worker(&["begun"], 1).await;
        worker.send_message(begun(4 * MIB)).await;
        messages.push(worker);
    }
    let whole = answer_whole(&relay, 16, 4 * MIB).await;
    let mut talkative = relay.core1_worker(&["m2"], 1).await;
    let noise: Vec<_> = (0..2_000).map(|at| Message::text(json!({"type": "unknown", "at": at}).to_string())).collect();
    talkative.send_together(noise).await;

    relay.eventually("most of the budget is used", async || held(&relay).await > 48 * MIB).await;
    check_honest(&relay, &mut honest).await;
    // What the operator gives a relay with this budget.
    let peak = relay.usage().peak_bytes;
    eprintln!("{} MiB at most, {} MiB held", peak / MIB as u64, held(&relay).await / MIB);
    assert!(peak < 128 * MIB as u64, "{peak} bytes");
    drop((heads, streams, response_heads, uploads, messages, whole));
    is_free(&relay).await;
}
