//! Every family: name, help, labels, buckets. Dashboards and alerts depend on the names.

use std::collections::HashMap;

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Registry};

use super::keys::KeyFamilies;
use super::process::ProcessGauges;
use super::register::{counter_vec, gauge_vec, histogram_vec, int_counter, int_gauge};
use super::state::StateGauges;
use super::zones::ZoneFamilies;

const LONG: &[f64] =
    &[0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0];
const FIRST_TOKEN: &[f64] =
    &[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0];
const INTERVAL: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0];
const QUEUE: &[f64] = &[0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0];
const SIZE: &[f64] =
    &[256.0, 1024.0, 4096.0, 16_384.0, 65_536.0, 262_144.0, 1_048_576.0, 4_194_304.0, 16_777_216.0, 33_554_432.0];
const OVERHEAD: &[f64] = &[0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];

pub(super) struct Families {
    pub(super) registry: Registry,
    pub(super) requests: IntCounterVec,
    pub(super) request_duration: HistogramVec,
    pub(super) first_token: HistogramVec,
    pub(super) upstream_first_token: HistogramVec,
    pub(super) inter_chunk: HistogramVec,
    pub(super) output_token: HistogramVec,
    pub(super) queue_wait: HistogramVec,
    pub(super) placements: IntCounterVec,
    pub(super) requeues: IntCounterVec,
    pub(super) cancellations: IntCounterVec,
    pub(super) client_retries: IntCounterVec,
    pub(super) tokens: IntCounterVec,
    pub(super) request_body: HistogramVec,
    pub(super) response_body: HistogramVec,
    pub(super) worker_connections: IntCounterVec,
    pub(super) worker_disconnects: IntCounterVec,
    pub(super) heartbeat_rtt: HistogramVec,
    pub(super) auth_failures: IntCounterVec,
    pub(super) audit_lost: IntCounter,
    pub(super) journal_lines_lost: IntCounter,
    pub(super) usage_write_failures: IntCounter,
    pub(super) keys: KeyFamilies,
    pub(super) log_lines_dropped: IntCounter,
    /// Without a sample if no traces are exported.
    pub(super) spans_dropped: IntCounterVec,
    pub(super) overhead: HistogramVec,
    pub(super) config_info: IntGaugeVec,
    pub(super) config_ok: IntGauge,
    /// These two have no label, and no sample without TLS.
    pub(super) tls_ok: IntGaugeVec,
    pub(super) tls_expiry: IntGaugeVec,
    pub(super) build_info: IntGaugeVec,
    pub(super) gauges: StateGauges,
    pub(super) zones: ZoneFamilies,
    pub(super) process: ProcessGauges,
}

impl Families {
    pub(super) fn new() -> Self {
        let registry = Registry::new();
        let counter = |name, help, labels: &[&str]| counter_vec(&registry, name, help, labels);
        let histogram = |name, help, buckets, labels: &[&str]| histogram_vec(&registry, name, help, buckets, labels);
        let request = &["provider", "model", "endpoint"];
        Self {
            requests: counter(
                "requests_total",
                "Completed requests.",
                &["provider", "model", "endpoint", "outcome", "code"],
            ),
            request_duration: histogram(
                "request_duration_seconds",
                "Time from a request's acceptance to its last byte.",
                LONG,
                &["provider", "model", "endpoint", "stream"],
            ),
            first_token: histogram(
                "time_to_first_token_seconds",
                "Time from a request's acceptance to the first byte of its response body.",
                FIRST_TOKEN,
                request,
            ),
            upstream_first_token: histogram(
                "upstream_time_to_first_token_seconds",
                "Time from a request's dispatch to the first byte from its worker.",
                FIRST_TOKEN,
                request,
            ),
            inter_chunk: histogram(
                "inter_chunk_latency_seconds",
                "Time between two chunks of a stream.",
                INTERVAL,
                &["provider", "model"],
            ),
            output_token: histogram(
                "time_per_output_token_seconds",
                "Time per token after the first, if the backend reports token counts.",
                INTERVAL,
                &["provider", "model"],
            ),
            queue_wait: histogram(
                "queue_wait_seconds",
                "Time in the queue; a requeued request has one observation per wait.",
                QUEUE,
                &["provider", "outcome"],
            ),
            placements: counter(
                "placement_total",
                "Requests sent to workers, by the reason for the choice of the worker.",
                &["provider", "decision", "reason"],
            ),
            requeues: counter("requeues_total", "Requests returned to the queue.", &["provider", "reason"]),
            cancellations: counter("cancellations_total", "Cancelled requests.", &["provider", "reason", "stage"]),
            client_retries: counter("client_retries_total", "Requests that an SDK marked as retries.", &["client"]),
            tokens: counter(
                "tokens_total",
                "Tokens, if the backend reports token counts.",
                &["provider", "model", "type"],
            ),
            request_body: histogram("request_body_bytes", "Size of request bodies.", SIZE, &["endpoint"]),
            response_body: histogram("response_body_bytes", "Size of response bodies.", SIZE, &["endpoint"]),
            worker_connections: counter(
                "worker_connections_total",
                "Worker connections, accepted and rejected.",
                &["provider", "result"],
            ),
            worker_disconnects: counter(
                "worker_disconnects_total",
                "Closed worker connections.",
                &["provider", "reason"],
            ),
            heartbeat_rtt: histogram(
                "worker_heartbeat_rtt_seconds",
                "Time from a ping to its pong.",
                INTERVAL,
                &["provider"],
            ),
            auth_failures: counter("auth_failures_total", "Authentication failures.", &["realm"]),
            log_lines_dropped: int_counter(
                &registry,
                "log_lines_dropped_total",
                "Log lines dropped because standard error was not read.",
            ),
            audit_lost: int_counter(
                &registry,
                "audit_write_failures_total",
                "Events that could not be written to AUDIT_LOG_FILE.",
            ),
            journal_lines_lost: int_counter(
                &registry,
                "request_journal_lines_lost_total",
                "Finished requests that could not be written to REQUEST_JOURNAL_FILE.",
            ),
            usage_write_failures: int_counter(
                &registry,
                "usage_write_failures_total",
                "Failed writes of USAGE_FILE; the sums are written later.",
            ),
            keys: KeyFamilies::new(&registry),
            spans_dropped: counter(
                "trace_spans_dropped_total",
                "Trace spans not delivered to the collector.",
                &["reason"],
            ),
            overhead: histogram(
                "relay_overhead_seconds",
                "Time that the relay itself spends on a request.",
                OVERHEAD,
                &["endpoint"],
            ),
            config_info: gauge_vec(&registry, "config_info", "Active configuration hash.", &["hash"]),
            config_ok: int_gauge(
                &registry,
                "config_last_reload_successful",
                "1 if the last configuration reload succeeded.",
            ),
            tls_ok: gauge_vec(
                &registry,
                "tls_last_reload_successful",
                "1 if the last reload of TLS certificate and key succeeded.",
                &[],
            ),
            tls_expiry: gauge_vec(
                &registry,
                "tls_certificate_expiry_timestamp_seconds",
                "Expiry time of the TLS certificate, in seconds since 1970.",
                &[],
            ),
            build_info: gauge_vec(&registry, "build_info", "Build information.", &["version", "revision", "rustc"]),
            gauges: StateGauges::new(&registry),
            zones: ZoneFamilies::new(&registry),
            process: ProcessGauges::new(&registry),
            registry,
        }
    }

    /// Deletes every series whose label `label` has this value.
    pub(super) fn delete_where(&self, label: &str, value: &str) {
        let counters = [
            &self.requests,
            &self.placements,
            &self.zones.requests,
            &self.requeues,
            &self.cancellations,
            &self.tokens,
            &self.worker_connections,
            &self.worker_disconnects,
        ];
        let histograms = [
            &self.request_duration,
            &self.first_token,
            &self.upstream_first_token,
            &self.inter_chunk,
            &self.output_token,
            &self.queue_wait,
            &self.heartbeat_rtt,
        ];
        counters.into_iter().for_each(|family| delete(family, label, value));
        histograms.into_iter().for_each(|family| delete(family, label, value));
    }
}

fn delete<T: MetricVecBuilder>(family: &MetricVec<T>, label: &str, value: &str) {
    for family_now in family.collect() {
        for metric in family_now.get_metric() {
            let labels: HashMap<&str, &str> =
                metric.get_label().iter().map(|pair| (pair.name(), pair.value())).collect();
            if labels.get(label) == Some(&value) {
                // An error means that another thread deleted it in between.
                let _ = family.remove(&labels);
            }
        }
    }
}
