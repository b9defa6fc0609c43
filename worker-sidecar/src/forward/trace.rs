//! The OpenTelemetry spans of one request: the worker's span, and below it the backend's. They exist only if traces are
//! exported; otherwise a client's own trace headers are forwarded to the backend unchanged.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use http::{HeaderMap, HeaderName, HeaderValue};
use modelrelay_protocol::message::Request;
use modelrelay_traces::{Parent, Span, SpanKind, TRACEPARENT, TRACESTATE, Traces};
use url::Url;

/// The spans of one request. A request that is dropped without an end was cancelled.
#[derive(Debug)]
pub(super) struct ForwardTrace(Mutex<Option<Spans>>);

#[derive(Debug)]
struct Spans {
    forward: Span,
    backend: Option<Span>,
}

impl ForwardTrace {
    /// Continues the relay's trace. Removes its headers from the request, because the backend continues the worker's
    /// trace.
    pub(super) fn begin(traces: &Traces, request: &mut Request, worker: &str) -> Self {
        let (mut parent, mut state) = (None, None);
        request.headers.retain(|name, value| {
            let place = match name {
                name if name.eq_ignore_ascii_case(TRACEPARENT) => &mut parent,
                name if name.eq_ignore_ascii_case(TRACESTATE) => &mut state,
                _ => return true,
            };
            *place = Some(std::mem::take(value));
            false
        });
        let parent = Parent::read(parent.as_deref(), state.as_deref());
        let name = format!("forward {}", request.model);
        let mut forward = traces.begin(name, SpanKind::Server, parent, Instant::now());
        forward.set("gen_ai.request.model", request.model.clone());
        forward.set("gen_ai.request.stream", request.is_streaming);
        forward.set("modelrelay.worker", worker.to_owned());
        Self(Mutex::new(Some(Spans { forward, backend: None })))
    }

    /// The request has its slot, or its model is loaded.
    pub(super) fn mark_forwarding(&self) {
        if let Some(spans) = self.lock().as_mut() {
            spans.forward.event("forwarding");
        }
    }

    /// The request is being sent to the backend: adds the trace headers. `path`: from the allow-list, without its
    /// query.
    pub(super) fn begin_backend(&self, backend: &Url, method: &str, path: &str, headers: &mut HeaderMap) {
        let mut spans = self.lock();
        let Some(spans) = spans.as_mut() else { return };
        let mut span = spans.forward.child(method.to_owned(), SpanKind::Client, Instant::now());
        span.set("http.request.method", method.to_owned());
        span.set("url.path", path.to_owned());
        span.set("server.address", backend.host_str().unwrap_or_default().to_owned());
        span.set("server.port", i64::from(backend.port_or_known_default().unwrap_or_default()));
        for (name, value) in span.headers() {
            match HeaderValue::from_str(&value) {
                Ok(value) if !value.is_empty() => _ = headers.insert(HeaderName::from_static(name), value),
                Ok(_) | Err(_) => _ = headers.remove(name),
            }
        }
        spans.backend = Some(span);
    }

    /// The backend's response has begun.
    pub(super) fn mark_answered(&self, status: u16) {
        let mut spans = self.lock();
        let Some(Spans { forward, backend: Some(backend) }) = spans.as_mut() else { return };
        for span in [&mut *backend, forward] {
            span.set("http.response.status_code", i64::from(status));
        }
        backend.event("first byte");
        if status >= 400 {
            // A client cannot know the cause.
            backend.fail(&status.to_string());
        }
    }

    /// The response is complete, unless it has failed before.
    pub(super) fn finish(&self) {
        if let Some(mut spans) = self.lock().take() {
            spans.forward.set("modelrelay.outcome", "ok");
        }
    }

    /// The request failed, for a reason from a fixed list.
    pub(super) fn fail(&self, reason: &'static str) {
        if let Some(Spans { mut forward, backend }) = self.lock().take() {
            forward.set("modelrelay.outcome", reason);
            forward.fail(reason);
            if let Some(mut backend) = backend {
                backend.fail(reason);
            }
        }
    }

    /// Held only briefly, by the request's own task.
    fn lock(&self) -> MutexGuard<'_, Option<Spans>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ForwardTrace {
    fn drop(&mut self) {
        if let Some(mut spans) = self.lock().take() {
            spans.forward.set("modelrelay.outcome", "cancelled");
        }
    }
}
