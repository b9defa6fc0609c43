//! `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's dialect.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::{Value, json};

use super::answer::{Completion, Finish, Limits, Prompt, text_of_content, text_of_messages};
use super::reply::{DemoError, Dialect, Frames, fresh_id, parse_for_model, unary, wants_stream};
use super::{Demo, tokens};

const DIALECT: Dialect = Dialect::Anthropic;

/// `POST /v1/messages`.
pub(super) async fn create(
    State(demo): State<Demo>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    let prompt = prompt_of(&body)?;
    let limits = Limits::read(&body, &["max_tokens"], "stop_sequences")
        .map_err(|(param, problem)| DemoError::invalid(DIALECT, param, &problem))?;
    if limits.max_tokens.is_none() {
        return Err(DemoError::invalid(DIALECT, "max_tokens", "max_tokens: field required"));
    }
    let answer = Completion::new(&prompt, None, &limits);
    if wants_stream(DIALECT, &body)? {
        return Ok(stream(&body["model"], &answer).into_response(&demo));
    }
    let mut message = message(&body["model"], &answer);
    message["content"] = json!([{"type": "text", "text": answer.text}]);
    message["stop_reason"] = stop_reason(&answer.finish);
    message["stop_sequence"] = stop_sequence(&answer.finish);
    message["usage"]["output_tokens"] = json!(answer.output_tokens);
    Ok(unary(&demo, answer.words().count(), message).await)
}

/// `POST /v1/messages/count_tokens`.
pub(super) async fn count_tokens(
    State(demo): State<Demo>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    Ok(Json(json!({"input_tokens": tokens::count(&prompt_of(&body)?.all)})))
}

fn prompt_of(body: &Value) -> Result<Prompt, DemoError> {
    let mut prompt =
        text_of_messages(&body["messages"]).map_err(|problem| DemoError::invalid(DIALECT, "messages", &problem))?;
    prompt.all.push_str(&text_of_content(&body["system"]));
    Ok(prompt)
}

/// Returns a message without text.
fn message(model: &Value, answer: &Completion) -> Value {
    json!({
        "id": fresh_id("msg_"), "type": "message", "role": "assistant", "model": model, "content": [],
        "stop_reason": null, "stop_sequence": null,
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": 0},
    })
}

fn stream(model: &Value, answer: &Completion) -> Frames {
    let mut frames = Frames::default();
    frames.event(&json!({"type": "message_start", "message": message(model, answer)}));
    let block = json!({"type": "text", "text": ""});
    frames.event(&json!({"type": "content_block_start", "index": 0, "content_block": block}));
    frames.event(&json!({"type": "ping"}));
    for word in answer.words() {
        let delta = json!({"type": "text_delta", "text": word});
        frames.word_event(&json!({"type": "content_block_delta", "index": 0, "delta": delta}));
    }
    frames.event(&json!({"type": "content_block_stop", "index": 0}));
    frames.event(&json!({
        "type": "message_delta",
        "delta": {"stop_reason": stop_reason(&answer.finish), "stop_sequence": stop_sequence(&answer.finish)},
        "usage": {"input_tokens": answer.input_tokens, "output_tokens": answer.output_tokens},
    }));
    frames.event(&json!({"type": "message_stop"}));
    frames
}

fn stop_reason(finish: &Finish) -> Value {
    json!(match finish {
        Finish::End => "end_turn",
        Finish::Stop(_) => "stop_sequence",
        Finish::Length => "max_tokens",
    })
}

fn stop_sequence(finish: &Finish) -> Value {
    match finish {
        Finish::Stop(stop) => json!(stop),
        Finish::End | Finish::Length => Value::Null,
    }
}
