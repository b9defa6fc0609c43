//! The attributes of a span that only the response contains: the worker reads them for a relay that traces the request.

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

use super::collector::{Collector, Span};
use super::{ENDPOINT, OTHER_TRACE, SOON, TRACE, chat, exchange, exporting_relay, only, parent};

const DETAILS: [&str; 4] =
    ["gen_ai.provider.name", "gen_ai.response.model", "gen_ai.response.id", "gen_ai.response.finish_reasons"];

fn details(span: &Span) -> [String; 4] {
    DETAILS.map(|key| span.attribute(key))
}

#[tokio::test]
async fn details_of_response_are_attributes_of_relay() {
    let collector = Collector::start().await;
    let url = collector.http.url();
    // The worker need not export spans.
    let mut stack = Stack::with(
        |relay| relay.env(ENDPOINT, &url).env(SOON.0, SOON.1),
        |worker| worker.env("BACKEND_ENGINE", "vllm"),
    )
    .await;
    let usage = json!({"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4}});
    let choices = json!([{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": "length"}]);
    let answer = json!({"id": "chatcmpl-1", "model": "org/m-1", "choices": choices, "usage": usage});
    exchange(&mut stack, chat().header("traceparent", parent(TRACE, "01")), &answer).await;
    let spans = collector.ended_trace(TRACE).await;
    let server = only(&spans, "POST /v1/chat/completions");
    assert_eq!(server.attribute("gen_ai.usage.cache_read.input_tokens"), "4");
    for span in [server, only(&spans, "chat m")] {
        assert_eq!(details(span), ["vllm", "org/m-1", "chatcmpl-1", "stop,length"], "{}", span.name);
    }
}

#[tokio::test]
async fn details_from_worker_are_cut() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let client = relay.begin(chat().header("traceparent", parent(TRACE, "01")));
    let job = worker.expect_request().await;
    assert_eq!(job.message["wants_details"], json!(true));
    worker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    worker.pieces(&job, b"{}").await;
    let reported = json!({"backend": "b".repeat(33), "model": "m\u{1b}".repeat(300), "id": "i".repeat(129),
        "finish_reasons": vec!["r".repeat(65); 17], "of_the_future": 1});
    worker.send(&json!({"type": "response_complete", "request_id": job.id, "details": reported})).await;
    client.reply().await.with_status(200);
    let spans = collector.ended_trace(TRACE).await;
    let reasons = vec!["r".repeat(64); 16].join(",");
    let cut = ["b".repeat(32), "m".repeat(256), "i".repeat(128), reasons];
    assert_eq!(details(only(&spans, "POST /v1/chat/completions")), cut);
}

#[tokio::test]
async fn worker_without_details_is_accepted() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let client = relay.begin(chat().header("traceparent", parent(TRACE, "01")));
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    client.reply().await.with_status(200);
    let spans = collector.ended_trace(TRACE).await;
    assert_eq!(details(only(&spans, "POST /v1/chat/completions")), ["", "", "", ""]);
}

/// Returns `wants_details` of a request, as a worker with or without `core1` receives it.
async fn wanted(relay: &Relay, core1: bool, request: Request) -> Option<serde_json::Value> {
    let mut worker = if core1 { relay.core1_worker(&["m"], 1).await } else { relay.worker(&["m"], 1).await };
    let client = relay.begin(request);
    let job = worker.expect_request().await;
    client.abandon();
    drop(worker);
    relay.wait_for_workers(0).await;
    job.message.get("wants_details").cloned()
}

#[tokio::test]
async fn details_are_wanted_only_for_exported_spans() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).start().await;
    let request = |flags| chat().header("traceparent", parent(OTHER_TRACE, flags));
    assert_eq!(wanted(&relay, true, request("01")).await, Some(json!(true)));
    assert_eq!(wanted(&relay, true, request("00")).await, None, "the client's trace is not sampled");
    assert_eq!(wanted(&relay, false, request("01")).await, None, "an old worker knows only the original fields");
    let without_traces = Relay::start().await;
    assert_eq!(wanted(&without_traces, true, request("01")).await, None);
}
