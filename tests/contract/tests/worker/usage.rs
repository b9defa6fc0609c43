//! Token counts, response ids and details, read while forwarding in all three dialects.

use modelrelay_harness::fake_backend::Answer;
use modelrelay_harness::fake_relay::{Ack, RequestSpec};
use modelrelay_harness::worker_process::Rig;
use serde_json::{Value, json};

fn counts(prompt: u64, completion: u64) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion})
}

/// Returns `response_complete` for a non-streamed response on this path.
async fn unary(path: &str, body: &Value) -> Value {
    let mut rig = Rig::core1().await;
    rig.answered(&RequestSpec::chat("m").path(path), &Answer::json(200, body)).await.end
}

/// Returns `response_complete` for a stream of these events, which the backend writes byte by byte.
async fn streamed(path: &str, events: &[(&str, Value)]) -> Value {
    streamed_for(&RequestSpec::stream("m").path(path), events).await
}

async fn streamed_for(spec: &RequestSpec, events: &[(&str, Value)]) -> Value {
    let mut rig = Rig::core1().await;
    let request = rig.link.send_request(spec);
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    let mut body = Vec::new();
    for (name, data) in events {
        if !name.is_empty() {
            body.extend(format!("event: {name}\n").into_bytes());
        }
        body.extend(format!("data: {data}\n\n").into_bytes());
    }
    for byte in &body {
        call.chunk(&[*byte]).await;
    }
    call.end_stream().await;
    let reply = rig.link.reply(&request).await;
    assert!(reply.body == body, "reading the usage changed the stream");
    reply.end
}

#[tokio::test]
async fn chat_completion_reports_its_tokens() {
    let body = json!({"id": "c", "choices": [{"message": {"content": "hi"}}], "usage": counts(42, 128)});
    assert_eq!(unary("/v1/chat/completions", &body).await["token_counts"], counts(42, 128));
}

#[tokio::test]
async fn chat_stream_reports_its_tokens() {
    let events = [
        ("", json!({"choices": [{"delta": {"content": "hi"}}]})),
        ("", json!({"choices": [], "usage": counts(7, 3)})),
        ("", json!("[DONE]")),
    ];
    assert_eq!(streamed("/v1/chat/completions", &events).await["token_counts"], counts(7, 3));
}

#[tokio::test]
async fn chat_stream_with_null_usage_reports_last_one() {
    let events = [
        ("", json!({"choices": [{"delta": {"content": "hi"}}], "usage": null})),
        ("", json!({"choices": [], "usage": counts(9, 1)})),
    ];
    assert_eq!(streamed("/v1/chat/completions", &events).await["token_counts"], counts(9, 1));
}

#[tokio::test]
async fn message_reports_its_tokens() {
    let body =
        json!({"id": "msg_1", "type": "message", "content": [], "usage": {"input_tokens": 11, "output_tokens": 5}});
    assert_eq!(unary("/v1/messages", &body).await["token_counts"], counts(11, 5));
}

#[tokio::test]
async fn messages_stream_reports_its_tokens() {
    let usage = json!({"input_tokens": 25, "output_tokens": 1});
    let events = [
        ("message_start", json!({"type": "message_start", "message": {"id": "msg_1", "usage": usage}})),
        ("content_block_delta", json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}})),
        ("message_delta", json!({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 15}})),
        ("message_stop", json!({"type": "message_stop"})),
    ];
    assert_eq!(streamed("/v1/messages", &events).await["token_counts"], counts(25, 15));
}

#[tokio::test]
async fn response_reports_its_tokens_and_id() {
    let usage = json!({"input_tokens": 30, "output_tokens": 12, "total_tokens": 42});
    let end = unary("/v1/responses", &json!({"id": "resp_abc", "object": "response", "usage": usage})).await;
    assert_eq!(end["token_counts"], counts(30, 12));
    assert_eq!(end["response_id"], "resp_abc");
}

#[tokio::test]
async fn responses_stream_reports_its_tokens_and_id() {
    let usage = json!({"input_tokens": 8, "output_tokens": 4, "total_tokens": 12});
    let created =
        json!({"type": "response.created", "response": {"id": "resp_s", "object": "response", "usage": null}});
    let completed =
        json!({"type": "response.completed", "response": {"id": "resp_s", "object": "response", "usage": usage}});
    let delta = json!({"type": "response.output_text.delta", "delta": "hi"});
    let events =
        [("response.created", created), ("response.output_text.delta", delta), ("response.completed", completed)];
    let end = streamed("/v1/responses", &events).await;
    assert_eq!(end["token_counts"], counts(8, 4));
    assert_eq!(end["response_id"], "resp_s");
}

#[tokio::test]
async fn token_counts_are_absent_without_backend_usage() {
    let end = unary("/v1/chat/completions", &json!({"choices": []})).await;
    assert!(end.get("token_counts").is_none_or(Value::is_null), "{end}");
    assert!(end.get("response_id").is_none_or(Value::is_null), "{end}");
    let end = streamed("/v1/chat/completions", &[("", json!({"choices": [{"delta": {"content": "hi"}}]}))]).await;
    assert!(end.get("token_counts").is_none_or(Value::is_null), "{end}");
}

#[tokio::test]
async fn usage_within_response_text_is_ignored() {
    let words = r#"{"usage":{"prompt_tokens":999,"completion_tokens":999,"total_tokens":1998}}"#;
    let body = json!({"choices": [{"message": {"content": words}}], "usage": counts(2, 3)});
    assert_eq!(unary("/v1/chat/completions", &body).await["token_counts"], counts(2, 3));
    let events = [
        ("", json!({"choices": [{"delta": {"content": format!("data: {words}\n\n")}}]})),
        ("", json!({"choices": [], "usage": counts(4, 5)})),
    ];
    assert_eq!(streamed("/v1/chat/completions", &events).await["token_counts"], counts(4, 5));
}

#[tokio::test]
async fn malformed_json_response_passes_without_token_counts() {
    let mut rig = Rig::core1().await;
    let answer = Answer::new(200, &[("content-type", "application/json")], b"{\"usage\": {\"prompt_tokens\": ");
    let reply = rig.answered(&RequestSpec::chat("m"), &answer).await;
    assert_eq!((reply.status, reply.body), (200, answer.body));
    assert!(reply.end.get("token_counts").is_none_or(Value::is_null), "{}", reply.end);
}

#[tokio::test]
async fn embedding_tokens_are_counted() {
    let usage = json!({"prompt_tokens": 6, "total_tokens": 6});
    let end = unary("/v1/embeddings", &json!({"object": "list", "data": [], "usage": usage})).await;
    assert_eq!((&end["token_counts"]["prompt_tokens"], &end["token_counts"]["total_tokens"]), (&json!(6), &json!(6)));
}

#[tokio::test]
async fn details_are_sent_only_if_wanted() {
    let choice = json!({"index": 0, "delta": {}, "finish_reason": "length"});
    let events = [
        (
            "",
            json!({"id": "chatcmpl-1", "model": "org/m", "choices": [{"delta": {"content": "hi"}, "finish_reason": null}]}),
        ),
        ("", json!({"id": "chatcmpl-1", "model": "org/m", "choices": [choice]})),
        ("", json!({"id": "chatcmpl-1", "model": "org/m", "choices": [], "usage": counts(4, 5)})),
        ("", json!("[DONE]")),
    ];
    let wanted = streamed_for(&RequestSpec::stream("m").wants_details(), &events).await;
    let details = json!({"model": "org/m", "id": "chatcmpl-1", "finish_reasons": ["length"]});
    assert_eq!((&wanted["details"], &wanted["token_counts"]), (&details, &counts(4, 5)));
    let unwanted = streamed("/v1/chat/completions", &events).await;
    assert_eq!((unwanted.get("details"), &unwanted["token_counts"]), (None, &counts(4, 5)));
}

#[tokio::test]
async fn details_name_kind_of_backend() {
    let mut rig = Rig::with(&Ack::core1(), 1, |worker| worker.env("BACKEND_ENGINE", "llama-server")).await;
    let answer = Answer::json(200, &json!({"data": []}));
    let end = rig.answered(&RequestSpec::chat("m").path("/v1/embeddings").wants_details(), &answer).await.end;
    assert_eq!(end["details"], json!({"backend": "llama_cpp"}));
    // An error has no other details.
    let error = Answer::json(400, &json!({"id": "x", "model": "m"}));
    let end = rig.answered(&RequestSpec::chat("m").wants_details(), &error).await.end;
    assert_eq!(end["details"], json!({"backend": "llama_cpp"}));
}
