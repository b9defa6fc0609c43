//! Worker secrets change under load, and no request fails.

use std::path::{Path, PathBuf};

use modelrelay_harness::client::{Pending, Request};
use modelrelay_harness::fake_backend::{Answer, Call, FakeBackend};
use modelrelay_harness::fake_kubernetes::{Data, Mount};
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Load, eventually};

/// The number of responses for each client before the next step.
const ANSWERS: usize = 3;

const CHAT: &str = "/v1/chat/completions";
const ONE: &str = "providers:\n- name: local\n  workerSecrets: [{file: worker-secret}]\n";
const BOTH: &str =
    "providers:\n- name: local\n  workerSecrets: [{file: worker-secret}, {file: worker-secret-previous}]\n";

fn write(path: &Path, secret: &str) {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, secret).expect("a writable directory");
    std::fs::rename(fresh, path).expect("a file can be renamed");
}

async fn hash(relay: &Relay) -> Value {
    relay.admin_json("/admin/state").await["config_hash"].clone()
}

/// Mounts this configuration in one step, as a kubelet does, and waits until it is in effect.
async fn configure(relay: &Relay, mount: &Mount, files: &[(&str, &str)]) {
    let before = hash(relay).await;
    mount.show(&data(files));
    relay.eventually("the configuration counts", || async { hash(relay).await != before }).await;
}

fn data(files: &[(&str, &str)]) -> Data {
    files.iter().map(|(name, content)| ((*name).to_owned(), content.as_bytes().to_vec())).collect()
}

/// A worker with the first secret in its file, under load, with a partial response.
struct Rotation {
    mount: Mount,
    relay: Relay,
    worker: WorkerProcess,
    /// The file of its secret.
    secret: PathBuf,
    streamed: Pending,
    call: Call,
    load: Load,
    backend: FakeBackend,
    directory: TempDir,
}

impl Rotation {
    async fn begin() -> Self {
        let mount = Mount::new();
        mount.show(&data(&[("relay.yaml", ONE), ("worker-secret", "the-first-secret")]));
        let config = mount.file("relay.yaml").to_string_lossy().into_owned();
        let relay = Relay::builder().without_env("WORKER_SECRET").env("MODELRELAY_CONFIG", &config).start().await;
        let mut backend = FakeBackend::start().await;
        let directory = tempfile::tempdir().expect("a temporary directory");
        let secret = directory.path().join("worker-secret");
        write(&secret, "the-first-secret\n");
        let worker = WorkerProcess::builder().relay(format!("http://{}", relay.addr())).backend(backend.url());
        let worker = worker.without("WORKER_SECRET").file("WORKER_SECRET_FILE", &secret).concurrency(4).start().await;
        wait_for_model(&relay, "m").await;
        let streamed = relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})));
        let mut call = backend.call().await;
        call.start_stream().await;
        call.chunk(b"data: 1\n\n").await;
        backend.answer_with(|_, body| Answer::new(200, &[], body));
        let load = Load::start(&relay, 6);
        load.serves_everyone(ANSWERS).await;
        Self { mount, relay, worker, secret, streamed, call, load, backend, directory }
    }
}

#[tokio::test]
async fn worker_adopts_new_secret_without_losing_requests() {
    let Rotation { mount, relay, worker, secret, streamed, mut call, load, backend: _backend, directory: _directory } =
        Rotation::begin().await;
    // The worker has it before the relay does: the secret is rejected, and the worker keeps its link.
    write(&secret, "the-second-secret\n");
    let refused = || async { relay.log().contains("worker authentication failed") };
    eventually("the new secret is refused", &relay, refused).await;
    load.serves_everyone(ANSWERS).await;
    let previous = ("worker-secret-previous", "the-first-secret");
    let second = ("worker-secret", "the-second-secret");
    configure(&relay, &mount, &[("relay.yaml", BOTH), second, previous]).await;
    eventually("a second link", &relay, || async { relay.workers().await.len() == 2 }).await;
    load.serves_everyone(ANSWERS).await;
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    assert_eq!(streamed.reply().await.with_status(200).text(), "data: 1\n\ndata: 2\n\n");
    relay.wait_for_workers(1).await;
    // The old secret is no longer accepted, which affects no worker.
    configure(&relay, &mount, &[("relay.yaml", ONE), second]).await;
    load.serves_everyone(ANSWERS).await;
    load.end().await;
    assert_eq!(worker.process.log().count_of(" registered"), 2, "{}", worker.log());
    for secret in ["the-first-secret", "the-second-secret"] {
        assert!(!relay.log().contains(secret) && !worker.log().contains(secret), "{secret} was logged");
    }
}

/// The older link may close at the very moment at which the newer one is accepted.
#[tokio::test]
async fn idle_worker_adopts_new_secret_without_losing_links() {
    let mount = Mount::new();
    let secrets = [("worker-secret", "the-second-secret"), ("worker-secret-previous", "the-first-secret")];
    mount.show(&data(&[("relay.yaml", BOTH), secrets[0], secrets[1]]));
    let config = mount.file("relay.yaml").to_string_lossy().into_owned();
    let relay = Relay::builder().without_env("WORKER_SECRET").env("MODELRELAY_CONFIG", &config).start().await;
    let backend = FakeBackend::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let secret = directory.path().join("worker-secret");
    write(&secret, "the-first-secret\n");
    let worker = WorkerProcess::builder().relay(format!("http://{}", relay.addr())).backend(backend.url());
    let worker = worker.without("WORKER_SECRET").file("WORKER_SECRET_FILE", &secret).start().await;
    wait_for_model(&relay, "m").await;
    write(&secret, "the-second-secret\n");
    let closed = || async { relay.log().count_of("worker disconnected") == 1 };
    eventually("the older link is closed", &relay, closed).await;
    let registered = || async { worker.process.log().count_of(" registered") == 2 };
    eventually("the worker logs that it registered again", &relay, registered).await;
    assert_eq!(relay.workers().await.len(), 1, "{}", relay.log().dump());
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    let _ = relay.fetch(Request::post(CHAT, &json!({"model": "m"}))).await.with_status(200);
    assert_eq!(relay.log().count_of("worker registered"), 2, "{}", relay.log().dump());
}

#[tokio::test]
async fn worker_secret_rotation_fails_no_request() {
    let Rotation { mount, relay, worker, secret, streamed, mut call, load, backend: _backend, directory: _directory } =
        Rotation::begin().await;
    // Both are accepted; then workers get the new one; then the old one is no longer accepted.
    let previous = ("worker-secret-previous", "the-first-secret");
    let second = ("worker-secret", "the-second-secret");
    configure(&relay, &mount, &[("relay.yaml", BOTH), second, previous]).await;
    load.serves_everyone(ANSWERS).await;
    write(&secret, "the-second-secret\n");
    configure(&relay, &mount, &[("relay.yaml", ONE), second]).await;
    // The worker connected with the old secret: it finishes its requests, reconnects with the new secret, and
    // continues.
    worker.process.wait_for_line("graceful shutdown").await;
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    assert_eq!(streamed.reply().await.with_status(200).text(), "data: 1\n\ndata: 2\n\n");
    // It is a race whether the relay closes first, with 1008, or the idle worker.
    worker.process.wait_for_line("link closed").await;
    load.serves_everyone(ANSWERS).await;
    load.end().await;
    assert_eq!(worker.process.log().count_of("registered"), 2, "{}", worker.log());
    assert_eq!(relay.dial().secret("the-first-secret").refused().await.status, 401);
    for secret in ["the-first-secret", "the-second-secret"] {
        assert!(!relay.log().contains(secret) && !worker.log().contains(secret), "{secret} was logged");
    }
}
