//! Both programs on a network that silently fails: no packet, no reset, no end of the connection.

use std::time::{Duration, Instant};

use modelrelay_harness::{
    client::Request,
    fake_backend::{Answer, sse},
    worker_process::Stack,
};
use serde_json::json;

use crate::inside;

/// Three heartbeats of a second each, times three for a busy machine.
const FOUND: Duration = Duration::from_secs(9);

const CHAT: &str = "/v1/chat/completions";

async fn stack() -> Stack {
    Stack::with(|relay| relay.env("HEARTBEAT_INTERVAL", "1"), |worker| worker).await
}

async fn both_find_out(stack: &Stack, since: Instant) {
    stack.relay.log().wait_for_line("worker heartbeat timed out").await;
    stack.worker.process.wait_for_line("link lost").await;
    assert!(since.elapsed() < FOUND, "found only after {:?}", since.elapsed());
}

async fn answers_again(stack: &Stack) {
    stack.wait_for_model("m").await;
    stack.backend.answer_with(|_, _| Answer::json(200, &json!({"back": true})));
    let reply = stack.relay.fetch(Request::post(CHAT, &json!({"model": "m"}))).await;
    assert_eq!(reply.with_status(200).json(), json!({"back": true}));
}

#[tokio::test]
async fn dead_idle_link_is_detected_and_replaced() {
    let test = "dead_network::dead_idle_link_is_detected_and_replaced";
    inside(test, |namespace| async move {
        let stack = stack().await;
        let dead = Instant::now();
        namespace.set_network(false).await;
        both_find_out(&stack, dead).await;
        namespace.set_network(true).await;
        answers_again(&stack).await;
    })
    .await;
}

#[tokio::test]
async fn link_dying_during_body_is_detected() {
    let test = "dead_network::link_dying_during_body_is_detected";
    inside(test, |namespace| async move {
        let mut stack = stack().await;
        let client = stack.relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})));
        let mut call = stack.backend.call().await;
        call.read_body().await;
        call.start_stream().await;
        let endless = tokio::spawn(async move { while call.chunk(&sse(&"x".repeat(60_000))).await {} });
        let mut response = client.response().await;
        response.read_at_least(8 << 20).await;
        let dead = Instant::now();
        namespace.set_network(false).await;
        both_find_out(&stack, dead).await;
        namespace.set_network(true).await;
        assert!(!response.read_to_end().await.is_complete(), "a truncated stream ended as complete");
        endless.await.expect("the backend's stream ends with its connection");
        answers_again(&stack).await;
    })
    .await;
}
