//! 2,000 uploads at once, into a memory budget for a few of them.

use std::time::Duration;

use bytes::Bytes;
use modelrelay_harness::{
    client::{Pending, Reply, Request},
    poll_for,
    relay::{Relay, RelayBuilder},
    usage::may_open,
};
use serde_json::json;

/// One for each connection here, and some for the rest.
const OPEN_FILES: u64 = 2500;

const UPLOADS: usize = 2000;
const UPLOAD_BYTES: usize = 1 << 20;
/// The number of them that fit: small bodies use fifteen sixteenths of the budget.
const FIT: usize = 60;

/// The maximum cost of a connection besides its body: a read buffer of 64 KiB, its task, its share of what the
/// allocator keeps.
const CONNECTION_BYTES: u64 = 128 << 10;

fn builder() -> RelayBuilder {
    Relay::builder()
        .env("MAX_BUFFERED_BYTES", "64Mi")
        .env("MAX_REQUEST_BYTES", "1Mi")
        .env("MAX_QUEUE_LEN", "4000")
        .env("QUEUE_TIMEOUT_SECS", "120")
        .env("TRUSTED_PROXIES", "127.0.0.1")
}

/// A chat request of exactly the size.
fn body() -> Bytes {
    let (begin, end) = ("{\"model\":\"m\",\"user\":\"", "\"}");
    format!("{begin}{}{end}", "u".repeat(UPLOAD_BYTES - begin.len() - end.len())).into()
}

/// The upload of that number, from one of four clients: each may use half of the budget.
fn upload(body: &Bytes, number: usize) -> Request {
    Request::new("POST", "/v1/chat/completions")
        .header("content-type", "application/json")
        .header("x-forwarded-for", format!("198.51.100.{}", number % 4))
        .body(body.clone())
}

fn check_overloaded(reply: &Reply) {
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert_eq!(reply.json()["error"]["code"], "overloaded", "{}", reply.text());
    assert_eq!(reply.header("retry-after").as_deref(), Some("1"));
}

/// Waits for this number of responses, in any order.
async fn answered(pending: &mut Vec<Pending>, count: usize) -> Vec<Reply> {
    let mut replies = Vec::new();
    let all = poll_for(Duration::from_secs(120), async || {
        let (ready, waiting): (Vec<_>, Vec<_>) = std::mem::take(pending).into_iter().partition(Pending::is_answered);
        *pending = waiting;
        for ready in ready {
            replies.push(ready.reply().await);
        }
        (replies.len() >= count).then_some(())
    });
    let all = all.await;
    assert!(all.is_some(), "received {} of {count} responses", replies.len());
    replies
}

async fn budget_is_free(relay: &Relay) {
    relay.eventually("no byte is held", || async { relay.metric("modelrelay_buffered_bytes ").await == 0.0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_concurrent_uploads_stay_within_memory_budget() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let relay = builder().start().await;
    let before = relay.usage().resident_bytes;
    let body = body();
    let mut uploads: Vec<_> = (0..UPLOADS).map(|number| relay.begin(upload(&body, number))).collect();
    for refused in answered(&mut uploads, UPLOADS - FIT).await {
        check_overloaded(&refused);
    }
    relay.wait_for_queue_depth("local", FIT as u64).await;
    let held = relay.metric("modelrelay_buffered_bytes ").await;
    assert!(held <= relay.metric("modelrelay_buffered_bytes_limit ").await, "{held} bytes are held");
    let peak = relay.usage().peak_bytes - before;
    eprintln!("{} MB at most, {} MB of bodies are held", peak / 1_000_000, held / 1e6);
    let bound = (FIT * UPLOAD_BYTES) as u64 + UPLOADS as u64 * CONNECTION_BYTES;
    assert!(peak < bound, "the uploads cost {peak} bytes, {bound} at most");

    let mut worker = relay.core1_worker(&["m"], FIT as u64).await;
    for _ in 0..FIT {
        let job = worker.expect_request().await;
        assert!(job.body == body, "a body was changed");
        worker.answer(&job, &json!({"read": job.body.len()})).await;
    }
    for reply in answered(&mut uploads, FIT).await {
        assert_eq!(reply.with_status(200).json()["read"], UPLOAD_BYTES);
    }
    budget_is_free(&relay).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_aborted_uploads_leave_nothing_behind() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let relay = builder().start().await;
    let body = body();
    let mut uploads: Vec<_> = (0..UPLOADS).map(|number| relay.begin(upload(&body, number))).collect();
    answered(&mut uploads, UPLOADS / 2).await;
    drop(uploads);
    budget_is_free(&relay).await;
    relay.wait_for_queue_depth("local", 0).await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let after = relay.begin(upload(&body, 0));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = after.reply().await.with_status(200);
}
