//! Interrupted requests: by a swap, by a client, by a model that cannot be loaded, by a server that dies.

use std::time::Duration;

use serde_json::json;

use crate::rig::{Stack, Weights, eventually, kill};
use crate::stream::{answer, chat, end_of, events, expected, stream};

/// This number of tokens takes longer than any drain here.
const ENDLESS: u32 = 30_000;

/// A llama-server that is stopped while it responds sometimes hangs, and is killed ten seconds later.
const SWAP: Duration = Duration::from_secs(30);

#[tokio::test]
async fn stream_outlasting_drain_ends_with_dialect_error() {
    let Some(weights) = Weights::new() else { return };
    let Some(slot) = weights.slot(2) else { return };
    let knobs = json!({"minResidency": "1ms", "maxWait": "1ms", "drainTimeout": "200ms"});
    let stack = Stack::start(&knobs, &slot).await;
    let paths = ["/v1/chat/completions", "/v1/messages"];
    let [openai, anthropic] = paths.map(|path| stack.relay.begin(chat(path, "tiny-a", ENDLESS)));
    let (mut openai, mut anthropic) = (openai.response().await, anthropic.response().await);
    openai.read_until("data: ").await;
    anthropic.read_until("content_block_delta").await;
    let other = stack.relay.begin(answer("tiny-b", 5)).response_within(SWAP).await.read_to_end().await;
    assert_eq!(other.with_status(200).json()["model"], "tiny-b");
    for (reply, code, end) in [
        (openai.read_to_end().await, r#""code":"severed_by_swap""#, "[DONE]"),
        (anthropic.read_to_end().await, r#""type":"overloaded_error""#, "message_stop"),
    ] {
        let text = reply.text();
        assert!(reply.error_frame().is_some() && text.contains(code) && !text.contains(end), "{}", end_of(&text));
    }
    assert_eq!(stack.worker.metric("modelrelay_worker_severed_total").await, 2.0);
    assert_eq!(weights.servers().len(), 1, "the severed server is gone");
}

#[tokio::test]
async fn client_leaving_before_eviction_causes_no_swap() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[4000]).await) else { return };
    let Some(slot) = weights.slot(1) else { return };
    let stack = Stack::start(&json!({"minResidency": "1ms", "maxWait": "1ms"}), &slot).await;
    let mut long = stack.relay.send(stream("tiny-a", 4000)).await;
    long.read_until("data: ").await;
    let other = stack.relay.begin(stream("tiny-b", 30));
    stack.until_slot("the gate is closed", |slot| slot["state"] == "draining").await;
    other.abandon();
    stack.until_slot("the gate is open again", |slot| slot["state"] == "ready").await;
    assert_eq!(events(&long.read_to_end().await), expected[&("tiny-a", 4000)]);
    assert_eq!((stack.starts("tiny-a"), stack.starts("tiny-b"), stack.loads().await), (1, 0, 1));
    assert_eq!(stack.worker.metric("modelrelay_worker_swaps_aborted_total").await, 1.0);
}

#[tokio::test]
async fn missing_model_file_rolls_back_swap() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[60]).await) else { return };
    let Some(slot) = weights.slot(1) else { return };
    let stack = Stack::start(&json!({"minResidency": "1ms"}), &slot).await;
    assert_eq!(events(&stack.relay.fetch(stream("tiny-a", 60)).await), expected[&("tiny-a", 60)]);
    let refused = stack.relay.fetch(answer("missing", 5)).await.with_status(503);
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "backend_unavailable");
    assert!(refused.header("retry-after").is_some(), "{error}");
    let (message, folder) = (error["message"].as_str().unwrap_or_default(), weights.folder().to_string_lossy());
    assert!(message.contains("missing") && message.contains("exit code 1") && !message.contains(&*folder), "{message}");
    let log = stack.worker.process.log();
    assert!(log.lines().iter().any(|line| line.contains("missing.gguf") && line.contains("model=\"missing\"")));
    // It was not requested again.
    stack
        .until_slot("the previous model is loaded again", |slot| {
            slot["resident"] == "tiny-a" && slot["state"] == "ready"
        })
        .await;
    assert_eq!(events(&stack.relay.fetch(stream("tiny-a", 60)).await), expected[&("tiny-a", 60)]);
    assert_eq!(stack.starts("tiny-a"), 2, "before and after");
}

#[tokio::test]
async fn dead_server_is_detected_and_restarted() {
    let (Some(weights), Some(expected)) = (Weights::new(), expected(&[60]).await) else { return };
    let Some(slot) = weights.slot(2) else { return };
    let stack = Stack::start(&json!({}), &slot).await;
    // One that had died before it had finished any response would be left alone for a while.
    assert_eq!(events(&stack.relay.fetch(stream("tiny-a", 60)).await), expected[&("tiny-a", 60)]);
    let mut cut = stack.relay.send(stream("tiny-a", ENDLESS)).await;
    cut.read_until("data: ").await;
    let [server] = weights.servers()[..] else { panic!("{:?}", weights.servers()) };
    kill(server).await;
    let next = stack.relay.begin(stream("tiny-a", 60));
    let cut = cut.read_to_end().await;
    assert!(cut.error_frame().is_some() && !cut.text().contains("[DONE]"), "{}", end_of(&cut.text()));
    assert_eq!(events(&next.reply().await), expected[&("tiny-a", 60)]);
    assert_eq!(stack.starts("tiny-a"), 2);
    // The same for an idle server.
    eventually("only a new server is running", async || weights.servers().len() == 1).await;
    kill(weights.servers()[0]).await;
    assert_eq!(events(&stack.relay.fetch(stream("tiny-a", 60)).await), expected[&("tiny-a", 60)]);
    stack.worker.process.wait_for_line("backend lost").await;
}
