//! Everything that peers can make the relay hold stays within `MAX_BUFFERED_BYTES`: each path by itself, and all of
//! them at once. Honest requests still receive responses, and the metric reports the held bytes.

use modelrelay_harness::client::{Pending, RawConnection, Reply, Request, Response};
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker::{FakeWorker, Job};
use serde_json::{Map, json};
use tokio_tungstenite::tungstenite::Message;

use crate::unfinished::begun;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The model whose requests are streamed.
const STREAMED: &str = "streamed";

/// A relay under attack, and a worker that is not part of it.
struct Site {
    relay: Relay,
    honest: FakeWorker,
    resident_before: u64,
}

impl Site {
    /// Starts both. `mib`: `MAX_BUFFERED_BYTES` of the relay.
    async fn start(mib: usize) -> Self {
        let builder = Relay::builder().env("MAX_BUFFERED_BYTES", &format!("{mib}Mi")).env("MAX_REQUEST_BYTES", "2Mi");
        let relay = builder.env("STREAM_KEEPALIVE_SECS", "0").start().await;
        let honest = relay.core1_worker(&["honest"], 1).await;
        let resident_before = relay.usage().resident_bytes;
        Self { relay, honest, resident_before }
    }

    async fn holds_more_than(&self, bytes: usize) {
        self.relay.eventually("much is held", async || held(&self.relay).await > bytes).await;
    }

    /// Checks the relay's memory since its start, after an attack with `sent` bytes.
    fn check_cost(&self, sent: usize, limit: usize) {
        let cost = self.relay.usage().peak_bytes - self.resident_before;
        eprintln!("{} KiB for {} KiB", cost / KIB as u64, sent / KIB);
        assert!(cost < limit as u64, "{cost} bytes");
    }

    /// Checks that clients that read receive responses, whole and streamed.
    async fn check_honest(&mut self) {
        let Self { relay, honest, .. } = self;
        let pending = begin_request(relay, "honest", false);
        let job = honest.expect_request().await;
        honest.answer(&job, &json!({"fine": true})).await;
        assert_eq!(pending.reply().await.with_status(200).json()["fine"], true);
        let pending = begin_request(relay, "honest", true);
        let job = honest.expect_request().await;
        honest.start_stream(&job, "data: 1\n\n").await;
        honest.end_stream(&job).await;
        let reply = pending.reply().await.with_status(200);
        assert!(!reply.aborted && reply.text().starts_with("data: 1\n\n"), "{}", reply.text());
    }

    /// Ends the attack, and checks that the budget is free again.
    async fn check_freed_of(&self, attack: impl Sized) {
        drop(attack);
        self.relay.eventually("no memory is reserved", async || held(&self.relay).await == 0).await;
    }
}

async fn held(relay: &Relay) -> usize {
    let held = relay.metric("modelrelay_buffered_bytes ").await;
    let limit = relay.metric("modelrelay_buffered_bytes_limit ").await;
    assert!(held <= limit, "{held} bytes are held, {limit} at most");
    held as usize
}

fn begin_request(relay: &Relay, model: &str, stream: bool) -> Pending {
    let body = json!({"model": model, "messages": [], "stream": stream});
    relay.begin(Request::post("/v1/chat/completions", &body).small_receive_buffer())
}

fn check_overloaded(reply: &Reply) {
    assert_eq!(reply.json()["error"]["code"], "overloaded", "{}", reply.text());
    assert!(reply.text().contains("MAX_BUFFERED_BYTES"), "{}", reply.text());
}

/// Requests that a worker has received.
async fn dispatched(relay: &Relay, worker: &mut FakeWorker, model: &str, count: usize) -> (Vec<Pending>, Vec<Job>) {
    let (mut pending, mut jobs) = (Vec::new(), Vec::new());
    for _ in 0..count {
        pending.push(begin_request(relay, model, model == STREAMED));
        jobs.push(worker.expect_request().await);
    }
    (pending, jobs)
}

/// Streams of `pieces` of 64 KiB, which an older worker sends without credit and of which clients read nothing.
async fn leave_streams_unread(relay: &Relay, worker: &mut FakeWorker, streams: usize, pieces: usize) -> Vec<Response> {
    let piece = format!("data: {}\n\n", "x".repeat(64 * KIB - 8));
    let (pending, jobs) = dispatched(relay, worker, STREAMED, streams).await;
    for job in &jobs {
        for _ in 0..pieces {
            worker.chunk(&job.id, &piece).await;
        }
    }
    let mut unread = Vec::new();
    for pending in pending {
        unread.push(pending.response().await);
    }
    unread
}

/// Whole responses of older workers, one of each.
async fn answer_whole(relay: &Relay, workers: usize, bytes: usize) -> Vec<Pending> {
    let (mut unread, body) = (Vec::new(), "x".repeat(bytes));
    for _ in 0..workers {
        let mut worker = relay.worker(&["whole"], 1).await;
        unread.push(begin_request(relay, "whole", false));
        let job = worker.expect_request().await;
        worker.complete(&job.id, 200, Map::new(), &body).await;
        worker.vanish();
    }
    unread
}

/// Response heads of `bytes` each, whose bodies do not come.
async fn send_heads(relay: &Relay, worker: &mut FakeWorker, heads: usize, bytes: usize) -> Vec<Pending> {
    let value = "x".repeat(bytes);
    let (pending, jobs) = dispatched(relay, worker, "heads", heads).await;
    for job in &jobs {
        worker.response_start(job, 200, &[("openai-processing-ms", &value)]).await;
    }
    pending
}

/// Connections on which `bytes` of a request's head have come, and not its end.
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
async fn unread_streams_stay_within_budget() {
    let mut site = Site::start(16).await;
    let mut worker = site.relay.worker(&[STREAMED], 32).await;
    let unread = leave_streams_unread(&site.relay, &mut worker, 32, 48).await;
    site.holds_more_than(8 * MIB).await;
    site.check_cost(32 * 48 * 64 * KIB, 32 * MIB);
    site.check_honest().await;
    site.check_freed_of(unread).await;
}

#[tokio::test]
async fn whole_responses_stay_within_budget() {
    let mut site = Site::start(64).await;
    let unread = answer_whole(&site.relay, 12, 20 * MIB).await;
    // Two of them, and one on its way: its message, and its text.
    site.holds_more_than(40 * MIB).await;
    site.check_cost(12 * 20 * MIB, 120 * MIB);
    site.check_honest().await;
    site.check_freed_of(unread).await;
}

#[tokio::test]
async fn response_heads_stay_within_budget() {
    let mut site = Site::start(4).await;
    let mut worker = site.relay.core1_worker(&["heads"], 100).await;
    let mut unread = send_heads(&site.relay, &mut worker, 100, 60 * KIB).await;
    check_overloaded(&unread.pop().expect("the last of them").reply().await.with_status(503));
    assert!(held(&site.relay).await > 3 * MIB);
    site.check_honest().await;
    site.check_freed_of(unread).await;
}

#[tokio::test]
async fn unfinished_request_heads_stay_within_budget() {
    let mut site = Site::start(16).await;
    let mut open = begin_heads(&site.relay, 400, 60 * KIB).await;
    assert_eq!(open.pop().expect("the last of them").read_to_end().await, "");
    assert!(held(&site.relay).await > 12 * MIB);
    site.check_cost(400 * 60 * KIB, 40 * MIB);
    site.check_honest().await;
    site.check_freed_of(open).await;
}

#[tokio::test]
async fn combined_loads_stay_within_budget() {
    let mut site = Site::start(64).await;
    let relay = &site.relay;
    let mut streaming = relay.worker(&[STREAMED], 32).await;
    let mut heading = relay.core1_worker(&["heads"], 100).await;

    let heads = begin_heads(relay, 200, 60 * KIB).await;
    let streams = leave_streams_unread(relay, &mut streaming, 16, 16).await;
    let response_heads = send_heads(relay, &mut heading, 100, 60 * KIB).await;
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
    let whole = answer_whole(relay, 16, 4 * MIB).await;
    let mut talkative = relay.core1_worker(&["m2"], 1).await;
    let noise: Vec<_> = (0..2_000).map(|at| Message::text(json!({"type": "unknown", "at": at}).to_string())).collect();
    talkative.send_together(noise).await;

    site.holds_more_than(48 * MIB).await;
    site.check_honest().await;
    // The operator sets a relay's memory limit to twice this budget.
    let peak = site.relay.usage().peak_bytes;
    eprintln!("{} MiB at most, {} MiB held", peak / MIB as u64, held(&site.relay).await / MIB);
    assert!(peak < 128 * MIB as u64, "{peak} bytes");
    site.check_freed_of((heads, streams, response_heads, uploads, messages, whole)).await;
}
