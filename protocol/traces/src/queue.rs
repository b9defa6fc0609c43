//! The queue between requests and the collector, which counts what it drops.
//!
//! The SDK's own queue drops as this one does, and tells only its log how much, at the end. Here the room is counted before
//! that queue is asked, which therefore never is full.

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

/// Why a finished span is not exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// More spans ended than the collector took meanwhile.
    QueueFull,
    /// The collector was away, or refused its batch.
    ExportFailed,
}

impl Loss {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::QueueFull, Self::ExportFailed];

    /// As metrics have it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::ExportFailed => "export_failed",
        }
    }
}

/// Told of each loss, and of how many spans; from any thread.
pub type OnLoss = Arc<dyn Fn(Loss, u64) + Send + Sync>;

/// The queue, on the side of those whose spans end.
pub(crate) struct Queue {
    batches: BatchSpanProcessor,
    waiting: Arc<AtomicUsize>,
    capacity: usize,
    on_loss: OnLoss,
}

/// The exporter, on the side of the collector.
struct Taker<E> {
    exporter: E,
    waiting: Arc<AtomicUsize>,
    on_loss: OnLoss,
}

impl Queue {
    /// Batches and the queue's size are what OpenTelemetry's variables say, or its defaults.
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
