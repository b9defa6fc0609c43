//! `homes1`: reports of workers on the conversations of other relays.

use std::time::{Duration, Instant};

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
