//! OpenTelemetry: one trace from a client to its backend if traces are exported, and nothing at all otherwise.

mod away;
mod collector;
mod details;
mod metrics;

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_relay::{Ack, RequestSpec};
use modelrelay_harness::process::Process;
use modelrelay_harness::relay::{Relay, RelayBuilder};
use modelrelay_harness::tls::Certificates;
use modelrelay_harness::worker_process::{Rig, Stack, WorkerBuilder, WorkerProcess};
use modelrelay_harness::{TEST_TIMEOUT, poll_until};
use serde_json::{Value, json};

use collector::{Collector, Span};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const OTHER_TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT_SPAN: &str = "00f067aa0ba902b7";

const ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const SOON: (&str, &str) = ("OTEL_BSP_SCHEDULE_DELAY", "50");

const SERVER: i32 = 2;
const CLIENT: i32 = 3;

fn chat() -> Request {
    Request::post("/v1/chat/completions", &json!({"model": "m", "messages": []}))
}

fn parent(trace: &str, flags: &str) -> String {
    format!("00-{trace}-{CLIENT_SPAN}-{flags}")
}

/// Both programs, exporting to this address.
async fn exporting(to: &str) -> Stack {
    Stack::with(
        |relay| relay.env(ENDPOINT, to).env(SOON.0, SOON.1),
        |worker| worker.env(ENDPOINT, to).env(SOON.0, SOON.1),
    )
    .await
}

fn exporting_relay(to: &Collector) -> RelayBuilder {
    exporting_to(&to.http.url())
}

fn exporting_to(address: &str) -> RelayBuilder {
    Relay::builder().env(ENDPOINT, address).env(SOON.0, SOON.1)
}

/// Sends a request, lets the backend respond, and returns the trace headers that it received.
async fn exchange(stack: &mut Stack, request: Request, answer: &Value) -> (Option<String>, Option<String>) {
    let client = stack.relay.begin(request);
    let call = stack.backend.call().await;
    let header = |name| call.head.header(name).map(str::to_owned);
    let received = (header("traceparent"), header("tracestate"));
    call.answer_json(200, answer).await;
    client.reply().await.with_status(200);
    received
}

fn only<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let found: Vec<&Span> = spans.iter().filter(|span| span.name == name).collect();
    assert_eq!(found.len(), 1, "spans named {name:?} of {spans:#?}");
    found[0]
}

#[tokio::test]
async fn one_trace_spans_client_relay_worker_and_backend() {
    let collector = Collector::start().await;
    let mut stack = exporting(&collector.http.url()).await;
    let request = chat().header("traceparent", parent(TRACE, "01")).header("tracestate", "vendor=1");
    let usage = json!({"usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}});
    let (traceparent, state) = exchange(&mut stack, request, &usage).await;
    let spans = collector.trace(TRACE, 4).await;

    let server = only(&spans, "POST /v1/chat/completions");
    assert_eq!((server.kind, &*server.service, &*server.parent), (SERVER, "modelrelay-relay", CLIENT_SPAN));
    let attempt = only(&spans, "chat m");
    assert_eq!((attempt.kind, &*attempt.service, &attempt.parent), (CLIENT, "modelrelay-relay", &server.id));
    let forward = only(&spans, "forward m");
    assert_eq!((forward.kind, &*forward.service, &forward.parent), (SERVER, "modelrelay-worker", &attempt.id));
    let backend = only(&spans, "POST");
    assert_eq!((backend.kind, &*backend.service, &backend.parent), (CLIENT, "modelrelay-worker", &forward.id));
    assert_eq!(traceparent, Some(format!("00-{TRACE}-{}-01", backend.id)), "the traceparent that the backend received");
    assert_eq!(state.as_deref(), Some("vendor=1"));

    for (key, value) in [
        ("http.route", "/v1/chat/completions"),
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("gen_ai.request.model", "m"),
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.usage.input_tokens", "5"),
        ("gen_ai.usage.output_tokens", "7"),
        ("modelrelay.provider", "local"),
        ("modelrelay.outcome", "ok"),
    ] {
        assert_eq!(server.attribute(key), value, "{key}");
    }
    assert!(server.attribute("gen_ai.response.time_to_first_chunk").parse::<f64>().expect("seconds") > 0.0);
    assert_eq!(
        (&*attempt.attribute("modelrelay.worker"), &*attempt.attribute("modelrelay.attempt")),
        ("gpu-box-1", "1")
    );
    assert_eq!(backend.attribute("server.port"), stack.backend.addr().port().to_string());
    assert!(spans.iter().all(|span| !span.is_error), "{spans:#?}");
    assert!(server.nanos >= attempt.nanos && forward.nanos >= backend.nanos, "{spans:#?}");
    let line = format!("trace_id=\"{TRACE}\"");
    assert!(stack.relay.log().contains(&line), "the request's log line does not contain {line}");
}

#[tokio::test]
async fn malformed_parent_is_ignored_and_starts_new_trace() {
    let collector = Collector::start().await;
    let mut stack = exporting(&collector.http.url()).await;
    let malformed = format!("00-{}-{CLIENT_SPAN}-01", TRACE.to_uppercase());
    let request = chat().header("traceparent", malformed).header("tracestate", "vendor=1");
    let (traceparent, state) = exchange(&mut stack, request, &json!({})).await;
    let traceparent = traceparent.expect("a traceparent");
    let trace = traceparent.split('-').nth(1).expect("a trace").to_owned();
    assert!(!trace.eq_ignore_ascii_case(TRACE), "{traceparent}");
    assert_eq!(state, None, "a tracestate belongs to its traceparent");
    let spans = collector.trace(&trace, 4).await;
    assert_eq!(only(&spans, "POST /v1/chat/completions").parent, "");
}

#[tokio::test]
async fn unsampled_parent_is_passed_on_and_exports_nothing() {
    let collector = Collector::start().await;
    let mut stack = exporting(&collector.http.url()).await;
    let (traceparent, _) =
        exchange(&mut stack, chat().header("traceparent", parent(OTHER_TRACE, "00")), &json!({})).await;
    let traceparent = traceparent.expect("a traceparent");
    assert!(traceparent.starts_with(&format!("00-{OTHER_TRACE}-")) && traceparent.ends_with("-00"), "{traceparent}");
    assert!(!traceparent.contains(CLIENT_SPAN), "{traceparent}");
    exchange(&mut stack, chat().header("traceparent", parent(TRACE, "01")), &json!({})).await;
    collector.trace(TRACE, 4).await;
    let others: Vec<Span> = collector.spans().into_iter().filter(|span| span.trace != TRACE).collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[tokio::test]
async fn refused_and_failed_requests_are_spans() {
    let collector = Collector::start().await;
    let mut stack = exporting(&collector.http.url()).await;
    let nameless = Request::post("/v1/chat/completions", &json!({}));
    stack.relay.fetch(nameless.header("traceparent", parent(OTHER_TRACE, "01"))).await.with_status(400);
    let refused = collector.trace(OTHER_TRACE, 1).await;
    let refused = only(&refused, "POST /v1/chat/completions");
    assert_eq!((&*refused.attribute("modelrelay.outcome"), refused.is_error), ("client_error", false));

    let client = stack.relay.begin(chat().header("traceparent", parent(TRACE, "01")));
    stack.backend.call().await.answer(&Answer::json(500, &json!({}))).await;
    client.reply().await.with_status(500);
    let spans = collector.trace(TRACE, 4).await;
    assert!(spans.iter().filter(|span| span.is_error).count() >= 3, "{spans:#?}");
    assert_eq!(only(&spans, "POST /v1/chat/completions").attribute("error.type"), "upstream_error");
}

#[tokio::test]
async fn queue_wait_is_its_own_span() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).env("QUEUE_TIMEOUT_SECS", "0.2").start().await;
    relay.fetch(chat().header("traceparent", parent(TRACE, "01"))).await.with_status(504);
    let spans = collector.trace(TRACE, 2).await;
    let (server, queue) = (only(&spans, "POST /v1/chat/completions"), only(&spans, "queue"));
    assert_eq!((&queue.parent, queue.is_error, server.is_error), (&server.id, true, true));
    assert!(queue.nanos >= 200_000_000 && server.nanos >= queue.nanos, "{spans:#?}");
    assert_eq!(server.attribute("error.type"), "queue_timeout");

    // A request that is dispatched after waiting records how long it waited.
    let relay = exporting_relay(&collector).start().await;
    let client = relay.begin(chat().header("traceparent", parent(OTHER_TRACE, "01")));
    relay.wait_for_queue_depth("local", 1).await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let job = worker.expect_request().await;
    worker.answer(&job, &json!({})).await;
    client.reply().await.with_status(200);
    let spans = collector.trace(OTHER_TRACE, 3).await;
    let (server, queue, attempt) =
        (only(&spans, "POST /v1/chat/completions"), only(&spans, "queue"), only(&spans, "chat m"));
    assert_eq!((&queue.parent, &attempt.parent, queue.is_error), (&server.id, &server.id, false));
    assert!(queue.nanos + attempt.nanos <= server.nanos + 1_000_000, "{spans:#?}");
}

#[tokio::test]
async fn queue_wait_after_requeue_is_its_own_span() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).env("QUEUE_TIMEOUT_SECS", "0.2").start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let client = relay.begin(chat().header("traceparent", parent(TRACE, "01")));
    worker.expect_request().await;
    drop(worker);
    client.reply().await.with_status(504);
    let spans = collector.trace(TRACE, 3).await;
    let (server, queue) = (only(&spans, "POST /v1/chat/completions"), only(&spans, "queue"));
    assert_eq!((&queue.parent, queue.is_error, &*queue.attribute("error.type")), (&server.id, true, "queue_timeout"));
    assert!(queue.nanos >= 150_000_000, "{spans:#?}");
    assert!(server.attribute("modelrelay.queue_seconds").parse::<f64>().expect("a number") >= 0.15, "{server:#?}");
}

#[tokio::test]
async fn attempts_of_requeued_request_are_linked_spans() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).start().await;
    let mut first = relay.core1_worker(&["m"], 1).await;
    let client = relay.begin(chat().header("traceparent", parent(TRACE, "01")));
    let sent = first.expect_request().await.header("traceparent").expect("a parent").to_owned();
    drop(first);
    let mut second = relay.core1_worker(&["m"], 1).await;
    let again = second.expect_request().await.header("traceparent").expect("a parent").to_owned();
    assert_ne!(sent, again, "each attempt must have its own span");
    drop(second);
    let mut third = relay.core1_worker(&["m"], 1).await;
    let last = third.expect_request().await.header("traceparent").expect("a parent").to_owned();
    client.abandon();
    let spans = collector.ended_trace(TRACE).await;
    let server = only(&spans, "POST /v1/chat/completions");
    assert_eq!((&*server.attribute("modelrelay.outcome"), server.is_error), ("cancelled", false));
    let mut attempts: Vec<&Span> = spans.iter().filter(|span| span.name == "chat m").collect();
    attempts.sort_by_key(|span| span.attribute("modelrelay.attempt"));
    let ids: Vec<String> = attempts.iter().map(|span| format!("00-{TRACE}-{}-01", span.id)).collect();
    assert_eq!(ids, [sent, again, last]);
    let links: Vec<&[String]> = attempts.iter().map(|span| &span.links[..]).collect();
    assert_eq!(links, [&[][..], &[attempts[0].id.clone()], &[attempts[1].id.clone()]]);
    assert_eq!((attempts[0].is_error, &*attempts[0].attribute("error.type")), (true, "worker_lost"));
    assert!(!attempts[2].is_error && attempts.iter().all(|span| span.parent == server.id), "{spans:#?}");
}

/// The worker of the response is between two connections and is awaited: nothing else ends this request.
#[tokio::test]
async fn client_leaving_before_queueing_ends_span() {
    let collector = Collector::start().await;
    let relay = exporting_relay(&collector).start().await;
    let mut maker = relay.core1_worker(&["m"], 1).await;
    let made = relay.begin(Request::post("/v1/responses", &json!({"model": "m", "input": "hi"})));
    let job = maker.expect_request().await;
    maker.response_start(&job, 200, &[("content-type", "application/json")]).await;
    maker.pieces(&job, br#"{"id": "resp_1", "object": "response"}"#).await;
    maker.send(&json!({"type": "response_complete", "request_id": job.id, "response_id": "resp_1"})).await;
    made.reply().await.with_status(200);
    drop(maker);
    relay.wait_for_workers(0).await;
    let waiting = Request::get("/v1/responses/resp_1").header("traceparent", parent(TRACE, "01"));
    let client = relay.begin(waiting);
    // The last visible event before it waits.
    let read = "modelrelay_request_body_bytes_count{endpoint=\"responses\"}";
    relay.eventually("its body", || async { relay.metric(read).await == 2.0 }).await;
    client.abandon();
    let spans = collector.trace(TRACE, 1).await;
    let server = only(&spans, "GET /v1/responses/{id}");
    assert_eq!((&*server.attribute("modelrelay.outcome"), server.is_error), ("cancelled", false));
    assert_eq!(server.attribute("http.response.status_code"), "499");
}

#[tokio::test]
async fn stream_protocol_violation_marks_span_as_failed() {
    let collector = Collector::start().await;
    let url = collector.http.url();
    let exporting = |worker: WorkerBuilder| worker.env(ENDPOINT, &url).env(SOON.0, SOON.1);
    let mut rig = Rig::with(&Ack::core1(), 1, exporting).await;
    let more =
        RequestSpec::chat("m").header("traceparent", &parent(TRACE, "01")).body(b"twenty bytes of body").claiming(10);
    let request = rig.link.send_request(&more);
    assert!(rig.link.reply(&request).await.error_code().is_some());
    let spans = collector.trace_with(TRACE, "forward m").await;
    let forward = only(&spans, "forward m");
    assert_eq!((forward.is_error, &*forward.attribute("error.type")), (true, "body"));
    assert_eq!(forward.attribute("modelrelay.outcome"), "body");
    // A request that the relay cancels is not an error.
    let request = rig
        .link
        .send_request_head(&RequestSpec::chat("m").header("traceparent", &parent(OTHER_TRACE, "01")).claiming(10));
    rig.link.cancel(&request.id, "client_disconnect");
    let spans = collector.trace_with(OTHER_TRACE, "forward m").await;
    let forward = only(&spans, "forward m");
    assert_eq!((forward.is_error, &*forward.attribute("modelrelay.outcome")), (false, "cancelled"));
}

#[tokio::test]
async fn no_secret_is_exported() {
    const PLANTED: [&str; 4] = ["planted-prompt-31", "planted-answer-32", "planted-client-key-33", "planted-query-34"];
    const COLLECTOR_KEY: &str = "planted-collector-key-36";
    let collector = Collector::start().await;
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS", format!("x-api-key={COLLECTOR_KEY}"));
    let url = collector.http.url();
    let mut stack = Stack::with(
        |relay| relay.env(ENDPOINT, &url).env(SOON.0, SOON.1).env(headers.0, &headers.1),
        |worker| worker.env(ENDPOINT, &url).env(SOON.0, SOON.1).env(headers.0, &headers.1),
    )
    .await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": PLANTED[0]}]});
    let request = Request::post(&format!("/v1/chat/completions?key={}", PLANTED[3]), &body);
    let request = request.bearer(PLANTED[2]).header("traceparent", parent(TRACE, "01"));
    exchange(&mut stack, request, &json!({"content": PLANTED[1]})).await;
    collector.trace(TRACE, 4).await;
    let broken = Request::new("POST", "/v1/chat/completions").body(format!("{{\"model\": \"m\", {}", PLANTED[0]));
    let broken = broken.bearer(PLANTED[2]).header("traceparent", parent(OTHER_TRACE, "01"));
    stack.relay.fetch(broken).await.with_status(400);
    collector.trace(OTHER_TRACE, 1).await;
    assert!(collector.has_received("modelrelay.outcome"), "the search must find an attribute that exists");
    for planted in PLANTED.into_iter().chain([modelrelay_harness::relay::WORKER_SECRET]) {
        assert!(!collector.has_received(planted), "{planted} was exported");
    }
    let sent = collector.http.received_heads();
    assert!(sent.iter().all(|head| head.header("x-api-key") == Some(COLLECTOR_KEY)), "{sent:?}");
    for log in [stack.relay.log().lines().join("\n"), stack.worker.log()] {
        assert!(!log.contains(COLLECTOR_KEY), "{log}");
    }
}

/// A TLS relay plays the collector. It has no such route, but its response arrives over TLS.
#[tokio::test]
async fn tls_collector_is_trusted_by_its_certificate() {
    let certificates = Certificates::make();
    let collector = Relay::builder().tls(&certificates).start().await;
    let about_export = |line: &str| line.contains("cannot export traces").then(|| line.to_owned());
    let trusting = exporting_to(&collector.url())
        .env("OTEL_EXPORTER_OTLP_CERTIFICATE", &certificates.ca_file().to_string_lossy())
        .start()
        .await;
    let wary = exporting_to(&collector.url()).start().await;
    for (relay, expected) in [(&trusting, "the collector returned 404"), (&wary, "invalid peer certificate")] {
        relay.fetch(Request::post("/v1/chat/completions", &json!({}))).await.with_status(400);
        let line = relay.log().wait_for("a line about the collector", about_export).await;
        assert!(line.contains(expected), "{line}");
    }
}

#[tokio::test]
async fn without_endpoint_headers_pass_and_no_exporter_starts() {
    let mut stack = Stack::start().await;
    assert_untouched(&mut stack).await;
    for process in [stack.relay.process(), &mut stack.worker.process] {
        let threads = threads(process);
        assert!(threads.iter().all(|name| !name.contains("OpenTelemetry")), "{threads:?}");
    }
    let away = FakeBackend::refusing().await;
    let mut relay = exporting_to(&away.url()).start().await;
    // With exporting enabled, the thread is found under its name, which it sets itself.
    let process = relay.process();
    let is_started = async || threads(process).iter().any(|name| name.contains("OpenTelemetry"));
    poll_until(TEST_TIMEOUT, "a thread of OpenTelemetry", process.log(), is_started).await;
}

#[tokio::test]
async fn sdk_disabled_variable_turns_tracing_off() {
    let collector = Collector::start().await;
    let endpoint = collector.http.url();
    let off = ("OTEL_SDK_DISABLED", "true");
    let mut stack = Stack::with(
        |relay| relay.env(ENDPOINT, &endpoint).env(off.0, off.1),
        |worker| worker.env(ENDPOINT, &endpoint).env(off.0, off.1),
    )
    .await;
    assert_untouched(&mut stack).await;
    stack.worker.terminate().await;
    stack.worker.process.wait_exit().await;
    stack.relay.process().terminate().await;
    stack.relay.process().wait_exit().await;
    assert_eq!(collector.http.received_heads().len(), 0, "the collector received a request");
}

/// Checks that a client's headers reach the backend unchanged, well-formed or not.
async fn assert_untouched(stack: &mut Stack) {
    for value in [parent(TRACE, "01"), "nonsense".to_owned()] {
        let request = chat().header("traceparent", &value).header("tracestate", "vendor=1, other");
        let traceparent = exchange(stack, request, &json!({})).await;
        assert_eq!(traceparent, (Some(value), Some("vendor=1, other".to_owned())));
    }
    assert_eq!(exchange(stack, chat(), &json!({})).await, (None, None));
}

fn threads(process: &Process) -> Vec<String> {
    let pid = process.pid().expect("it runs");
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads");
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.ok()?.path().join("comm")).ok();
    tasks.filter_map(name).collect()
}

#[tokio::test]
async fn batches_are_compressed_if_configured() {
    let collector = Collector::start().await;
    let url = collector.http.url();
    let gzip = ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip");
    let mut stack = Stack::with(
        |relay| relay.env(ENDPOINT, &url).env(SOON.0, SOON.1).env(gzip.0, gzip.1),
        |worker| worker.env(ENDPOINT, &url).env(SOON.0, SOON.1).env(gzip.0, gzip.1),
    )
    .await;
    exchange(&mut stack, chat().header("traceparent", parent(TRACE, "01")), &json!({})).await;
    collector.trace(TRACE, 4).await;
    let batches = collector.http.received_heads();
    assert!(batches.iter().all(|head| head.header("content-encoding") == Some("gzip")), "{batches:?}");
}

#[tokio::test]
async fn remaining_spans_are_exported_at_shutdown() {
    let collector = Collector::start().await;
    let endpoint = collector.http.url();
    let far = ("OTEL_BSP_SCHEDULE_DELAY", "3600000");
    let mut stack = Stack::with(
        |relay| relay.env(ENDPOINT, &endpoint).env(far.0, far.1),
        |worker| worker.arg("--otlp-endpoint").arg(&endpoint).env(far.0, far.1),
    )
    .await;
    exchange(&mut stack, chat().header("traceparent", parent(TRACE, "01")), &json!({})).await;
    stack.worker.terminate().await;
    stack.worker.process.wait_exit().await;
    stack.relay.process().terminate().await;
    stack.relay.process().wait_exit().await;
    collector.trace(TRACE, 4).await;
}

#[tokio::test]
async fn variable_overrides_trace_endpoint_of_worker_file() {
    let (collector, away) = (Collector::start().await, FakeBackend::refusing().await);
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("worker.yaml");
    let wrong = "http://me:planted-password-37@collector:4318";
    let say = |address: &str| std::fs::write(&config, format!("otlpEndpoint: {address}\n")).expect("a file");
    let file = || config.to_string_lossy().into_owned();
    say(&collector.http.url());
    let mut stack = Stack::with(|relay| relay, |worker| worker.env("WORKER_CONFIG", file()).env(SOON.0, SOON.1)).await;
    exchange(&mut stack, chat().header("traceparent", parent(TRACE, "01")), &json!({})).await;
    collector.trace(TRACE, 2).await;

    say(&away.url());
    let url = collector.http.url();
    let of_both = |worker: WorkerBuilder| worker.env("WORKER_CONFIG", file()).env(ENDPOINT, &url).env(SOON.0, SOON.1);
    let mut stack = Stack::with(|relay| relay, of_both).await;
    exchange(&mut stack, chat().header("traceparent", parent(OTHER_TRACE, "01")), &json!({})).await;
    collector.trace(OTHER_TRACE, 2).await;

    say(wrong);
    let mut worker = WorkerProcess::builder().env("WORKER_CONFIG", file()).spawn();
    assert_eq!(worker.wait_exit().await.code(), Some(1));
    let lines = worker.log().lines();
    assert!(lines.len() == 1 && lines[0].contains("otlpEndpoint: "), "{lines:?}");
    assert!(!lines[0].contains("planted-password-37"), "{lines:?}");
}

#[tokio::test]
async fn invalid_endpoint_ends_program_without_leaking_it() {
    const WRONG: &str = "http://me:planted-password-35@collector:4318";
    let (status, log) = Relay::builder().env(ENDPOINT, WRONG).start_and_exit().await;
    let relay = (status.code(), log.lines());
    let mut worker = WorkerProcess::builder().env(ENDPOINT, WRONG).spawn();
    let status = worker.wait_exit().await;
    for (code, lines) in [relay, (status.code(), worker.log().lines())] {
        assert_eq!((code, lines.len()), (Some(1), 1), "{lines:?}");
        assert!(lines[0].contains("OTEL_EXPORTER_OTLP_ENDPOINT (--otlp-endpoint)"), "{lines:?}");
        assert!(!lines[0].contains("planted-password-35"), "{lines:?}");
    }
}
