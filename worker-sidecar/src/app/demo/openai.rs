//! `/v1/chat/completions` and `/v1/completions`: two formats of the same response.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::{Value, json};

use super::Demo;
use super::answer::{Completion, Finish, Limits, Prompt, text_of_messages};
use super::reply::{DemoError, Dialect, Frames, fresh_id, parse_for_model, unary, unix_now, wants_stream};

const DIALECT: Dialect = Dialect::OpenAi;

/// `POST /v1/chat/completions`.
pub(super) async fn chat(State(demo): State<Demo>, body: Result<Bytes, BytesRejection>) -> Result<Response, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    let prompt =
        text_of_messages(&body["messages"]).map_err(|problem| DemoError::invalid(DIALECT, "messages", &problem))?;
    respond(&demo, &body, &prompt, &CHAT).await
}

/// `POST /v1/completions`.
pub(super) async fn completions(
    State(demo): State<Demo>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    let prompt = &body["prompt"];
    let only = prompt.as_array().filter(|prompts| prompts.len() == 1);
    let prompt = only
        .map_or(prompt, |prompts| &prompts[0])
        .as_str()
        .ok_or_else(|| DemoError::invalid(DIALECT, "prompt", "prompt must be one string"))?;
    respond(&demo, &body, &Prompt::text(prompt), &COMPLETION).await
}

/// The differences between the two routes.
struct Shape {
    id_prefix: &'static str,
    object: &'static str,
    chunk_object: &'static str,
    max_names: &'static [&'static str],
    /// The choice of a unary response, without its index and finish reason.
    whole: fn(&str) -> (&'static str, Value),
    /// The choice of a chunk with a word.
    part: fn(&str) -> (&'static str, Value),
    /// The first and the last choice of a stream, which contain no word.
    open: Option<fn() -> Value>,
    close: fn() -> (&'static str, Value),
}

const CHAT: Shape = Shape {
    id_prefix: "chatcmpl-",
    object: "chat.completion",
    chunk_object: "chat.completion.chunk",
    max_names: &["max_completion_tokens", "max_tokens"],
    whole: |text| ("message", json!({"role": "assistant", "content": text})),
    part: |word| ("delta", json!({"content": word})),
    open: Some(|| json!({"role": "assistant", "content": ""})),
    close: || ("delta", json!({})),
};

const COMPLETION: Shape = Shape {
    id_prefix: "cmpl-",
    object: "text_completion",
    chunk_object: "text_completion",
    max_names: &["max_tokens"],
    whole: |text| ("text", json!(text)),
    part: |word| ("text", json!(word)),
    open: None,
    close: || ("text", json!("")),
};

async fn respond(demo: &Demo, body: &Value, prompt: &Prompt, shape: &Shape) -> Result<Response, DemoError> {
    let limits = Limits::read(body, shape.max_names, "stop")
        .map_err(|(param, problem)| DemoError::invalid(DIALECT, param, &problem))?;
    let answer = Completion::new(prompt, None, &limits);
    if wants_stream(DIALECT, body)? {
        let with_usage = body["stream_options"]["include_usage"].as_bool().unwrap_or(false);
        return Ok(stream(&body["model"], &answer, shape, with_usage).into_response(demo));
    }
    let whole = json!({
        "id": fresh_id(shape.id_prefix), "object": shape.object, "created": unix_now(), "model": body["model"],
        "choices": [choice((shape.whole)(&answer.text), Some(&answer.finish))], "usage": usage(&answer),
    });
    Ok(unary(demo, answer.words().count(), whole).await)
}

fn stream(model: &Value, answer: &Completion, shape: &Shape, with_usage: bool) -> Frames {
    let (id, created) = (fresh_id(shape.id_prefix), unix_now());
    let chunk = |choices: Value, usage: Value| {
        let mut chunk = json!({
            "id": id, "object": shape.chunk_object, "created": created, "model": model, "choices": choices,
        });
        if with_usage {
            chunk["usage"] = usage;
        }
        chunk
    };
    let mut frames = Frames::default();
    if let Some(open) = shape.open {
        frames.data(&chunk(json!([choice(("delta", open()), None)]), Value::Null));
    }
    for word in answer.words() {
        frames.word(&chunk(json!([choice((shape.part)(word), None)]), Value::Null));
    }
    frames.data(&chunk(json!([choice((shape.close)(), Some(&answer.finish))]), Value::Null));
    if with_usage {
        frames.data(&chunk(json!([]), usage(answer)));
    }
    frames.done();
    frames
}

fn choice((name, content): (&str, Value), finish: Option<&Finish>) -> Value {
    let reason = finish.map(|finish| match finish {
        Finish::End | Finish::Stop(_) => "stop",
        Finish::Length => "length",
    });
    json!({"index": 0, name: content, "logprobs": null, "finish_reason": reason})
}

fn usage(answer: &Completion) -> Value {
    json!({
        "prompt_tokens": answer.input_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.input_tokens + answer.output_tokens,
    })
}
