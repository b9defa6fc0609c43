//! One request in OpenTelemetry: a server span, and below it a span for each wait in the queue and each attempt.
//!
//! It exists only if traces are exported. The spans are made where the request's log line gets its figures, and contain
//! the same: names, numbers and the relay's own terms.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, Method};
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::limits::{MAX_FINISH_REASON_BYTES, MAX_FINISH_REASONS, MAX_ID_BYTES, MAX_MODEL_CHARS};
use modelrelay_protocol::message::{ResponseDetails, TokenCounts};
use modelrelay_protocol::names::printable;
use modelrelay_protocol::paths::{Endpoint, POST_PATHS};
use modelrelay_traces::{Parent, Span, SpanContext, SpanKind, TRACEPARENT, TRACESTATE, Traces};

use super::{CLIENT_CLOSED_REQUEST, RequestRecord};
use crate::dispatch::Decision;
use crate::telemetry::metrics::Outcome;

/// A shorter wait has no span: the request was sent as it came.
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The attribute for a request's conversation.
const CONVERSATION: &str = "gen_ai.conversation.id";

/// The longest name of a kind of backend.
const MAX_BACKEND_CHARS: usize = 32;

/// The spans of one request.
#[derive(Debug)]
pub struct RequestTrace {
    trace_id: String,
    spans: Mutex<Option<Spans>>,
}

#[derive(Debug)]
struct Spans {
    server: Span,
    /// The pseudonym of the request's conversation, if traces show it.
    conversation: Option<String>,
    /// The running attempt.
    attempt: Option<Span>,
    /// The previous attempt, which failed.
    before: Option<SpanContext>,
    /// The beginning of the present wait, after a failed attempt.
    requeued_at: Option<Instant>,
}

/// How a request ended.
pub struct TraceEnd<'a> {
    /// The outcome.
    pub outcome: Outcome,
    /// The status for the client.
    pub code: u16,
    /// True if a response that had begun was broken off.
    pub is_broken: bool,
    /// The request.
    pub record: &'a RequestRecord,
    /// The total time in the queue before its dispatch.
    pub queue_wait: Duration,
    /// The time from its arrival to the first byte of its response.
    pub first_byte: Option<Duration>,
    /// The time from its last dispatch to the worker's first byte.
    pub upstream_first_byte: Option<Duration>,
    /// The beginning of its wait, if it was never sent.
    pub unsent_since: Option<Instant>,
    /// The token counts from the backend.
    pub tokens: Option<TokenCounts>,
}

impl RequestTrace {
    /// Begins the trace of a request at its head, as part of the client's trace if it names one.
    pub fn begin(traces: &Traces, method: &Method, path: &str, headers: &HeaderMap, request_id: &str) -> Self {
        let method = if method == Method::GET { "GET" } else { "POST" };
        let route = route(path);
        let mut server = traces.begin(format!("{method} {route}"), SpanKind::Server, parent(headers), Instant::now());
        server.set("http.request.method", method);
        server.set("http.route", route);
        server.set("modelrelay.request_id", request_id.to_owned());
        Self {
            trace_id: server.trace_id(),
            spans: Mutex::new(Some(Spans {
                server,
                conversation: None,
                attempt: None,
                before: None,
                requeued_at: None,
            })),
        }
    }

    /// The id of the trace, for the log.
    pub fn id(&self) -> &str {
        &self.trace_id
    }

    /// True if the trace is sampled, so that attributes are exported.
    pub fn is_recording(&self) -> bool {
        self.lock().as_ref().is_some_and(|spans| spans.server.is_recording())
    }

    /// Sets the pseudonym of the request's conversation, also on the attempts that begin later.
    pub fn set_conversation(&self, pseudonym: String) {
        if let Some(spans) = self.lock().as_mut() {
            spans.server.set(CONVERSATION, pseudonym.clone());
            spans.conversation = Some(pseudonym);
        }
    }

    /// Sets the details of the response. A worker may report anything, so all texts are cut.
    pub fn set_details(&self, details: &ResponseDetails) {
        let mut spans = self.lock();
        let Some(Spans { server, attempt, .. }) = spans.as_mut() else { return };
        for span in attempt.iter_mut().chain([server]) {
            describe(span, details);
        }
    }

    /// Begins an attempt, after this time in the queue.
    pub fn begin_attempt(
        &self,
        record: &RequestRecord,
        worker: &str,
        (attempt, decision): (u32, Decision),
        waited: Duration,
    ) {
        let mut spans = self.lock();
        let Some(spans) = spans.as_mut() else { return };
        let now = Instant::now();
        spans.requeued_at = None;
        if waited >= SHORTEST_WAIT {
            spans.server.child("queue", SpanKind::Internal, now.checked_sub(waited).unwrap_or(now)).end_at(now);
        }
        let operation = operation(record.endpoint);
        let name = format!("{operation} {}", record.model);
        let mut span = spans.server.child(name, SpanKind::Client, now);
        span.set("gen_ai.operation.name", operation);
        span.set("gen_ai.request.model", record.model.to_string());
        span.set("modelrelay.worker", worker.to_owned());
        span.set("modelrelay.attempt", i64::from(attempt));
        span.set("modelrelay.placement", decision.as_str());
        if !decision.reason().is_empty() {
            span.set("modelrelay.placement.reason", decision.reason());
        }
        if let Some(pseudonym) = &spans.conversation {
            span.set(CONVERSATION, pseudonym.clone());
        }
        if let Some(before) = spans.before.take() {
            span.follow(before);
        }
        spans.attempt = Some(span);
    }

    /// Ends a failed attempt; the request waits again.
    pub fn requeue(&self, reason: &'static str) {
        let mut spans = self.lock();
        let Some(spans) = spans.as_mut() else { return };
        spans.requeued_at = Some(Instant::now());
        if let Some(mut attempt) = spans.attempt.take() {
            spans.before = Some(attempt.context());
            attempt.fail(reason);
        }
    }

    /// Replaces the client's headers, so that the worker continues the trace below the running attempt.
    pub fn stamp(&self, headers: &mut BTreeMap<String, String>) {
        if let Some(spans) = self.lock().as_ref() {
            headers.remove(TRACESTATE);
            let span = spans.attempt.as_ref().unwrap_or(&spans.server);
            let values = span.headers().into_iter().filter(|(_, value)| !value.is_empty());
            headers.extend(values.map(|(name, value)| (name.to_owned(), value)));
        }
    }

    /// Ends the trace of a request that was rejected before it was queued.
    pub fn refuse(&self, error: &ApiError) {
        let Some(mut spans) = self.lock().take() else { return };
        end(&mut spans.server, Outcome::of_error(error.kind()), error.status(), false);
    }

    /// Ends the trace.
    pub fn finish(&self, how: &TraceEnd<'_>) {
        let Some(Spans { mut server, attempt, requeued_at, .. }) = self.lock().take() else { return };
        let TraceEnd { outcome, code, is_broken, record, mut queue_wait, .. } = *how;
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
        server.set("gen_ai.operation.name", operation(record.endpoint));
        server.set("gen_ai.request.model", record.model.to_string());
        server.set("gen_ai.request.stream", record.is_streaming);
        server.set("modelrelay.provider", record.provider.to_string());
        server.set("modelrelay.queue_seconds", queue_wait.as_secs_f64());
        if let Some(first) = how.first_byte {
            server.set("gen_ai.response.time_to_first_chunk", first.as_secs_f64());
        }
        if let Some(tokens) = how.tokens {
            server.set("gen_ai.usage.input_tokens", count(tokens.prompt_tokens));
            server.set("gen_ai.usage.output_tokens", count(tokens.completion_tokens));
            if let Some(cached) = tokens.cached_tokens {
                server.set("gen_ai.usage.cache_read.input_tokens", count(cached));
            }
        }
        end(&mut server, outcome, code, is_broken);
    }

    /// Held briefly; inside of a provider's lock, never around it.
    fn lock(&self) -> MutexGuard<'_, Option<Spans>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the trace of a client that disconnected before anything else ended it.
impl Drop for RequestTrace {
    fn drop(&mut self) {
        if let Some(mut spans) = self.lock().take() {
            end(&mut spans.server, Outcome::Cancelled, CLIENT_CLOSED_REQUEST, false);
        }
    }
}

/// Ends a span. Errors of a client are not errors of its server, and neither is its disconnect.
fn end(span: &mut Span, outcome: Outcome, code: u16, is_broken: bool) {
    span.set("http.response.status_code", i64::from(code));
    span.set("modelrelay.outcome", outcome.as_str());
    if code >= 500 || is_broken {
        span.fail(outcome.as_str());
    }
}

/// Sets the attributes of a response.
fn describe(span: &mut Span, details: &ResponseDetails) {
    let texts = [
        ("gen_ai.provider.name", &details.backend, MAX_BACKEND_CHARS),
        ("gen_ai.response.model", &details.model, MAX_MODEL_CHARS),
        ("gen_ai.response.id", &details.id, MAX_ID_BYTES),
    ];
    for (key, text, longest) in texts {
        if let Some(text) = text {
            span.set(key, printable(text, longest));
        }
    }
    if !details.finish_reasons.is_empty() {
        let reasons = details.finish_reasons.iter().take(MAX_FINISH_REASONS);
        let reasons = reasons.map(|reason| printable(reason, MAX_FINISH_REASON_BYTES)).collect();
        span.set_texts("gen_ai.response.finish_reasons", reasons);
    }
}

/// Only a single `traceparent` is used; several are treated as malformed.
fn parent(headers: &HeaderMap) -> Option<Parent> {
    let mut parents = headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
    let states: Vec<_> = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok()).collect();
    Parent::read(parent.to_str().ok(), Some(&states.join(",")))
}

/// The public name of the route, without the parts of a path that clients choose.
fn route(path: &str) -> &'static str {
    match POST_PATHS.iter().find(|(known, _)| *known == path) {
        Some((known, _)) => known,
        None if path.ends_with("/cancel") => "/v1/responses/{id}/cancel",
        None => "/v1/responses/{id}",
    }
}

/// OpenTelemetry's name of the operation, or else the relay's.
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

/// OpenTelemetry supports only signed numbers.
fn count(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX)
}
