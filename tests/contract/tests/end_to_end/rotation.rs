//! Worker secrets change under load, and no request fails.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use modelrelay_harness::client::Request;
use modelrelay_harness::fake_backend::{Answer, FakeBackend};
use modelrelay_harness::fake_kubernetes::{Data, Mount};
use modelrelay_harness::process::Log;
use modelrelay_harness::relay::Relay;
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const ONE: &str = "providers:\n- name: local\n  workerSecrets: [{file: worker-secret}]\n";
const BOTH: &str =
    "providers:\n- name: local\n  workerSecrets: [{file: worker-secret}, {file: worker-secret-previous}]\n";

/// Clients that ask all the time until they are told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(relay: &Relay, clients: usize) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let clients = (0..clients).map(|_| {
            let (stop, answered, to) = (Arc::clone(&stop), Arc::clone(&answered), relay.addr());
            tokio::spawn(async move {
                let log = Log::new("a client");
                while !stop.load(Ordering::SeqCst) {
                    let asked = Request::post(CHAT, &json!({"model": "m"}));
                    let _ = asked.fetch(to, &log).await.with_status(200);
                    answered.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            })
        });
        Self { clients: clients.collect(), stop, answered }
    }

    /// Waits for further answers.
    async fn goes_on(&self, relay: &Relay) {
        let before = self.answered.load(Ordering::SeqCst);
        relay
            .eventually("requests are answered", || async { self.answered.load(Ordering::SeqCst) > before + 20 })
            .await;
    }

    async fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.await.expect("every request was answered with 200");
        }
    }
}

fn write(path: &Path, secret: &str) {
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, secret).expect("a writable directory");
    std::fs::rename(fresh, path).expect("a file can be renamed");
}

async fn hash(relay: &Relay) -> Value {
    relay.admin_json("/admin/state").await["config_hash"].clone()
}

/// Mounts this configuration in one step, as a kubelet does, and waits until it counts.
async fn configure(relay: &Relay, mount: &Mount, files: &[(&str, &str)]) {
    let before = hash(relay).await;
    mount.show(&data(files));
    relay.eventually("the configuration counts", || async { hash(relay).await != before }).await;
}

fn data(files: &[(&str, &str)]) -> Data {
    files.iter().map(|(name, content)| ((*name).to_owned(), content.as_bytes().to_vec())).collect()
}

#[tokio::test]
async fn a_worker_moves_to_a_new_secret_while_the_old_one_is_good_and_no_request_is_lost() {
    let mount = Mount::new();
    mount.show(&data(&[("relay.yaml", ONE), ("worker-secret", "the-first-secret")]));
    let config = mount.file("relay.yaml").to_string_lossy().into_owned();
    let relay = Relay::builder().without_env("WORKER_SECRET").env("MODELRELAY_CONFIG", &config).start().await;
    let mut backend = FakeBackend::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mounted = directory.path().join("worker-secret");
    write(&mounted, "the-first-secret\n");
    let worker = WorkerProcess::builder().relay(format!("http://{}", relay.addr())).backend(backend.url());
    let worker = worker.without("WORKER_SECRET").file("WORKER_SECRET_FILE", &mounted).concurrency(4).start().await;
    wait_for_model(&relay, "m").await;
    let streamed = relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})));
    let mut call = backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    let load = Load::start(&relay, 6);
    load.goes_on(&relay).await;
    // The worker has it before the relay does: it is refused, and stays.
    write(&mounted, "the-second-secret\n");
    let refused = || async { relay.log().contains("worker authentication failed") };
    eventually("the new secret is refused", refused).await;
    load.goes_on(&relay).await;
    let previous = ("worker-secret-previous", "the-first-secret");
    let second = ("worker-secret", "the-second-secret");
    configure(&relay, &mount, &[("relay.yaml", BOTH), second, previous]).await;
    eventually("a second link", || async { relay.workers().await.len() == 2 }).await;
    load.goes_on(&relay).await;
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    assert_eq!(streamed.reply().await.with_status(200).text(), "data: 1\n\ndata: 2\n\n");
    relay.wait_for_workers(1).await;
    // The old secret admits nobody any more, and nobody minds.
    configure(&relay, &mount, &[("relay.yaml", ONE), second]).await;
    load.goes_on(&relay).await;
    load.end().await;
    assert_eq!(worker.process.log().count_of(" registered"), 2, "{}", worker.log());
    for secret in ["the-first-secret", "the-second-secret"] {
        assert!(!relay.log().contains(secret) && !worker.log().contains(secret), "{secret} was logged");
    }
}

/// A fleet moves within ten seconds, and one that was refused pauses: longer than a test usually waits.
async fn eventually<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    for _ in 0..600 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("waited 30 s in vain for {what}");
}

#[tokio::test]
async fn a_rotated_worker_secret_costs_no_request() {
    let mount = Mount::new();
    mount.show(&data(&[("relay.yaml", ONE), ("worker-secret", "the-first-secret")]));
    let config = mount.file("relay.yaml").to_string_lossy().into_owned();
    let relay = Relay::builder().without_env("WORKER_SECRET").env("MODELRELAY_CONFIG", &config).start().await;
    let mut backend = FakeBackend::start().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mounted = directory.path().join("worker-secret");
    write(&mounted, "the-first-secret\n");
    let worker = WorkerProcess::builder().relay(format!("http://{}", relay.addr())).backend(backend.url());
    let worker = worker.without("WORKER_SECRET").file("WORKER_SECRET_FILE", &mounted).concurrency(4).start().await;
    wait_for_model(&relay, "m").await;
    let streamed = relay.begin(Request::post(CHAT, &json!({"model": "m", "stream": true})));
    let mut call = backend.call().await;
    call.start_stream().await;
    call.chunk(b"data: 1\n\n").await;
    backend.answer_with(|_, body| Answer::new(200, &[], body));
    let load = Load::start(&relay, 6);
    load.goes_on(&relay).await;
    // Both admit; then workers are given the new one; then the old one admits nobody.
    let previous = ("worker-secret-previous", "the-first-secret");
    let second = ("worker-secret", "the-second-secret");
    configure(&relay, &mount, &[("relay.yaml", BOTH), second, previous]).await;
    load.goes_on(&relay).await;
    write(&mounted, "the-second-secret\n");
    configure(&relay, &mount, &[("relay.yaml", ONE), second]).await;
    // The worker came in with the old secret: it finishes what it holds, comes back with the new one, and goes on.
    worker.process.wait_for_line("graceful shutdown").await;
    call.chunk(b"data: 2\n\n").await;
    call.end_stream().await;
    assert_eq!(streamed.reply().await.with_status(200).text(), "data: 1\n\ndata: 2\n\n");
    // Who closes first, the relay with 1008 or the idle worker itself, is a race.
    worker.process.wait_for_line("link closed").await;
    load.goes_on(&relay).await;
    load.end().await;
    assert_eq!(worker.process.log().count_of("registered"), 2, "{}", worker.log());
    assert_eq!(relay.dial().secret("the-first-secret").refused().await.status, 401);
    for secret in ["the-first-secret", "the-second-secret"] {
        assert!(!relay.log().contains(secret) && !worker.log().contains(secret), "{secret} was logged");
    }
}
