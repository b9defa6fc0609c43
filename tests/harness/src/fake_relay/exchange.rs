//! Requests as a relay sends them, in both forms, and the assembled responses.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::link::{Event, RelayLink};
use crate::secrecy::PROMPT;

/// A request to be sent to a worker.
#[derive(Clone, Debug)]
pub struct RequestSpec {
    model: String,
    path: String,
    method: Option<String>,
    streaming: bool,
    headers: Map<String, Value>,
    body: Vec<u8>,
    window: Option<u64>,
    content_length: Option<u64>,
    wants_details: bool,
    conversation: Option<String>,
}

/// A request that was sent.
#[derive(Clone, Debug)]
pub struct SentRequest {
    /// Its `request_id`.
    pub id: String,
    /// Its stream number; without `core1` only this side uses it.
    pub stream: u32,
}

/// A worker's whole response.
#[derive(Clone, Debug)]
pub struct Reply {
    /// `response_start`, with `core1` and if one was sent.
    pub start: Option<Value>,
    /// The status: from `response_start`, or from `response_complete` in the old form. 0 if neither was sent.
    pub status: u16,
    /// Headers, repeated ones repeated.
    pub headers: Vec<(String, String)>,
    /// The assembled body.
    pub body: Vec<u8>,
    /// The pieces, or the chunks of the old form, as received.
    pub parts: Vec<Vec<u8>>,
    /// `response_complete` or `error`.
    pub end: Value,
    /// The position of `end` in the link's order of arrival.
    pub end_seq: u64,
}

impl RequestSpec {
    /// Creates a chat completion for this model with a small prompt.
    #[must_use]
    pub fn chat(model: &str) -> Self {
        let body = json!({"model": model, "messages": [{"role": "user", "content": PROMPT}]});
        Self::post("/v1/chat/completions", model).body(body.to_string().as_bytes())
    }

    /// Creates a streamed chat completion.
    #[must_use]
    pub fn stream(model: &str) -> Self {
        let body = json!({"model": model, "stream": true, "messages": [{"role": "user", "content": PROMPT}]});
        Self::post("/v1/chat/completions", model).body(body.to_string().as_bytes()).streaming()
    }

    /// Creates a POST without a body.
    #[must_use]
    pub fn post(path: &str, model: &str) -> Self {
        let mut headers = Map::new();
        headers.insert("content-type".to_owned(), json!("application/json"));
        Self {
            model: model.to_owned(),
            path: path.to_owned(),
            method: None,
            streaming: false,
            headers,
            body: Vec::new(),
            window: None,
            content_length: None,
            wants_details: false,
            conversation: None,
        }
    }

    /// Sets the body.
    #[must_use]
    pub fn body(self, body: &[u8]) -> Self {
        Self { body: body.to_vec(), ..self }
    }

    /// Sets `is_streaming`.
    #[must_use]
    pub fn streaming(self) -> Self {
        Self { streaming: true, ..self }
    }

    /// Sets `endpoint_path`, including the query string.
    #[must_use]
    pub fn path(self, path: &str) -> Self {
        Self { path: path.to_owned(), ..self }
    }

    /// Sets `method`.
    #[must_use]
    pub fn method(self, method: &str) -> Self {
        Self { method: Some(method.to_owned()), ..self }
    }

    /// Adds or replaces a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.insert(name.to_owned(), json!(value));
        self
    }

    /// Sets `window`.
    #[must_use]
    pub fn window(self, bytes: u64) -> Self {
        Self { window: Some(bytes), ..self }
    }

    /// States another `content_length` than the body's.
    #[must_use]
    pub fn claiming(self, content_length: u64) -> Self {
        Self { content_length: Some(content_length), ..self }
    }

    /// Sets `wants_details`.
    #[must_use]
    pub fn wants_details(self) -> Self {
        Self { wants_details: true, ..self }
    }

    /// Sets `conversation`.
    #[must_use]
    pub fn conversation(self, key: &str) -> Self {
        Self { conversation: Some(key.to_owned()), ..self }
    }

    /// The length of its body.
    #[must_use]
    pub fn body_len(&self) -> usize {
        self.body.len()
    }

    fn message(&self, request: &SentRequest, core1: bool) -> Value {
        let mut message = json!({
            "type": "request",
            "request_id": request.id,
            "model": self.model,
            "endpoint_path": self.path,
            "is_streaming": self.streaming,
            "headers": self.headers,
        });
        if core1 {
            message["stream"] = json!(request.stream);
            message["content_length"] = json!(self.content_length.unwrap_or(self.body.len() as u64));
        } else {
            message["body"] = json!(String::from_utf8(self.body.clone()).expect("old peers carry text only"));
        }
        if let Some(method) = &self.method {
            message["method"] = json!(method);
        }
        if let Some(window) = self.window {
            message["window"] = json!(window);
        }
        if self.wants_details {
            message["wants_details"] = json!(true);
        }
        if let Some(key) = &self.conversation {
            message["conversation"] = json!(key);
        }
        message
    }
}

impl Reply {
    /// The first header of this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// All values of a header.
    #[must_use]
    pub fn header_values(&self, name: &str) -> Vec<&str> {
        let found = self.headers.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str()).collect()
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }

    /// The `code`, if the response ended with `error`.
    #[must_use]
    pub fn error_code(&self) -> Option<&str> {
        (self.end["type"] == "error").then(|| self.end["code"].as_str().unwrap_or_default())
    }

    /// True if it ended with `response_complete`.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.end["type"] == "response_complete"
    }
}

impl RelayLink {
    /// Sends a request with its body, in the form of this link. The body is sent in the background as the worker
    /// returns credit.
    pub fn send_request(&mut self, spec: &RequestSpec) -> SentRequest {
        let request = self.send_request_head(spec);
        if self.core1 && !spec.body.is_empty() {
            let (sender, stream, body) = (self.sender(), request.stream, spec.body.clone());
            tokio::spawn(async move { sender.send_body(stream, &body).await });
        }
        request
    }

    /// Sends only the `request` message.
    pub fn send_request_head(&mut self, spec: &RequestSpec) -> SentRequest {
        let request = SentRequest { id: format!("request-{}", self.next), stream: self.next };
        self.next += 1;
        self.send(&spec.message(&request, self.core1));
        request
    }

    /// Sends a request and waits for its whole response.
    pub async fn exchange(&mut self, spec: &RequestSpec) -> Reply {
        let request = self.send_request(spec);
        self.reply(&request).await
    }

    /// The whole response to a request.
    ///
    /// # Panics
    /// If nothing arrives for ten seconds before its end, or the messages violate the protocol's order.
    pub async fn reply(&mut self, request: &SentRequest) -> Reply {
        let found = self.reply_within(super::TEST_TIMEOUT, request).await;
        found.unwrap_or_else(|| panic!("the response to {} ended prematurely", request.id))
    }

    /// The whole response, or `None` if nothing arrives for `patience` before its end.
    pub async fn reply_within(&mut self, patience: Duration, request: &SentRequest) -> Option<Reply> {
        let mut reply = Reply {
            start: None,
            status: 0,
            headers: Vec::new(),
            body: Vec::new(),
            parts: Vec::new(),
            end: Value::Null,
            end_seq: 0,
        };
        loop {
            let event = self.next_where(patience, |event| belongs(event, request)).await?;
            match event {
                Event::Piece { payload, .. } => {
                    assert!(reply.start.is_some(), "a piece before response_start");
                    reply.add(&payload);
                }
                Event::Message(message) => match message.kind() {
                    "response_start" => reply.handle_start(message.body),
                    "response_chunk" => reply.add(message["chunk"].as_str().expect("a text chunk").as_bytes()),
                    _ => {
                        reply.end_seq = message.seq;
                        reply.handle_end(message.body, self.core1);
                        return Some(reply);
                    }
                },
                Event::Ping(_) | Event::Closed { .. } => return None,
            }
        }
    }

    /// Waits for `response_start` of a request.
    pub async fn started(&mut self, request: &SentRequest) -> Value {
        self.expect_where("response_start", |start| start["request_id"] == json!(request.id)).await.body
    }

    /// The next part of a response: a piece's payload or a chunk's text.
    ///
    /// # Panics
    /// If none arrives within ten seconds.
    pub async fn part(&mut self, request: &SentRequest) -> Vec<u8> {
        let is_part = |event: &Event| match event {
            Event::Message(message) => message.kind() == "response_chunk" && belongs(event, request),
            Event::Piece { .. } => belongs(event, request),
            Event::Ping(_) | Event::Closed { .. } => false,
        };
        match self.next_where(super::TEST_TIMEOUT, is_part).await {
            Some(Event::Message(message)) => message["chunk"].as_str().expect("a text chunk").as_bytes().to_vec(),
            Some(Event::Piece { payload, .. }) => payload.to_vec(),
            Some(Event::Ping(_) | Event::Closed { .. }) | None => {
                panic!("no part of the response to {} within 10 s", request.id)
            }
        }
    }
}

impl Reply {
    fn add(&mut self, bytes: &[u8]) {
        self.body.extend_from_slice(bytes);
        self.parts.push(bytes.to_vec());
    }

    fn handle_start(&mut self, start: Value) {
        assert!(self.start.is_none() && self.parts.is_empty(), "response_start must arrive once, before the pieces");
        self.status = status_of(&start);
        let pairs = start["headers"].as_array().expect("headers as an array of pairs");
        self.headers = pairs.iter().map(|pair| (text(&pair[0]), text(&pair[1]))).collect();
        self.start = Some(start);
    }

    fn handle_end(&mut self, end: Value, core1: bool) {
        if end["type"] == "response_complete" {
            if core1 {
                assert!(end.get("body").is_none_or(Value::is_null), "a body in a core1 response_complete");
                assert!(self.start.is_some(), "response_complete without response_start");
            } else {
                self.status = status_of(&end);
                let map = end["headers"].as_object().cloned().unwrap_or_default();
                self.headers = map.iter().map(|(key, value)| (key.clone(), text(value))).collect();
                self.body.extend_from_slice(end["body"].as_str().unwrap_or_default().as_bytes());
            }
        }
        self.end = end;
    }
}

fn belongs(event: &Event, request: &SentRequest) -> bool {
    const ANSWERS: [&str; 4] = ["response_start", "response_chunk", "response_complete", "error"];
    match event {
        Event::Message(message) => ANSWERS.contains(&message.kind()) && message["request_id"] == json!(request.id),
        Event::Piece { stream, .. } => *stream == request.stream,
        Event::Ping(_) | Event::Closed { .. } => false,
    }
}

fn status_of(message: &Value) -> u16 {
    message["status_code"].as_u64().and_then(|status| u16::try_from(status).ok()).expect("a status_code")
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
