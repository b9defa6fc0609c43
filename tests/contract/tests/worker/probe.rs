//! The probe server, for the kubelet and for users.

use std::net::SocketAddr;

use modelrelay_harness::client::RawConnection;
use modelrelay_harness::fake_backend::FakeBackend;
use modelrelay_harness::fake_relay::RequestSpec;
use modelrelay_harness::process::Spawn;
use modelrelay_harness::worker_process::{Rig, WorkerProcess};
use modelrelay_harness::{TEST_TIMEOUT, poll_until};
use serde_json::json;
use tokio::net::TcpListener;

/// Returns a URL with a port on which nothing listens.
async fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    format!("http://{}", listener.local_addr().expect("a bound socket"))
}

/// Returns the probe server's address.
fn address(worker: &WorkerProcess) -> SocketAddr {
    let log = worker.log();
    let after = log.split("probe server listening on http://").nth(1).expect("a probe server that listens");
    let address: String =
        after.chars().take_while(|letter| letter.is_ascii_digit() || ".:".contains(*letter)).collect();
    address.parse().unwrap_or_else(|_| panic!("no address in {log}"))
}

/// Opens a connection to the probe server, without sending anything.
async fn connect(worker: &WorkerProcess) -> RawConnection {
    RawConnection::open(address(worker), worker.process.log()).await
}

/// Opens more connections than the probe server allows at once; none of them sends anything.
pub(super) async fn silent_crowd(worker: &WorkerProcess) -> Vec<RawConnection> {
    let mut crowd = Vec::new();
    for _ in 0..160 {
        crowd.push(connect(worker).await);
    }
    crowd
}

#[tokio::test]
async fn unfinished_header_times_out_after_ten_seconds() {
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(nowhere().await).start().await;
    let mut endless = connect(&worker).await;
    endless.write("GET /livez HTTP/1.1\r\nhost: x\r\nx-odd: ").await;
    let answer = endless.read_to_end_within(TEST_TIMEOUT * 2).await;
    assert_eq!(answer, "");
    assert_eq!(worker.probe("/livez").await.status, 200);
}

#[tokio::test]
async fn headers_over_16_kib_lead_to_431() {
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(nowhere().await).start().await;
    let most = "h".repeat(15 << 10);
    assert_eq!(worker.probe_with("/livez", &[("x-odd", &most)]).await.status, 200);
    let mut long = connect(&worker).await;
    long.write(format!("GET /livez HTTP/1.1\r\nhost: x\r\nx-odd: {}\r\n\r\n", "h".repeat(64 << 10))).await;
    // Unread bytes reset the connection, which may overtake the response.
    let answer = long.read_to_end().await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test]
async fn connections_without_request_do_not_block_probes() {
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(nowhere().await).start().await;
    let mut crowd = silent_crowd(&worker).await;
    // Before the timeout of any of them.
    let probed = tokio::time::timeout(TEST_TIMEOUT / 2, worker.probe("/livez")).await.expect("a response");
    assert_eq!(probed.status, 200);
    assert_eq!(crowd[0].read_to_end_within(TEST_TIMEOUT / 2).await, "", "the oldest connection must be closed");
}

#[tokio::test]
async fn liveness_and_readiness_ignore_relay_and_backend() {
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(nowhere().await).start().await;
    assert_eq!(worker.probe("/livez").await.status, 200);
    assert_eq!(worker.probe("/readyz").await.status, 200);
}

/// Waits until `/backendz` has this status and begins with this text.
async fn backendz(worker: &WorkerProcess, status: u16, words: &str) {
    let is_so = async || {
        let answer = worker.probe("/backendz").await;
        assert!([200, 503].contains(&answer.status), "{}: {}", answer.status, answer.body);
        answer.status == status && answer.body.starts_with(words)
    };
    poll_until(TEST_TIMEOUT, &format!("{status} {words} of /backendz"), worker.process.log(), is_so).await;
}

#[tokio::test]
async fn backendz_waits_until_backend_accepts_connections() {
    let mut backend = FakeBackend::refusing().await;
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(backend.url()).start().await;
    backendz(&worker, 503, "the backend is not ready: ").await;
    assert_eq!(worker.probe("/readyz").await.status, 200);
    backend.reopen();
    backendz(&worker, 200, "ok").await;
}

#[tokio::test]
async fn backendz_waits_until_backend_has_loaded_its_model() {
    let backend = FakeBackend::with_models(&["m"]).await;
    backend.set_healthy(false);
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(backend.url()).without("MODELS").start().await;
    backendz(&worker, 503, "the backend is not ready: ").await;
    backend.set_healthy(true);
    backendz(&worker, 200, "ok").await;
}

#[tokio::test]
async fn backendz_waits_for_readable_model_list() {
    let backend = FakeBackend::start().await;
    backend.set_listing(false);
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(backend.url()).without("MODELS").start().await;
    backendz(&worker, 503, "cannot list the backend's models: ").await;
    backend.set_listing(true);
    backendz(&worker, 200, "ok").await;
}

#[tokio::test]
async fn backendz_accepts_healthy_backend_without_models() {
    // An Ollama without any model yet: it has nothing left to load.
    let backend = FakeBackend::with_models(&[]).await;
    let worker = WorkerProcess::builder().relay(nowhere().await).backend(backend.url()).without("MODELS").start().await;
    backendz(&worker, 200, "ok").await;
}

#[tokio::test]
async fn backendz_stays_ready_after_backend_loss() {
    let mut rig = Rig::core1().await;
    backendz(&rig.worker, 200, "ok").await;
    rig.backend.refuse().await;
    rig.link.exchange(&RequestSpec::chat("m")).await;
    assert_eq!(rig.worker.metric("modelrelay_worker_backend_up").await, 0.0);
    assert_eq!(rig.worker.probe("/backendz").await.status, 200, "an outage is the relay's matter, not a rollout's");
}

#[tokio::test]
async fn healthz_reports_state_as_json() {
    let rig = Rig::core1().await;
    let health = rig.worker.probe("/healthz").await;
    assert!(health.json().is_object(), "{}", health.body);
    assert!(health.body.contains("\"m\""), "no models in {}", health.body);
    let link = &health.json()["links"][0];
    assert_eq!((&link["unanswered"], &link["waiting"]), (&json!(0), &json!(0)));
}

#[tokio::test]
async fn unknown_paths_are_not_found() {
    let rig = Rig::core1().await;
    for path in ["/", "/admin", "/v1/models", "/v1/chat/completions"] {
        assert_eq!(rig.worker.probe(path).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn metrics_have_their_published_names() {
    let mut rig = Rig::core1().await;
    rig.still_serves().await;
    let metrics = rig.worker.probe("/metrics").await;
    assert_eq!(metrics.status, 200);
    for name in [
        "connected",
        "reconnects_total",
        "backend_up",
        "backend_request_duration_seconds",
        "backend_errors_total",
        "requests_in_flight",
        "max_concurrency",
        "forwarded_bytes_total",
        "send_backpressure_seconds_total",
        "model_refresh_total",
        "last_relay_message_timestamp_seconds",
    ] {
        let line = format!("# TYPE modelrelay_worker_{name} ");
        assert!(metrics.body.contains(&line), "no {name} in\n{}", metrics.body);
    }
}

#[tokio::test]
async fn metrics_follow_events() {
    let mut rig = Rig::core1().await;
    assert_eq!(rig.worker.metric("modelrelay_worker_connected").await, 1.0);
    assert_eq!(rig.worker.metric("modelrelay_worker_backend_up").await, 1.0);
    assert_eq!(rig.worker.metric("modelrelay_worker_max_concurrency").await, 4.0);
    let request = rig.link.send_request(&RequestSpec::chat("m"));
    let call = rig.backend.call().await;
    assert_eq!(rig.worker.metric("modelrelay_worker_requests_in_flight").await, 1.0);
    call.answer_json(200, &json!({"some": "bytes"})).await;
    rig.link.reply(&request).await;
    assert_eq!(rig.worker.metric("modelrelay_worker_requests_in_flight").await, 0.0);
    assert!(rig.worker.metric("modelrelay_worker_forwarded_bytes_total").await >= 16.0);
    assert_eq!(rig.worker.metric("modelrelay_worker_backend_request_duration_seconds_count").await, 1.0);
    rig.backend.refuse().await;
    rig.link.exchange(&RequestSpec::chat("m")).await;
    assert_eq!(rig.worker.metric("modelrelay_worker_backend_up").await, 0.0);
    assert_eq!(rig.worker.metric("modelrelay_worker_backend_errors_total{kind=\"connect\"").await, 1.0);
}

#[tokio::test]
async fn occupied_explicit_address_ends_program() {
    let taken = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = taken.local_addr().expect("a bound socket").to_string();
    let mut process = WorkerProcess::builder().env("PROBE_ADDR", &addr).spawn();
    assert_eq!(process.wait_exit().await.code(), Some(1));
    process.wait_for_line(&addr).await;
}

#[tokio::test]
async fn occupied_default_address_is_replaced() {
    let _taken = TcpListener::bind("127.0.0.1:17990").await;
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().backend(backend.url()).without("PROBE_ADDR").start().await;
    assert_eq!(worker.probe("/livez").await.status, 200);
    assert!(!worker.log().contains("listening on http://127.0.0.1:17990"), "{}", worker.log());
    assert!(worker.log().contains("17990"), "the log does not mention the default port: {}", worker.log());
}

#[tokio::test]
async fn version_is_printed() {
    let mut process = Spawn::program("modelrelay-worker").arg("--version").start();
    assert_eq!(process.wait_exit().await.code(), Some(0));
    process.wait_for_line("modelrelay-worker").await;
}
