//! One request as OpenTelemetry sees it: a server span, and below it each wait in the queue and each sending to a worker.
//!
//! There only where traces are exported. The spans are made where the request's one log line gets its figures from, and
//! hold the same: names, numbers and our own words for what happened.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, Method};
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::message::TokenCounts;
use modelrelay_protocol::paths::{Endpoint, POST_PATHS};
use modelrelay_traces::{Parent, Span, SpanContext, SpanKind, TRACEPARENT, TRACESTATE, Traces};

use super::{CLIENT_CLOSED_REQUEST, Outline};
use crate::metrics::Outcome;

/// A shorter wait is none: the request was sent as it came.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The spans of one request.
#[derive(Debug)]
pub struct RequestTrace {
    trace_id: String,
    spans: Mutex<Option<Spans>>,
}

#[derive(Debug)]
struct Spans {
    server: Span,
    /// The sending that runs.
    attempt: Option<Span>,
    /// The one before, which came to nothing.
    before: Option<SpanContext>,
    /// Since when it waits again, after a sending that came to nothing.
    requeued_at: Option<Instant>,
}

/// How a request ended.
pub struct TraceEnd<'a> {
    /// In a word.
    pub outcome: Outcome,
    /// What the client was told.
    pub code: u16,
    /// Whether an answer that had begun was broken off.
    pub is_broken: bool,
    /// The request.
    pub outline: &'a Outline,
    /// How long it waited in the queue before it was sent, altogether.
    pub queue_wait: Duration,
    /// From its arrival to the first byte of its answer.
    pub first_byte: Option<Duration>,
    /// The same from when it was sent last, as the worker's first byte came.
    pub upstream_first_byte: Option<Duration>,
    /// Since when it has waited, if it was never sent.
    pub unsent_since: Option<Instant>,
    /// What the backend said it used.
    pub tokens: Option<TokenCounts>,
}

impl RequestTrace {
    /// The trace of a request whose head has come: its client's, where that names one.
    pub fn begin(traces: &Traces, method: &Method, path: &str, headers: &HeaderMap, request_id: &str) -> Self {
        let method = if method == Method::GET { "GET" } else { "POST" };
        let route = route(path);
        let mut server = traces.begin(format!("{method} {route}"), SpanKind::Server, parent(headers), Instant::now());
        server.set("http.request.method", method);
        server.set("http.route", route);
        server.set("modelrelay.request_id", request_id.to_owned());
        Self {
            trace_id: server.trace_id(),
            spans: Mutex::new(Some(Spans { server, attempt: None, before: None, requeued_at: None })),
        }
    }

    /// Which trace it is, for the log.
    pub fn id(&self) -> &str {
        &self.trace_id
    }

    /// It is sent to a worker, after so long in the queue.
    pub fn begin_attempt(&self, outline: &Outline, worker: &str, attempt: u32, waited: Duration) {
        let mut spans = self.lock();
        let Some(spans) = spans.as_mut() else { return };
        let now = Instant::now();
        spans.requeued_at = None;
        if waited >= SHORTEST_WAIT {
            spans.server.child("queue", SpanKind::Internal, now.checked_sub(waited).unwrap_or(now)).end_at(now);
        }
        let operation = operation(outline.endpoint);
        let name = format!("{operation} {}", outline.model);
        let mut span = spans.server.child(name, SpanKind::Client, now);
        span.set("gen_ai.operation.name", operation);
        span.set("gen_ai.request.model", outline.model.to_string());
        span.set("modelrelay.worker", worker.to_owned());
        span.set("modelrelay.attempt", i64::from(attempt));
        if let Some(before) = spans.before.take() {
            span.follow(before);
        }
        spans.attempt = Some(span);
    }

    /// That sending came to nothing, and the request waits again.
    pub fn requeue(&self, reason: &'static str) {
        let mut spans = self.lock();
        let Some(spans) = spans.as_mut() else { return };
        spans.requeued_at = Some(Instant::now());
        if let Some(mut attempt) = spans.attempt.take() {
            spans.before = Some(attempt.context());
            attempt.fail(reason);
        }
    }

    /// Has the worker continue the trace under the sending that runs, in the place of what the client sent.
    pub fn stamp(&self, headers: &mut BTreeMap<String, String>) {
        if let Some(spans) = self.lock().as_ref() {
            headers.remove(TRACESTATE);
            let span = spans.attempt.as_ref().unwrap_or(&spans.server);
            let values = span.headers().into_iter().filter(|(_, value)| !value.is_empty());
            headers.extend(values.map(|(name, value)| (name.to_owned(), value)));
        }
    }

    /// It was refused before it had a place in the queue.
    pub fn refuse(&self, error: &ApiError) {
        let Some(mut spans) = self.lock().take() else { return };
        end(&mut spans.server, Outcome::of_error(error.kind()), error.status(), false);
    }

    /// It is over.
    pub fn finish(&self, how: &TraceEnd<'_>) {
        let Some(Spans { mut server, attempt, requeued_at, .. }) = self.lock().take() else { return };
        let TraceEnd { outcome, code, is_broken, outline, mut queue_wait, .. } = *how;
        if let Some(mut attempt) = attempt {
            end(&mut attempt, outcome, code, is_broken);
            if let Some(first) = how.upstream_first_byte {
                attempt.set("gen_ai.response.time_to_first_chunk", first.as_secs_f64());
            }
        } else if let Some(since) = requeued_at.or(how.unsent_since) {
            let waited = since.elapsed();
            queue_wait += waited;
            if waited >= SHORTEST_WAIT {
                server.child("queue", SpanKind::Internal, since).fail(outcome.as_str());
            }
        }
        server.set("gen_ai.operation.name", operation(outline.endpoint));
        server.set("gen_ai.request.model", outline.model.to_string());
        server.set("gen_ai.request.stream", outline.is_streaming);
        server.set("modelrelay.provider", outline.provider.to_string());
        server.set("modelrelay.queue_seconds", queue_wait.as_secs_f64());
        if let Some(first) = how.first_byte {
            server.set("gen_ai.response.time_to_first_chunk", first.as_secs_f64());
        }
        if let Some(tokens) = how.tokens {
            server.set("gen_ai.usage.input_tokens", count(tokens.prompt_tokens));
            server.set("gen_ai.usage.output_tokens", count(tokens.completion_tokens));
        }
        end(&mut server, outcome, code, is_broken);
    }

    /// Held for moments; inside of a provider's lock, never around it.
    fn lock(&self) -> MutexGuard<'_, Option<Spans>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Its client left before there was anything else to end it.
impl Drop for RequestTrace {
    fn drop(&mut self) {
        if let Some(mut spans) = self.lock().take() {
            end(&mut spans.server, Outcome::Cancelled, CLIENT_CLOSED_REQUEST, false);
        }
    }
}

/// What a client does wrong is no error of its server, and neither is that it leaves.
fn end(span: &mut Span, outcome: Outcome, code: u16, is_broken: bool) {
    span.set("http.response.status_code", i64::from(code));
    span.set("modelrelay.outcome", outcome.as_str());
    if code >= 500 || is_broken {
        span.fail(outcome.as_str());
    }
}

/// One `traceparent` counts; several are as good as a malformed one.
fn parent(headers: &HeaderMap) -> Option<Parent> {
    let mut parents = headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
    let states: Vec<_> = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok()).collect();
    Parent::read(parent.to_str().ok(), Some(&states.join(",")))
}

/// The route as it is known to people: no part of a path that clients choose.
fn route(path: &str) -> &'static str {
    match POST_PATHS.iter().find(|(known, _)| *known == path) {
        Some((known, _)) => known,
        None if path.ends_with("/cancel") => "/v1/responses/{id}/cancel",
        None => "/v1/responses/{id}",
    }
}

/// OpenTelemetry's word for what is asked, or else ours.
fn operation(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::ChatCompletions | Endpoint::Responses | Endpoint::Messages => "chat",
        Endpoint::Completions => "text_completion",
        Endpoint::CountTokens
        | Endpoint::Embeddings
        | Endpoint::Rerank
        | Endpoint::Score
        | Endpoint::Audio
        | Endpoint::Classify
        | Endpoint::Images
        | Endpoint::Native
        | Endpoint::Tokenize
        | Endpoint::Models
        | Endpoint::Other => endpoint.as_str(),
    }
}

/// OpenTelemetry knows only signed numbers.
fn count(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX)
}
