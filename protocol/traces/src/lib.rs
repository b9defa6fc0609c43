//! OpenTelemetry traces of the relay and the worker: whether, where to, and in whose trace.
//!
//! Spans are made by hand at the few places that know a request's life, not by a layer over everything that is logged: a
//! layer would be asked about every event of every library, and a log line's fields are no span's attributes. Whoever makes
//! them holds an `Option` of what is here. `None` is the default, and then nothing of this crate runs: no thread, no
//! connection, no allocation, one comparison at each of those places.
//!
//! Rules:
//! - A request never waits. A finished span goes into a bounded queue, and is dropped when that is full; a thread of its own
//!   sends batches, with a deadline for each. What is dropped is counted.
//! - Attributes are names, numbers and words of ours: never prompts, answers, keys, secrets, queries or what a library said.

mod collector;
mod context;
mod queue;
mod settings;
mod span;

pub use context::{Parent, TRACEPARENT, TRACESTATE};
pub use opentelemetry::trace::{SpanContext, SpanKind};
pub use queue::{Loss, OnLoss};
pub use settings::{ENDPOINT, SettingError, Target};
pub use span::Span;

use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tokio::runtime::Handle;

use collector::Collector;
use queue::Queue;

/// How long the last batch may take when the program ends. Somebody is waiting for that, and for no span.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

/// What makes spans and sends them. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// Whose spans they are, where `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` do not say otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Service<'a> {
    /// The program.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// Its process.
    pub instance: &'a str,
}

impl Traces {
    /// Begins to export to `target`. Within a tokio runtime, which does the sending. Sampling, batches and limits are what
    /// OpenTelemetry's variables say, or its defaults. `on_loss` is told of every span that is dropped, not of those that a
    /// collector takes and refuses in its answer, nor of those that are left at the end; and of none by each reason at once.
    pub fn start(target: &Target, service: &Service<'_>, on_loss: OnLoss) -> Result<Self, SettingError> {
        let exporter = exporter(target, Collector::new(target, Some(Handle::current()))?)?;
        Loss::ALL.into_iter().for_each(|loss| on_loss(loss, 0));
        let queue = Queue::new(exporter, on_loss);
        let provider = SdkTracerProvider::builder().with_span_processor(queue).with_resource(resource(service)).build();
        let tracer = provider.tracer(service.name);
        tracing::info!(collector = target.shown(), "exporting traces");
        Ok(Self { provider, tracer })
    }

    /// A span in somebody else's trace, or the first of a new one.
    pub fn begin(&self, name: impl Into<String>, kind: SpanKind, parent: Option<Parent>, at: Instant) -> Span {
        let parent = parent.map(|parent| parent.0);
        Span::start(&self.tracer, name.into(), kind, parent, wall_clock(at))
    }

    /// Sends what is left, for at most two seconds.
    #[expect(clippy::disallowed_methods, reason = "simulations export no traces")]
    pub async fn shutdown(self) {
        let flushed = tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(FLUSH_PATIENCE)).await;
        if !matches!(flushed, Ok(Ok(()))) {
            tracing::debug!("the last traces could not be exported");
        }
    }
}

impl Target {
    /// Finds what [`Traces::start`] would refuse, without a thread, a connection or a runtime.
    pub fn check(&self) -> Result<(), SettingError> {
        exporter(self, Collector::new(self, None)?).map(|_| ())
    }
}

fn exporter(target: &Target, collector: Collector) -> Result<SpanExporter, SettingError> {
    SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(target.url.as_str())
        .with_http_client(collector)
        // Whoever is away is away for a while, and the next batch is the next try; a retry would hold the queue up, and the
        // end of the program.
        .with_retry_policy(RetryPolicy::disabled())
        .build()
        .map_err(|error| SettingError::new("OTEL_EXPORTER_OTLP_*", error.to_string()))
}

fn resource(service: &Service<'_>) -> Resource {
    let detected = Resource::builder().build();
    // Without any variable the SDK calls a program "unknown_service", and its file's name.
    let is_said = |key: &'static str| {
        let value = detected.get(&Key::from_static_str(key));
        value.is_some_and(|value| !value.as_str().starts_with("unknown_service"))
    };
    let ours = [
        ("service.name", service.name),
        ("service.version", service.version),
        ("service.instance.id", service.instance),
    ];
    let unsaid = ours.into_iter().filter(|(key, _)| !is_said(key));
    let unsaid = unsaid.map(|(key, value)| KeyValue::new(key, value.to_owned()));
    Resource::builder().with_attributes(unsaid).build()
}

/// Spans are told in the time of day, requests in that of a stopwatch.
fn wall_clock(at: Instant) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(at.elapsed()).unwrap_or(now)
}
