//! Each dialect, non-streamed and streamed, byte for byte.

use modelrelay_harness::client::{Piece, Request};
use modelrelay_harness::fake_backend::Answer;
use modelrelay_harness::worker_process::Stack;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

/// Returns a body whose exact text would not survive parsing and serializing.
fn odd_request(stream: bool) -> String {
    format!("{{ \"stream\":{stream},\r\n\t\"model\" : \"m\", \"n\": 1.0e0, \"text\": \"\\u017c\u{017c}\\/\" }}")
}

async fn unary(path: &str) {
    let mut stack = Stack::start().await;
    let body = odd_request(false);
    let request = Request::new("POST", path).header("content-type", "application/json").body(body.clone());
    let answering = stack.relay.begin(request);
    let mut call = stack.backend.call().await;
    assert_eq!(call.head.target, path);
    assert_eq!(call.read_body().await, body.as_bytes());
    let answer =
        Answer::new(200, &[("content-type", "application/json")], b"{ \"odd\" :\t\"\\u017c\", \"n\":1.0e0 }\n");
    call.answer(&answer).await;
    let reply = answering.reply().await;
    assert_eq!((reply.status, reply.body.as_slice(), reply.aborted), (200, answer.body.as_slice(), false));
    assert_eq!(reply.header("content-type").as_deref(), Some("application/json"));
    assert!(reply.header("x-request-id").is_some() && reply.header("request-id").is_some());
}

/// Streams these events, split at every ninth byte, and compares what the client receives.
async fn streamed(path: &str, events: &str) {
    let mut stack = Stack::start().await;
    let request = Request::new("POST", path).header("content-type", "application/json").body(odd_request(true));
    let answering = stack.relay.begin(request);
    let mut call = stack.backend.call().await;
    call.read_body().await;
    call.start_stream().await;
    let mut response = answering.response().await;
    assert_eq!((response.status, response.headers.first("content-type")), (200, Some("text/event-stream".to_owned())));
    let mut got = Vec::new();
    for cut in events.as_bytes().chunks(9) {
        call.chunk(cut).await;
        got.extend(response.read_at_least(cut.len()).await);
    }
    call.end_stream().await;
    assert_eq!(response.next_piece().await, Piece::End);
    assert!(got == events.as_bytes(), "{:?}", String::from_utf8_lossy(&got));
}

#[tokio::test]
async fn chat_completion_passes_byte_for_byte() {
    unary(CHAT).await;
}

#[tokio::test]
async fn response_passes_byte_for_byte() {
    unary(RESPONSES).await;
}

#[tokio::test]
async fn message_passes_byte_for_byte() {
    unary(MESSAGES).await;
}

#[tokio::test]
async fn chat_stream_passes_byte_for_byte() {
    let events = "data: {\"choices\":[{\"delta\":{\"content\":\"zażółć 🦙\"}}]}\n\n: odd comment\n\ndata: [DONE]\n\n";
    streamed(CHAT, events).await;
}

#[tokio::test]
async fn responses_stream_passes_byte_for_byte() {
    let events = "event: response.created\ndata: {\"response\":{\"id\":\"resp_1\"}}\n\n\
                  event: response.completed\r\ndata: {\"response\":{\"id\":\"resp_1\",\"text\":\"żółw\"}}\r\n\r\n";
    streamed(RESPONSES, events).await;
}

#[tokio::test]
async fn messages_stream_passes_byte_for_byte() {
    let events = "event: message_start\ndata: {\"type\":\"message_start\"}\n\nevent: ping\ndata: {\"type\": \"ping\"}\n\n\
                  event: message_stop\ndata: {\"type\":\"message_stop\",\"x\":\"🦙\"}\n\n";
    streamed(MESSAGES, events).await;
}

#[tokio::test]
async fn backend_errors_pass_unchanged_unary_and_streamed() {
    let stack = Stack::start().await;
    stack.backend.answer_with(|head, _| {
        let status = head.header("x-request-id").and_then(|id| id.parse().ok()).unwrap_or(200);
        Answer::new(status, &[("content-type", "text/odd")], b"the backend's own words \xff")
    });
    for status in [400, 401, 404, 422, 429, 500, 503] {
        for stream in [false, true] {
            let request = Request::post(CHAT, &json!({"model": "m", "stream": stream}));
            let reply = stack.relay.fetch(request.header("x-request-id", status.to_string())).await;
            assert_eq!((reply.status, reply.body.as_slice()), (status, &b"the backend's own words \xff"[..]));
            assert_eq!(reply.header("content-type").as_deref(), Some("text/odd"));
        }
    }
}

#[tokio::test]
async fn client_accepting_gzip_receives_uncompressed_bytes() {
    let mut stack = Stack::start().await;
    let request = Request::post(CHAT, &json!({"model": "m"})).header("accept-encoding", "gzip, br, zstd");
    let answering = stack.relay.begin(request);
    let call = stack.backend.call().await;
    assert_eq!(call.head.header("accept-encoding"), None);
    call.answer_json(200, &json!({"plain": true})).await;
    let reply = answering.reply().await;
    assert_eq!((reply.json(), reply.header("content-encoding")), (json!({"plain": true}), None));
}

#[tokio::test]
async fn repeated_backend_headers_reach_client_repeated() {
    let stack = Stack::start().await;
    stack.backend.answer_with(|_, _| Answer::new(200, &[("vary", "accept"), ("vary", "origin")], b"{}"));
    let reply = stack.relay.fetch(Request::post(CHAT, &json!({"model": "m"}))).await;
    assert_eq!(reply.headers.all("vary"), ["accept", "origin"]);
}

#[tokio::test]
async fn stored_response_comes_from_worker_that_created_it() {
    let mut stack = Stack::start().await;
    let answering = stack.relay.begin(Request::post(RESPONSES, &json!({"model": "m"})));
    stack.backend.call().await.answer_json(200, &json!({"id": "resp_77", "object": "response"})).await;
    answering.reply().await.with_status(200);
    let answering = stack.relay.begin(Request::get("/v1/responses/resp_77"));
    let call = stack.backend.call().await;
    assert_eq!((call.head.method.as_str(), call.head.target.as_str()), ("GET", "/v1/responses/resp_77"));
    call.answer_json(200, &json!({"id": "resp_77", "status": "completed"})).await;
    assert_eq!(answering.reply().await.json()["status"], "completed");
}

#[tokio::test]
async fn backend_token_counts_reach_relay_metrics() {
    let stack = Stack::start().await;
    let usage = json!({"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42});
    stack.backend.answer_with(move |_, _| Answer::json(200, &json!({"choices": [], "usage": usage})));
    stack.relay.fetch(Request::post(CHAT, &json!({"model": "m"}))).await.with_status(200);
    let counted = || async {
        let metrics = stack.relay.get("/metrics").await.text();
        metrics.lines().any(|line| {
            line.starts_with("modelrelay_tokens_total{") && line.contains("type=\"input\"") && line.ends_with(" 40")
        })
    };
    stack.relay.eventually("40 input tokens in /metrics", counted).await;
}

#[tokio::test]
async fn unserved_model_is_unknown_regardless_of_catalogue() {
    let catalogue =
        "providers:\n- name: local\n  workerSecrets: [{value: worker-secret-of-the-tests}]\n  models: [{id: m}]\n";
    for stack in [Stack::start().await, Stack::with(|relay| relay.config(catalogue), |worker| worker).await] {
        let reply = stack.relay.fetch(Request::post(CHAT, &json!({"model": "other"}))).await;
        assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("model_not_found")));
    }
}

#[tokio::test]
async fn alias_reaches_backend_as_model_id() {
    let catalogue = "providers:\n- name: local\n  workerSecrets: [{value: worker-secret-of-the-tests}]\n  \
                     models: [{id: m, aliases: [claude-x]}]\n";
    let mut stack = Stack::with(|relay| relay.config(catalogue), |worker| worker).await;
    let answering = stack.relay.begin(Request::post(MESSAGES, &json!({"max_tokens": 1, "model": "claude-x"})));
    let mut call = stack.backend.call().await;
    assert_eq!(call.read_json().await, json!({"max_tokens": 1, "model": "m"}));
    call.answer_json(200, &Value::Null).await;
    answering.reply().await.with_status(200);
}
