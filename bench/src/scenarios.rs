//! The measurements of a system in its turn.
//!
//! [`shared`] is for every system, and makes the table; the others are for promises that only ModelRelay makes.

mod bursts;
pub mod dispatch;
mod idle;
mod shared;
mod slow_client;
pub mod workers;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::figures::{Figures, Turn};
use crate::load::{Load, Outcome};
use crate::programs::ProgramError;
use crate::systems::{Running, Setup, System, SystemError};
use crate::usage::Usage;

/// A part of a run that can be run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Memory of a thousand open streams.
    Memory,
    /// Plain responses: one client, then 32.
    Unary,
    /// Streams: paced, then as fast as possible.
    Streams,
    /// Prompts of 220 kB and 20 MB.
    Prompts,
    /// Clients that disconnect in the middle.
    Aborts,
    /// Streams that begin at the same moment, while each request is logged.
    Bursts,
    /// A thousand idle workers.
    Idle,
    /// The dispatch core by itself.
    Dispatch,
    /// One to eight workers.
    Workers,
    /// A client that stops reading.
    SlowClient,
    /// Start and memory of a relay with nothing to do.
    Start,
}

impl Part {
    /// All parts, in the order in which they are run: memory first, while no heap has grown.
    pub const ALL: [Self; 11] = [
        Self::Memory,
        Self::Unary,
        Self::Streams,
        Self::Prompts,
        Self::Aborts,
        Self::Bursts,
        Self::Idle,
        Self::Dispatch,
        Self::Workers,
        Self::SlowClient,
        Self::Start,
    ];
}

/// The duration and extent of each turn.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Extent {
    /// Seconds of each load.
    pub seconds: f64,
    /// Open streams whose memory is measured.
    pub streams: u32,
    /// Requests with a prompt of 220 kB; a fiftieth as many of 20 MB.
    pub long_prompts: u32,
    /// Idle workers.
    pub idle_workers: u32,
    /// Seconds that they are idle.
    pub idle_seconds: f64,
    /// Seconds in which temporary memory is released: the allocator returns it to the system within ten.
    pub settle_seconds: f64,
    /// The most workers among which the core chooses.
    pub dispatch_workers: u64,
    /// The most requests that wait in the core.
    pub dispatch_queue: u64,
}

impl Extent {
    /// The extent of published figures.
    pub const FULL: Self = Self {
        seconds: 3.0,
        streams: 1000,
        long_prompts: 400,
        idle_workers: 1000,
        idle_seconds: 31.0,
        settle_seconds: 12.0,
        dispatch_workers: 10_000,
        dispatch_queue: 100_000,
    };

    /// Shows that everything runs; its figures mean little.
    pub const QUICK: Self = Self {
        seconds: 0.3,
        streams: 50,
        long_prompts: 10,
        idle_workers: 20,
        idle_seconds: 0.5,
        settle_seconds: 0.3,
        dispatch_workers: 1000,
        dispatch_queue: 2000,
    };

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}

/// Why a part has no figures.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    /// A program failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A system that was started for this part failed.
    #[error(transparent)]
    System(#[from] SystemError),
    /// Responses differed from the backend's.
    #[error("{wrong} of {all} responses were wrong, the first: {first}")]
    Wrong {
        /// The number of wrong ones.
        wrong: u64,
        /// The number of all.
        all: u64,
        /// The first fault.
        first: String,
    },
    /// Something else.
    #[error("{0}")]
    Other(String),
}

/// One turn: its settings, and its results so far.
pub struct Turns<'a> {
    setup: &'a Setup,
    extent: &'a Extent,
    turn: Turn,
}

impl<'a> Turns<'a> {
    /// Begins a turn.
    pub fn new(setup: &'a Setup, extent: &'a Extent, system: System, round: u32) -> Self {
        let turn = Turn { system, round, figures: Figures::new(), right: 0, bytes: 0, faults: Vec::new() };
        Self { setup, extent, turn }
    }

    /// Runs all of these parts that apply to this system. A part that fails does not end the others.
    pub async fn run(mut self, parts: &[Part], running: &Running) -> Turn {
        for part in parts {
            if let Err(error) = self.part(*part, running).await {
                self.turn.faults.push(format!("{part:?}: {error}"));
            }
        }
        self.turn
    }

    async fn part(&mut self, part: Part, running: &Running) -> Result<(), PartError> {
        match part {
            Part::Memory => return shared::memory(self, running).await,
            Part::Unary => return shared::unary(self, running).await,
            Part::Streams => return shared::streams(self, running).await,
            Part::Prompts => return shared::prompts(self, running).await,
            Part::Aborts => return shared::aborts(self, running).await,
            Part::Bursts => return bursts::logged(self, running).await,
            Part::Idle | Part::Dispatch | Part::Workers | Part::SlowClient | Part::Start => {}
        }
        if self.turn.system != System::Modelrelay {
            return Ok(());
        }
        match part {
            Part::Idle => idle::workers(self).await,
            Part::Start => idle::start(self).await,
            Part::Dispatch => self.dispatch().await,
            Part::Workers => workers::one_to_eight(self).await,
            Part::SlowClient => slow_client::one_of_a_hundred(self).await,
            Part::Memory | Part::Unary | Part::Streams | Part::Prompts | Part::Aborts | Part::Bursts => Ok(()),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the benchmark is not simulated")]
    async fn dispatch(&mut self) -> Result<(), PartError> {
        let extent = *self.extent;
        // On a thread of its own, because it runs for seconds without yielding.
        let costs =
            tokio::task::spawn_blocking(move || dispatch::costs(extent.dispatch_workers, extent.dispatch_queue));
        let costs = costs.await.map_err(|error| PartError::Other(error.to_string()))?;
        self.turn.figures.extend(costs.map_err(|error| PartError::Other(error.to_string()))?);
        Ok(())
    }

    fn set(&mut self, figure: crate::figures::Figure, value: f64) {
        self.turn.figures.insert(figure, value);
    }

    /// Runs a load; returns an error if a response was wrong.
    async fn load(&mut self, load: Load) -> Result<Outcome, PartError> {
        self.count(load.run().await)
    }

    fn count(&mut self, outcome: Outcome) -> Result<Outcome, PartError> {
        self.turn.right += outcome.right;
        self.turn.bytes += outcome.bytes;
        if outcome.wrong > 0 {
            let first = outcome.first_fault.unwrap_or_default();
            return Err(PartError::Wrong { wrong: outcome.wrong, all: outcome.wrong + outcome.right, first });
        }
        Ok(outcome)
    }

    /// The usage of the system so far; for `direct`, that of the backend.
    fn usage(&self, running: &Running) -> Result<Usage, PartError> {
        match self.turn.system {
            System::Direct => Ok(self.setup.backend.usage()?),
            System::Nginx
            | System::Haproxy
            | System::VllmRouter
            | System::SglangRouter
            | System::Rathole
            | System::Modelrelay => Ok(running.usage()?),
        }
    }
}

/// Microseconds divided by `count`.
fn micros_each(cpu: Duration, count: u64) -> f64 {
    cpu.as_secs_f64() * 1e6 / count.max(1) as f64
}

fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}
