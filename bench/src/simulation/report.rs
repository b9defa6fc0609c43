//! The tables of `docs/multiplexer/policy.md`.

use std::fmt::Write as _;
use std::time::Duration;

use modelrelay_multiplexer::config::Linger;
use modelrelay_relay::dispatch::Class;

use super::fleet::{Fleet, KEY};
use super::rivals::{Rival, Rule};
use super::rng::Rng;
use super::slot::Setup;
use super::workload::{Busy, Kind, Saturated};
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

/// A batch job and chats with different models, and what a relay knows of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The relay requires no keys.
    None,
    /// Two keys of one class.
    Equal,
    /// The chats are `interactive`, the job is `batch`.
    Classed,
}

impl Keys {
    /// All of them, in the table's order.
    pub const ALL: [Self; 3] = [Self::None, Self::Equal, Self::Classed];

    fn classes(self) -> Option<Vec<Class>> {
        match self {
            Self::None => None,
            Self::Equal => Some(vec![Class::Normal; 2]),
            Self::Classed => Some(vec![Class::Batch, Class::Interactive]),
        }
    }

    /// Simulates an hour of 64 batch requests for one model at any time, and a chat request for another every minute.
    /// Returns the responses of the job, and the waiting times of the chats in order.
    pub fn simulate(self, load: Duration, seed: u64) -> (u32, Vec<Duration>) {
        let chat = KEY + 1;
        let mut clients = Saturated { busy: Busy { rng: Rng::new(seed), models: vec![0; 64] }, rare: chat };
        let outcome = run(&mut clients, &mut Fleet::with_keys(2, load, self.classes()), LENGTH);
        let mut waits = outcome.models.get(&chat).map(|(_, waits)| waits.clone()).unwrap_or_default();
        waits.sort_unstable();
        (outcome.done_of(0), waits)
    }
}

/// The table that compares what a relay knows of the keys of a batch job and of chats, as Markdown.
pub fn keys() -> String {
    let mut text = String::from(
        "| load | no keys | keys of one class | **chats `interactive`, job `batch`** |\n|---|---|---|---|\n",
    );
    for secs in LOADS {
        let _ = write!(text, "| {secs} s |");
        for keys in Keys::ALL {
            let runs: Vec<_> = SEEDS.map(|seed| keys.simulate(Duration::from_secs(secs), seed)).collect();
            let done = runs.iter().map(|(done, _)| f64::from(*done)).sum::<f64>() / runs.len() as f64;
            let mut waits: Vec<_> = runs.into_iter().flat_map(|(_, waits)| waits).collect();
            waits.sort_unstable();
            let part = |percent: usize| waits[(waits.len() - 1) * percent / 100].as_secs_f64();
            let cell = format!("{done:.0} / {:.0} / {:.0}", part(50), part(100));
            let _ = if keys == Keys::Classed { write!(text, " **{cell}** |") } else { write!(text, " {cell} |") };
        }
        text.push('\n');
    }
    text
}

/// Simulates an hour in which one key keeps eight requests waiting for one model, and each of four other keys for
/// another model. Returns the responses of each key.
pub fn one_key_beside_four(has_keys: bool, load: Duration, seed: u64) -> Vec<u32> {
    let model = |key: usize| KEY * key + key.min(1);
    let models = (0..5).flat_map(|key| vec![model(key); 8]).collect();
    let mut clients = Busy { rng: Rng::new(seed), models };
    let classes = has_keys.then(|| vec![Class::Normal; 5]);
    let outcome = run(&mut clients, &mut Fleet::with_keys(2, load, classes), LENGTH);
    (0..5).map(|key| outcome.done_of(model(key))).collect()
}

fn show(cell: Cell) -> String {
    let worst = if cell.worst >= STARVED { "starved".to_owned() } else { format!("{:.0}", cell.worst.as_secs_f64()) };
    format!("{:.0} / {worst} / {:.0}", cell.done, cell.loads)
}
