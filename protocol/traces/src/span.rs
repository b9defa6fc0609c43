//! A span that ends when it is dropped.

use std::time::{Instant, SystemTime};

use opentelemetry::trace::{Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::SdkTracer;

use crate::{context, wall_clock};

/// A part of a request's life. It ends when it is dropped, however the request ended.
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

    /// Begins a child span.
    pub fn child(&self, name: impl Into<String>, kind: SpanKind, at: Instant) -> Self {
        Self::start(&self.tracer, name.into(), kind, Some(self.context()), wall_clock(at))
    }

    /// Sets an attribute. A span that is not sampled keeps none.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if self.span.is_recording() {
            self.span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Sets an attribute that is a list of texts.
    pub fn set_texts(&mut self, key: &'static str, texts: Vec<String>) {
        self.set(key, Value::Array(Array::String(texts.into_iter().map(StringValue::from).collect())));
    }

    /// True if the span is sampled, so that attributes are kept.
    pub fn is_recording(&self) -> bool {
        self.span.is_recording()
    }

    /// Links to a span whose work this one repeats.
    pub fn follow(&mut self, before: SpanContext) {
        self.span.add_link(before, Vec::new());
    }

    /// The context that other spans can link to, even after this span has ended.
    pub fn context(&self) -> SpanContext {
        self.span.span_context().clone()
    }

    /// Records an event at the current time.
    pub fn event(&mut self, name: &'static str) {
        self.span.add_event(name, Vec::new());
    }

    /// Marks the span as failed, with a reason from a fixed list.
    pub fn fail(&mut self, reason: &str) {
        self.set("error.type", reason.to_owned());
        self.span.set_status(Status::error(""));
    }

    /// Ends the span at the given time instead of when it is dropped.
    pub fn end_at(mut self, at: Instant) {
        self.span.end_with_timestamp(wall_clock(at));
    }

    /// The trace headers of a request that is sent under this span. Headers with an empty value are not sent.
    pub fn headers(&self) -> [(&'static str, String); 2] {
        context::headers(self.span.span_context())
    }

    /// The id of its trace, for the log.
    pub fn trace_id(&self) -> String {
        self.span.span_context().trace_id().to_string()
    }
}
