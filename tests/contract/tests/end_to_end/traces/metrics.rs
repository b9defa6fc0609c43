//! The export of metrics, which requires `OTEL_METRICS_EXPORTER=otlp`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::{Stack, WorkerProcess};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use opentelemetry_proto::tonic::metrics::v1::{HistogramDataPoint, Metric, NumberDataPoint};
use serde_json::json;

use super::collector::{Collector, text};
use super::{ENDPOINT, SOON, TRACE, chat, exchange, parent};

const EXPORTER: (&str, &str) = ("OTEL_METRICS_EXPORTER", "otlp");
const INTERVAL: &str = "OTEL_METRIC_EXPORT_INTERVAL";
const HOUR: &str = "3600000";
const RELAY: &str = "modelrelay-relay";
const WORKER: &str = "modelrelay-worker";

/// Both programs, exporting metrics alone to this address, with these further variables.
async fn exporting(to: &str, more: &[(&str, &str)]) -> Stack {
    let all = [(ENDPOINT, to), EXPORTER, ("OTEL_TRACES_EXPORTER", "none")];
    let all: Vec<_> = all.into_iter().chain(more.iter().copied()).collect();
    Stack::with(
        |relay| all.iter().fold(relay, |relay, (name, value)| relay.env(name, value)),
        |worker| all.iter().fold(worker, |worker, (name, value)| worker.env(name, *value)),
    )
    .await
}

async fn terminate(stack: &mut Stack) {
    stack.worker.terminate().await;
    assert!(stack.worker.process.wait_exit().await.success());
    stack.relay.process().terminate().await;
    assert!(stack.relay.process().wait_exit().await.success());
}

/// Returns the data of a metric as of the last export of a service.
fn data(collector: &Collector, service: &str, name: &str) -> Option<Data> {
    collector.metrics(service).into_iter().find(|metric| metric.name == name).and_then(|metric| metric.data)
}

fn has(attributes: &[KeyValue], key: &str, value: &str) -> bool {
    attributes.iter().any(|it| it.key == key && text(it.value.as_ref()) == value)
}

fn number(point: &NumberDataPoint) -> f64 {
    let Some(Value::AsDouble(number)) = point.value else { panic!("not a number: {point:?}") };
    number
}

/// The number of successful requests, as the relay exports it.
fn requests(collector: &Collector) -> f64 {
    let Some(Data::Sum(sum)) = data(collector, RELAY, "modelrelay_requests_total") else { return 0.0 };
    assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "not a cumulative counter: {sum:?}");
    let is_ok =
        |point: &&NumberDataPoint| has(&point.attributes, "outcome", "ok") && has(&point.attributes, "model", "m");
    sum.data_points.iter().filter(is_ok).map(number).sum()
}

fn histogram(collector: &Collector, name: &str) -> Vec<HistogramDataPoint> {
    match data(collector, RELAY, name) {
        Some(Data::Histogram(histogram)) => histogram.data_points,
        other => panic!("{name} is no histogram: {other:?}"),
    }
}

#[tokio::test]
async fn metrics_of_both_programs_are_pushed() {
    let collector = Collector::start().await;
    let more = [
        (INTERVAL, "50"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=a%20key"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
    ];
    let mut stack = exporting(&collector.http.url(), &more).await;
    exchange(&mut stack, chat(), &json!({})).await;
    stack.relay.eventually("the request in an export", || async { requests(&collector) == 1.0 }).await;
    let first_tokens = histogram(&collector, "modelrelay_time_to_first_token_seconds");
    let first = first_tokens.iter().find(|point| point.count == 1).expect("an observation");
    assert_eq!(first.bucket_counts.iter().sum::<u64>(), 1);
    assert_eq!(first.bucket_counts.len(), first.explicit_bounds.len() + 1);
    assert!(first.start_time_unix_nano > 0 && first.start_time_unix_nano < first.time_unix_nano, "{first:?}");
    let Some(Data::Gauge(connected)) = data(&collector, WORKER, "modelrelay_worker_connected") else {
        panic!("not a gauge: {:#?}", collector.metrics(WORKER))
    };
    assert_eq!(connected.data_points.iter().map(number).sum::<f64>(), 1.0);
    let heads = collector.http.received_heads();
    let is_expected = |name, value| heads.iter().all(|head| head.header(name) == Some(value));
    assert!(is_expected("x-api-key", "a key") && is_expected("content-encoding", "gzip"), "{heads:?}");
    assert!(heads.iter().all(|head| head.path() == "/v1/metrics"), "{heads:?}");
    assert!(!stack.relay.log().contains("a key") && !stack.worker.log().contains("a key"));
}

#[tokio::test]
async fn pushed_families_equal_scraped_ones() {
    let collector = Collector::start().await;
    let mut stack = exporting(&collector.http.url(), &[(INTERVAL, HOUR)]).await;
    exchange(&mut stack, chat(), &json!({})).await;
    let scraped = [stack.relay.get("/metrics").await.text(), stack.worker.probe("/metrics").await.body];
    terminate(&mut stack).await;
    for (service, text) in [RELAY, WORKER].into_iter().zip(&scraped) {
        let metrics = collector.metrics(service);
        let pushed: BTreeSet<&str> = metrics.iter().map(|metric: &Metric| &*metric.name).collect();
        let scraped: BTreeSet<&str> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let missing: Vec<_> = scraped.difference(&pushed).collect();
        assert!(!scraped.is_empty() && missing.is_empty(), "{service} does not push {missing:?}");
    }
}

#[tokio::test]
async fn final_metrics_are_pushed_at_shutdown() {
    let collector = Collector::start().await;
    let mut stack = exporting(&collector.http.url(), &[(INTERVAL, HOUR)]).await;
    exchange(&mut stack, chat(), &json!({})).await;
    assert_eq!(collector.http.request_count("/v1/metrics"), 0, "the first interval has not passed");
    terminate(&mut stack).await;
    assert_eq!(requests(&collector), 1.0);
    assert_eq!(collector.http.request_count("/v1/metrics"), 2, "one for each program");
}

#[tokio::test]
async fn metrics_are_not_pushed_without_opt_in() {
    let collector = Collector::start().await;
    let url = collector.http.url();
    let variables = [(ENDPOINT, &*url), SOON, (INTERVAL, "20")];
    let mut stack = Stack::with(
        |relay| variables.iter().fold(relay, |relay, (name, value)| relay.env(name, value)),
        |worker| variables.iter().fold(worker, |worker, (name, value)| worker.env(name, *value)),
    )
    .await;
    exchange(&mut stack, chat().header("traceparent", parent(TRACE, "01")), &json!({})).await;
    collector.trace(TRACE, 4).await;
    terminate(&mut stack).await;
    assert_eq!(collector.http.request_count("/v1/metrics"), 0);
}

#[tokio::test]
async fn hanging_collector_of_metrics_delays_nothing() {
    const NEAR: Duration = Duration::from_secs(8);
    // A call that the test does not handle is never completed.
    let hanging = FakeBackend::start().await;
    let mut stack = exporting(&hanging.url(), &[(INTERVAL, "20")]).await;
    stack.relay.eventually("exports under way", || async { hanging.request_count("/v1/metrics") >= 2 }).await;
    let since = Instant::now();
    for _ in 0..5 {
        exchange(&mut stack, chat(), &json!({})).await;
    }
    terminate(&mut stack).await;
    assert!(since.elapsed() < NEAR, "requests and exits took {:?}", since.elapsed());
}

#[tokio::test]
async fn refusing_collector_of_metrics_is_logged_once() {
    let collector = Collector::answering(|before| if before < 6 { 503 } else { 200 }).await;
    let stack = exporting(&collector.http.url(), &[(INTERVAL, "20")]).await;
    let logs = || format!("{}\n{}", stack.relay.log().lines().join("\n"), stack.worker.log());
    stack.relay.eventually("the return", || async { logs().contains("metric export resumed") }).await;
    let warnings = logs().lines().filter(|line| line.contains("cannot export metrics")).count();
    assert!((1..=2).contains(&warnings), "{warnings} warnings of two programs for six exports:\n{}", logs());
}

#[tokio::test]
async fn opt_in_without_endpoint_ends_program() {
    let (status, log) = Relay::builder().env(EXPORTER.0, EXPORTER.1).start_and_exit().await;
    let relay = (status.code(), log.lines());
    let mut worker = WorkerProcess::builder().env(EXPORTER.0, EXPORTER.1).spawn();
    let status = worker.wait_exit().await;
    for (code, lines) in [relay, (status.code(), worker.log().lines())] {
        assert_eq!((code, lines.len()), (Some(1), 1), "{lines:?}");
        assert!(lines[0].contains("OTEL_METRICS_EXPORTER: otlp requires a collector"), "{lines:?}");
    }
}
