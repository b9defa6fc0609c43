//! The processes of a scenario: relays, and workers with a backend each, and the faults applied to them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use modelrelay_harness::{
    poll_for,
    process::{Process, Spawn},
    relay::{Relay, RelayBuilder, WORKER_SECRET},
    worker_process::{WorkerBuilder, WorkerProcess},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    dice::Dice,
    executions::Executions,
    ledger::{Ledger, Summary, report_line},
    load::{Load, Plan, Target},
};

/// The timeout for the loss of a heartbeat and a back-off on a busy machine.
const LONG: Duration = Duration::from_secs(40);

/// A backend process.
pub struct Backend {
    /// The process.
    pub process: Process,
    spawn: Spawn,
    addr: SocketAddr,
}

impl Backend {
    /// Kills it and starts it again at the same address.
    pub async fn kill_and_restart(&mut self) {
        self.process.kill().await;
        self.process = self.spawn.clone().start();
        self.process.wait_for_line("listening on").await;
    }

    /// Returns the value for `BACKEND_URL`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

/// A worker process.
pub struct Worker {
    /// The process.
    pub process: WorkerProcess,
    builder: WorkerBuilder,
}

impl Worker {
    /// Starts it.
    pub async fn start(builder: WorkerBuilder) -> Self {
        Self { process: builder.clone().start().await, builder }
    }

    /// Kills it and starts it again.
    pub async fn kill_and_restart(&mut self) {
        self.process.process.kill().await;
        self.process = self.builder.clone().start().await;
    }

    /// Replaces it gracefully: starts another one, possibly before the old one ends.
    pub async fn roll(&mut self) {
        let next = self.builder.clone().start().await;
        let mut old = std::mem::replace(&mut self.process, next);
        old.terminate().await;
        assert_eq!(old.process.wait_exit_within(LONG).await.code(), Some(0), "{}", old.log());
    }
}

/// A relay process with a fixed address.
pub struct RelayNode {
    /// The process.
    pub relay: Relay,
    /// The relay as clients see it.
    pub target: Arc<Target>,
    builder: RelayBuilder,
}

impl RelayNode {
    /// Starts it.
    pub async fn start(builder: RelayBuilder) -> Self {
        let relay = builder.clone().start().await;
        let builder = builder.env("LISTEN_ADDR", &relay.addr().to_string());
        Self { target: Target::new(relay.addr()), relay, builder }
    }

    /// Kills it: connections of its clients that break until it is back are excused.
    pub async fn kill(&mut self) {
        self.target.is_killed();
        self.relay.process().kill().await;
    }

    /// Restarts it at its address.
    pub async fn restart(&mut self) {
        self.relay = self.builder.clone().start().await;
        self.target.is_back();
    }

    /// Waits until it can dispatch to this number of workers: registered, serving the model, and with granted slots.
    pub async fn has_workers(&self, count: usize) {
        let serves = |worker: &&Value| worker["models"].as_array().is_some_and(|models| !models.is_empty());
        eventually(&format!("{count} workers"), async || {
            let workers = self.relay.workers().await;
            workers.len() == count && workers.iter().filter(serves).count() == count
        })
        .await;
    }
}

/// All parts of one scenario. Dropping it kills everything.
pub struct Site {
    /// The relays.
    pub relays: Vec<RelayNode>,
    /// The workers.
    pub workers: Vec<Worker>,
    /// Their backends, in the same order.
    pub backends: Vec<Backend>,
    /// The source of all randomness.
    pub dice: Dice,
    chaos_backend: PathBuf,
    dir: TempDir,
}

impl Site {
    /// Creates an empty site. `chaos_backend` is the path of the backends' program, which only a test of this crate
    /// knows.
    #[must_use]
    pub fn new(chaos_backend: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (relays, workers, backends) = (Vec::new(), Vec::new(), Vec::new());
        Self { relays, workers, backends, dice: Dice::thrown(), chaos_backend: chaos_backend.into(), dir }
    }

    /// Starts one relay and this number of workers, ready to serve.
    pub async fn with_workers(
        chaos_backend: &str,
        count: usize,
        relay: impl FnOnce(RelayBuilder) -> RelayBuilder,
        worker: impl Fn(WorkerBuilder) -> WorkerBuilder,
    ) -> Self {
        let mut site = Self::new(chaos_backend);
        site.relays.push(RelayNode::start(relay(Self::relay())).await);
        let url = format!("http://{}", site.relays[0].relay.addr());
        for _ in 0..count {
            site.add_worker(&url, &worker).await;
        }
        site.ready().await;
        site
    }

    /// A relay that detects dead links in three seconds and limits each request to ten.
    #[must_use]
    pub fn relay() -> RelayBuilder {
        let relay = Relay::builder().env("HEARTBEAT_INTERVAL", "1").env("REQUEST_TIMEOUT_SECS", "10");
        relay.env("LOG_LEVEL", "info").env("DRAIN_TIMEOUT_SECS", "20").env("MAX_QUEUE_LEN", "1000")
    }

    /// Adds a backend and a worker of eight slots in front of it.
    pub async fn add_worker(&mut self, relay: &str, settings: impl Fn(WorkerBuilder) -> WorkerBuilder) {
        let backend = self.backend("127.0.0.1:0").await;
        let worker = WorkerProcess::builder().relay(relay).backend(backend.url()).concurrency(8);
        let worker = worker.env("WORKER_SECRET", WORKER_SECRET).env("LOG_LEVEL", "info");
        self.workers.push(Worker::start(settings(worker)).await);
        self.backends.push(backend);
    }

    /// Starts a backend at this address.
    pub async fn backend(&self, address: &str) -> Backend {
        self.backend_under(address, |spawn| spawn).await
    }

    /// Starts a backend in another way.
    pub async fn backend_under(&self, address: &str, how: impl Fn(Spawn) -> Spawn) -> Backend {
        let journal = self.journal().to_string_lossy().into_owned();
        let program = self.chaos_backend.to_string_lossy().into_owned();
        let spawn = |address: String| how(Spawn::program(&program).arg(address).arg(&journal));
        let process = spawn(address.to_owned()).start();
        let line = process.wait_for_line("listening on").await;
        let addr: SocketAddr = line.rsplit("//").next().and_then(|it| it.parse().ok()).expect("an address");
        Backend { process, spawn: spawn(addr.to_string()), addr }
    }

    /// Waits until every relay can use every worker.
    pub async fn ready(&self) {
        for relay in &self.relays {
            relay.has_workers(self.workers.len()).await;
        }
    }

    /// Starts clients of all relays, and returns when they have received some responses.
    pub async fn load(&mut self, plan: Plan) -> Load {
        let targets: Vec<_> = self.relays.iter().map(|relay| Arc::clone(&relay.target)).collect();
        let load = Load::start(plan, &targets, &mut self.dice);
        load.ledger().answers(20).await;
        load
    }

    /// Ends the load, prints the summary and checks it.
    pub async fn check(&self, scenario: &str, load: Load) -> Summary {
        let ledger = load.finish().await;
        let summary = self.summary(&ledger);
        if summary.lost.len() + summary.doubled.len() > 0 {
            self.print_logs();
        }
        summary.check(&format!("{scenario} (seed {})", self.dice.seed()));
        summary
    }

    /// Returns the combined summary of the ledger and the backends.
    #[must_use]
    pub fn summary(&self, ledger: &Ledger) -> Summary {
        ledger.summary(&self.executions())
    }

    /// Returns the backends' executions so far.
    #[must_use]
    pub fn executions(&self) -> Executions {
        Executions::read(&self.journal())
    }

    fn journal(&self) -> PathBuf {
        self.dir.path().join("journal")
    }

    /// Prints all logs, for a failure.
    fn print_logs(&self) {
        for relay in &self.relays {
            report_line(&relay.relay.log().dump());
        }
        for worker in &self.workers {
            report_line(&worker.process.process.log().dump());
        }
    }
}

/// Waits for a condition that may take longer than usual.
///
/// # Panics
/// If it does not hold in time.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let held = poll_for(LONG, async || condition().await.then_some(())).await;
    assert!(held.is_some(), "timed out after {LONG:?} waiting for {what}");
}
