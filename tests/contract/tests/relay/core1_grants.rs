//! `core1`: the worker reports how much it accepts, the relay how much is waiting.

use std::time::Instant;

use modelrelay_harness::relay::Relay;
use serde_json::json;

use crate::support::{chat, check_instant, tag_of, tagged};

#[tokio::test]
async fn no_request_is_sent_before_first_grant() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], 4).await;
    let pending = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    let start = Instant::now();
    worker.grant(1).await;
    let job = worker.expect_request().await;
    check_instant(start, "dispatch after a grant");
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn running_requests_never_exceed_grant() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], 9).await;
    worker.grant(2).await;
    let clients: Vec<_> = (0..4).map(|_| relay.begin(chat("m"))).collect();
    let first = worker.expect_request().await;
    worker.expect_request().await;
    relay.wait_for_queue_depth("local", 2).await;
    worker.expect_quiet().await;
    worker.answer(&first, &json!({})).await;
    worker.expect_request().await;
    worker.expect_quiet().await;
    worker.grant(3).await;
    worker.expect_request().await;
    drop(clients);
}

#[tokio::test]
async fn lower_grant_replaces_previous_grant() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 2).await;
    let one = relay.begin(chat("m"));
    let first = worker.expect_request().await;
    worker.grant_of(0, 0, 2, 1).await;
    worker.answer(&first, &json!({})).await;
    // The grant was read before the response that follows it.
    let _ = one.reply().await.with_status(200);
    let _two = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    worker.grant_of(1, 0, 2, 1).await;
    worker.expect_request().await;
}

#[tokio::test]
async fn at_capacity_requeues_without_spending_attempt() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    for _ in 0..8 {
        let job = worker.expect_request().await;
        worker.grant_of(0, 1, 1, 2).await;
        worker.fail(&job.id, "at_capacity", "full").await;
        relay.wait_for_queue_depth("local", 1).await;
        worker.grant_of(1, 0, 1, 2).await;
    }
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn request_refused_before_newer_grant_is_retried() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let pending = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    // The slot went to another relay and is back: a worker reports that in one grant, not in two.
    worker.grant_of(1, 0, 1, 2).await;
    worker.fail(&job.id, "at_capacity", "full").await;
    let again = worker.expect_request().await;
    worker.answer(&again, &json!({})).await;
    let _ = pending.reply().await.with_status(200);
}

#[tokio::test]
async fn at_capacity_keeps_place_in_queue() {
    let relay = Relay::start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let _early = relay.begin(tagged("m", "early"));
    let job = worker.expect_request().await;
    let _late = relay.begin(tagged("m", "late"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.grant_of(0, 1, 1, 2).await;
    worker.fail(&job.id, "at_capacity", "full").await;
    relay.wait_for_queue_depth("local", 2).await;
    worker.grant_of(1, 0, 1, 2).await;
    assert_eq!(tag_of(&worker.expect_request().await), "early");
}

#[tokio::test]
async fn requests_of_other_relays_add_to_load() {
    let relay = Relay::start().await;
    let mut shared = relay.dial().open().await;
    shared.register_core1(&["m"], 9).await;
    shared.grant_of(4, 5, 9, 2).await;
    let mut own = relay.core1_worker(&["m"], 9).await;
    // Grants are read in order with the messages that follow on their own socket; the barrier makes both known.
    shared.expect_quiet().await;
    own.expect_quiet().await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(relay.begin(chat("m")));
        own.expect_request().await;
    }
    shared.expect_quiet().await;
}

#[tokio::test]
async fn demand_is_sent_to_worker_with_several_links() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], 1).await;
    worker.grant_of(0, 1, 1, 2).await;
    worker.expect_quiet().await;
    let start = Instant::now();
    let one = relay.begin(chat("m"));
    let demand = worker.expect_demand("m", 1).await;
    check_instant(start, "the first demand");
    let entry = &demand["models"][0];
    assert_eq!(entry["id"], "m");
    assert!(entry["oldest_ms"].is_u64() && entry["sum_ms"].is_u64(), "{demand}");
    let _two = relay.begin(chat("m"));
    let _three = relay.begin(chat("m"));
    worker.expect_demand("m", 3).await;
    one.abandon();
    worker.expect_demand("m", 2).await;
    worker.grant_of(2, 0, 2, 2).await;
    worker.expect_request().await;
    worker.expect_request().await;
    worker.expect_demand("m", 0).await;
}

#[tokio::test]
async fn demand_lists_only_models_of_that_worker() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], 1).await;
    worker.grant_of(0, 1, 1, 2).await;
    // It lists nothing yet, so every model may still appear.
    let _asking = relay.worker(&[], 1).await;
    let _other = relay.begin(chat("other"));
    relay.wait_for_queue_depth("local", 1).await;
    let _mine = relay.begin(chat("m"));
    let demand = worker.expect_demand("m", 1).await;
    assert_eq!(demand["models"].as_array().map(Vec::len), Some(1), "{demand}");
}

#[tokio::test]
async fn worker_with_one_link_receives_no_demand() {
    let relay = Relay::start().await;
    let mut worker = relay.dial().open().await;
    worker.register_core1(&["m"], 1).await;
    worker.grant_of(0, 0, 0, 1).await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.expect_quiet().await;
    assert_eq!(worker.unread_demands(), 0);
}

#[tokio::test]
async fn older_worker_receives_neither_demand_nor_credit() {
    let relay = Relay::start().await;
    let mut worker = relay.worker(&["m"], 1).await;
    let first = relay.begin(chat("m"));
    let job = worker.expect_request().await;
    let _waiting = relay.begin(chat("m"));
    relay.wait_for_queue_depth("local", 1).await;
    worker.answer(&job, &json!({})).await;
    let _ = first.reply().await.with_status(200);
    worker.expect_request().await;
    assert_eq!(worker.unread_demands(), 0);
}
