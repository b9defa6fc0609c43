//! `/v1/responses`: the only dialect with stored state, which its routing through a relay depends on.
//!
//! The newest [`STORED`] responses are kept, so that `previous_response_id` and `GET /v1/responses/{id}` find them;
//! older ones are dropped. The stream ends with `response.completed` or `response.incomplete`, never with `[DONE]`.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::answer::{Completion, Finish, Limits, Prompt, given, text_of_messages};
use super::reply::{DemoError, Dialect, Frames, fresh_id, parse_for_model, unary, unix_now, wants_stream};
use super::{Demo, tokens};

const DIALECT: Dialect = Dialect::OpenAi;

/// The number of responses that are stored.
pub(super) const STORED: usize = 1000;

/// The stored responses, shared by all requests.
#[derive(Debug, Clone, Default)]
pub(super) struct Store(Arc<Mutex<StoredResponses>>);

#[derive(Debug, Default)]
struct StoredResponses {
    by_id: HashMap<String, Stored>,
    oldest_first: VecDeque<String>,
}

#[derive(Debug, Clone)]
struct Stored {
    /// The user's last text.
    prompt: String,
    response: Value,
}

impl Store {
    fn find(&self, id: &str) -> Option<Stored> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by_id.get(id).cloned()
    }

    fn keep(&self, id: &str, stored: Stored) {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        memory.by_id.insert(id.to_owned(), stored);
        memory.oldest_first.push_back(id.to_owned());
        if memory.oldest_first.len() > STORED
            && let Some(oldest) = memory.oldest_first.pop_front()
        {
            memory.by_id.remove(&oldest);
        }
    }
}

/// `POST /v1/responses`.
pub(super) async fn create(
    State(demo): State<Demo>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    let prompt = prompt_of(&body)?;
    let limits = Limits::read(&body, &["max_output_tokens"], "stop")
        .map_err(|(param, problem)| DemoError::invalid(DIALECT, param, &problem))?;
    let streamed = wants_stream(DIALECT, &body)?;
    let previous = given(&body["previous_response_id"])
        .map(|id| {
            let found = demo.stored.find(id.as_str().unwrap_or_default());
            found.ok_or_else(|| no_such_response("previous_response_not_found"))
        })
        .transpose()?;
    let answer = Completion::new(&prompt, previous.as_ref().map(|previous| previous.prompt.as_str()), &limits);
    let id = fresh_id("resp_");
    let response = finished(&id, &body, &answer);
    if body["store"].as_bool().unwrap_or(true) {
        demo.stored.keep(&id, Stored { prompt: prompt.last, response: response.clone() });
    }
    if streamed {
        return Ok(stream(&response, &answer).into_response(&demo));
    }
    Ok(unary(&demo, answer.words().count(), response).await)
}

/// `POST /v1/responses/input_tokens`.
pub(super) async fn input_tokens(
    State(demo): State<Demo>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, DemoError> {
    let body = parse_for_model(&demo, DIALECT, body)?;
    let count = tokens::count(&prompt_of(&body)?.all);
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": count})))
}

/// `GET /v1/responses/{id}`.
pub(super) async fn retrieve(State(demo): State<Demo>, Path(id): Path<String>) -> Result<Json<Value>, DemoError> {
    demo.stored.find(&id).map(|stored| Json(stored.response)).ok_or_else(|| no_such_response("response_not_found"))
}

/// `POST /v1/responses/{id}/cancel`: the demo runs nothing in the background, so there is never anything to cancel.
pub(super) async fn cancel(State(demo): State<Demo>, Path(id): Path<String>) -> DemoError {
    match demo.stored.find(&id) {
        Some(_) => DemoError::invalid(DIALECT, "response_id", "only a background response can be cancelled"),
        None => no_such_response("response_not_found"),
    }
}

fn no_such_response(code: &'static str) -> DemoError {
    DemoError::new(DIALECT, StatusCode::NOT_FOUND, code, "no response with this id is stored here")
}

fn prompt_of(body: &Value) -> Result<Prompt, DemoError> {
    let input = &body["input"];
    let mut prompt = match input.as_str() {
        Some(text) => Prompt::text(text),
        None => text_of_messages(input).map_err(|problem| DemoError::invalid(DIALECT, "input", &problem))?,
    };
    prompt.all.push_str(body["instructions"].as_str().unwrap_or_default());
    Ok(prompt)
}

/// Returns the response in its final state.
fn finished(id: &str, body: &Value, answer: &Completion) -> Value {
    let (status, incomplete) = match answer.finish {
        Finish::End | Finish::Stop(_) => ("completed", Value::Null),
        Finish::Length => ("incomplete", json!({"reason": "max_output_tokens"})),
    };
    json!({
        "id": id, "object": "response", "created_at": unix_now(), "status": status, "model": body["model"],
        "error": null, "incomplete_details": incomplete, "instructions": body["instructions"],
        "max_output_tokens": body["max_output_tokens"], "metadata": {}, "parallel_tool_calls": true,
        "previous_response_id": body["previous_response_id"], "store": body["store"].as_bool().unwrap_or(true),
        "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}},
        "output": [{
            "id": fresh_id("msg_"), "type": "message", "role": "assistant", "status": status,
            "content": [text_part(&answer.text)],
        }],
        "usage": {
            "input_tokens": answer.input_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.output_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.input_tokens + answer.output_tokens,
        },
    })
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": []})
}

fn stream(response: &Value, answer: &Completion) -> Frames {
    let mut begun = response.clone();
    begun["status"] = json!("in_progress");
    begun["incomplete_details"] = Value::Null;
    begun["output"] = json!([]);
    begun["usage"] = Value::Null;
    let item = &response["output"][0];
    let item_id = &item["id"];
    let mut empty_item = item.clone();
    empty_item["status"] = json!("in_progress");
    empty_item["content"] = json!([]);

    let mut sequence = 0..;
    let mut frames = Frames::default();
    let mut event = |is_word: bool, mut event: Value| {
        event["sequence_number"] = json!(sequence.next());
        if is_word {
            frames.word_event(&event);
        } else {
            frames.event(&event);
        }
    };
    let in_part = |kind: &str, name: &str, value: Value| json!({"type": kind, "item_id": item_id, "output_index": 0, "content_index": 0, name: value});
    event(false, json!({"type": "response.created", "response": begun}));
    event(false, json!({"type": "response.in_progress", "response": begun}));
    event(false, json!({"type": "response.output_item.added", "output_index": 0, "item": empty_item}));
    event(false, in_part("response.content_part.added", "part", text_part("")));
    for word in answer.words() {
        event(true, in_part("response.output_text.delta", "delta", json!(word)));
    }
    event(false, in_part("response.output_text.done", "text", json!(answer.text)));
    event(false, in_part("response.content_part.done", "part", text_part(&answer.text)));
    event(false, json!({"type": "response.output_item.done", "output_index": 0, "item": item}));
    let end = if answer.finish == Finish::Length { "response.incomplete" } else { "response.completed" };
    event(false, json!({"type": end, "response": response}));
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_newest_responses_are_kept() {
        let store = Store::default();
        for number in 0..=STORED {
            store.keep(&number.to_string(), Stored { prompt: String::new(), response: Value::Null });
        }
        assert!(store.find("0").is_none());
        assert!(store.find("1").is_some() && store.find(&STORED.to_string()).is_some());
        assert_eq!(store.0.lock().unwrap().by_id.len(), STORED);
    }
}
