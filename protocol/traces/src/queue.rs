//! The queue between requests and the collector, which counts the spans that it drops.
//!
//! The SDK's own queue drops spans in the same way, but only logs their number at the end. Here the room is counted
//! before a span enters the SDK's queue, which therefore never is full.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, OTEL_BSP_MAX_QUEUE_SIZE, OTEL_BSP_MAX_QUEUE_SIZE_DEFAULT, Span, SpanData,
    SpanExporter, SpanProcessor,
};

/// The reason why a finished span is not exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Spans ended faster than the collector accepted them.
    QueueFull,
    /// The collector was unavailable, or rejected the batch.
    ExportFailed,
}

impl Loss {
    /// All reasons.
    pub const ALL: [Self; 2] = [Self::QueueFull, Self::ExportFailed];

    /// The label value in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::ExportFailed => "export_failed",
        }
    }
}

/// Called with each loss and the number of spans, from any thread.
pub type OnLoss = Arc<dyn Fn(Loss, u64) + Send + Sync>;

/// The queue, as the sender of spans sees it.
pub(crate) struct Queue {
    batches: BatchSpanProcessor,
    waiting: Arc<AtomicUsize>,
    capacity: usize,
    on_loss: OnLoss,
}

/// The exporter, as the SDK's queue sees it.
struct Taker<E> {
    exporter: E,
    waiting: Arc<AtomicUsize>,
    on_loss: OnLoss,
}

impl Queue {
    /// Batch and queue sizes follow OpenTelemetry's environment variables, or their defaults.
    pub(crate) fn new<E: SpanExporter + 'static>(exporter: E, on_loss: OnLoss) -> Self {
        let capacity = std::env::var(OTEL_BSP_MAX_QUEUE_SIZE).ok().and_then(|text| text.parse().ok());
        let capacity = capacity.unwrap_or(OTEL_BSP_MAX_QUEUE_SIZE_DEFAULT);
        let waiting = Arc::new(AtomicUsize::new(0));
        let taker = Taker { exporter, waiting: Arc::clone(&waiting), on_loss: Arc::clone(&on_loss) };
        let config = BatchConfigBuilder::default().with_max_queue_size(capacity).build();
        let batches = BatchSpanProcessor::builder(taker).with_batch_config(config).build();
        Self { batches, waiting, capacity, on_loss }
    }
}

impl SpanProcessor for Queue {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.waiting.fetch_add(1, Ordering::AcqRel) < self.capacity {
            self.batches.on_end(span);
        } else {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            (self.on_loss)(Loss::QueueFull, 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

impl<E: SpanExporter> SpanExporter for Taker<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.waiting.fetch_sub(spans, Ordering::AcqRel);
        let taken = self.exporter.export(batch).await;
        if taken.is_err() {
            (self.on_loss)(Loss::ExportFailed, spans as u64);
        }
        taken
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

impl<E> std::fmt::Debug for Taker<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Taker").finish_non_exhaustive()
    }
}
