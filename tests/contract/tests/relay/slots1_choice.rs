//! `slots1`: which of several workers receives the demand for a model that no worker holds.

use std::time::Instant;

use modelrelay_harness::{
    relay::Relay,
    worker::{FakeWorker, failed, new_instance_id, slot, slots1_registration},
};
use serde_json::json;

use crate::support::{anthropic_error, chat, check_instant, messages, openai_error};

/// Fails if the worker received any demand.
async fn check_no_demand(worker: &mut FakeWorker) {
    worker.expect_quiet().await;
    assert_eq!(worker.unread_demands(), 0);
}

#[tokio::test]
async fn demand_goes_to_one_worker_at_once() {
    let relay = Relay::start().await;
    let mut near = relay.slots1_worker(&["a", "b"]).await;
    let mut far = relay.dial().open().await;
    let mut busy = slot("gpu0", "ready", &["a", "b"]);
    (busy["resident"], busy["generation"]) = (json!("a"), json!(1));
    far.register_slots1(&["a", "b"], &[busy]).await;
    let start = Instant::now();
    let _one = relay.begin(chat("b"));
    let demand = near.expect_demand("b", 1).await;
    check_instant(start, "the first demand");
    let entry = &demand["models"][0];
    assert!(entry["oldest_ms"].is_u64() && entry["sum_ms"].is_u64(), "{demand}");
    let _two = relay.begin(chat("b"));
    near.expect_demand("b", 2).await;
    check_no_demand(&mut far).await;
}

#[tokio::test]
async fn failed_load_tries_another_worker_then_ends_requests() {
    let relay = Relay::start().await;
    let empty = slot("gpu0", "empty", &["a"]);
    let (mut one, mut two) = (relay.slots1_worker(&["a"]).await, relay.dial().open().await);
    let mut busy = empty.clone();
    (busy["state"], busy["resident"]) = (json!("ready"), json!("b"));
    two.register_slots1(&["a"], &[busy]).await;
    let openai = relay.begin(chat("a"));
    let anthropic = relay.begin(messages("a"));
    one.expect_demand("a", 2).await;
    one.send_slots(&[failed(empty.clone(), "a", "insufficient_memory", "needs 24 GiB, has 8 GiB", 9_000)]).await;
    one.expect_demand("a", 0).await;
    two.expect_demand("a", 2).await;
    two.send_slots(&[failed(empty.clone(), "a", "backend_unavailable", "no such file", 4_000)]).await;
    for pending in [openai, anthropic] {
        let reply = pending.reply().await;
        let message = if reply.json()["type"] == "error" {
            anthropic_error(&reply, 503, "overloaded_error")
        } else {
            openai_error(&reply, 503, "service_unavailable_error", "backend_unavailable")
        };
        assert!(message.contains("no such file"), "{message}");
        assert_eq!(reply.header("retry-after").as_deref(), Some("4"), "the earliest retry time");
    }
    let again = relay.fetch(chat("a")).await;
    openai_error(&again, 503, "service_unavailable_error", "backend_unavailable");
    one.send_slots(&[empty]).await;
    one.expect_quiet().await;
    let _pending = relay.begin(chat("a"));
    one.expect_demand("a", 1).await;
}

#[tokio::test]
async fn quarantined_slot_is_503_without_retry() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register_slots1(&["a"], &[slot("gpu0", "quarantined", &["a"])]).await;
    let reply = relay.fetch(chat("a")).await;
    let message = openai_error(&reply, 503, "server_error", "slot_quarantined");
    assert!(message.contains("gpu0"), "{message}");
    assert_eq!(reply.header("x-should-retry").as_deref(), Some("false"));
}

#[tokio::test]
async fn open_gate_is_preferred_to_load() {
    let relay = Relay::start().await;
    let mut empty = relay.slots1_worker(&["a"]).await;
    let mut open = relay.slots1_worker(&["a"]).await;
    open.open_gates(&[("a", 4)]).await;
    open.expect_quiet().await;
    let pending = relay.begin(chat("a"));
    let job = open.expect_request().await;
    open.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
    check_no_demand(&mut empty).await;
}

#[tokio::test]
async fn worker_without_multiplexer_prevents_load_elsewhere() {
    for core1 in [false, true] {
        let relay = Relay::start().await;
        let mut multiplexer = relay.slots1_worker(&["a"]).await;
        let mut plain = if core1 { relay.core1_worker(&["a"], 1).await } else { relay.worker(&["a"], 1).await };
        let first = relay.begin(chat("a"));
        let job = plain.expect_request().await;
        let second = relay.begin(chat("a"));
        relay.wait_for_queue_depth("local", 1).await;
        check_no_demand(&mut multiplexer).await;
        plain.answer(&job, &json!({})).await;
        let _ = first.reply().await.with_status(200);
        plain.expect_request().await;
        // Once it is gone, another worker has to load it.
        plain.vanish();
        multiplexer.expect_demand("a", 1).await;
        multiplexer.open_gates(&[("a", 4)]).await;
        let job = multiplexer.expect_request().await;
        multiplexer.answer(&job, &json!({})).await;
        let _ = second.reply().await.with_status(200);
    }
}

#[tokio::test]
async fn open_gate_demand_is_capped_at_twice_capacity() {
    let relay = Relay::start().await;
    let mut worker = relay.slots1_worker(&["a"]).await;
    worker.open_gates(&[("a", 0)]).await;
    worker.expect_quiet().await;
    let _clients: Vec<_> = (0..11).map(|_| relay.begin(chat("a"))).collect();
    relay.wait_for_queue_depth("local", 11).await;
    worker.expect_demand("a", 8).await;
    worker.expect_quiet().await;
}

#[tokio::test]
async fn relays_sharing_workers_choose_same_worker() {
    let relays = [Relay::start().await, Relay::start().await];
    let models = ["a", "b", "c", "d", "e", "f"];
    let mut links = Vec::new();
    for _ in 0..3 {
        let instance = new_instance_id();
        let mut pair = Vec::new();
        for relay in &relays {
            let mut link = relay.dial().open().await;
            link.register_with(slots1_registration(&models, &[slot("gpu0", "empty", &models)], &instance)).await;
            pair.push(link);
        }
        links.push(pair);
    }
    // In the same order at both: a worker from which a relay requested one model is not free for the next.
    let mut clients = Vec::new();
    for (number, model) in models.into_iter().enumerate() {
        for relay in &relays {
            clients.push(relay.begin(chat(model)));
            relay.wait_for_queue_depth("local", number as u64 + 1).await;
        }
    }
    let mut last_of = [None; 3];
    for model in models {
        let mut assigned = Vec::new();
        for (number, relay) in relays.iter().enumerate() {
            let state = relay.admin_json("/admin/state").await;
            let listed = state["providers"][0]["models"].as_array().expect("models").clone();
            let entry = listed.into_iter().find(|entry| entry["id"] == model).expect("the model is listed");
            let id = entry["asked_worker"].as_str().expect("a worker is assigned").to_owned();
            assigned.push(links.iter().position(|pair| pair[number].worker_id == id).expect("one of the workers"));
        }
        assert_eq!(assigned[0], assigned[1], "model {model}");
        last_of[assigned[0]] = Some(model);
    }
    for (pair, last) in links.iter_mut().zip(last_of) {
        for link in pair {
            match last {
                Some(model) => drop(link.expect_demand(model, 1).await),
                None => check_no_demand(link).await,
            }
        }
    }
}
