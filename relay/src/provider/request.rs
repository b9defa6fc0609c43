//! One client request outside of the core: the data to send, the pipe of its response, and its progress.
//!
//! A request has five types: [`RequestRecord`] is what the client sent, and the ticket (`clients/ticket.rs`)
//! is its client's hold on it, which cancels it when dropped. The dispatch core gets a
//! [`NewRequest`](crate::dispatch::NewRequest) and keeps its state in a type of its own. A worker gets a [`Request`].
//! Each dispatch is an [`Attempt`](crate::provider::worker::link::Attempt) on one worker's link, and the response comes
//! back through a [`ResponsePipe`].

mod estimate;
mod trace;

pub use estimate::{input_estimate, is_free, output_estimate};
pub use trace::{RequestTrace, TraceEnd};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use modelrelay_protocol::headers::looks_like_key;
use modelrelay_protocol::message::{ConversationKey, RelayToWorker, Request, TokenCounts, encode};
use modelrelay_protocol::paths::Endpoint;

use crate::dispatch::{Class, Decision, RequestKey};
#[cfg(test)]
use crate::net::budget::Budget;
use crate::provider::response::ResponsePipe;

/// The most that an old worker's envelope adds to the body: path, ids and at most 32 KiB of headers, escaped.
const ENVELOPE_BYTES: usize = 128 << 10;

/// The status of a request whose client disconnected, as in nginx.
pub const CLIENT_CLOSED_REQUEST: u16 = 499;

/// One client request.
pub struct RequestRecord {
    /// Its place in the queue.
    pub key: RequestKey,
    /// The request id for the client.
    pub id: String,
    /// The backend's name of the model.
    pub model: Arc<str>,
    /// The id of its API key; `None` if none is required.
    pub api_key: Option<Arc<str>>,
    /// The provider.
    pub provider: Arc<str>,
    /// The route.
    pub endpoint: Endpoint,
    /// The HTTP method.
    pub method: &'static str,
    /// Path and query.
    pub path_and_query: String,
    /// Headers for the backend; repeated ones are joined.
    pub headers: BTreeMap<String, String>,
    /// True if a stream is requested.
    pub is_streaming: bool,
    /// True if a stored response is only read, which uses no tokens again.
    pub is_stored: bool,
    /// The body.
    pub body: Bytes,
    /// The size of the body without what the relay added to request the usage.
    pub body_bytes: u64,
    /// True if the relay requested the usage of the stream, which the client does not expect.
    pub hides_usage: bool,
    /// The key of its conversation, if it has one that matters; never logged.
    pub conversation: Option<u64>,
    /// The pseudonym of its conversation in the request journal, if that is written.
    pub pseudonym: Option<Box<str>>,
    /// The time of its first byte.
    pub received_at: Instant,
    /// The same, human-readable.
    pub arrived: SystemTime,
    /// Its spans, if traces are exported.
    pub trace: Option<Arc<RequestTrace>>,
    /// Why only a `core1` worker can handle it, if so.
    pub needs_core1: Option<NeedsCore1>,
    /// The pipe of its response.
    pub response: Arc<ResponsePipe>,
    /// Its progress so far.
    pub progress: Mutex<Progress>,
}

/// Why a request cannot be sent to an old worker, which supports only the original messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeedsCore1 {
    /// It would not fit into one message.
    Size,
    /// It is not text, or not a POST.
    Form,
}

/// The progress of a request so far.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// The worker of its last attempt.
    pub worker: Option<Arc<str>>,
    /// The time of its last dispatch.
    pub dispatched_at: Option<Instant>,
    /// The total time in the queue, without a present wait.
    pub queue_wait: Duration,
    /// The beginning of its present wait in the queue.
    pub waiting_since: Option<Instant>,
    /// The number of attempts.
    pub attempts: u32,
    /// The time for which earlier attempts held slots of workers.
    pub slot_time: Duration,
    /// The beginning of the present attempt, which holds a slot.
    pub slot_since: Option<Instant>,
    /// Why its last attempt went to its worker.
    pub decision: Option<Decision>,
    /// The token counts from the backend.
    pub token_counts: Option<TokenCounts>,
}

impl Progress {
    /// Returns why its last attempt went to its worker, as the admin API names it: `home`, `moved: busy`.
    pub fn placement(&self) -> Option<String> {
        let decision = self.decision?;
        let (name, reason) = (decision.as_str(), decision.reason());
        Some(if reason.is_empty() { name.to_owned() } else { format!("{name}: {reason}") })
    }

    /// Ends an attempt: its slot is free. Has no effect without one.
    pub fn end_attempt(&mut self, now: Instant) {
        if let Some(since) = self.slot_since.take() {
            self.slot_time += now.saturating_duration_since(since);
        }
    }

    /// Ends a wait without a dispatch, and adds it to the total.
    pub fn end_wait(&mut self, now: Instant) {
        if let Some(since) = self.waiting_since.take() {
            self.queue_wait += now.saturating_duration_since(since);
        }
    }
}

impl RequestRecord {
    /// The model for the log: users put keys into the wrong field.
    pub fn logged_model(&self) -> &str {
        if looks_like_key(&self.model) { "(looks like a key)" } else { &self.model }
    }

    /// Locks its progress so far.
    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The `request` message for a `core1` worker; the body follows in pieces. `conversation` is for `homes1`, a
    /// `class` other than the default for `slots1`.
    pub fn core1_text(
        &self,
        request_id: &str,
        stream: u32,
        window: Option<u64>,
        (conversation, class): (Option<u64>, Class),
    ) -> String {
        encode(&RelayToWorker::Request(Request {
            stream: Some(stream),
            content_length: Some(self.body.len() as u64),
            window,
            wants_details: self.trace.as_ref().is_some_and(|trace| trace.is_recording()),
            conversation: conversation.map(ConversationKey),
            class: class.into(),
            ..self.envelope(request_id)
        }))
    }

    /// The `request` message for an old worker, including the body.
    pub fn seed_text(&self, request_id: &str) -> String {
        // `needs_core1` keeps bodies that are not text away from such workers.
        let body = String::from_utf8_lossy(&self.body).into_owned();
        encode(&RelayToWorker::Request(Request { method: None, body: Some(body), ..self.envelope(request_id) }))
    }

    fn envelope(&self, request_id: &str) -> Request {
        let mut headers = self.headers.clone();
        if let Some(trace) = &self.trace {
            trace.stamp(&mut headers);
        }
        Request {
            request_id: request_id.to_owned(),
            model: self.model.to_string(),
            endpoint_path: self.path_and_query.clone(),
            is_streaming: self.is_streaming,
            headers,
            method: (self.method != "POST").then(|| self.method.to_owned()),
            ..Request::default()
        }
    }
}

/// Returns why only a `core1` worker can handle a request with this method and body, if so.
pub fn needs_core1(method: &str, body: &[u8]) -> Option<NeedsCore1> {
    if method != "POST" || std::str::from_utf8(body).is_err() {
        return Some(NeedsCore1::Form);
    }
    let limit = modelrelay_protocol::limits::MAX_OLD_WORKER_MESSAGE_BYTES - ENVELOPE_BYTES;
    // A byte becomes at most six (`\u001f`), so small bodies need no counting.
    let fits = body.len() <= limit / 6 || escaped_len(body) <= limit;
    (!fits).then_some(NeedsCore1::Size)
}

/// The length of `text` as a JSON string.
fn escaped_len(text: &[u8]) -> usize {
    let extra: usize = text
        .iter()
        .map(|byte| match byte {
            b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 1,
            0..=0x1f => 5,
            _ => 0,
        })
        .sum();
    text.len() + extra
}

#[cfg(test)]
impl RequestRecord {
    /// A request for tests, for the model `m`.
    pub fn sample(key: RequestKey, body: &'static [u8], budget: Arc<Budget>) -> Arc<Self> {
        Arc::new(Self {
            key,
            id: "id".into(),
            model: "m".into(),
            api_key: None,
            provider: "p".into(),
            endpoint: Endpoint::ChatCompletions,
            method: "POST",
            path_and_query: "/v1/chat/completions".into(),
            headers: BTreeMap::new(),
            is_streaming: false,
            is_stored: false,
            body: Bytes::from_static(body),
            body_bytes: body.len() as u64,
            hides_usage: false,
            conversation: None,
            pseudonym: None,
            received_at: Instant::now(),
            arrived: SystemTime::now(),
            trace: None,
            needs_core1: None,
            response: ResponsePipe::new(budget, 1 << 20, 1 << 20),
            progress: Mutex::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_small_textual_post_fits_old_worker() {
        assert_eq!(needs_core1("POST", b"{}"), None);
        assert_eq!(needs_core1("GET", &[]), Some(NeedsCore1::Form));
        assert_eq!(needs_core1("POST", &[0xff]), Some(NeedsCore1::Form));
        assert_eq!(needs_core1("POST", &vec![b'a'; 15 << 20]), None);
        assert_eq!(needs_core1("POST", &vec![b'a'; 16 << 20]), Some(NeedsCore1::Size));
        assert_eq!(needs_core1("POST", &vec![1; 3 << 20]), Some(NeedsCore1::Size));
    }

    #[test]
    fn escaped_length_matches_serde_json() {
        let text: String = (0..128u8).map(char::from).chain("äπ😀".chars()).collect();
        let written = serde_json::to_string(&text).unwrap().len() - 2;
        assert_eq!(escaped_len(text.as_bytes()), written);
    }
}
