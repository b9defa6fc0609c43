//! One client request as the shell keeps it: what to send, where the answer goes, and what became of it.

mod trace;

pub use trace::{RequestTrace, TraceEnd};

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use modelrelay_protocol::dialect::Dialect;
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::headers::looks_like_key;
use modelrelay_protocol::message::{RelayToWorker, Request, TokenCounts, encode};
use modelrelay_protocol::paths::Endpoint;

use crate::dispatch::{Allowed, QueueShare, RequestKey};
use crate::exchange::Exchange;

/// What an old worker's envelope may add to the body: path, ids and at most 32 KiB of headers, escaped.
const ENVELOPE_BYTES: usize = 128 << 10;

/// What a client that left would have been told, as nginx writes it.
pub const CLIENT_CLOSED_REQUEST: u16 = 499;

/// What a handler knows of a request when it submits it.
pub struct Outline {
    /// The id that the client is told.
    pub id: String,
    /// The model as the backend sees it.
    pub model: Arc<str>,
    /// The models that may answer, by their ids, where it asks by a name that a worker gives to one; `None`: any.
    pub allowed: Option<Allowed>,
    /// The id of its API key; `None` where none is required.
    pub key: Option<Arc<str>>,
    /// How much of the queue its key may fill; `None`: all of it.
    pub share: Option<QueueShare>,
    /// The provider.
    pub provider: Arc<str>,
    /// The route.
    pub endpoint: Endpoint,
    /// How errors are spelled.
    pub dialect: Dialect,
    /// The HTTP method.
    pub method: &'static str,
    /// Path and query.
    pub path_and_query: String,
    /// Headers for the backend; repeats joined.
    pub headers: BTreeMap<String, String>,
    /// Whether a stream was asked for.
    pub is_streaming: bool,
    /// The body.
    pub body: Bytes,
    /// When its first byte was seen.
    pub received_at: Instant,
    /// Its spans, where traces are exported.
    pub trace: Option<Arc<RequestTrace>>,
}

impl Outline {
    /// The model as the log may have it: people put keys into the wrong field.
    pub fn logged_model(&self) -> &str {
        if looks_like_key(&self.model) { "(looks like a key)" } else { &self.model }
    }
}

/// Why a request cannot go to a worker that knows only the seeds' messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeedsCore1 {
    /// It would not fit into one message.
    Size,
    /// It is not text, or not a POST.
    Form,
}

/// One client request.
pub struct RequestRecord {
    /// Its place in the queue.
    pub key: RequestKey,
    /// What the handler knew.
    pub outline: Outline,
    /// When it arrived, for people.
    pub arrived: SystemTime,
    /// Why only a `core1` worker can carry it, if so.
    pub needs_core1: Option<NeedsCore1>,
    /// Where its answer goes.
    pub exchange: Arc<Exchange>,
    progress: Mutex<Progress>,
}

/// What became of a request so far.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// The worker that has or had it.
    pub worker: Option<Arc<str>>,
    /// When it was sent last.
    pub dispatched_at: Option<Instant>,
    /// How long it waited altogether, without a wait that goes on.
    pub queue_wait: Duration,
    /// Since when it waits, while it is in the queue.
    pub waiting_since: Option<Instant>,
    /// How often it was sent.
    pub attempts: u32,
    /// What a worker said when it failed the request.
    pub worker_error: Option<ApiError>,
    /// What the backend said it used.
    pub token_counts: Option<TokenCounts>,
}

impl Progress {
    /// Ends a wait that no sending ended, and counts it.
    pub fn end_wait(&mut self, now: Instant) {
        if let Some(since) = self.waiting_since.take() {
            self.queue_wait += now.saturating_duration_since(since);
        }
    }
}

impl RequestRecord {
    /// A request that has not been submitted yet.
    pub fn new(key: RequestKey, outline: Outline, exchange: Arc<Exchange>) -> Self {
        let needs_core1 = needs_core1(&outline);
        Self { key, outline, arrived: SystemTime::now(), needs_core1, exchange, progress: Mutex::default() }
    }

    /// What became of it so far.
    pub fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The `request` message for a `core1` worker; the body follows in pieces.
    pub fn core1_text(&self, request_id: &str, stream: u32, window: Option<u64>) -> String {
        encode(&RelayToWorker::Request(Request {
            stream: Some(stream),
            content_length: Some(self.outline.body.len() as u64),
            window,
            ..self.envelope(request_id)
        }))
    }

    /// The `request` message for a worker that knows only the seeds, body and all.
    pub fn seed_text(&self, request_id: &str) -> String {
        // `needs_core1` keeps bodies that are not text away from such workers.
        let body = String::from_utf8_lossy(&self.outline.body).into_owned();
        encode(&RelayToWorker::Request(Request { method: None, body: Some(body), ..self.envelope(request_id) }))
    }

    fn envelope(&self, request_id: &str) -> Request {
        let mut headers = self.outline.headers.clone();
        if let Some(trace) = &self.outline.trace {
            trace.stamp(&mut headers);
        }
        Request {
            request_id: request_id.to_owned(),
            model: self.outline.model.to_string(),
            endpoint_path: self.outline.path_and_query.clone(),
            is_streaming: self.outline.is_streaming,
            headers,
            method: (self.outline.method != "POST").then(|| self.outline.method.to_owned()),
            ..Request::default()
        }
    }
}

fn needs_core1(outline: &Outline) -> Option<NeedsCore1> {
    if outline.method != "POST" || std::str::from_utf8(&outline.body).is_err() {
        return Some(NeedsCore1::Form);
    }
    let limit = modelrelay_protocol::limits::MAX_OLD_WORKER_MESSAGE_BYTES - ENVELOPE_BYTES;
    // A byte becomes six at most (`\u001f`), so small bodies need no counting.
    let fits = outline.body.len() <= limit / 6 || escaped_len(&outline.body) <= limit;
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
mod tests {
    use super::*;

    fn outline(method: &'static str, body: Vec<u8>) -> Outline {
        Outline {
            id: "id".into(),
            model: "m".into(),
            allowed: None,
            key: None,
            share: None,
            provider: "p".into(),
            endpoint: Endpoint::ChatCompletions,
            dialect: Dialect::OpenAi,
            method,
            path_and_query: "/v1/chat/completions".into(),
            headers: BTreeMap::new(),
            is_streaming: false,
            body: body.into(),
            received_at: Instant::now(),
            trace: None,
        }
    }

    #[test]
    fn only_a_small_textual_post_can_go_to_an_old_worker() {
        assert_eq!(needs_core1(&outline("POST", b"{}".to_vec())), None);
        assert_eq!(needs_core1(&outline("GET", vec![])), Some(NeedsCore1::Form));
        assert_eq!(needs_core1(&outline("POST", vec![0xff])), Some(NeedsCore1::Form));
        assert_eq!(needs_core1(&outline("POST", vec![b'a'; 15 << 20])), None);
        assert_eq!(needs_core1(&outline("POST", vec![b'a'; 16 << 20])), Some(NeedsCore1::Size));
        assert_eq!(needs_core1(&outline("POST", vec![1; 3 << 20])), Some(NeedsCore1::Size));
    }

    #[test]
    fn the_escaped_length_is_what_serde_json_writes() {
        let text: String = (0..128u8).map(char::from).chain("äπ😀".chars()).collect();
        let written = serde_json::to_string(&text).unwrap().len() - 2;
        assert_eq!(escaped_len(text.as_bytes()), written);
    }
}
