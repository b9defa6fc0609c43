//! The cost of swapping, compared with documented limits. Tests that compare speeds need the machine for themselves:
//! `.config/nextest.toml` runs each of these alone.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::rig::{LONG, Stack, Weights};
use crate::stream::{answer, stream};

#[tokio::test]
async fn queued_requests_for_two_models_need_two_swaps() {
    let Some(weights) = Weights::new() else { return };
    let Some(slot) = weights.slot(1) else { return };
    let stack = Stack::start(&json!({}), &slot).await;
    let mut running = stack.relay.send(stream("tiny-a", 2000)).await;
    running.read_until("data: ").await;
    let before = stack.loads().await;
    let queued: Vec<_> =
        (0..12).map(|number| stack.relay.begin(answer(["tiny-a", "tiny-b"][number % 2], 20))).collect();
    stack.relay.wait_for_queue_depth("local", 12).await;
    assert!(running.read_to_end().await.is_complete());
    for (number, queued) in queued.into_iter().enumerate() {
        assert_eq!(queued.reply().await.with_status(200).json()["model"], ["tiny-a", "tiny-b"][number % 2]);
    }
    let (swaps, starts) = (stack.loads().await - before, stack.starts("tiny-a") + stack.starts("tiny-b"));
    assert!(swaps <= 2 && starts == before + swaps, "{swaps} swaps, {starts} starts");
}

#[tokio::test]
async fn alternating_clients_need_at_most_25_loads() {
    let Some(weights) = Weights::new() else { return };
    let Some(slot) = weights.slot(4) else { return };
    let stack = Stack::start(&json!({}), &slot).await;
    let relay = &stack.relay;
    let client = async |number: usize| {
        for turn in 0..20 {
            let model = ["tiny-a", "tiny-b"][(number + turn) % 2];
            assert_eq!(relay.fetch(answer(model, 30)).await.with_status(200).json()["model"], model);
        }
    };
    let (client, all) = (&client, 0..8);
    futures_util::future::join_all(all.map(client)).await;
    let (loads, starts) = (stack.loads().await, stack.starts("tiny-a") + stack.starts("tiny-b"));
    eprintln!("{loads} loads for 160 requests");
    assert!(loads <= 25 && starts == loads, "{loads} loads, {starts} starts");
}

#[tokio::test]
async fn lone_request_next_to_saturated_model_is_served() {
    saturated(Duration::from_secs(8)).await;
}

/// The same over the documented minute.
#[tokio::test]
#[ignore = "takes two minutes; run by scripts/test saturated"]
async fn lone_request_during_saturated_minute_is_served() {
    saturated(Duration::from_secs(60)).await;
}

/// Four clients keep one model busy. The number of responses that they get in `window` must take only a little longer
/// while another client requests another model, and that request must not wait longer than its bound.
async fn saturated(window: Duration) {
    let Some(weights) = Weights::new() else { return };
    let Some(slot) = weights.slot(2) else { return };
    let drain = 5;
    let knobs = json!({"drainTimeout": format!("{drain}s")});
    let stack = Stack::start(&knobs, &slot).await;
    // Both were loaded before, so that the worker knows their cost.
    for model in ["tiny-b", "tiny-a"] {
        stack.relay.fetch(answer(model, 5)).await.with_status(200);
    }
    let counted = tokio::sync::watch::Sender::new(0_usize);
    let client = async || {
        loop {
            let reply = stack.relay.fetch(answer("tiny-a", 100)).await;
            assert_eq!(reply.with_status(200).json()["model"], "tiny-a");
            counted.send_modify(|count| *count += 1);
        }
    };
    let judge = async {
        let began = Instant::now();
        let mut count = counted.subscribe();
        while began.elapsed() < window {
            count.changed().await.expect("it is counted");
        }
        let (alone, answers) = (began.elapsed(), *count.borrow_and_update());
        let cost = cost_of(&stack.slot().await, "tiny-b");
        let start = Instant::now();
        let lone = stack.relay.begin(answer("tiny-b", 20));
        let waited = async {
            lone.reply().await.with_status(200);
            start.elapsed()
        };
        let rest = async {
            count.wait_for(|count| *count >= 2 * answers).await.expect("it is counted");
            start.elapsed()
        };
        let (waited, mixed) = tokio::join!(waited, tokio::time::timeout(LONG * 3, rest));
        let mixed = mixed.expect("the clients of the other model are served again");
        // The load of the machine may have changed meanwhile: the slower of the times before and after is used.
        let after = Instant::now();
        let rest = count.wait_for(|count| *count >= 3 * answers);
        tokio::time::timeout(LONG * 3, rest).await.expect("they go on").expect("it is counted");
        let alone = alone.max(after.elapsed());
        // docs/multiplexer/policy.md: the other model's turn (quantum, drain and swap), and its own drain and swap.
        let quantum = (cost * 8).max(Duration::from_secs(5));
        let bound = quantum + 2 * (cost + Duration::from_secs(drain));
        let kept = alone.as_secs_f64() / mixed.as_secs_f64();
        eprintln!(
            "{answers} answers in {alone:.1?} alone, in {mixed:.1?} with a lone request in parallel: {:.0} %; it took {waited:.1?} \
             of {bound:.1?}, a swap costs {cost:.1?}",
            100.0 * kept
        );
        assert!(waited <= bound, "{waited:?} > {bound:?}");
        assert!(kept >= 0.7, "{kept}");
        assert!(stack.starts("tiny-b") >= 2 && stack.starts("tiny-a") >= 2);
    };
    tokio::select! {
        () = judge => {}
        _ = async { tokio::join!(client(), client(), client(), client()) } => {}
    }
}

/// Returns the cost that the worker expects of a swap to this model.
fn cost_of(slot: &Value, model: &str) -> Duration {
    let models = slot["models"].as_array().expect("a slot has models");
    let cost = models.iter().find(|entry| entry["id"] == model).and_then(|entry| entry["swap_cost_ms"].as_u64());
    Duration::from_millis(cost.expect("it was measured"))
}
