//! Creates and registers metrics, whose names all begin alike.

use prometheus::core::Collector;
use prometheus::{
    CounterVec, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

const PREFIX: &str = "modelrelay_";

pub(super) fn counter_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    registered(registry, IntCounterVec::new(Opts::new(format!("{PREFIX}{name}"), help), labels))
}

pub(super) fn int_counter(registry: &Registry, name: &str, help: &str) -> IntCounter {
    registered(registry, IntCounter::new(format!("{PREFIX}{name}"), help))
}

pub(super) fn float_counter_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> CounterVec {
    registered(registry, CounterVec::new(Opts::new(format!("{PREFIX}{name}"), help), labels))
}

pub(super) fn gauge_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    registered(registry, IntGaugeVec::new(Opts::new(format!("{PREFIX}{name}"), help), labels))
}

pub(super) fn float_gauge_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    registered(registry, GaugeVec::new(Opts::new(format!("{PREFIX}{name}"), help), labels))
}

pub(super) fn int_gauge(registry: &Registry, name: &str, help: &str) -> IntGauge {
    registered(registry, IntGauge::new(format!("{PREFIX}{name}"), help))
}

pub(super) fn histogram_vec(
    registry: &Registry,
    name: &str,
    help: &str,
    buckets: &[f64],
    labels: &[&str],
) -> HistogramVec {
    let options = HistogramOpts::new(format!("{PREFIX}{name}"), help).buckets(buckets.to_vec());
    registered(registry, HistogramVec::new(options, labels))
}

/// Registers a collector. Names and labels are constants of this crate: a wrong one fails in the first test, not for a
/// user.
pub(super) fn registered<C: Collector + Clone + 'static>(registry: &Registry, collector: prometheus::Result<C>) -> C {
    let collector = collector.expect("metric name and labels are valid");
    registry.register(Box::new(collector.clone())).expect("metric name is unique");
    collector
}
