//! Request headers from a client to the backend.

use modelrelay_harness::client::Request;
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

const SENT: [(&str, &str); 5] = [
    ("user-agent", "agent/1"),
    ("x-tenant", "t-1"),
    ("x-secret", "Bearer mr-id-secret"),
    ("x-other", "1"),
    ("anthropic-beta", "b-1"),
];

/// Sends a request with all of them, and returns those that the backend receives.
async fn received(stack: &mut Stack) -> Vec<&'static str> {
    let request = Request::post("/v1/chat/completions", &json!({"model": "m"}));
    let request = SENT.iter().fold(request, |request, (name, value)| request.header(name, value));
    let client = stack.relay.begin(request);
    let call = stack.backend.call().await;
    let received = SENT.iter().filter(|(name, value)| call.head.header(name) == Some(value)).map(|(name, _)| *name);
    let received = received.collect();
    call.answer_json(200, &json!({})).await;
    client.reply().await.with_status(200);
    received
}

#[tokio::test]
async fn configured_headers_reach_backend() {
    let relay_headers = "User-Agent, x-tenant, x-secret";
    let mut stack = Stack::with(|relay| relay.env("REQUEST_HEADERS", relay_headers), |worker| worker).await;
    assert_eq!(received(&mut stack).await, ["user-agent", "x-tenant", "anthropic-beta"]);
}

#[tokio::test]
async fn no_further_header_reaches_backend_by_default() {
    let mut stack = Stack::start().await;
    assert_eq!(received(&mut stack).await, ["anthropic-beta"]);
}
