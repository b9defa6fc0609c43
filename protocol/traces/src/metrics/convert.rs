//! Prometheus' families as OTLP.

use std::time::{SystemTime, UNIX_EPOCH};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{
    AggregationTemporality, Gauge, Histogram, HistogramDataPoint, Metric, NumberDataPoint, ResourceMetrics,
    ScopeMetrics, Sum,
};
use opentelemetry_proto::tonic::resource::v1::Resource as ProtoResource;
use opentelemetry_sdk::Resource;
use prometheus::proto::{LabelPair, Metric as Series, MetricFamily, MetricType};

const CUMULATIVE: i32 = AggregationTemporality::Cumulative as i32;

/// The program, and the time at which its counters began at zero.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scope {
    pub(super) name: &'static str,
    pub(super) version: &'static str,
    pub(super) started: SystemTime,
}

/// The time range of the values.
#[derive(Clone, Copy)]
struct Times {
    start: u64,
    now: u64,
}

/// Returns one export of all families.
pub(super) fn export(
    families: &[MetricFamily],
    resource: &Resource,
    scope: &Scope,
    now: SystemTime,
) -> ExportMetricsServiceRequest {
    let times = Times { start: nanos(scope.started), now: nanos(now) };
    let attributes = resource.iter().map(|(key, value)| KeyValue {
        key: key.as_str().to_owned(),
        value: Some(value.clone().into()),
        ..KeyValue::default()
    });
    let scope =
        InstrumentationScope { name: scope.name.to_owned(), version: scope.version.to_owned(), ..Default::default() };
    ExportMetricsServiceRequest {
        resource_metrics: vec![ResourceMetrics {
            resource: Some(ProtoResource { attributes: attributes.collect(), ..Default::default() }),
            scope_metrics: vec![ScopeMetrics {
                scope: Some(scope),
                metrics: families.iter().filter_map(|family| metric(family, times)).collect(),
                ..Default::default()
            }],
            ..Default::default()
        }],
    }
}

/// Returns a family; `None` for a type that no program uses.
fn metric(family: &MetricFamily, times: Times) -> Option<Metric> {
    let series = family.get_metric();
    let data = match family.get_field_type() {
        MetricType::COUNTER => Data::Sum(Sum {
            data_points: series.iter().map(|it| number(it, it.get_counter().get_value(), times)).collect(),
            aggregation_temporality: CUMULATIVE,
            is_monotonic: true,
        }),
        MetricType::GAUGE => Data::Gauge(Gauge {
            data_points: series.iter().map(|it| number(it, it.get_gauge().get_value(), times)).collect(),
        }),
        MetricType::HISTOGRAM => Data::Histogram(Histogram {
            data_points: series.iter().map(|it| histogram(it, times)).collect(),
            aggregation_temporality: CUMULATIVE,
        }),
        MetricType::SUMMARY | MetricType::UNTYPED => return None,
    };
    Some(Metric {
        name: family.name().to_owned(),
        description: family.help().to_owned(),
        data: Some(data),
        ..Metric::default()
    })
}

fn number(series: &Series, value: f64, times: Times) -> NumberDataPoint {
    NumberDataPoint {
        attributes: attributes(series.get_label()),
        start_time_unix_nano: times.start,
        time_unix_nano: times.now,
        value: Some(Value::AsDouble(value)),
        ..NumberDataPoint::default()
    }
}

/// Prometheus counts the observations up to each bound, OTLP those of each bucket.
fn histogram(series: &Series, times: Times) -> HistogramDataPoint {
    let histogram = series.get_histogram();
    let buckets = histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound().is_finite());
    let (mut explicit_bounds, mut bucket_counts, mut before) = (Vec::new(), Vec::new(), 0);
    for bucket in buckets {
        explicit_bounds.push(bucket.upper_bound());
        bucket_counts.push(bucket.cumulative_count().saturating_sub(before));
        before = bucket.cumulative_count();
    }
    let count = histogram.get_sample_count();
    bucket_counts.push(count.saturating_sub(before));
    HistogramDataPoint {
        attributes: attributes(series.get_label()),
        start_time_unix_nano: times.start,
        time_unix_nano: times.now,
        count,
        sum: Some(histogram.get_sample_sum()),
        bucket_counts,
        explicit_bounds,
        ..HistogramDataPoint::default()
    }
}

fn attributes(labels: &[LabelPair]) -> Vec<KeyValue> {
    let attribute = |label: &LabelPair| KeyValue {
        key: label.name().to_owned(),
        value: Some(AnyValue { value: Some(any_value::Value::StringValue(label.value().to_owned())) }),
        ..KeyValue::default()
    };
    labels.iter().map(attribute).collect()
}

fn nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGauge, Opts, Registry};

    use super::*;

    /// Gathers this registry, and returns its metrics as exported.
    fn exported(registry: &Registry) -> Vec<Metric> {
        let started = UNIX_EPOCH + Duration::from_secs(1);
        let resource = Resource::builder_empty().with_service_name("s").build();
        let scope = Scope { name: "program", version: "1", started };
        let mut request = export(&registry.gather(), &resource, &scope, started + Duration::from_secs(1));
        let mut resource = request.resource_metrics.remove(0);
        let name = resource.resource.as_ref().expect("a resource").attributes[0].clone();
        assert_eq!((name.key.as_str(), name.value), ("service.name", Some(text("s"))));
        resource.scope_metrics.remove(0).metrics
    }

    fn text(text: &str) -> AnyValue {
        AnyValue { value: Some(any_value::Value::StringValue(text.to_owned())) }
    }

    #[test]
    fn counter_is_cumulative_sum_with_labels() {
        let registry = Registry::new();
        let counter = IntCounterVec::new(Opts::new("c_total", "Help."), &["kind"]).expect("a counter");
        registry.register(Box::new(counter.clone())).expect("registered");
        counter.with_label_values(&["a"]).inc_by(3);
        let metrics = exported(&registry);
        assert_eq!((&*metrics[0].name, &*metrics[0].description), ("c_total", "Help."));
        let Some(Data::Sum(sum)) = &metrics[0].data else { panic!("not a sum: {metrics:?}") };
        assert!(sum.is_monotonic && sum.aggregation_temporality == CUMULATIVE);
        let point = &sum.data_points[0];
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (1_000_000_000, 2_000_000_000));
        assert_eq!(point.value, Some(Value::AsDouble(3.0)));
        assert_eq!((&*point.attributes[0].key, &point.attributes[0].value), ("kind", &Some(text("a"))));
    }

    #[test]
    fn gauge_is_gauge() {
        let registry = Registry::new();
        let gauge = IntGauge::new("g", "Help.").expect("a gauge");
        registry.register(Box::new(gauge.clone())).expect("registered");
        gauge.set(-2);
        let metrics = exported(&registry);
        let Some(Data::Gauge(gauge)) = &metrics[0].data else { panic!("not a gauge: {metrics:?}") };
        assert_eq!(gauge.data_points[0].value, Some(Value::AsDouble(-2.0)));
    }

    #[test]
    fn histogram_counts_each_bucket_on_its_own() {
        let registry = Registry::new();
        let options = HistogramOpts::new("h", "Help.").buckets(vec![1.0, 2.0]);
        let histogram = HistogramVec::new(options, &[]).expect("a histogram");
        registry.register(Box::new(histogram.clone())).expect("registered");
        for value in [0.5, 0.5, 1.5, 10.0, 20.0, 30.0] {
            histogram.with_label_values::<&str>(&[]).observe(value);
        }
        let metrics = exported(&registry);
        let Some(Data::Histogram(histogram)) = &metrics[0].data else { panic!("not a histogram: {metrics:?}") };
        let point = &histogram.data_points[0];
        assert_eq!((&point.explicit_bounds[..], &point.bucket_counts[..]), (&[1.0, 2.0][..], &[2, 1, 3][..]));
        assert_eq!((point.count, point.sum), (6, Some(62.5)));
    }
}
