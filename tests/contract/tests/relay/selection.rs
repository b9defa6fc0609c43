//! The choice of the worker for a request.

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, openai_error, tag_of, tagged};

#[tokio::test]
async fn worker_with_lowest_load_is_chosen() {
    let relay = Relay::start().await;
    let mut busy = relay.dial().open().await;
    let mut registration = modelrelay_harness::worker::registration(&["m"], 9);
    registration["current_load"] = json!(2);
    busy.register_with(registration).await;
    let mut idle = relay.worker(&["m"], 9).await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        clients.push(relay.begin(chat("m")));
        idle.expect_request().await;
    }
    busy.expect_quiet().await;
}

#[tokio::test]
async fn ties_are_broken_by_rotation() {
    let relay = Relay::start().await;
    let mut one = relay.worker(&["m"], 4).await;
    let mut two = relay.worker(&["m"], 4).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(relay.begin(chat("m")));
        relay
            .eventually("all requests are in flight", || async {
                relay.admin_json("/admin/stats").await["in_flight"]["local"] == clients.len()
            })
            .await;
    }
    for _ in 0..2 {
        one.expect_request().await;
        two.expect_request().await;
    }
}

#[tokio::test]
async fn equal_workers_alternate_for_sequential_requests() {
    let relay = Relay::start().await;
    let mut one = relay.worker(&["m"], 1).await;
    let mut two = relay.worker(&["m"], 1).await;
    let mut turns = [0, 0];
    for _ in 0..4 {
        let pending = relay.begin(chat("m"));
        tokio::select! {
            job = one.expect_request() => { turns[0] += 1; one.answer(&job, &json!({})).await; }
            job = two.expect_request() => { turns[1] += 1; two.answer(&job, &json!({})).await; }
        }
        let _ = pending.reply().await.with_status(200);
    }
    assert_eq!(turns, [2, 2]);
}

#[tokio::test]
async fn request_goes_only_to_worker_with_exact_model() {
    let relay = Relay::start().await;
    let mut other = relay.worker(&["M", "m2", "m "], 9).await;
    let mut right = relay.dial().open().await;
    right.register(&["model"], 1).await;
    let pending = relay.begin(tagged("model", "mine"));
    let job = right.expect_request().await;
    assert_eq!(tag_of(&job), "mine");
    right.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    openai_error(&relay.fetch(chat("model2")).await, 404, "invalid_request_error", "model_not_found");
    other.expect_quiet().await;
}

#[tokio::test]
async fn worker_never_exceeds_its_max_concurrent() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 2).await;
    let clients: Vec<_> = (0..5).map(|_| relay.begin(chat("m"))).collect();
    worker.expect_request().await;
    worker.expect_request().await;
    relay.wait_for_queue_depth("local", 3).await;
    worker.expect_quiet().await;
    drop(clients);
}

#[tokio::test]
async fn max_concurrent_of_zero_is_one() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    let ack = worker.register(&["m"], 0).await;
    assert!(ack["warnings"].as_array().is_some_and(|warnings| !warnings.is_empty()), "{ack}");
    let _one = relay.begin(chat("m"));
    worker.expect_request().await;
    let _two = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
}

#[tokio::test]
async fn reported_load_reduces_free_capacity() {
    let relay = Relay::start().await;
    let mut shared = relay.worker(&["m"], 3).await;
    shared.report_load(3).await;
    relay.eventually("the load is known", || async { relay.workers().await[0]["reported_load"] == 3 }).await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    shared.expect_quiet().await;
}

#[tokio::test]
async fn worker_with_failing_model_is_passed_over() {
    let relay = Relay::start().await;
    let mut failing = relay.dial().open().await;
    let mut registration = modelrelay_harness::worker::registration(&["m", "n"], 9);
    registration["failing"] = json!(["m", "unknown"]);
    failing.register_with(registration).await;
    assert_eq!(relay.workers().await[0]["failing_models"], json!(["m"]));
    let mut sound = relay.worker(&["m"], 1).await;
    let first = relay.begin(chat("m"));
    let job = sound.expect_request().await;
    let second = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    sound.answer(&job, &json!({})).await;
    let _ = first.reply().await.with_status(200);
    let job = sound.expect_request().await;
    let third = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    failing.send(&json!({"type": "models_update", "models": ["m", "n"]})).await;
    let recovered = failing.expect_request().await;
    failing.answer(&recovered, &json!({})).await;
    sound.answer(&job, &json!({})).await;
    let _ = second.reply().await.with_status(200);
    let _ = third.reply().await.with_status(200);
}
