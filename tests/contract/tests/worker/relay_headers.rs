//! Headers for a proxy in front of the relay.

use modelrelay_harness::fake_relay::FakeRelay;
use modelrelay_harness::worker_process::{WORKER_SECRET, WorkerBuilder, WorkerProcess};

fn worker(relay: &FakeRelay) -> WorkerBuilder {
    WorkerProcess::builder().relay(format!("{}/llm", relay.url())).env("LOG_LEVEL", "trace,tungstenite=trace")
}

#[tokio::test]
async fn dial_sends_configured_headers() {
    let mut relay = FakeRelay::start().await;
    let headers = "CF-Access-Client-Id: id.access; Authorization: Basic planted-4711";
    let worker = worker(&relay).env("RELAY_HEADERS", headers).start().await;
    let dial = relay.dial().await;
    assert_eq!(dial.path, "/llm/v1/worker/connect");
    assert_eq!(dial.header("cf-access-client-id"), Some("id.access"));
    assert_eq!(dial.header("authorization"), Some("Basic planted-4711"));
    assert_eq!(dial.header("x-worker-secret"), Some(WORKER_SECRET));
    dial.refuse(403).await;
    let line = worker.process.wait_for_line("the relay returned 403").await;
    assert!(!worker.log().contains("planted-4711"), "{line}");
}

#[tokio::test]
async fn header_file_is_read_at_each_dial() {
    let mut relay = FakeRelay::start().await;
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), "x-access: one\n").expect("a writable file");
    let _worker = worker(&relay).file("RELAY_HEADERS_FILE", file.path()).start().await;
    let dial = relay.dial().await;
    assert_eq!(dial.header("x-access"), Some("one"));
    std::fs::write(file.path(), "x-access: two; a\n").expect("a writable file");
    dial.refuse(403).await;
    assert_eq!(relay.dial().await.header("x-access"), Some("two; a"));
}

#[tokio::test]
async fn settings_file_may_contain_headers() {
    let mut relay = FakeRelay::start().await;
    let config = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(config.path(), "relayHeaders: {X-Access: one}\n").expect("a writable file");
    let _worker = worker(&relay).file("WORKER_CONFIG", config.path()).start().await;
    assert_eq!(relay.dial().await.header("x-access"), Some("one"));
}

#[tokio::test]
async fn handshake_header_is_rejected() {
    for (headers, error) in [
        ("Host: planted-4711", "RELAY_HEADERS: \"host\" is not allowed"),
        ("sec-websocket-key: planted-4711", "RELAY_HEADERS: \"sec-websocket-key\" is not allowed"),
        ("planted-4711", "RELAY_HEADERS: each header (not shown) must have the form NAME: VALUE"),
    ] {
        let process = WorkerProcess::builder().relay("http://127.0.0.1:9").env("RELAY_HEADERS", headers).spawn();
        let line = process.wait_for_line(error).await;
        assert!(!line.contains("planted-4711"), "{line}");
    }
}

#[tokio::test]
async fn authorization_header_with_token_is_rejected() {
    let worker = WorkerProcess::builder().without("WORKER_SECRET").env("WORKER_TOKEN_FILE", "/nowhere/token");
    let process = worker.env("RELAY_HEADERS", "authorization: Basic planted-4711").spawn();
    process.wait_for_line("authorization carries the token of WORKER_TOKEN_FILE").await;
}
