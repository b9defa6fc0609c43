//! Our relay and our workers, as an operator starts them, with room for as many requests as a scenario has.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Running, SystemError, ready};
use crate::content::MODEL;
use crate::programs::{Program, ProgramError};
use crate::usage::Usage;

/// No line for each request, as everybody's logs are turned down here; but the address.
const QUIET: &str = "warn,modelrelay_relay::relay=info";

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
        Self { workers: 1, concurrency: 4096 }
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

impl Stack {
    /// Starts it, and waits until every worker is registered and answers are right.
    pub async fn start(programs: &Path, backend: SocketAddr, options: &StackOptions) -> Result<Self, SystemError> {
        let mut stack = Self::relay_alone(programs).await?;
        for number in 0..options.workers {
            let env = [
                ("PROXY_URL", format!("http://{}", stack.addr)),
                ("WORKER_SECRET", SECRET.to_owned()),
                ("WORKER_NAME", format!("worker-{number}")),
                ("BACKEND_URL", format!("http://{backend}")),
                ("MODELS", MODEL.to_owned()),
                ("MAX_CONCURRENCY", options.concurrency.to_string()),
                ("PROBE_ADDR", "127.0.0.1:0".to_owned()),
            ];
            let (name, binary) = (format!("worker-{number}"), programs.join("modelrelay-worker"));
            stack.workers.push(Program::start::<&str>(&name, &binary, &[], &env, stack.folder.path())?);
        }
        for worker in &mut stack.workers {
            worker.printed("registered").await?;
        }
        ready(stack.addr, &mut stack.workers).await?;
        Ok(stack)
    }

    /// Only the relay.
    pub async fn relay_alone(programs: &Path) -> Result<Self, SystemError> {
        let folder = tempfile::tempdir()?;
        let env = [
            ("LISTEN_ADDR", "127.0.0.1:0".to_owned()),
            ("WORKER_SECRET", SECRET.to_owned()),
            ("MAX_QUEUE_LEN", "10000".to_owned()),
            ("LOG_LEVEL", QUIET.to_owned()),
        ];
        let begun = Instant::now();
        let mut relay = Program::start::<&str>("relay", &programs.join("modelrelay-relay"), &[], &env, folder.path())?;
        let addr = relay.printed("listening on http://").await?;
        let relay_start = begun.elapsed();
        let addr = addr.parse().map_err(|_| relay.failed("printed no address"))?;
        Ok(Self { addr, relay, workers: Vec::new(), relay_start, folder })
    }

    /// What relay and workers used so far, together.
    pub fn usage(&self) -> Result<Usage, ProgramError> {
        self.workers.iter().try_fold(self.relay.usage()?, |sum, worker| Ok(sum + worker.usage()?))
    }
}
