//! Commands and views of the admin API over two relays, with one real worker behind both.

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::relay::Relay;
use serde_json::{Value, json};

use crate::fleet::{Node, chat, id_at, load_once_it_has_started, order, outcome};

async fn slot_at(relay: &Relay) -> Value {
    relay.workers().await[0]["slots"][0].clone()
}

async fn two_relays() -> (Relay, Relay, Balancer, Node) {
    let relay = || Relay::builder().env("RELAY_COUNT", "2").start();
    let (one, two) = tokio::join!(relay(), relay());
    let front = Balancer::start(&[&one, &two]).await;
    let node = Node::start("one", front.url(), &json!({})).await;
    one.wait_for_workers(1).await;
    two.wait_for_workers(1).await;
    (one, two, front, node)
}

#[tokio::test]
async fn order_of_one_relay_is_visible_everywhere() {
    let (one, two, _front, _node) = two_relays().await;
    load_once_it_has_started(&one, &id_at(&one, "one").await, "b").await;
    for relay in [&one, &two] {
        let resident = || async { slot_at(relay).await["resident"] == "b" };
        relay.eventually("both relays report the loaded model", resident).await;
        let slot = slot_at(relay).await;
        assert_eq!((&slot["id"], &slot["state"], &slot["generation"]), (&json!("gpu0"), &json!("ready"), &json!(1)));
        let status: Vec<_> = slot["models"].as_array().expect("models").iter().map(|it| it["status"].clone()).collect();
        assert_eq!(status, ["unloaded", "resident"], "{slot}");
        let state = relay.admin_json("/admin/state?residency=true").await;
        let here = json!([{"worker_id": id_at(relay, "one").await, "slot": "gpu0", "slot_state": "ready", "status": "resident", "open": true}]);
        assert_eq!(state["providers"][0]["models"][1]["residency"], here);
    }
    order(&two, &id_at(&two, "one").await, &json!({"command": "unload", "model": "b", "slot": "gpu0", "mode": "now"}))
        .await;
    for relay in [&one, &two] {
        relay
            .eventually("both relays report the model as unloaded", || async {
                slot_at(relay).await["state"] == "empty"
            })
            .await;
    }
}

#[tokio::test]
async fn pin_of_one_relay_withstands_demand_of_other() {
    let (one, two, _front, _node) = two_relays().await;
    one.fetch(chat("a")).await.with_status(200);
    order(&one, &id_at(&one, "one").await, &json!({"command": "pin", "model": "a"})).await;
    let waiting = two.begin(chat("b"));
    two.wait_for_queue_depth("local", 1).await;
    // Served the whole time, though `b` waits.
    for _ in 0..20 {
        one.fetch(chat("a")).await.with_status(200);
    }
    assert!(!waiting.is_answered(), "a pinned model was unloaded");
    let pinned = slot_at(&two).await["models"][0]["pinned"].clone();
    assert_eq!(pinned, json!(true), "the other relay must receive the pin");
    order(&two, &id_at(&two, "one").await, &json!({"command": "unpin", "model": "a"})).await;
    assert_eq!(waiting.reply().await.with_status(200).json()["model"], "b");
}

#[tokio::test]
async fn rejected_order_reports_reason() {
    let (one, _two, _front, node) = two_relays().await;
    load_once_it_has_started(&one, &id_at(&one, "one").await, "a").await;
    order(&one, &id_at(&one, "one").await, &json!({"command": "pin", "model": "a"})).await;
    let refused = json!({"command": "load", "model": "b"});
    let ended = outcome(&one, &id_at(&one, "one").await, &refused).await;
    assert_eq!(ended["ok"], false, "{ended}");
    assert!(ended["error"].as_str().is_some_and(|why| why.contains("pin")), "{ended}");
    assert_eq!(node.worker.metric("modelrelay_worker_load_failures_total").await, 0.0);
}
