//! The worker's metrics, `modelrelay_worker_…`. Labels are bounded: no model, no request, no client.

use std::time::Duration;

use modelrelay_platform::log;
use modelrelay_protocol::paths::Endpoint;
use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{
    Counter, Encoder, Gauge, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

use crate::backend::condition::Condition;

/// All metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Links, by relay address.
    pub connected: IntGaugeVec,
    reconnects: IntCounterVec,
    backend_up: IntGauge,
    backend_condition: IntGaugeVec,
    failing_models: IntGauge,
    backend_duration: HistogramVec,
    backend_errors: IntCounterVec,
    /// Requests that are running.
    pub in_flight: IntGauge,
    /// The number of slots.
    pub max_concurrency: IntGauge,
    /// Body bytes from relays.
    pub received_bytes: IntCounter,
    /// Body bytes to relays.
    pub sent_bytes: IntCounter,
    backpressure: Counter,
    refreshes: IntCounterVec,
    last_message: GaugeVec,
    /// Pieces without a receiver.
    pub dropped_pieces: IntCounter,
    log_lines_dropped: IntCounter,
    /// Has no sample if no traces are exported.
    spans_dropped: IntCounterVec,
}

/// Responses take from milliseconds to an hour.
const SECONDS: [f64; 16] =
    [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0];

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers all metrics, at zero.
    pub fn new() -> Self {
        let metrics = Self::without_series();
        // A counter that does not exist until its first event cannot show that event as an increase.
        for reason in ["lost", "closed", "silent", "unreachable", "rejected", "auth_failed", "duplicate"] {
            metrics.reconnects.with_label_values(&[reason]);
        }
        for kind in ["connect", "reset", "lost", "http_5xx", "body", "cancelled"] {
            metrics.backend_errors.with_label_values(&[kind]);
        }
        for result in ["ok", "error"] {
            metrics.refreshes.with_label_values(&[result]);
        }
        metrics
    }

    fn without_series() -> Self {
        let registry = Registry::new();
        let bytes: IntCounterVec = labelled(
            &registry,
            IntCounterVec::new(opts("forwarded_bytes_total", "Forwarded body bytes, by direction"), &["direction"]),
        );
        let info = labelled(&registry, IntGaugeVec::new(opts("build_info", "Build information"), &["version"]));
        info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let duration = HistogramOpts::new(
            name("backend_request_duration_seconds"),
            "Time to the backend's response headers, by endpoint and status",
        );
        Self {
            connected: labelled(&registry, IntGaugeVec::new(opts("connected", "Open links, by relay"), &["relay"])),
            reconnects: labelled(
                &registry,
                IntCounterVec::new(opts("reconnects_total", "Ended links and failed dials, by reason"), &["reason"]),
            ),
            backend_up: labelled(&registry, IntGauge::with_opts(opts("backend_up", "1 while the backend is healthy"))),
            backend_condition: labelled(
                &registry,
                IntGaugeVec::new(
                    opts("backend_condition", "1 for the current condition of the backend"),
                    &["condition"],
                ),
            ),
            failing_models: labelled(
                &registry,
                IntGauge::with_opts(opts("failing_models", "Models for which the backend fails every request")),
            ),
            backend_duration: labelled(
                &registry,
                HistogramVec::new(duration.buckets(SECONDS.to_vec()), &["endpoint", "code"]),
            ),
            backend_errors: labelled(
                &registry,
                IntCounterVec::new(
                    opts("backend_errors_total", "Requests without a complete backend response, by kind"),
                    &["kind"],
                ),
            ),
            in_flight: labelled(&registry, IntGauge::with_opts(opts("requests_in_flight", "Running requests"))),
            max_concurrency: labelled(
                &registry,
                IntGauge::with_opts(opts("max_concurrency", "Maximum number of concurrent requests")),
            ),
            received_bytes: bytes.with_label_values(&["request"]),
            sent_bytes: bytes.with_label_values(&["response"]),
            backpressure: labelled(
                &registry,
                Counter::with_opts(opts(
                    "send_backpressure_seconds_total",
                    "Time that backend responses waited for slow readers",
                )),
            ),
            refreshes: labelled(
                &registry,
                IntCounterVec::new(
                    opts("model_refresh_total", "Polls of the backend's models, by result"),
                    &["result"],
                ),
            ),
            last_message: labelled(
                &registry,
                GaugeVec::new(
                    opts("last_relay_message_timestamp_seconds", "Time of the relay's last message"),
                    &["relay"],
                ),
            ),
            dropped_pieces: labelled(
                &registry,
                IntCounter::with_opts(opts(
                    "dropped_pieces_total",
                    "Body chunks dropped because their request had ended",
                )),
            ),
            log_lines_dropped: labelled(
                &registry,
                IntCounter::with_opts(opts(
                    "log_lines_dropped_total",
                    "Log lines dropped because standard error was not read",
                )),
            ),
            spans_dropped: labelled(
                &registry,
                IntCounterVec::new(
                    opts("trace_spans_dropped_total", "Trace spans not delivered to the collector"),
                    &["reason"],
                ),
            ),
            registry,
        }
    }

    /// The trace collector did not receive this many spans.
    pub fn spans_dropped(&self, reason: &str, spans: u64) {
        self.spans_dropped.with_label_values(&[reason]).inc_by(spans);
    }

    /// A link ended, or a dial failed.
    pub fn reconnects(&self, reason: &str) {
        self.reconnects.with_label_values(&[reason]).inc();
    }

    /// A request has no complete response.
    pub fn backend_errors(&self, kind: &str) {
        self.backend_errors.with_label_values(&[kind]).inc();
    }

    /// The head of the backend's response arrived.
    pub fn observe_backend(&self, endpoint: Endpoint, status: u16, took: Duration) {
        let endpoint = endpoint.as_str();
        self.backend_duration.with_label_values(&[endpoint, status_class(status)]).observe(took.as_secs_f64());
        if (500..=599).contains(&status) {
            self.backend_errors("http_5xx");
        }
    }

    /// The backend entered this condition.
    pub fn backend_condition(&self, entered: Condition) {
        for condition in Condition::ALL {
            let is_entered = i64::from(condition == entered);
            self.backend_condition.with_label_values(&[condition.as_str()]).set(is_entered);
        }
        self.backend_up.set(i64::from(entered == Condition::Healthy));
    }

    /// The number of models whose requests the backend fails.
    pub fn failing_models(&self, count: usize) {
        self.failing_models.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The backend's models were requested.
    pub fn refreshed(&self, result: &str) {
        self.refreshes.with_label_values(&[result]).inc();
    }

    /// A backend waited this long for its reader.
    pub fn waited(&self, time: Duration) {
        if !time.is_zero() {
            self.backpressure.inc_by(time.as_secs_f64());
        }
    }

    /// Returns the gauge for the time of this relay's last message.
    pub fn last_message(&self, relay: &str) -> Gauge {
        self.last_message.with_label_values(&[relay])
    }

    /// A relay's last link is gone: removes its series.
    pub fn forget_relay(&self, relay: &str) {
        let _ = self.connected.remove_label_values(&[relay]);
        let _ = self.last_message.remove_label_values(&[relay]);
    }

    /// Removes the metrics that apply only to a worker with one backend: with slots, "down" would be a false alarm.
    pub fn forget_backend(&self) {
        // It fails only if the metric is already removed.
        let _ = self.registry.unregister(Box::new(self.backend_up.clone()));
        let _ = self.registry.unregister(Box::new(self.backend_condition.clone()));
    }

    /// The registry for further metrics of this worker.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Returns the present values of all metrics.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.log_lines_dropped.inc_by(log::dropped_lines().saturating_sub(self.log_lines_dropped.get()));
        self.registry.gather()
    }

    /// Returns the text for Prometheus.
    pub fn render(&self) -> Vec<u8> {
        let mut text = Vec::new();
        // Writing to memory fails only for invalid metrics.
        let _ = TextEncoder::new().encode(&self.gather(), &mut text);
        text
    }
}

fn name(of: &str) -> String {
    format!("modelrelay_worker_{of}")
}

fn opts(of: &str, help: &str) -> Opts {
    Opts::new(name(of), help)
}

/// Names and labels are constants of this file, so neither step can fail at run time.
fn labelled<C: Collector + Clone + 'static>(registry: &Registry, metric: prometheus::Result<C>) -> C {
    let metric = metric.expect("a metric with a valid name");
    registry.register(Box::new(metric.clone())).expect("a metric registered once");
    metric
}

/// Maps a status to one of a few labels: a backend may return any status.
fn status_class(status: u16) -> &'static str {
    match status {
        200 => "200",
        201..=299 => "2xx",
        300..=399 => "3xx",
        400 => "400",
        401 => "401",
        404 => "404",
        429 => "429",
        402..=499 => "4xx",
        500 => "500",
        503 => "503",
        501..=599 => "5xx",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_metric_names_are_exported() {
        let metrics = Metrics::new();
        metrics.connected.with_label_values(&["r"]).set(1);
        metrics.reconnects("lost");
        metrics.backend_errors("connect");
        metrics.observe_backend(Endpoint::Messages, 503, Duration::from_millis(3));
        metrics.refreshed("ok");
        metrics.last_message("r").set(1.0);
        let text = String::from_utf8(metrics.render()).unwrap();
        for name in [
            "connected{relay=\"r\"} 1",
            "reconnects_total{reason=\"lost\"} 1",
            "backend_up 0",
            "failing_models 0",
            "backend_request_duration_seconds_count{code=\"503\",endpoint=\"messages\"} 1",
            "backend_errors_total{kind=\"http_5xx\"} 1",
            "requests_in_flight 0",
            "max_concurrency 0",
            "forwarded_bytes_total{direction=\"response\"} 0",
            "send_backpressure_seconds_total 0",
            "model_refresh_total{result=\"ok\"} 1",
            "last_relay_message_timestamp_seconds{relay=\"r\"}",
        ] {
            assert!(text.contains(&format!("modelrelay_worker_{name}")), "{name} in\n{text}");
        }
        metrics.forget_relay("r");
        assert!(!String::from_utf8(metrics.render()).unwrap().contains("relay=\"r\""));
    }
}
