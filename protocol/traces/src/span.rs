//! One span, which ends when it is dropped.

use std::time::{Instant, SystemTime};

use opentelemetry::trace::{Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::SdkTracer;

use crate::{context, wall_clock};

/// A part of a request's life. It ends when it is dropped, however its request ended.
#[derive(Debug)]
pub struct Span {
    tracer: SdkTracer,
    span: opentelemetry_sdk::trace::Span,
}

impl Span {
    pub(crate) fn start(
        tracer: &SdkTracer,
        name: String,
        kind: SpanKind,
        parent: Option<SpanContext>,
        at: SystemTime,
    ) -> Self {
        // Never the thread's current context: tasks of many requests share a thread.
        let context = Context::new();
        let context = match parent {
            Some(parent) => context.with_remote_span_context(parent),
            None => context,
        };
        let builder = SpanBuilder::from_name(name).with_kind(kind).with_start_time(at);
        Self { tracer: tracer.clone(), span: tracer.build_with_context(builder, &context) }
    }

    /// A part of this part.
    pub fn child(&self, name: impl Into<String>, kind: SpanKind, at: Instant) -> Self {
        Self::start(&self.tracer, name.into(), kind, Some(self.context()), wall_clock(at))
    }

    /// Says something of it. Nothing is kept of a span that is not sampled.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if self.span.is_recording() {
            self.span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// It does again what this span did.
    pub fn follow(&mut self, before: SpanContext) {
        self.span.add_link(before, Vec::new());
    }

    /// What another span can be linked to, even when this one has ended.
    pub fn context(&self) -> SpanContext {
        self.span.span_context().clone()
    }

    /// Something happened in it, now.
    pub fn event(&mut self, name: &'static str) {
        self.span.add_event(name, Vec::new());
    }

    /// It came to nothing, for a reason of a list of ours.
    pub fn fail(&mut self, reason: &str) {
        self.set("error.type", reason.to_owned());
        self.span.set_status(Status::error(""));
    }

    /// It ended then, not when it is dropped.
    pub fn end_at(mut self, at: Instant) {
        self.span.end_with_timestamp(wall_clock(at));
    }

    /// What a request that is sent under it carries; an empty value is not sent.
    pub fn headers(&self) -> [(&'static str, String); 2] {
        context::headers(self.span.span_context())
    }

    /// The trace that it is in, for the log.
    pub fn trace_id(&self) -> String {
        self.span.span_context().trace_id().to_string()
    }
}
