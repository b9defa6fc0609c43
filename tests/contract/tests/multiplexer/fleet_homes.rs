//! Conversations at multiplexers, and a relay that restarts.

use std::collections::{BTreeMap, BTreeSet};

use modelrelay_harness::balancer::Balancer;
use modelrelay_harness::client::Request;
use modelrelay_harness::relay::Relay;
use serde_json::{Value, json};

use crate::fleet::{Node, id_at, load_once_it_has_started, order};

/// Enough that chance cannot send each of them to the same worker again.
const CONVERSATIONS: usize = 16;

const NODES: [&str; 2] = ["one", "two"];

/// Sends a turn of each of these conversations, and returns the worker of each.
async fn take_turns(relay: &Relay, conversations: impl Iterator<Item = usize>) -> BTreeMap<usize, Value> {
    let mut workers = BTreeMap::new();
    for conversation in conversations {
        let prompt = format!("conversation {conversation}: {}", "x".repeat(2000));
        let body = json!({"model": "a", "messages": [{"role": "user", "content": prompt}]});
        let reply = relay.fetch(Request::post("/v1/chat/completions", &body)).await.with_status(200);
        workers.insert(conversation, reply.json()["worker"].clone());
    }
    workers
}

/// In another order: workers that only take turns would get other conversations.
fn in_other_order() -> impl Iterator<Item = usize> {
    (0..CONVERSATIONS).step_by(2).chain((1..CONVERSATIONS).step_by(2))
}

async fn open_gates(relay: &Relay) -> usize {
    let state = relay.admin_json("/admin/state?residency=true").await;
    let models = state["providers"][0]["models"].as_array().cloned().unwrap_or_default();
    let of_a = models.iter().filter(|model| model["id"] == "a");
    let slots = of_a.filter_map(|model| model["residency"].as_array()).flatten();
    slots.filter(|slot| slot["open"] == true).count()
}

/// A relay, and two workers that have loaded `a`, each behind a balancer.
async fn two_nodes_with_model() -> (Relay, Vec<Balancer>, Vec<Node>) {
    let relay = Relay::builder().env("PLACEMENT", "cache").start().await;
    let (mut nodes, mut fronts) = (Vec::new(), Vec::new());
    for name in NODES {
        let front = Balancer::start(&[&relay]).await;
        nodes.push(Node::start(name, front.url(), &json!({})).await);
        fronts.push(front);
    }
    relay.wait_for_workers(2).await;
    for name in NODES {
        load_once_it_has_started(&relay, &id_at(&relay, name).await, "a").await;
    }
    relay.eventually("both gates are open", || async { open_gates(&relay).await == 2 }).await;
    (relay, fronts, nodes)
}

/// Restarts the relay, and waits until it knows this number of homes, and both gates.
async fn restart(relay: Relay, fronts: &[Balancer], homes: f64) -> Relay {
    let relay = relay.restart().await;
    fronts.iter().for_each(|front| front.add(&relay));
    let is_ready = || async {
        relay.metric("modelrelay_homes{provider=\"local\"}").await == homes && open_gates(&relay).await == 2
    };
    relay.eventually("the relay knows its homes and gates", is_ready).await;
    relay
}

#[tokio::test]
async fn restarted_relay_learns_homes_at_multiplexers() {
    let (relay, fronts, _nodes) = two_nodes_with_model().await;
    let first = take_turns(&relay, 0..CONVERSATIONS).await;
    assert_eq!(first.values().map(Value::to_string).collect::<BTreeSet<_>>().len(), 2, "{first:?}");
    let relay = restart(relay, &fronts, CONVERSATIONS as f64).await;
    assert_eq!(take_turns(&relay, in_other_order()).await, first);
}

#[tokio::test]
async fn restarted_relay_learns_nothing_of_former_load() {
    let (relay, fronts, _nodes) = two_nodes_with_model().await;
    let first = take_turns(&relay, 0..CONVERSATIONS).await;
    let id = id_at(&relay, "two").await;
    for command in [
        json!({"command": "unload", "model": "a", "slot": "gpu0", "mode": "now"}),
        json!({"command": "load", "model": "a"}),
    ] {
        order(&relay, &id, &command).await;
    }
    let kept = first.values().filter(|worker| *worker == "one").count();
    let relay = restart(relay, &fronts, kept as f64).await;
    let second = take_turns(&relay, in_other_order()).await;
    assert!(first.iter().all(|(key, worker)| *worker == "two" || second[key] == *worker), "{first:?} and {second:?}");
    let home = "modelrelay_placement_total{decision=\"home\",provider=\"local\",reason=\"\"}";
    assert_eq!(relay.metric(home).await, kept as f64);
}
