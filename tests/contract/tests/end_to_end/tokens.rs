//! The kubelet renews a worker's token under load, the API server becomes unavailable, and no request fails.

use std::path::Path;

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_kubernetes::{AN_HOUR, FakeKubernetes, Fault};
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::json;

use crate::support::{Load, eventually};

const GPU: &str = "llm/gpu";
const CHAT: &str = "/v1/chat/completions";

fn renew(directory: &Path, token: &str) {
    let fresh = directory.join("token.new");
    std::fs::write(&fresh, token).expect("a writable directory");
    std::fs::rename(fresh, directory.join("token")).expect("a file can be renamed");
}

async fn relay_in(kubernetes: &FakeKubernetes) -> Relay {
    let relay = Relay::builder().without_env("WORKER_SECRET").env("WORKER_TOKEN_RECHECK_SECS", "0.2");
    kubernetes.reviewing(GPU).into_iter().fold(relay, |relay, (name, value)| relay.env(name, &value)).start().await
}

async fn worker_of(relay: &Relay, backend: &FakeBackend, directory: &Path) -> WorkerProcess {
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url()).concurrency(4);
    let worker = worker.without("WORKER_SECRET").file("WORKER_TOKEN_FILE", &directory.join("token")).start().await;
    wait_for_model(relay, "m").await;
    worker
}

#[tokio::test]
async fn token_renewal_fails_no_request() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).await;
    let mut backend = FakeBackend::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (first, second) = (kubernetes.token(GPU, "modelrelay", AN_HOUR), kubernetes.token(GPU, "modelrelay", AN_HOUR));
    renew(directory.path(), &first);
    let worker = worker_of(&relay, &backend, directory.path()).await;
    let streamed = relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})));
    let mut call = backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    let load = Load::start(&relay, 4);
    load.serves_everyone(2).await;
    // Reviews are unavailable: connected workers stay, and new links are retried.
    kubernetes.fail_reviews(&[const { Fault::Status(503, "the API server is away") }; 5]);
    renew(directory.path(), &second);
    eventually("a second link", &relay, || async { relay.workers().await.len() == 2 }).await;
    load.serves_everyone(2).await;
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    assert_eq!(streamed.reply().await.with_status(200).text(), "data: 1\n\ndata: 2\n\n");
    relay.wait_for_workers(1).await;
    kubernetes.revoke(&first);
    let before = kubernetes.reviewed().len();
    eventually("the second token was reviewed again", &relay, || async { kubernetes.reviewed().len() > before + 2 })
        .await;
    load.serves_everyone(2).await;
    load.end().await;
    assert_eq!(relay.log().count_of("worker registered"), 2, "{}", relay.log().dump());
    assert_eq!(relay.workers().await[0]["identity"], GPU);
    for token in [first, second] {
        let signature = token.rsplit('.').next().expect("a signature");
        assert!(!relay.log().contains(signature) && !worker.log().contains(signature), "a token was logged");
    }
}

#[tokio::test]
async fn worker_of_deleted_pod_logs_rejection_reason() {
    let kubernetes = FakeKubernetes::start().await;
    let relay = relay_in(&kubernetes).await;
    let backend = FakeBackend::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let token = kubernetes.token(GPU, "modelrelay", AN_HOUR);
    renew(directory.path(), &token);
    let worker = worker_of(&relay, &backend, directory.path()).await;
    kubernetes.revoke(&token);
    relay.log().wait_for_line("the worker's token is no longer valid").await;
    let line = worker.process.wait_for_line("the relay rejected the worker token (401)").await;
    assert!(line.contains("WARN"), "{line}");
    relay.wait_for_workers(0).await;
}
