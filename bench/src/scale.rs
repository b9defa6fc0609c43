//! The scalability of one relay, and the cost of its features: ten thousand idle workers, thousands of streams and of
//! waiting
//! requests at once, each feature on and off, and the same over two network hops.
//!
//! This is one run, too: everything that is compared has its turn in front of one backend. The figures per worker,
//! stream or request are the share of the programs. The kernel's memory for each connection is not in them.

pub mod features;
mod namespaces;
pub mod network;
pub mod queue;
pub mod streams;
pub mod workers;

use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::crowd::CrowdError;
use crate::http::HttpError;
use crate::load::{Fault, Outcome};
use crate::machine::{Machine, open_files};
use crate::programs::ProgramError;
use crate::scenarios::workers::answers_of;
use crate::systems::{Installed, Setup, SystemError};

/// The number of files that a program has open in addition to its connections.
const OTHER_FILES: u64 = 300;

/// A part that can be run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Idle workers, and a relay that restarts while they are connected.
    Workers,
    /// Open streams.
    Streams,
    /// Waiting requests whose clients disconnect or whose deadline passes.
    Queue,
    /// The throughput of one, two, four and eight workers.
    Throughput,
    /// Client, relay and worker in networks of their own.
    Network,
    /// Each feature on and off.
    Features,
}

impl Part {
    /// All parts, in the order in which they are run.
    pub const ALL: [Self; 6] =
        [Self::Workers, Self::Streams, Self::Queue, Self::Throughput, Self::Network, Self::Features];
}

/// The extent of each part.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Extent {
    /// Idle workers.
    pub workers: u32,
    /// Seconds that they are idle: two heartbeats of each.
    pub idle_seconds: f64,
    /// Open streams.
    pub streams: u32,
    /// Seconds over which they begin.
    pub begin_seconds: f64,
    /// Events of each, two a second.
    pub stream_chunks: u32,
    /// Waiting requests.
    pub queued: u32,
    /// Seconds until their deadline.
    pub queue_seconds: u64,
    /// Rounds of features and networks, in each of which all of them are measured.
    pub rounds: u32,
    /// Seconds of each load.
    pub seconds: f64,
}

impl Extent {
    /// The extent of published figures.
    pub const FULL: Self = Self {
        workers: 10_000,
        idle_seconds: 30.0,
        streams: 5000,
        begin_seconds: 5.0,
        stream_chunks: 20,
        queued: 15_000,
        queue_seconds: 20,
        rounds: 5,
        seconds: 1.2,
    };

    /// Shows that everything runs; its figures mean little.
    pub const QUICK: Self = Self {
        workers: 100,
        idle_seconds: 0.5,
        streams: 50,
        begin_seconds: 0.3,
        stream_chunks: 3,
        queued: 100,
        queue_seconds: 4,
        rounds: 1,
        seconds: 0.2,
    };

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Limits the connections to the number of files that may be open, here and in each program.
    fn within(self, open_files: u64) -> Self {
        let most = u32::try_from(open_files.saturating_sub(OTHER_FILES)).unwrap_or(u32::MAX);
        let (workers, streams, queued) = (self.workers.min(most), self.streams.min(most), self.queued.min(most));
        Self { workers, streams, queued, ..self }
    }
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Parts.
    pub parts: Vec<Part>,
    /// The extent of each part.
    pub extent: Extent,
    /// True if the extent is small.
    pub quick: bool,
    /// The paths of the programs.
    pub installed: Installed,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The place and time.
    pub machine: Machine,
    /// Files that a program may have open.
    pub open_files: u64,
    /// True if too little was measured to mean much.
    pub quick: bool,
    /// The extent of each part.
    pub extent: Extent,
    /// The duration of the run.
    pub seconds: f64,
    /// Idle workers.
    pub workers: Option<workers::Workers>,
    /// Open streams: of the backend itself, and of relay and worker.
    pub streams: Vec<streams::Streams>,
    /// Waiting requests.
    pub queue: Option<queue::Queue>,
    /// Numbers of workers, and their responses a second.
    pub throughput: Vec<(u32, f64)>,
    /// Over networks.
    pub network: Vec<network::Way>,
    /// Many streams over networks.
    pub loaded: Option<network::Loaded>,
    /// The cost of each feature, in each round.
    pub features: Vec<features::Costs>,
    /// Responses that were right in every byte.
    pub right: u64,
    /// Bytes that were compared.
    pub bytes: u64,
    /// The parts that this machine cannot run.
    pub absent: Vec<String>,
    /// The faults of the run.
    pub faults: Vec<String>,
}

/// Why a part has no figures.
#[derive(Debug, thiserror::Error)]
pub enum ScaleError {
    /// A program failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A group of programs failed.
    #[error(transparent)]
    System(#[from] SystemError),
    /// A worker of the crowd failed.
    #[error(transparent)]
    Crowd(#[from] CrowdError),
    /// A request for a program's state failed.
    #[error("cannot read the relay's state: {0}")]
    Http(#[from] HttpError),
    /// A request failed.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The machine failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// This machine cannot run the part.
    #[error("not available on this machine: {0}")]
    Absent(String),
    /// Something else.
    #[error("{0}")]
    Other(String),
}

/// Runs all of it, and reports its progress to `tell`.
pub async fn run(options: &Options, folder: &Path, tell: impl Fn(&str)) -> Result<Report, SystemError> {
    let (begun, open_files) = (Instant::now(), open_files());
    let setup = Setup::new(&options.installed, folder).await?;
    let extent = options.extent.within(open_files);
    let mut report = Report {
        machine: Machine::here(),
        open_files,
        quick: options.quick,
        extent,
        seconds: 0.0,
        workers: None,
        streams: Vec::new(),
        queue: None,
        throughput: Vec::new(),
        network: Vec::new(),
        loaded: None,
        features: Vec::new(),
        right: 0,
        bytes: 0,
        absent: Vec::new(),
        faults: Vec::new(),
    };
    if extent.queued < options.extent.queued {
        report.absent.push(format!("the limit of {open_files} open files is too low, so all numbers are reduced"));
    }
    for part in Part::ALL.into_iter().filter(|part| options.parts.contains(part)) {
        tell(&format!("{part:?}"));
        match report.measure(part, &setup).await {
            Ok(()) => {}
            Err(ScaleError::Absent(why)) => report.absent.push(format!("{part:?}: {why}")),
            Err(error) => report.faults.push(format!("{part:?}: {error}")),
        }
    }
    report.seconds = begun.elapsed().as_secs_f64();
    Ok(report)
}

impl Report {
    async fn measure(&mut self, part: Part, setup: &Setup) -> Result<(), ScaleError> {
        let extent = self.extent;
        match part {
            Part::Workers => self.workers = Some(workers::idle(setup, &extent).await?),
            Part::Streams => {
                self.streams = streams::open(setup, &extent, |outcome| self.right_and_bytes(outcome)).await?;
            }
            Part::Queue => self.queue = Some(queue::waiting(setup, &extent).await?),
            Part::Throughput => {
                for workers in [1, 2, 4, 8] {
                    let outcome = answers_of(workers, setup, extent.time()).await?;
                    let a_second = outcome.right as f64 / outcome.seconds;
                    self.right_and_bytes(&outcome)?;
                    self.throughput.push((workers, a_second));
                }
            }
            Part::Network => {
                let (ways, loaded) = network::measure(setup, &extent, |outcome| self.right_and_bytes(outcome)).await?;
                (self.network, self.loaded) = (ways, Some(loaded));
            }
            Part::Features => {
                let mut absent = Vec::new();
                let all = features::all(setup, &extent, &mut absent, |outcome| self.right_and_bytes(outcome)).await;
                self.absent.append(&mut absent);
                self.features = all?;
            }
        }
        Ok(())
    }

    /// Adds the compared responses; a wrong one is an error.
    fn right_and_bytes(&mut self, outcome: &Outcome) -> Result<(), ScaleError> {
        self.right += outcome.right;
        self.bytes += outcome.bytes;
        if outcome.wrong == 0 {
            return Ok(());
        }
        let first = outcome.first_fault.clone().unwrap_or_default();
        let all = outcome.wrong + outcome.right;
        Err(ScaleError::Other(format!("{} of {all} responses were wrong, the first: {first}", outcome.wrong)))
    }
}

fn other(error: impl Display) -> ScaleError {
    ScaleError::Other(error.to_string())
}

/// Microseconds divided by `count`.
fn micros_each(time: Duration, count: u64) -> f64 {
    time.as_secs_f64() * 1e6 / count.max(1) as f64
}

fn kib_each(bytes: u64, count: u32) -> f64 {
    bytes as f64 / 1024.0 / f64::from(count.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_stay_below_open_file_limit() {
        let less = Extent::FULL.within(4096);
        assert_eq!((less.workers, less.streams, less.queued), (3796, 3796, 3796));
        let all = Extent::FULL.within(1 << 20);
        assert_eq!((all.workers, all.streams, all.queued), (10_000, 5000, 15_000));
    }
}
