//! One client's request bodies take half of the relay's memory at most, so that others still get in.

use std::time::Instant;

use modelrelay_harness::{
    client::{RawConnection, Reply, Request},
    relay::{Relay, RelayBuilder},
    worker::FakeWorker,
};
use serde_json::json;

use crate::support::{chat, check_instant, openai_error, post_bytes};

/// Four of them fit into a share, and seven into what large bodies may use.
const FLOOD_BYTES: usize = 8_000_000;
const FIT: usize = 4;

/// The header that a client shows.
type Shown<'a> = (&'a str, &'a str);

fn builder() -> RelayBuilder {
    Relay::builder().env("MAX_BUFFERED_BYTES", "64Mi")
}

/// Begins a large request and sends all of it but the end.
async fn upload(relay: &Relay, (name, value): Shown<'_>) -> RawConnection {
    let mut raw = RawConnection::open(relay.addr(), relay.log()).await;
    raw.write(format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{name}: {value}\r\n")).await;
    raw.write(format!("content-length: {FLOOD_BYTES}\r\n\r\n")).await;
    raw.write(vec![b' '; FLOOD_BYTES - 1]).await;
    raw
}

/// Uploads until the client's share is full, and checks that the next upload is refused at once.
async fn fill_share(relay: &Relay, shown: Shown<'_>, client: &str) -> Vec<RawConnection> {
    let mut held = Vec::new();
    for number in 1..=FIT {
        held.push(upload(relay, shown).await);
        let all = (number * (FLOOD_BYTES - 1)) as f64;
        relay.eventually("an upload is held", async || relay.metric("modelrelay_buffered_bytes ").await >= all).await;
    }
    let refused = relay.fetch(post_bytes("/v1/completions", vec![b' '; FLOOD_BYTES]).header(shown.0, shown.1)).await;
    let message = openai_error(&refused, 503, "service_unavailable_error", "overloaded");
    assert!(message.contains(client) && message.contains("half of MAX_BUFFERED_BYTES"), "{message}");
    held
}

/// A request of two megabytes.
fn large() -> Request {
    post_bytes("/v1/completions", format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "x".repeat(2 << 20)))
}

async fn answered(relay: &Relay, worker: &mut FakeWorker, request: Request, (name, value): Shown<'_>) -> Reply {
    let pending = relay.begin(request.header(name, value));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    pending.reply().await.with_status(200)
}

/// Fills the share of `flooding`, and checks what it and the other client get.
async fn check_shares(relay: &Relay, flooding: Shown<'_>, other: Shown<'_>, client: &str) {
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let flood = fill_share(relay, flooding, client).await;
    let start = Instant::now();
    let _ = answered(relay, &mut worker, large(), other).await;
    check_instant(start, "a request of another client");
    let _ = answered(relay, &mut worker, chat("m"), flooding).await;
    let refused = relay.fetch(large().header(flooding.0, flooding.1)).await.with_status(503);
    assert_eq!(refused.header("retry-after").as_deref(), Some("1"));
    drop(flood);
    relay.eventually("the share is free", async || relay.metric("modelrelay_buffered_bytes ").await == 0.0).await;
    let _ = answered(relay, &mut worker, large(), flooding).await;
}

#[tokio::test]
async fn uploads_of_one_key_leave_room_for_another() {
    let relay = builder().env("MODELRELAY_REQUIRE_API_KEYS", "true").start().await;
    let key = async |name| relay.admin_post("/admin/keys", &json!({"name": name})).await.json()["secret"].clone();
    let [flooding, other] =
        [key("flooding").await, key("other").await].map(|secret| format!("Bearer {}", secret.as_str().unwrap_or("")));
    check_shares(&relay, ("authorization", &flooding), ("authorization", &other), "this API key").await;
}

#[tokio::test]
async fn uploads_of_one_address_leave_room_for_another() {
    let relay = builder().env("TRUSTED_PROXIES", "127.0.0.1").start().await;
    let (flooding, other) = (("x-forwarded-for", "198.51.100.7"), ("x-forwarded-for", "198.51.100.8"));
    check_shares(&relay, flooding, other, "this client's address").await;
}

#[tokio::test]
async fn largest_body_alone_exceeds_its_clients_share() {
    let relay = builder().env("MAX_REQUEST_BYTES", "48Mi").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let body = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "x".repeat(40 << 20));
    let _ = answered(&relay, &mut worker, post_bytes("/v1/completions", body), ("x-any", "1")).await;
}
