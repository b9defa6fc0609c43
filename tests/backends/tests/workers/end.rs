//! The end of a worker, and of its servers.

use serde_json::json;

use crate::rig::{LONG, Stack, Weights, eventually};
use crate::stream::{end_of, events, expected, stream};

#[tokio::test]
async fn killed_worker_leaves_no_server_behind() {
    let Some(weights) = Weights::new() else { return };
    let Some(slot) = weights.slot(1) else { return };
    let mut stack = Stack::start(&json!({}), &slot).await;
    let mut cut = stack.relay.send(stream("tiny-a", 30_000)).await;
    cut.read_until("data: ").await;
    assert_eq!(weights.servers().len(), 1);
    stack.worker.process.kill().await;
    eventually("its server is gone too", async || weights.servers().is_empty()).await;
    let cut = cut.read_to_end().await;
    assert!(cut.error_frame().is_some() && !cut.text().contains("[DONE]"), "{}", end_of(&cut.text()));
}

#[tokio::test]
async fn sigterm_under_load_cuts_no_stream() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[30, 2000]).await) else { return };
    let Some(slot) = weights.slot(2) else { return };
    let mut stack = Stack::start(&json!({}), &slot).await;
    let running = [stack.relay.begin(stream("tiny-a", 2000)), stack.relay.begin(stream("tiny-a", 2000))];
    stack
        .until_slot("both run", |slot| {
            slot["requests"].as_array().is_some_and(|all| all.iter().any(|model| model["leases"] == 2))
        })
        .await;
    let waiting = [("tiny-a", 30), ("tiny-b", 30), ("tiny-b", 30)];
    let waiting = waiting.map(|(model, tokens)| (model, tokens, stack.relay.begin(stream(model, tokens))));
    stack.relay.wait_for_queue_depth("local", 3).await;
    stack.worker.terminate().await;
    for running in running {
        assert_eq!(events(&running.reply().await), expected[&("tiny-a", 2000)]);
    }
    assert!(stack.worker.process.wait_exit_within(LONG).await.success());
    assert!(weights.servers().is_empty(), "{}", stack.worker.log());
    let (_worker, _config) = stack.another_worker().await;
    for (model, tokens, waiting) in waiting {
        assert_eq!(events(&waiting.reply().await), expected[&(model, tokens)]);
    }
}
