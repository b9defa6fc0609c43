//! OpenTelemetry traces of the relay and the worker, and the export of their metrics.
//!
//! Spans are created by hand at the few places that know a request's life, not by a layer over all log events: a layer
//! would have to check every event of every library, and the fields of a log line are not the attributes of a span.
//! These places hold an `Option` of this crate's types. It is `None` by default, and then nothing of this crate runs:
//! no thread, no connection, no allocation, one comparison at each place.
//!
//! Rules:
//! - A request never waits. A finished span goes into a bounded queue, and is dropped if the queue is full. A thread of
//!   its own sends batches, each with a deadline. Dropped spans are counted.
//! - Attributes are names, numbers and our own constants: never prompts, responses, keys, secrets, queries or the
//!   messages of libraries.

mod collector;
mod context;
mod metrics;
mod queue;
mod settings;
mod span;

pub use context::{Parent, TRACEPARENT, TRACESTATE};
pub use metrics::{Gather, GatherFuture, MetricExport, MetricsTarget};
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

use collector::{Collector, Signal};
use queue::Queue;

/// How long the last export may take when the program ends. A user may be waiting for the end, but not for telemetry.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

/// Creates and exports spans. Clones share one exporter.
#[derive(Clone, Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The source of spans and metrics, unless `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override it.
#[derive(Clone, Copy, Debug)]
pub struct Service<'a> {
    /// The program's name.
    pub name: &'static str,
    /// The program's version.
    pub version: &'static str,
    /// The identifier of the process.
    pub instance: &'a str,
}

impl Traces {
    /// Starts to export to `target`. Must be called within a tokio runtime, which does the sending. Sampling, batches
    /// and limits follow OpenTelemetry's environment variables, or their defaults. `on_loss` is called for every span
    /// that is dropped, but not for spans that a collector rejects in a successful response, nor for those left at the
    /// end. It is called once at the start with 0 spans for each reason.
    pub fn start(target: &Target, service: &Service<'_>, on_loss: OnLoss) -> Result<Self, SettingError> {
        let exporter = exporter(target, Collector::new(target, Signal::Traces, Some(Handle::current()))?)?;
        Loss::ALL.into_iter().for_each(|loss| on_loss(loss, 0));
        let queue = Queue::new(exporter, on_loss);
        let provider = SdkTracerProvider::builder().with_span_processor(queue).with_resource(resource(service)).build();
        let tracer = provider.tracer(service.name);
        tracing::info!(collector = target.shown(), "exporting traces");
        Ok(Self { provider, tracer })
    }

    /// Begins a span in a caller's trace, or the first span of a new trace.
    pub fn begin(&self, name: impl Into<String>, kind: SpanKind, parent: Option<Parent>, at: Instant) -> Span {
        let parent = parent.map(|parent| parent.0);
        Span::start(&self.tracer, name.into(), kind, parent, wall_clock(at))
    }

    /// Sends the remaining spans, for at most two seconds.
    #[expect(clippy::disallowed_methods, reason = "simulations export no traces")]
    pub async fn shutdown(self) {
        let flushed = tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(FLUSH_PATIENCE)).await;
        if !matches!(flushed, Ok(Ok(()))) {
            tracing::debug!("cannot export the last traces");
        }
    }
}

impl Target {
    /// Checks for the errors of [`Traces::start`], without a thread, a connection or a runtime.
    pub fn check(&self) -> Result<(), SettingError> {
        exporter(self, Collector::new(self, Signal::Traces, None)?).map(|_| ())
    }
}

fn exporter(target: &Target, collector: Collector) -> Result<SpanExporter, SettingError> {
    SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(target.url.as_str())
        .with_http_client(collector)
        // A collector that is down stays down for a while, and the next batch is the next attempt. A retry would block
        // the queue and delay the end of the program.
        .with_retry_policy(RetryPolicy::disabled())
        .build()
        .map_err(|error| SettingError::new("OTEL_EXPORTER_OTLP_*", error.to_string()))
}

fn resource(service: &Service<'_>) -> Resource {
    let detected = Resource::builder().build();
    // Without any variable, the SDK sets the name to "unknown_service" and the name of the executable.
    let is_detected = |key: &'static str| {
        let value = detected.get(&Key::from_static_str(key));
        value.is_some_and(|value| !value.as_str().starts_with("unknown_service"))
    };
    let defaults = [
        ("service.name", service.name),
        ("service.version", service.version),
        ("service.instance.id", service.instance),
    ];
    let undetected = defaults.into_iter().filter(|(key, _)| !is_detected(key));
    let undetected = undetected.map(|(key, value)| KeyValue::new(key, value.to_owned()));
    Resource::builder().with_attributes(undetected).build()
}

/// Converts to wall-clock time, which spans use; requests use a monotonic clock.
fn wall_clock(at: Instant) -> SystemTime {
    let now = SystemTime::now();
    now.checked_sub(at.elapsed()).unwrap_or(now)
}
