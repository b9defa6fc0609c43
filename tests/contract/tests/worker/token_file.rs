//! A worker that presents the token of its Pod's ServiceAccount, which the kubelet renews.

use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

use modelrelay_harness::fake_kubernetes::{AN_HOUR, made_up};
use modelrelay_harness::fake_relay::{Ack, Dial, FakeRelay, RequestSpec};
use modelrelay_harness::worker_process::{Rig, WorkerBuilder, WorkerProcess};
use serde_json::json;
use tempfile::TempDir;

/// The file is read each second, and a worker moves within ten.
const MOVE: Duration = Duration::from_secs(13);

/// Returns the same token each time, though its expiry is relative to the first call.
fn token(number: usize) -> &'static str {
    static TOKENS: LazyLock<[String; 2]> =
        LazyLock::new(|| [1, 2].map(|n| made_up("llm/gpu", "modelrelay", AN_HOUR, n)));
    &TOKENS[number - 1]
}

/// Renews the file as the kubelet does: the old one stays until the new one is complete.
fn renew(directory: &Path, token: &str) {
    let fresh = directory.join("token.new");
    std::fs::write(&fresh, token).expect("a writable directory");
    std::fs::rename(fresh, directory.join("token")).expect("a file can be renamed");
}

fn with_token(worker: WorkerBuilder, directory: &TempDir) -> WorkerBuilder {
    worker.without("WORKER_SECRET").file("WORKER_TOKEN_FILE", &directory.path().join("token"))
}

fn check_shown(dial: &Dial, token: &str) {
    assert_eq!(dial.header("authorization"), Some(format!("Bearer {token}").as_str()));
    assert_eq!(dial.header("x-worker-secret"), None);
    assert_eq!(dial.query, "provider=local");
}

#[tokio::test]
async fn token_is_read_at_each_dial_for_header() {
    let mut relay = FakeRelay::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    renew(directory.path(), token(1));
    let worker = with_token(WorkerProcess::builder().relay(relay.url()), &directory).start().await;
    let dial = relay.dial().await;
    check_shown(&dial, token(1));
    renew(directory.path(), token(2));
    dial.refuse(401).await;
    check_shown(&relay.dial().await, token(2));
    let line = worker.process.wait_for_line("worker authentication failed").await;
    assert!(line.contains("workerServiceAccounts"), "{line}");
}

#[tokio::test]
async fn missing_token_file_is_awaited() {
    let mut relay = FakeRelay::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let worker = with_token(WorkerProcess::builder().relay(relay.url()), &directory).start().await;
    let line = worker.process.wait_for_line("there is no worker token yet").await;
    assert!(line.contains("WORKER_TOKEN_FILE"), "{line}");
    renew(directory.path(), token(1));
    check_shown(&relay.dial().await, token(1));
}

#[tokio::test]
async fn renewed_token_opens_new_link_while_old_finishes() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    renew(directory.path(), token(1));
    let mut rig = Rig::with(&Ack::core1(), 4, |worker| with_token(worker, &directory)).await;
    let request = rig.link.send_request(&RequestSpec::stream("m"));
    let mut call = rig.backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    renew(directory.path(), token(2));
    let dial = rig.relay.dial_within(MOVE).await.expect("a dial with the new token");
    check_shown(&dial, token(2));
    let mut newer = dial.upgrade().await;
    newer.register(&Ack::core1()).await;
    assert_eq!(newer.registration["succeeds"], json!(["relay-a"]));
    newer.models(&["m"]).await;
    newer.grant(3).await;
    rig.link.send(&json!({"type": "graceful_shutdown", "reason": "succeeded", "drain_timeout_secs": 300}));
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    let reply = rig.link.reply(&request).await;
    assert_eq!((reply.body.as_slice(), reply.is_complete()), (&b"data: 1\n\ndata: 2\n\n"[..], true));
    rig.link.closed().await;
    newer.grant(4).await;
    rig.link = newer;
    rig.still_serves().await;
}

#[tokio::test]
async fn relay_unable_to_review_tokens_is_redialled() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    renew(directory.path(), token(1));
    let mut relay = FakeRelay::start().await;
    let worker = with_token(WorkerProcess::builder().relay(relay.url()), &directory).start().await;
    for _ in 0..2 {
        relay.dial().await.refuse(503).await;
    }
    check_shown(&relay.dial().await, token(1));
    worker.process.wait_for_line("503").await;
    assert_eq!(worker.process.log().count_of("worker authentication failed"), 0, "{}", worker.log());
}

#[tokio::test]
async fn token_and_secret_together_are_rejected() {
    let worker = WorkerProcess::builder().env("WORKER_TOKEN_FILE", "/nowhere/token");
    let mut process = worker.spawn();
    assert_eq!(process.wait_exit().await.code(), Some(1));
    let lines = process.log().lines();
    assert!(lines.len() == 1 && lines[0].contains("WORKER_TOKEN_FILE"), "{lines:?}");
    assert!(lines[0].contains("WORKER_SECRET is set too"), "{lines:?}");
}
