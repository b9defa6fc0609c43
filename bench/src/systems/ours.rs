//! Our relay and our workers, as an operator starts them, with room for as many requests as a scenario has.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Running, SystemError, answered};
use crate::content::MODEL;
use crate::load::{Load, Until};
use crate::programs::{Program, ProgramError};
use crate::usage::Usage;

/// No line for each request, as everybody's logs are turned down here; but the relay's address, and that a worker is there.
const QUIET: &str =
    "warn,modelrelay_relay::relay=info,modelrelay_worker::relay_link=info,modelrelay_worker::probe=info";

/// Requests that a worker runs at once, unless a scenario says otherwise: more than any has.
const CONCURRENCY: u32 = 4096;

/// What admits workers here.
pub const SECRET: &str = "bench-worker-secret";

/// What differs between scenarios.
#[derive(Clone, Copy, Debug)]
pub struct StackOptions {
    /// Workers in front of the backend.
    pub workers: u32,
    /// Requests that each of them runs at once.
    pub concurrency: u32,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self { workers: 1, concurrency: CONCURRENCY }
    }
}

/// A relay with workers that serve.
#[derive(Debug)]
pub struct Stack {
    /// Where to ask.
    pub addr: SocketAddr,
    /// The relay.
    pub relay: Program,
    /// The workers.
    pub workers: Vec<Program>,
    /// From the relay's start until it answered.
    pub relay_start: Duration,
    folder: TempDir,
}

impl From<Stack> for Running {
    fn from(stack: Stack) -> Self {
        let programs = std::iter::once(stack.relay).chain(stack.workers).collect();
        Self { addr: stack.addr, programs, _folder: stack.folder }
    }
}

/// How one of our programs is started, besides what all have in common.
#[derive(Clone, Copy, Debug, Default)]
pub struct How<'a> {
    /// A command that it is started under.
    pub under: &'a [String],
    /// Settings, which win over the common ones; an empty one counts as not given.
    pub env: &'a [(&'a str, String)],
}

impl Stack {
    /// Starts it, and waits until every worker is registered and answers are right.
    pub async fn start(programs: &Path, backend: SocketAddr, options: &StackOptions) -> Result<Self, SystemError> {
        let mut stack = Self::relay_alone(programs).await?;
        let env = [("MAX_CONCURRENCY", options.concurrency.to_string())];
        for _ in 0..options.workers {
            stack.add_worker(programs, backend, How { env: &env, ..How::default() })?;
        }
        stack.serves(Load::new(stack.addr, Until::Requests(1))).await?;
        Ok(stack)
    }

    /// Only the relay.
    pub async fn relay_alone(programs: &Path) -> Result<Self, SystemError> {
        Self::relay(programs, How::default()).await
    }

    /// Only the relay, started so.
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

    /// One more worker, which need not be there yet when this returns.
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

    /// Waits until every worker is registered, and this load is answered rightly.
    pub async fn serves(&mut self, load: Load) -> Result<(), SystemError> {
        for worker in &mut self.workers {
            worker.printed("registered").await?;
        }
        answered(load, &mut self.workers).await
    }

    /// Folder of its programs.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What relay and workers used so far, together.
    pub fn usage(&self) -> Result<Usage, ProgramError> {
        self.workers.iter().try_fold(self.relay.usage()?, |sum, worker| Ok(sum + worker.usage()?))
    }

    /// Stops all of it.
    pub async fn stop(self) {
        Running::from(self).stop().await;
    }
}
