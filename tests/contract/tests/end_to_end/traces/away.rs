//! A collector that is unavailable, rejects exports or hangs: nothing waits for it, and lost spans are counted.

use std::time::{Duration, Instant};

use modelrelay_harness::TEST_TIMEOUT;
use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::Stack;
use serde_json::json;

use super::collector::Collector;
use super::{ENDPOINT, TRACE, chat, exchange, exporting, exporting_relay, parent};

#[tokio::test]
async fn refusing_collector_causes_one_warning_per_outage() {
    let collector = Collector::answering(|before| if before < 6 { 503 } else { 200 }).await;
    let mut stack = exporting(&collector.http.url()).await;
    let since = Instant::now();
    while collector.spans().is_empty() {
        assert!(since.elapsed() < TEST_TIMEOUT, "no span was exported after the collector's return");
        exchange(&mut stack, chat(), &json!({})).await;
    }
    let both = format!("{}\n{}", stack.relay.log().lines().join("\n"), stack.worker.log());
    let warnings = both.lines().filter(|line| line.contains("cannot export traces")).count();
    assert!((1..=2).contains(&warnings), "{warnings} warnings of two programs for six refused batches:\n{both}");
    stack
        .relay
        .eventually("a line that reports it", || async {
            stack.relay.log().contains("trace export resumed") || stack.worker.log().contains("trace export resumed")
        })
        .await;
}

#[tokio::test]
async fn unreachable_collector_delays_neither_requests_nor_exit() {
    let away = FakeBackend::refusing().await;
    assert_unhindered(exporting(&away.url()).await).await;
}

#[tokio::test]
async fn hanging_collector_delays_neither_requests_nor_exit() {
    // A call that the test does not handle is never completed.
    let hanging = FakeBackend::start().await;
    assert_unhindered(exporting(&hanging.url()).await).await;
    assert!(hanging.request_count("/v1/traces") > 0, "the collector received no request");
}

const DROPPED: &str = "modelrelay_trace_spans_dropped_total";
const DROPPED_BY_WORKER: &str = "modelrelay_worker_trace_spans_dropped_total";

/// Sends requests that are rejected, each of which is one span.
async fn end_spans(relay: &Relay, number: usize) {
    for _ in 0..number {
        relay.fetch(Request::post("/v1/chat/completions", &json!({}))).await.with_status(400);
    }
}

#[tokio::test]
async fn every_span_refused_by_collector_is_counted() {
    let collector = Collector::answering(|before| if before < 1 { 503 } else { 200 }).await;
    let relay = exporting_relay(&collector).start().await;
    for reason in ["queue_full", "export_failed"] {
        let none = format!("{DROPPED}{{reason=\"{reason}\"}} 0");
        assert!(
            relay.get("/metrics").await.text().contains(&none),
            "the series must exist at 0 so that an increase is visible: {none}"
        );
    }
    end_spans(&relay, 1).await;
    let refused = format!("{DROPPED}{{reason=\"export_failed\"}}");
    relay.eventually("the loss", || async { relay.metric(&refused).await == 1.0 }).await;
    // Accepted spans are no loss.
    relay.fetch(chat().header("traceparent", parent(TRACE, "01")).body("{}")).await.with_status(400);
    collector.trace(TRACE, 1).await;
    assert_eq!(relay.metric(DROPPED).await, 1.0);

    let refusing = Collector::answering(|_| 503).await;
    let mut stack = exporting(&refusing.http.url()).await;
    exchange(&mut stack, chat(), &json!({})).await;
    let counted = async || stack.worker.metric(&format!("{DROPPED_BY_WORKER}{{reason=\"export_failed\"}}")).await;
    stack.relay.eventually("the loss of two spans", || async { counted().await == 2.0 }).await;
    assert_eq!(stack.worker.metric(DROPPED_BY_WORKER).await, 2.0);
}

#[tokio::test]
async fn every_span_dropped_by_full_queue_is_counted() {
    // A call that the test does not handle is never completed.
    let hanging = FakeBackend::start().await;
    let relay = Relay::builder()
        .env(ENDPOINT, &hanging.url())
        .env("OTEL_BSP_SCHEDULE_DELAY", "3600000")
        .env("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")
        .env("OTEL_BSP_MAX_QUEUE_SIZE", "2");
    let relay = relay.start().await;
    // A batch is as large as the queue, and is exported at once when full.
    end_spans(&relay, 2).await;
    relay.eventually("a batch under way", || async { hanging.request_count("/v1/traces") == 1 }).await;
    end_spans(&relay, 5).await;
    assert_eq!(relay.metric(&format!("{DROPPED}{{reason=\"queue_full\"}}")).await, 3.0, "two of five fit in the queue");
    assert_eq!(relay.metric(DROPPED).await, 3.0);
}

/// A batch would have ten seconds.
async fn assert_unhindered(mut stack: Stack) {
    const NEAR: Duration = Duration::from_secs(8);
    let since = Instant::now();
    for _ in 0..20 {
        exchange(&mut stack, chat(), &json!({})).await;
    }
    assert!(since.elapsed() < NEAR, "20 requests took {:?}", since.elapsed());
    let since = Instant::now();
    stack.worker.terminate().await;
    assert!(stack.worker.process.wait_exit().await.success());
    assert!(since.elapsed() < NEAR, "the worker took {:?}", since.elapsed());
    let since = Instant::now();
    stack.relay.process().terminate().await;
    assert!(stack.relay.process().wait_exit().await.success());
    assert!(since.elapsed() < NEAR, "the relay took {:?}", since.elapsed());
}
