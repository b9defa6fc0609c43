//! The tables of `docs/multiplexer/policy.md`.

use std::fmt::Write as _;
use std::time::Duration;

use modelrelay_multiplexer::config::Linger;

use super::rivals::{Rival, Rule};
use super::worker::Setup;
use super::workload::Kind;
use super::{Outcome, Scheduler, run};

/// The simulated time.
pub const LENGTH: Duration = Duration::from_secs(3600);

/// The durations of a load, in seconds.
pub const LOADS: [u64; 3] = [3, 15, 40];

/// The seeds of the runs; each cell is their mean.
pub const SEEDS: std::ops::Range<u64> = 1..6;

/// Long enough that no response is cut off, so that the policies are compared and not how they cut off responses.
pub const DRAIN: Duration = Duration::from_secs(60);

/// A request that waits this part of the hour is called starved.
const STARVED: Duration = Duration::from_secs(3000);

/// A policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One of the others.
    Rival(Rule),
    /// The worker's.
    Ours,
}

impl Policy {
    /// All policies, in the table's order.
    pub const ALL: [Self; 4] = [
        Self::Rival(Rule::ArrivalOrder),
        Self::Rival(Rule::ImmediateAndBatch),
        Self::Rival(Rule::StickyUntilIdle),
        Self::Ours,
    ];

    /// Simulates one hour under this policy.
    pub fn simulate(self, kind: Kind, load: Duration, seed: u64) -> Outcome {
        let mut scheduler: Box<dyn Scheduler> = match self {
            Self::Rival(rule) => Box::new(Rival::new(rule, load)),
            Self::Ours => Box::new(Setup::new(kind.models(), load).drain_timeout(DRAIN).start()),
        };
        run(kind.clients(seed).as_mut(), scheduler.as_mut(), LENGTH)
    }
}

/// The results of five hours of one kind of clients under one policy.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Responses in an hour, on average.
    pub done: f64,
    /// The longest wait in any of the hours.
    pub worst: Duration,
    /// Loads in an hour, on average.
    pub loads: f64,
}

/// Simulates the five hours.
pub fn cell(policy: Policy, kind: Kind, load: Duration) -> Cell {
    let runs: Vec<_> = SEEDS.map(|seed| policy.simulate(kind, load, seed)).collect();
    let mean = |of: fn(&Outcome) -> u32| runs.iter().map(|run| f64::from(of(run))).sum::<f64>() / runs.len() as f64;
    let worst = runs.iter().map(|run| kind.watched().map_or_else(|| run.worst_of_all(), |model| run.worst(model)));
    Cell { done: mean(|run| run.done), loads: mean(|run| run.loads), worst: worst.max().unwrap_or_default() }
}

/// The table that compares policies, as Markdown.
pub fn policies() -> String {
    let mut text = String::from(
        "| clients | load | arrival order | immediate + batch | sticky until idle | **ModelRelay** |\n|---|---|---|---|---|---|\n",
    );
    for kind in Kind::ALL {
        for (index, secs) in LOADS.into_iter().enumerate() {
            let name = if index == 0 { kind.name() } else { "〃".to_owned() };
            let _ = write!(text, "| {name} | {secs} s |");
            for policy in Policy::ALL {
                let cell = show(cell(policy, kind, Duration::from_secs(secs)));
                let _ = if policy == Policy::Ours { write!(text, " **{cell}** |") } else { write!(text, " {cell} |") };
            }
            text.push('\n');
        }
    }
    text
}

/// The table that compares lingers, as Markdown.
pub fn lingers() -> String {
    let mut text = String::from("| clients | load | off | **auto** | 2 s |\n|---|---|---|---|---|\n");
    let kinds =
        [Kind::Orchestrators(1), Kind::Orchestrators(2), Kind::Assistants(2), Kind::Assistants(4), Kind::Alternating];
    for kind in kinds {
        for (index, secs) in LOADS.into_iter().enumerate() {
            let name = if index == 0 { kind.name() } else { "〃".to_owned() };
            let done = |linger| {
                let done = SEEDS.map(|seed| {
                    let mut setup = Setup::new(kind.models(), Duration::from_secs(secs)).drain_timeout(DRAIN);
                    setup.config.knobs.linger = linger;
                    f64::from(run(kind.clients(seed).as_mut(), &mut setup.start(), LENGTH).done)
                });
                done.sum::<f64>() / SEEDS.count() as f64
            };
            let (off, auto) = (done(Linger::Off), done(Linger::Auto));
            let fixed = done(Linger::Fixed(Duration::from_secs(2)));
            let _ = writeln!(text, "| {name} | {secs} s | {off:.0} | **{auto:.0}** | {fixed:.0} |");
        }
    }
    text
}

fn show(cell: Cell) -> String {
    let worst = if cell.worst >= STARVED { "starved".to_owned() } else { format!("{:.0}", cell.worst.as_secs_f64()) };
    format!("{:.0} / {worst} / {:.0}", cell.done, cell.loads)
}
