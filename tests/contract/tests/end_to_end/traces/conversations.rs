//! The pseudonyms of conversations, which require `TRACE_CONVERSATIONS=true`.

use modelrelay_harness::client::Request;
use modelrelay_harness::relay::RelayBuilder;
use serde_json::json;

use super::collector::{Collector, Span};
use super::{chat, exporting_relay, only, parent};

const CONVERSATION: &str = "gen_ai.conversation.id";
const SESSION: &str = "planted-session-41";
const FIRST: &str = "planted-first-message-42 ";

/// Returns a turn of the conversation with this first message, which is long enough to be recognized.
fn turn(first: &str, turns: usize) -> Request {
    let mut messages = vec![json!({"role": "user", "content": first.repeat(100)})];
    for number in 1..turns {
        messages.push(json!({"role": "assistant", "content": format!("answer {number}")}));
        messages.push(json!({"role": "user", "content": format!("question {number}")}));
    }
    let body = json!({"model": "m", "messages": messages, "prompt_cache_key": SESSION});
    Request::post("/v1/chat/completions", &body)
}

fn showing(collector: &Collector) -> RelayBuilder {
    exporting_relay(collector).env("TRACE_CONVERSATIONS", "true")
}

/// Sends these requests through a relay with one worker. Returns their attributes for the conversation, and all spans.
async fn traced(relay: RelayBuilder, collector: &Collector, requests: Vec<Request>) -> (Vec<String>, Vec<Span>) {
    let relay = relay.start().await;
    let mut worker = relay.core1_worker(&["m"], 16).await;
    let (mut conversations, mut all) = (Vec::new(), Vec::new());
    for (number, request) in requests.into_iter().enumerate() {
        let trace = format!("{:032x}", number + 1);
        let client = relay.begin(request.header("traceparent", parent(&trace, "01")));
        let job = worker.expect_request().await;
        worker.answer(&job, &json!({})).await;
        client.reply().await.with_status(200);
        let spans = collector.ended_trace(&trace).await;
        conversations.push(only(&spans, "POST /v1/chat/completions").attribute(CONVERSATION));
        all.extend(spans);
    }
    (conversations, all)
}

#[tokio::test]
async fn turns_of_one_conversation_share_pseudonym() {
    let collector = Collector::start().await;
    let requests = vec![turn(FIRST, 1), turn("another first message ", 1), turn(FIRST, 2), turn(FIRST, 3)];
    let (shown, spans) = traced(showing(&collector), &collector, requests).await;
    let is_pseudonym = |text: &String| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    assert!(shown.iter().all(is_pseudonym), "{shown:?}");
    assert!(shown[0] == shown[2] && shown[0] == shown[3] && shown[0] != shown[1], "{shown:?}");
    let attempts: Vec<String> =
        spans.iter().filter(|span| span.name == "chat m").map(|span| span.attribute(CONVERSATION)).collect();
    assert_eq!(attempts, shown);
    // The only worker gets the requests whatever their conversation.
    let placements: Vec<String> =
        spans.iter().filter(|span| span.name == "chat m").map(|span| span.attribute("modelrelay.placement")).collect();
    assert_eq!(placements, ["least_load"; 4]);
    for planted in [FIRST, SESSION] {
        assert!(!collector.has_received(planted), "{planted} was exported");
    }

    // A second relay with the same worker secret.
    let other = Collector::start().await;
    assert_eq!(traced(showing(&other), &other, vec![turn(FIRST, 1)]).await.0, shown[..1]);
}

#[tokio::test]
async fn conversations_are_not_shown_without_opt_in() {
    let collector = Collector::start().await;
    let (shown, spans) = traced(exporting_relay(&collector), &collector, vec![turn(FIRST, 1), turn(FIRST, 2)]).await;
    assert_eq!(shown, ["", ""]);
    assert!(spans.iter().all(|span| span.attribute(CONVERSATION).is_empty()), "{spans:#?}");
    assert!(!collector.has_received(CONVERSATION), "the attribute was exported");
}

#[tokio::test]
async fn short_prompt_without_session_has_no_pseudonym() {
    let collector = Collector::start().await;
    assert_eq!(traced(showing(&collector), &collector, vec![chat()]).await.0, [""]);
}
