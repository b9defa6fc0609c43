//! The common parts of all routes: the parsed body, errors in the route's dialect, ids, and a paced event stream.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};

use super::Demo;

/// The error format of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    OpenAi,
    Anthropic,
}

impl Dialect {
    /// Returns the dialect of a path, which need not exist.
    pub(super) fn of_path(path: &str) -> Self {
        if path.starts_with("/v1/messages") { Self::Anthropic } else { Self::OpenAi }
    }
}

/// An error, in one dialect.
#[derive(Debug)]
pub(super) struct DemoError {
    dialect: Dialect,
    status: StatusCode,
    code: &'static str,
    param: Option<&'static str>,
    message: String,
}

impl DemoError {
    pub(super) fn new(dialect: Dialect, status: StatusCode, code: &'static str, message: &str) -> Self {
        Self { dialect, status, code, param: None, message: message.to_owned() }
    }

    /// Creates a 400 that names the field.
    pub(super) fn invalid(dialect: Dialect, param: &'static str, message: &str) -> Self {
        Self { param: Some(param), ..Self::new(dialect, StatusCode::BAD_REQUEST, "invalid_value", message) }
    }

    pub(super) fn no_such_model(demo: &Demo, dialect: Dialect, id: &str) -> Self {
        let message = format!("the demo backend serves only model {:?}, not {id:?}", demo.model);
        Self { param: Some("model"), ..Self::new(dialect, StatusCode::NOT_FOUND, "model_not_found", &message) }
    }
}

impl IntoResponse for DemoError {
    fn into_response(self) -> Response {
        let body = match self.dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message, "type": "invalid_request_error", "param": self.param, "code": self.code,
            }}),
            Dialect::Anthropic => {
                let kind = match self.status {
                    StatusCode::NOT_FOUND => "not_found_error",
                    StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
                    _ => "invalid_request_error",
                };
                json!({"type": "error", "error": {"type": kind, "message": self.message}})
            }
        };
        (self.status, Json(body)).into_response()
    }
}

/// Parses the body as a JSON object, whatever its content type.
pub(super) fn parse(dialect: Dialect, body: Result<Bytes, BytesRejection>) -> Result<Value, DemoError> {
    let body = body.map_err(|rejection| {
        let code =
            if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE { "request_too_large" } else { "invalid_body" };
        DemoError::new(dialect, rejection.status(), code, &rejection.body_text())
    })?;
    match serde_json::from_slice(&body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => {
            Err(DemoError::new(dialect, StatusCode::BAD_REQUEST, "invalid_json", "the body must be a JSON object"))
        }
        Err(error) => {
            let message = format!("the body is not JSON: {error}");
            Err(DemoError::new(dialect, StatusCode::BAD_REQUEST, "invalid_json", &message))
        }
    }
}

/// Like [`parse`], for a route that runs the model: the body must name it.
pub(super) fn parse_for_model(
    demo: &Demo,
    dialect: Dialect,
    body: Result<Bytes, BytesRejection>,
) -> Result<Value, DemoError> {
    let body = parse(dialect, body)?;
    match body["model"].as_str() {
        Some(id) if *id == *demo.model => Ok(body),
        Some(other) => Err(DemoError::no_such_model(demo, dialect, other)),
        None => Err(DemoError::invalid(dialect, "model", "model must be a string")),
    }
}

/// Returns the flag `stream` of a body; absent or null is false.
pub(super) fn wants_stream(dialect: Dialect, body: &Value) -> Result<bool, DemoError> {
    match &body["stream"] {
        Value::Null => Ok(false),
        Value::Bool(stream) => Ok(*stream),
        Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_) => {
            Err(DemoError::invalid(dialect, "stream", "stream must be true or false"))
        }
    }
}

/// Returns a fresh id such as `chatcmpl-5f0c…`; random, because a relay sees the ids of many backends.
pub(super) fn fresh_id(prefix: &str) -> String {
    let mut bytes = [0; 12];
    // The system's random number generator fails only on a broken system; a demo may then repeat an id.
    if let Err(error) = getrandom::fill(&mut bytes) {
        tracing::warn!(%error, "system random number generator failed");
    }
    bytes.iter().fold(prefix.to_owned(), |id, byte| format!("{id}{byte:02x}"))
}

/// Returns the current time in seconds since 1970.
pub(super) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns a whole response, after the time that streaming its words would take.
pub(super) async fn unary(demo: &Demo, words: usize, body: Value) -> Response {
    let _underway = demo.answering.begin();
    tokio::time::sleep(demo.delay.saturating_mul(u32::try_from(words).unwrap_or(u32::MAX))).await;
    Json(body).into_response()
}

/// The frames of one event stream, in order.
#[derive(Debug, Default)]
pub(super) struct Frames(VecDeque<(bool, Bytes)>);

impl Frames {
    /// Adds `data: …`, sent at once.
    pub(super) fn data(&mut self, data: &Value) {
        self.push(false, format!("data: {data}\n\n"));
    }

    /// Adds `data: …` with a word, sent after a pause.
    pub(super) fn word(&mut self, data: &Value) {
        self.push(true, format!("data: {data}\n\n"));
    }

    /// Adds `data: [DONE]`, if the dialect ends with it.
    pub(super) fn done(&mut self) {
        self.push(false, "data: [DONE]\n\n".to_owned());
    }

    /// Adds an event with its name, which is also the `type` inside it.
    pub(super) fn event(&mut self, data: &Value) {
        self.push_event(false, data);
    }

    /// Like [`Self::event`], sent after the pause of a word.
    pub(super) fn word_event(&mut self, data: &Value) {
        self.push_event(true, data);
    }

    fn push_event(&mut self, pause: bool, data: &Value) {
        let name = data["type"].as_str().unwrap_or_default();
        self.push(pause, format!("event: {name}\ndata: {data}\n\n"));
    }

    fn push(&mut self, pause: bool, frame: String) {
        self.0.push_back((pause, frame.into()));
    }

    /// Returns the stream as a response. Dropping its body, which happens when the client disconnects, ends the
    /// response.
    pub(super) fn into_response(self, demo: &Demo) -> Response {
        let body = paced(self.0, demo.delay, demo.answering.begin());
        ([(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")], body)
            .into_response()
    }
}

fn paced(frames: VecDeque<(bool, Bytes)>, delay: Duration, underway: super::Underway) -> Body {
    Body::from_stream(stream::unfold((frames, underway), move |(mut frames, underway)| async move {
        let (pause, frame) = frames.pop_front()?;
        if pause {
            tokio::time::sleep(delay).await;
        }
        Some((Ok::<_, std::convert::Infallible>(frame), (frames, underway)))
    }))
}
