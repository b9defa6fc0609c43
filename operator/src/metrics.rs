//! The operator's metrics, with the names that the alerts and dashboards use.

use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Encoder, HistogramOpts, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

const DURATION_BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0];

/// All metrics of the process.
pub struct Metrics {
    registry: Registry,
    reconciliations: IntCounterVec,
    durations: HistogramVec,
    errors: IntCounterVec,
    /// Resources, by kind and readiness.
    pub resources: IntGaugeVec,
    /// Pods of a pool, by state: desired, ready, connected.
    pub pool_replicas: IntGaugeVec,
    relay_requests: IntCounterVec,
    /// Pods that the webhook reviewed, by result.
    pub injections: IntCounterVec,
    /// The expiry time of the webhook's certificate, in seconds since 1970.
    pub certificate_expiry: IntGauge,
    /// 1 if this replica leads.
    pub leader: IntGauge,
}

/// The two controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerName {
    /// The controller of Providers.
    Provider,
    /// The controller of WorkerPools.
    WorkerPool,
}

impl ControllerName {
    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Provider => "provider",
            Self::WorkerPool => "workerpool",
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Creates the metrics, all at zero.
    pub fn new() -> Self {
        let registry = Registry::new();
        let metrics = Self {
            reconciliations: counters(
                &registry,
                "reconciliations_total",
                "Completed reconciliations.",
                &["controller", "result"],
            ),
            durations: registered(
                &registry,
                HistogramVec::new(
                    HistogramOpts::new(name("reconcile_duration_seconds"), "Duration of reconciliations.")
                        .buckets(DURATION_BUCKETS.to_vec()),
                    &["controller"],
                ),
            ),
            errors: counters(
                &registry,
                "reconcile_errors_total",
                "Failed reconciliations, by failed step.",
                &["controller", "error"],
            ),
            resources: gauges(&registry, "resources", "Providers and WorkerPools, by readiness.", &["kind", "ready"]),
            pool_replicas: gauges(
                &registry,
                "workerpool_replicas",
                "Pods of a pool, by state: desired, ready, connected.",
                &["namespace", "workerpool", "state"],
            ),
            relay_requests: counters(
                &registry,
                "relay_api_requests_total",
                "Requests for the state of relays, by HTTP status code; 0 without a response.",
                &["code"],
            ),
            injections: counters(
                &registry,
                "injections_total",
                "Pods that the webhook reviewed, by result.",
                &["result"],
            ),
            certificate_expiry: gauge(
                &registry,
                "certificate_expiry_timestamp_seconds",
                "Expiry time of the webhook's certificate, in seconds since 1970.",
            ),
            leader: gauge(&registry, "leader", "1 if this replica leads."),
            registry,
        };
        metrics.show_zeros();
        metrics
    }

    /// Records a finished reconciliation; `error` is a fixed label value, never a message.
    pub fn reconciled(&self, controller: ControllerName, took: Duration, error: Option<&str>) {
        let controller = controller.as_str();
        let result = if error.is_some() { "error" } else { "ok" };
        self.reconciliations.with_label_values(&[controller, result]).inc();
        self.durations.with_label_values(&[controller]).observe(took.as_secs_f64());
        if let Some(error) = error {
            self.errors.with_label_values(&[controller, error]).inc();
        }
    }

    /// Records a request to a relay.
    pub fn relay_asked(&self, code: u16) {
        self.relay_requests.with_label_values(&[&code.to_string()]).inc();
    }

    /// Returns the page that Prometheus scrapes.
    pub fn render(&self) -> String {
        let mut page = Vec::new();
        // This fails only if writing to memory fails.
        let _ = TextEncoder::new().encode(&self.registry.gather(), &mut page);
        String::from_utf8(page).unwrap_or_default()
    }

    /// Initializes series to zero: a rate over a series that appears with its first error misses that error.
    fn show_zeros(&self) {
        for controller in [ControllerName::Provider, ControllerName::WorkerPool] {
            for result in ["ok", "error"] {
                self.reconciliations.with_label_values(&[controller.as_str(), result]);
            }
            self.errors.with_label_values(&[controller.as_str(), "api"]);
        }
        for kind in ["Provider", "WorkerPool"] {
            for ready in ["true", "false"] {
                self.resources.with_label_values(&[kind, ready]);
            }
        }
        for result in ["injected", "gated", "skipped", "refused", "error"] {
            self.injections.with_label_values(&[result]);
        }
        self.relay_requests.with_label_values(&["200"]);
    }
}

fn name(short: &str) -> String {
    format!("modelrelay_operator_{short}")
}

fn counters(registry: &Registry, short: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    registered(registry, IntCounterVec::new(Opts::new(name(short), help), labels))
}

fn gauges(registry: &Registry, short: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    registered(registry, IntGaugeVec::new(Opts::new(name(short), help), labels))
}

fn gauge(registry: &Registry, short: &str, help: &str) -> IntGauge {
    registered(registry, IntGauge::new(name(short), help))
}

/// Registers a metric. Names and labels are constants of this file; the first test finds one that the library rejects.
#[allow(clippy::expect_used, reason = "a wrong constant must not go unnoticed")]
fn registered<C: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<C>) -> C {
    let metric = made.expect("the metric's name is valid");
    registry.register(Box::new(metric.clone())).expect("the metric's name is unique");
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alerted_series_exist_before_first_event() {
        let page = Metrics::new().render();
        for series in [
            r#"modelrelay_operator_reconcile_errors_total{controller="provider",error="api"} 0"#,
            r#"modelrelay_operator_reconciliations_total{controller="workerpool",result="ok"} 0"#,
            r#"modelrelay_operator_injections_total{result="refused"} 0"#,
            "modelrelay_operator_leader 0",
        ] {
            assert!(page.contains(series), "{series} is missing in\n{page}");
        }
    }
}
