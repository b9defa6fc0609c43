//! `homes1`: reports of workers on the conversations of other relays.

use std::time::{Duration, Instant};

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker::{FakeWorker, core1_registration, new_instance_id};
use serde_json::{Value, json};

use crate::support::chat;

/// A worker with `homes1` that granted the relay a slot.
async fn homes1_worker(relay: &Relay) -> FakeWorker {
    let mut worker = relay.dial().open().await;
    let mut message = core1_registration(&["m"], 1, &new_instance_id());
    message["capabilities"] = json!(["core1", "homes1"]);
    let ack = worker.register_with(message).await;
    assert_eq!(ack["capabilities"], json!(["core1", "homes1"]));
    worker.grant(1).await;
    worker
}

fn report(number: usize) -> Value {
    let homes: Value = (0..number).map(|key| json!([format!("{key:016x}"), 1000])).collect();
    json!({"type": "homes", "homes": homes, "backlog": 5})
}

/// Shows with one exchange that relay and worker still serve.
async fn serves(relay: &Relay, worker: &mut FakeWorker) {
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

/// A turn of a conversation. Prompts under 1 KiB have no key.
fn turn(conversation: &str) -> Request {
    let prompt = format!("{conversation} {}", "x".repeat(1024));
    let body = json!({"model": "m", "messages": [{"role": "user", "content": prompt}]});
    Request::post("/v1/chat/completions", &body)
}

/// Sends a turn, has it answered, and returns which worker got it, and the key of its conversation.
async fn take_turn(relay: &Relay, workers: &mut [FakeWorker; 2], conversation: &str) -> (usize, Option<String>) {
    let pending = relay.begin(turn(conversation));
    let [one, two] = workers;
    let (number, job) = tokio::select! {
        job = one.expect_request() => (0, job),
        job = two.expect_request() => (1, job),
    };
    workers[number].answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    (number, job.message["conversation"].as_str().map(str::to_owned))
}

#[tokio::test]
async fn request_has_key_of_its_conversation() {
    let relay = Relay::start().await;
    let mut workers = [homes1_worker(&relay).await, homes1_worker(&relay).await];
    let mut keys = Vec::new();
    for conversation in ["one", "one", "two"] {
        keys.push(take_turn(&relay, &mut workers, conversation).await.1.expect("a key"));
    }
    assert!(keys[0] == keys[1] && keys[1] != keys[2], "{keys:?}");
    assert!(keys.iter().all(|key| key.len() == 16 && key.bytes().all(|byte| byte.is_ascii_hexdigit())), "{keys:?}");
}

#[tokio::test]
async fn worker_without_homes1_gets_no_key() {
    let relay = Relay::start().await;
    let mut workers = [relay.core1_worker(&["m"], 1).await, relay.core1_worker(&["m"], 1).await];
    assert_eq!(take_turn(&relay, &mut workers, "one").await.1, None);
}

#[tokio::test]
async fn reported_conversation_goes_to_reporting_worker() {
    let relay = Relay::start().await;
    let mut workers = [homes1_worker(&relay).await, homes1_worker(&relay).await];
    let key = take_turn(&relay, &mut workers, "one").await.1.expect("a key");
    // Each time, another relay has sent a longer turn there. The backlog shows that the relay has read the report.
    for (number, bytes) in [(1, 10_000), (0, 20_000), (0, 30_000), (1, 40_000)] {
        workers[number].send(&json!({"type": "homes", "homes": [[key, bytes]], "backlog": bytes})).await;
        let is_read = || async { relay.workers().await.iter().any(|worker| worker["backlog_bytes"] == bytes) };
        relay.eventually("the report is read", is_read).await;
        assert_eq!(take_turn(&relay, &mut workers, "one").await.0, number, "{bytes}");
    }
}

#[tokio::test]
async fn longest_report_on_homes_is_accepted() {
    let relay = Relay::start().await;
    let mut worker = homes1_worker(&relay).await;
    worker.send(&report(1024)).await;
    worker.send(&json!({"type": "homes"})).await;
    serves(&relay, &mut worker).await;
}

#[tokio::test]
async fn invalid_report_on_homes_closes_link() {
    let relay = Relay::start().await;
    let invalid = json!({"type": "homes", "homes": [["no key", 1]]});
    for message in [report(1025), invalid] {
        let mut worker = homes1_worker(&relay).await;
        worker.send(&message).await;
        assert_eq!(worker.expect_close().await, (1002, "worker registration protocol error".to_owned()));
    }
}

#[tokio::test]
async fn report_without_homes1_is_skipped() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    worker.send(&report(1025)).await;
    serves(&relay, &mut worker).await;
}

#[tokio::test]
async fn flood_of_reports_delays_only_its_worker() {
    let relay = Relay::start().await;
    let mut noisy = homes1_worker(&relay).await;
    let mut quiet = relay.core1_worker(&["n"], 1).await;
    let start = Instant::now();
    for _ in 0..30 {
        noisy.send(&report(1024)).await;
    }
    let pending = relay.begin(chat("n"));
    let job = quiet.expect_request().await;
    quiet.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    let undelayed = start.elapsed();
    serves(&relay, &mut noisy).await;
    // Eight reports are free, and each further one costs 100 ms.
    let delayed = start.elapsed();
    assert!(delayed >= Duration::from_secs(2) && undelayed < delayed / 2, "{undelayed:?} and {delayed:?}");
}
