//! A llama-server per model, started and stopped by the worker.

use std::collections::HashMap;
use std::sync::Arc;

use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::wait_for_model;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::rig::{Stack, Weights, eventually, start_worker};
use crate::stream::{events, expected, stream};

#[tokio::test]
async fn streams_across_swaps_match_servers_byte_by_byte() {
    let lengths = [40, 150, 400];
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&lengths).await) else { return };
    let Some(slot) = weights.slot(2) else { return };
    let stack = Stack::start(&json!({"minResidency": "1ms", "linger": "off"}), &slot).await;
    let relay = &stack.relay;
    // Four clients, each alternating between both models and requesting responses of different lengths.
    let client = async |number: usize| {
        for turn in 0..6 {
            let model = ["tiny-a", "tiny-b"][(number + turn) % 2];
            let tokens = lengths[(number + turn / 2) % lengths.len()];
            let reply = relay.fetch(stream(model, tokens)).await;
            assert_eq!(events(&reply), expected[&(model, tokens)], "{model}, {tokens} tokens");
        }
    };
    tokio::join!(client(0), client(1), client(2), client(3));
    // Each server identified itself in the worker's log, and the worker has counted all of them.
    let starts = [stack.starts("tiny-a"), stack.starts("tiny-b")];
    assert!(starts[0] > 0 && starts[1] > 0 && stack.loads().await == starts[0] + starts[1], "{starts:?}");
    assert_eq!(weights.servers().len(), 1, "one model at a time");
}

#[tokio::test]
async fn stream_during_swap_demand_ends_whole() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[30, 4000]).await) else { return };
    let Some(slot) = weights.slot(1) else { return };
    let stack = Stack::start(&json!({"minResidency": "1ms", "maxWait": "1ms"}), &slot).await;
    let mut long = stack.relay.send(stream("tiny-a", 4000)).await;
    long.read_until("data: ").await;
    let other = stack.relay.begin(stream("tiny-b", 30));
    stack.until_slot("the gate is closed for the stream", |slot| slot["state"] == "draining").await;
    assert!(!other.is_answered());
    assert_eq!(events(&long.read_to_end().await), expected[&("tiny-a", 4000)]);
    assert_eq!(events(&other.reply().await), expected[&("tiny-b", 30)]);
    assert_eq!(stack.slot().await["last_swap"]["severed"], 0);
}

#[tokio::test]
async fn two_relays_share_loaded_model_of_one_worker() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[60]).await) else { return };
    let Some(slot) = weights.slot(2) else { return };
    let relay = || Relay::builder().env("RELAY_COUNT", "2").start();
    let relays = Arc::new([relay().await, relay().await]);
    let front = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = front.local_addr().expect("it is bound");
    let behind = relays.each_ref().map(Relay::addr);
    // Each connection goes to the next relay.
    tokio::spawn(async move {
        for relay in behind.into_iter().cycle() {
            let Ok((mut inbound, _)) = front.accept().await else { break };
            tokio::spawn(async move {
                let mut outbound = TcpStream::connect(relay).await?;
                copy_bidirectional(&mut inbound, &mut outbound).await
            });
        }
    });
    let yaml = json!({"multiplexer": {"minResidency": "1ms", "linger": "off", "slots": [slot]}}).to_string();
    let (worker, _config) = start_worker(&yaml, address).await;
    for relay in &*relays {
        wait_for_model(relay, "tiny-b").await;
    }
    let client = async |number: usize| {
        let mut served = HashMap::new();
        for turn in 0..6 {
            let model = ["tiny-a", "tiny-b"][(number / 2 + turn) % 2];
            let reply = relays[number % 2].fetch(stream(model, 60)).await;
            assert_eq!(events(&reply), expected[&(model, 60)], "relay {}", number % 2);
            *served.entry(model).or_insert(0) += 1;
        }
        assert_eq!(served, HashMap::from([("tiny-a", 3), ("tiny-b", 3)]));
    };
    tokio::join!(client(0), client(1), client(2), client(3));
    eventually("no request is in flight", async || worker.metric("modelrelay_worker_requests_in_flight").await == 0.0)
        .await;
}
