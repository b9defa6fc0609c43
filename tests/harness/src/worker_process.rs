//! The real worker, started as an operator starts it: through its environment.

mod rig;
mod stack;

use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub use rig::Rig;
pub use stack::{Stack, wait_for_model};

use crate::process::{Process, Spawn};
use crate::trace::Trace;

/// The default secret of workers. It is also planted: it must never appear in a log.
pub const WORKER_SECRET: &str = "planted-worker-secret-5b1f";

/// The worker's output when its probe server listens.
const PROBE_LINE: &str = "probe server listening on http://";

/// The settings of a worker before its start.
#[derive(Clone, Debug)]
pub struct WorkerBuilder {
    spawn: Spawn,
}

/// A running worker. Dropping it kills it.
#[derive(Debug)]
pub struct WorkerProcess {
    /// The program and its log.
    pub process: Process,
    probe: SocketAddr,
    _home: TempDir,
}

/// A response of the probe server.
#[derive(Clone, Debug)]
pub struct Probed {
    /// The status.
    pub status: u16,
    /// The body.
    pub body: String,
}

impl Probed {
    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("a JSON body")
    }
}

impl WorkerProcess {
    /// Builds a worker with a secret, model `m`, and a probe server on a free port.
    #[must_use]
    pub fn builder() -> WorkerBuilder {
        let spawn = Spawn::program("modelrelay-worker")
            .env("WORKER_SECRET", WORKER_SECRET)
            .env("WORKER_NAME", "gpu-box-1")
            .env("MODELS", "m")
            .env("PROBE_ADDR", "127.0.0.1:0")
            .env("LOG_LEVEL", "debug");
        WorkerBuilder { spawn }
    }

    /// Sends a GET to the probe server.
    pub async fn probe(&self, path: &str) -> Probed {
        self.probe_with(path, &[]).await
    }

    /// Sends a GET to the probe server, with headers.
    ///
    /// # Panics
    /// If it does not respond.
    pub async fn probe_with(&self, path: &str, headers: &[(&str, &str)]) -> Probed {
        self.try_probe(path, headers).await.expect("the probe server responds")
    }

    /// Sends a GET to the probe server; `None` if it is gone.
    pub async fn try_probe(&self, path: &str, headers: &[(&str, &str)]) -> Option<Probed> {
        self.try_call("GET", path, headers).await
    }

    /// Drains like an operator on the machine, without a token.
    pub async fn drain(&self) -> Probed {
        self.post("/drain", &[("x-modelrelay-drain", "1")]).await
    }

    /// Posts to the probe server, with headers.
    ///
    /// # Panics
    /// If it does not respond.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)]) -> Probed {
        self.try_call("POST", path, headers).await.expect("the probe server responds")
    }

    async fn try_call(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Option<Probed> {
        let mut stream = TcpStream::connect(self.probe).await.ok()?;
        let mut request = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(key, _)| *key == "host") {
            request.push_str(&format!("host: {}\r\n", self.probe));
        }
        for (key, value) in headers {
            request.push_str(&format!("{key}: {value}\r\n"));
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        self.process.log().secrets().check("an answer of the probe server", body);
        Some(Probed { status, body: body.to_owned() })
    }

    /// The value of a metric: the sum over the series whose line begins with `series`.
    pub async fn metric(&self, series: &str) -> f64 {
        let metrics = self.probe("/metrics").await.body;
        let lines = metrics.lines().filter(|line| line.starts_with(series));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// The probe server's address.
    #[must_use]
    pub fn probe_addr(&self) -> SocketAddr {
        self.probe
    }

    /// Sends SIGTERM.
    pub async fn terminate(&self) {
        self.process.terminate().await;
    }

    /// All its output.
    #[must_use]
    pub fn log(&self) -> String {
        self.process.log().lines().join("\n")
    }
}

impl Drop for WorkerProcess {
    /// Prints the worker's log if the test failed.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.process.log().dump());
        }
    }
}

impl WorkerBuilder {
    /// Sets `PROXY_URL`.
    #[must_use]
    pub fn relay(self, url: impl Into<String>) -> Self {
        self.env("PROXY_URL", url)
    }

    /// Sets `BACKEND_URL`.
    #[must_use]
    pub fn backend(self, url: impl Into<String>) -> Self {
        self.env("BACKEND_URL", url)
    }

    /// Sets `MODELS`.
    #[must_use]
    pub fn models(self, models: &str) -> Self {
        self.env("MODELS", models)
    }

    /// Sets `MAX_CONCURRENCY`.
    #[must_use]
    pub fn concurrency(self, slots: u32) -> Self {
        self.env("MAX_CONCURRENCY", slots.to_string())
    }

    /// Sets any variable.
    #[must_use]
    pub fn env(self, name: &str, value: impl Into<String>) -> Self {
        Self { spawn: self.spawn.env(name, value) }
    }

    /// Sets a variable that names a file.
    #[must_use]
    pub fn file(self, name: &str, path: &Path) -> Self {
        self.env(name, path.to_string_lossy())
    }

    /// Unsets a variable.
    #[must_use]
    pub fn without(self, name: &str) -> Self {
        Self { spawn: self.spawn.without_env(name) }
    }

    /// Adds a command-line argument.
    #[must_use]
    pub fn arg(self, arg: &str) -> Self {
        Self { spawn: self.spawn.arg(arg) }
    }

    /// Runs it through another program that accepts a command line.
    #[must_use]
    pub fn under<const N: usize>(self, wrapper: [&str; N]) -> Self {
        Self { spawn: self.spawn.under(wrapper) }
    }

    /// Records the system calls that `filter` (strace's `-e trace=`) names.
    #[must_use]
    pub fn traced(self, trace: &Trace, filter: &str) -> Self {
        Self { spawn: trace.of(self.spawn, filter) }
    }

    /// Starts the program without waiting for anything: for settings that end it.
    #[must_use]
    pub fn spawn(self) -> Process {
        self.spawn.start()
    }

    /// Starts it in an empty directory and waits for its probe server.
    ///
    /// # Panics
    /// If the probe server does not start.
    pub async fn start(self) -> WorkerProcess {
        let home = tempfile::tempdir().expect("a temporary directory");
        let process = self.spawn.working_dir(home.path()).start();
        let line = process.wait_for_line(PROBE_LINE).await;
        let rest = line.split(PROBE_LINE).nth(1).unwrap_or_default();
        let addr: String =
            rest.chars().take_while(|letter| letter.is_ascii_hexdigit() || ".:[]".contains(*letter)).collect();
        let probe = addr.parse().unwrap_or_else(|_| panic!("no address in {line:?}"));
        WorkerProcess { process, probe, _home: home }
    }
}
