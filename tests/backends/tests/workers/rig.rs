//! A relay, a worker with one slot, and real servers behind it.

use std::net::SocketAddr;
use std::time::Duration;

use modelrelay_backends::engines;
use modelrelay_backends::server::processes_with;
use modelrelay_harness::poll_for;
use modelrelay_harness::relay::{Relay, WORKER_SECRET};
use modelrelay_harness::worker_process::{WorkerProcess, wait_for_model};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};

/// The timeout for several swaps on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Weights of `tiny-a` and `tiny-b` in the test's own folder, whose path is in the command line of each server that has
/// one of them open.
#[derive(Debug)]
pub(crate) struct Weights(TempDir);

impl Weights {
    pub(crate) fn new() -> Option<Self> {
        let folder =
            tempfile::Builder::new().prefix("modelrelay-worker-").tempdir().expect("the folder can be created");
        engines::weights(folder.path(), "", &["tiny-a", "tiny-b"])?;
        Some(Self(folder))
    }

    /// A slot with a llama-server per model, started by the worker, and one more model whose file is missing.
    pub(crate) fn slot(&self, capacity: usize) -> Option<Value> {
        let model = |id: &str| {
            let weights = self.0.path().join(format!("{id}.gguf"));
            let command = engines::llama_command(&weights, id, capacity, "${PORT}")?;
            Some(json!({"id": id, "command": command, "maxConcurrency": capacity}))
        };
        let models = [model("tiny-a")?, model("tiny-b")?, model("missing")?];
        Some(json!({"id": "gpu0", "driver": "process", "models": models}))
    }

    pub(crate) fn folder(&self) -> &std::path::Path {
        self.0.path()
    }

    /// Returns the servers that have one of these models open.
    pub(crate) fn servers(&self) -> Vec<u32> {
        processes_with(&self.0.path().to_string_lossy())
    }
}

/// The programs.
pub(crate) struct Stack {
    pub(crate) relay: Relay,
    pub(crate) worker: WorkerProcess,
    yaml: String,
    _config: NamedTempFile,
}

impl Stack {
    /// Starts the programs with these settings of the multiplexer and this slot.
    pub(crate) async fn start(knobs: &Value, slot: &Value) -> Self {
        let relay = Relay::start().await;
        let yaml = yaml(knobs, slot);
        let (worker, config) = start_worker(&yaml, relay.addr()).await;
        wait_for_model(&relay, "tiny-b").await;
        Self { relay, worker, yaml, _config: config }
    }

    /// Starts a further worker with the same settings.
    pub(crate) async fn another_worker(&self) -> (WorkerProcess, NamedTempFile) {
        start_worker(&self.yaml, self.relay.addr()).await
    }

    /// Returns the state of the slot.
    pub(crate) async fn slot(&self) -> Value {
        self.worker.probe("/healthz").await.json()["slots"][0].clone()
    }

    /// Waits until the slot satisfies the condition.
    pub(crate) async fn until_slot(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        eventually(what, async || is_so(&self.slot().await)).await;
    }

    /// Returns the number of loads so far, for any reason, as the worker counts them.
    pub(crate) async fn loads(&self) -> usize {
        self.worker.metric("modelrelay_worker_swaps_total{").await as usize
    }

    /// Returns the number of loads so far, as the servers report in the worker's log, under the name of their model.
    pub(crate) fn starts(&self, model: &str) -> usize {
        let (message, name) = (": listening on ", format!("model=\"{model}\""));
        self.worker.process.log().lines().iter().filter(|line| line.contains(message) && line.contains(&name)).count()
    }
}

fn yaml(knobs: &Value, slot: &Value) -> String {
    let mut knobs = knobs.clone();
    knobs["slots"] = json!([slot]);
    json!({"multiplexer": knobs}).to_string()
}

/// Starts a worker of the relay behind this address.
pub(crate) async fn start_worker(yaml: &str, relay: SocketAddr) -> (WorkerProcess, NamedTempFile) {
    let config = NamedTempFile::new().expect("a temporary file");
    std::fs::write(config.path(), yaml).expect("a writable file");
    let builder = WorkerProcess::builder().without("MODELS").arg("--config").arg(&config.path().to_string_lossy());
    let builder = builder.env("LOG_LEVEL", "info").env("WORKER_SECRET", WORKER_SECRET);
    (builder.relay(format!("http://{relay}")).start().await, config)
}

/// Waits until the condition holds.
///
/// # Panics
/// After [`LONG`].
pub(crate) async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let held = poll_for(LONG, async || is_so().await.then_some(())).await;
    assert!(held.is_some(), "timed out after {LONG:?} waiting until {what}");
}

/// Sends a process SIGKILL.
pub(crate) async fn kill(pid: u32) {
    let killed = tokio::process::Command::new("kill").arg("-KILL").arg(pid.to_string()).status().await;
    assert!(killed.is_ok_and(|killed| killed.success()), "{pid} can be killed");
}
