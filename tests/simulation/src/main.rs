//! Runs seeds and reports failures.

use std::collections::BTreeMap;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use modelrelay_simulation::log;
use modelrelay_simulation::world::{self, Report};

/// Seeds that failed once; they run first.
const KEPT: &str = include_str!("../seeds.txt");

/// Runs the real relay and worker on a simulated network, under faults that a seed decides.
#[derive(Parser)]
#[command(max_term_width = 110)]
struct Args {
    /// Seeds to run, besides those that failed once.
    #[arg(long, env = "SEEDS", default_value = "1000")]
    seeds: u64,
    /// The first of them. [default: another each time]
    #[arg(long, env = "FIRST_SEED")]
    first: Option<u64>,
    /// Run for this number of minutes instead of a number of seeds.
    #[arg(long, env = "MINUTES")]
    minutes: Option<u64>,
    /// Run this seed alone, and print all that happened.
    #[arg(long, env = "SEED")]
    seed: Option<u64>,
    /// With it, print what came of it for a program to read.
    #[arg(long, hide = true, requires = "seed")]
    report: bool,
    /// With it, print the steps of the grants protocol, for tests/spec.
    #[arg(long, hide = true, requires = "seed")]
    grants: bool,
    /// Seeds at once. [default: the machine's processors]
    #[arg(long, env = "JOBS")]
    jobs: Option<usize>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    log::install(args.grants);
    world::catch_panics();
    match args.seed {
        Some(seed) if args.report => report(seed),
        Some(seed) if args.grants => print_grants(seed),
        Some(seed) => run_seed(seed),
        None => run_all(&args),
    }
}

#[allow(clippy::print_stdout)]
fn run_seed(seed: u64) -> ExitCode {
    let report = world::run(seed);
    print!("{}", report.story);
    println!("seed {seed}: {:?}, fingerprint {:016x}, {:?}", report.elapsed, report.fingerprint, report.outcomes);
    report.wrong.iter().for_each(|wrong| println!("WRONG: {wrong}"));
    if report.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[allow(clippy::print_stdout)]
fn report(seed: u64) -> ExitCode {
    match serde_json::to_string(&world::run(seed)) {
        Ok(report) => println!("{report}"),
        Err(_) => return ExitCode::FAILURE,
    }
    ExitCode::SUCCESS
}

#[allow(clippy::print_stdout)]
fn print_grants(seed: u64) -> ExitCode {
    world::run(seed).steps.iter().for_each(|step| println!("{step}"));
    ExitCode::SUCCESS
}

/// Runs a seed in its own process, without leftovers of another seed.
fn run_apart(seed: u64) -> Report {
    let program = std::env::current_exe().expect("this program has a path");
    let output = Command::new(program).arg(format!("--seed={seed}")).arg("--report").output();
    let output = output.expect("this program can be started");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        Report::of_failure(seed, format!("the simulation exited with {}: {stderr}", output.status))
    })
}

#[derive(Default)]
struct Summary {
    seeds: usize,
    failed: Vec<u64>,
    outcomes: BTreeMap<String, usize>,
    faults: BTreeMap<String, usize>,
    simulated: Duration,
}

#[allow(clippy::print_stdout)]
fn run_all(args: &Args) -> ExitCode {
    let kept: Vec<u64> = KEPT.lines().filter_map(|line| line.split('#').next()?.trim().parse().ok()).collect();
    // The wall clock is random enough, and a seed of eight digits can be copied manually.
    let now = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64);
    let first = args.first.unwrap_or(now % 100_000_000);
    let jobs = args.jobs.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    println!("{} kept seeds, then from seed {first} on, {jobs} at once", kept.len());
    let end = args.minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
    let count = kept.len() as u64 + if end.is_some() { u64::MAX / 2 } else { args.seeds };
    let (next, (reports, received)) = (AtomicU64::new(0), mpsc::channel());
    let summary = thread::scope(|scope| {
        for _ in 0..jobs {
            let (next, reports, kept) = (&next, reports.clone(), &kept);
            scope.spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count || end.is_some_and(|end| Instant::now() > end) {
                        break;
                    }
                    let fresh = number.wrapping_sub(kept.len() as u64);
                    let seed = kept.get(number as usize).copied().unwrap_or(first.wrapping_add(fresh));
                    if reports.send(run_apart(seed)).is_err() {
                        break;
                    }
                }
            });
        }
        drop(reports);
        let mut summary = Summary::default();
        received.into_iter().for_each(|report| summary.add(&report));
        summary
    });
    summary.print();
    if summary.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Summary {
    #[allow(clippy::print_stdout)]
    fn add(&mut self, report: &Report) {
        self.seeds += 1;
        self.simulated += report.elapsed;
        report.outcomes.iter().for_each(|(name, count)| *self.outcomes.entry(name.clone()).or_default() += count);
        report.faults.iter().for_each(|name| *self.faults.entry(name.clone()).or_default() += 1);
        if !report.wrong.is_empty() {
            self.failed.push(report.seed);
            println!("seed {} FAILED; `make simulation SEED={}` prints every event", report.seed, report.seed);
            report.wrong.iter().for_each(|wrong| println!("  {wrong}"));
        } else if self.seeds.is_multiple_of(100) {
            println!("{} seeds, {} failed", self.seeds, self.failed.len());
        }
    }

    #[allow(clippy::print_stdout)]
    fn print(&self) {
        let list = |counts: &BTreeMap<String, usize>| {
            counts.iter().map(|(name, count)| format!("  {count:7} {name}\n")).collect::<String>()
        };
        print!("requests:\n{}faults:\n{}", list(&self.outcomes), list(&self.faults));
        let (hours, failed) = (self.simulated.as_secs_f64() / 3600.0, &self.failed);
        println!("simulation: {} seeds, {hours:.1} simulated hours, {} failed {failed:?}", self.seeds, failed.len());
    }
}
