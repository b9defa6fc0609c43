//! ModelRelay's relay and workers, started as an operator would, with room for all requests of a scenario.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Logs, Running, SystemError, answered};
use crate::content::MODEL;
use crate::load::{Load, Until};
use crate::programs::{Program, ProgramError};
use crate::usage::Usage;

/// No line per request, like the logs of all systems here; but the relay's address, and that a worker is registered.
const QUIET: &str = "warn,modelrelay_relay::app=info,modelrelay_worker::relays=info,modelrelay_worker::probe=info";

/// Concurrent requests of a worker, unless a scenario sets another number: more than any has.
const CONCURRENCY: u32 = 4096;

/// The secret of workers.
pub const SECRET: &str = "bench-worker-secret";

/// The settings that differ between scenarios.
#[derive(Clone, Copy, Debug)]
pub struct StackOptions {
    /// Workers in front of the backend.
    pub workers: u32,
    /// Concurrent requests of each worker.
    pub concurrency: u32,
    /// What relay and workers log.
    pub logs: Logs,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self { workers: 1, concurrency: CONCURRENCY, logs: Logs::Off }
    }
}

/// A relay with workers that serve.
#[derive(Debug)]
pub struct Stack {
    /// Its address.
    pub addr: SocketAddr,
    /// The relay.
    pub relay: Program,
    /// The workers.
    pub workers: Vec<Program>,
    /// The time from the relay's start until it listened.
    pub relay_start: Duration,
    folder: TempDir,
}

impl From<Stack> for Running {
    fn from(stack: Stack) -> Self {
        let programs = std::iter::once(stack.relay).chain(stack.workers).collect();
        Self { addr: stack.addr, programs, _folder: stack.folder }
    }
}

/// How one of the programs is started, in addition to the common settings.
#[derive(Clone, Copy, Debug, Default)]
pub struct How<'a> {
    /// The command that it is started under.
    pub under: &'a [String],
    /// Settings that override the common ones; an empty one is treated as not set.
    pub env: &'a [(&'a str, String)],
}

impl Stack {
    /// Starts relay and workers, and waits until every worker is registered and responses are right.
    pub async fn start(programs: &Path, backend: SocketAddr, options: &StackOptions) -> Result<Self, SystemError> {
        let level = match options.logs {
            Logs::Off => QUIET,
            Logs::Default => "info",
        };
        let level = ("LOG_LEVEL", level.to_owned());
        let mut stack = Self::relay(programs, How { env: std::slice::from_ref(&level), ..How::default() }).await?;
        let env = [("MAX_CONCURRENCY", options.concurrency.to_string()), level];
        for _ in 0..options.workers {
            stack.add_worker(programs, backend, How { env: &env, ..How::default() })?;
        }
        stack.serves(Load::new(stack.addr, Until::Requests(1))).await?;
        Ok(stack)
    }

    /// Starts only the relay.
    pub async fn relay_alone(programs: &Path) -> Result<Self, SystemError> {
        Self::relay(programs, How::default()).await
    }

    /// Starts only the relay, with these settings.
    pub async fn relay(programs: &Path, how: How<'_>) -> Result<Self, SystemError> {
        let folder = tempfile::tempdir()?;
        let common = [
            ("LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("WORKER_SECRET", SECRET.to_owned()),
            ("MAX_QUEUE_LEN", "10000".to_owned()),
            ("LOG_LEVEL", QUIET.to_owned()),
        ];
        let env = [&common[..], how.env].concat();
        let begun = Instant::now();
        let binary = programs.join("modelrelay-relay");
        let mut relay = Program::start_under("relay", how.under, &binary, &env, folder.path())?;
        let addr = relay.printed("listening on http://").await?;
        let relay_start = begun.elapsed();
        let addr = addr.parse().map_err(|_| relay.failed("printed no address"))?;
        Ok(Self { addr, relay, workers: Vec::new(), relay_start, folder })
    }

    /// Starts one more worker, which may not be registered when this returns.
    pub fn add_worker(&mut self, programs: &Path, backend: SocketAddr, how: How<'_>) -> Result<(), SystemError> {
        let name = format!("worker-{}", self.workers.len());
        let common = [
            ("PROXY_URL", format!("http://{}", self.addr)),
            ("WORKER_SECRET", SECRET.to_owned()),
            ("WORKER_NAME", name.clone()),
            ("BACKEND_URL", format!("http://{backend}")),
            ("MODELS", MODEL.to_owned()),
            ("MAX_CONCURRENCY", CONCURRENCY.to_string()),
            ("PROBE_ADDR", "127.0.0.1:0".to_owned()),
            ("LOG_LEVEL", QUIET.to_owned()),
        ];
        let env = [&common[..], how.env].concat();
        let binary = programs.join("modelrelay-worker");
        self.workers.push(Program::start_under(&name, how.under, &binary, &env, self.folder.path())?);
        Ok(())
    }

    /// Waits until every worker is registered and all responses to this load are right.
    pub async fn serves(&mut self, load: Load) -> Result<(), SystemError> {
        for worker in &mut self.workers {
            worker.printed("registered").await?;
        }
        answered(load, &mut self.workers).await
    }

    /// The folder of its programs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The usage of relay and workers so far.
    pub fn usage(&self) -> Result<Usage, ProgramError> {
        self.workers.iter().try_fold(self.relay.usage()?, |sum, worker| Ok(sum + worker.usage()?))
    }

    /// Stops all programs.
    pub async fn stop(self) {
        Running::from(self).stop().await;
    }
}
