//! The command line of the replay.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser};

use super::cache::BLOCK_TOKENS;
use super::cases::Case;
use super::journal::Journal;
use super::policy::Policy;
use super::report::{Row, broken_rules, recorded, rows, table};
use super::worker::Engine;
use crate::page;

/// The number of seeds of the cases.
const SEEDS: u64 = 10;

/// The number of seeds of a journal: they only decide which of two relays gets a request.
const JOURNAL_SEEDS: u64 = 3;

/// The policies that a journal is replayed with, unless others are chosen.
const JOURNAL_POLICIES: [Policy; 4] = [Policy::LeastLoad, Policy::Cache, Policy::TwoReported, Policy::Oracle];

/// Replays requests against the relay's dispatch core and against other routers' rules, in simulated time. Prints a
/// table of the means over all seeds. Exits with 1 if `cache` breaks a rule: its mean TTFT may exceed that of
/// `least-load` by 2 % in each case, and two relays must get 90 % of the oracle's hits.
#[derive(Debug, Parser)]
#[command(name = "replay-placement", version, max_term_width = 110)]
struct Cli {
    /// The number of seeds, which shift arrivals and draw the agents' turns. [default: 10; 3 for a journal]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// Only this case; can be repeated.
    #[arg(long, value_name = "NAME", value_parser = Case::ALL.map(|case| case.name))]
    case: Vec<String>,
    /// Only this policy; can be repeated. [default: all; least-load, cache, cache-2 and oracle for a journal]
    #[arg(long, value_name = "NAME", value_parser = Policy::ALL.map(Policy::name))]
    policy: Vec<String>,
    /// Print JSON instead of a Markdown table.
    #[arg(long)]
    json: bool,
    /// Write the table into this page, between the marks `replay: begin` and `replay: end`, instead of printing it.
    #[arg(long, value_name = "PAGE", conflicts_with_all = ["json", "case", "policy"])]
    write: Option<String>,
    #[command(flatten)]
    what_if: WhatIf,
}

/// A journal, and the workers that it is replayed with.
#[derive(Args, Debug)]
#[command(next_help_heading = "Replay of a request journal")]
struct WhatIf {
    /// Replay this file of a relay's REQUEST_JOURNAL_FILE instead of the cases; can be repeated, for the previous file
    /// and for those of other relays. No rule is checked.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["case", "write"])]
    journal: Vec<PathBuf>,
    /// Only requests for this model. Required if the journal has several.
    #[arg(long, value_name = "NAME", requires = "journal")]
    model: Option<String>,
    /// The number of workers. [default: the number of workers in the journal]
    #[arg(long, value_name = "N", requires = "journal", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    workers: Option<u32>,
    /// The number of requests that each worker serves at a time.
    #[arg(long, value_name = "N", requires = "journal", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    concurrency: u32,
    /// The size of each worker's prompt cache in tokens; vLLM logs it as `GPU KV cache size`.
    #[arg(long, value_name = "TOKENS", requires = "journal", default_value_t = 131_072)]
    cache: u32,
    /// The tokens of prompts that each worker computes in a second.
    #[arg(long, value_name = "TOKENS", requires = "journal", default_value_t = 16_000, value_parser = clap::value_parser!(u32).range(1..))]
    prefill_rate: u32,
    /// The time between two tokens of a response, in milliseconds.
    #[arg(long, value_name = "MS", requires = "journal", default_value_t = 25, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    token_ms: u32,
}

/// Parses the command line and runs the replay.
#[expect(clippy::print_stdout, reason = "the table is this program's output")]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let rows = if cli.what_if.journal.is_empty() { Ok(cli.replay_cases()) } else { cli.replay_journal() };
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) => return fail(&error),
    };
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&rows).expect("figures are valid JSON"));
    } else if let Some(path) = &cli.write {
        if let Err(error) = page::write(path, &[("replay", table(&rows))]) {
            return fail(&error);
        }
    } else {
        print!("{}", table(&rows));
    }
    let broken = if cli.what_if.journal.is_empty() { broken_rules(&rows) } else { Vec::new() };
    for rule in &broken {
        eprintln!("{rule}");
    }
    if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn fail(error: &str) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}

impl Cli {
    fn policies(&self, usual: &[Policy]) -> Vec<Policy> {
        let is_chosen = |policy: &Policy| self.policy.iter().any(|name| name == policy.name());
        if self.policy.is_empty() { usual.to_vec() } else { Policy::ALL.into_iter().filter(is_chosen).collect() }
    }

    fn replay_cases(&self) -> Vec<Row> {
        let is_chosen = |case: &Case| self.case.is_empty() || self.case.iter().any(|name| name == case.name);
        let cases: Vec<_> = Case::ALL.into_iter().filter(is_chosen).collect();
        rows(&cases, &self.policies(&Policy::ALL), self.seeds.unwrap_or(SEEDS))
    }

    /// Returns what the journal recorded, and the figures of each policy.
    fn replay_journal(&self) -> Result<Vec<Row>, String> {
        let journal = self.what_if.read()?;
        let case = self.what_if.case(journal);
        let WhatIf { concurrency, cache, prefill_rate, token_ms, .. } = self.what_if;
        eprintln!("{journal}");
        eprintln!(
            "workers: {}; for each: {concurrency} requests at a time, a cache of {cache} tokens, {prefill_rate} tokens/s of prompts, {token_ms} ms per token of a response",
            case.workers
        );
        let simulated = rows(&[case], &self.policies(&JOURNAL_POLICIES), self.seeds.unwrap_or(JOURNAL_SEEDS));
        Ok(std::iter::once(recorded(journal)).chain(simulated).collect())
    }
}

impl WhatIf {
    fn read(&self) -> Result<&'static Journal, String> {
        let read = |path: &PathBuf| {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {name}: {error}"))?;
            Ok((name, text))
        };
        let files = self.journal.iter().map(read).collect::<Result<Vec<_>, String>>()?;
        let journal = Journal::read(&files, self.model.as_deref()).map_err(|error| error.to_string())?;
        // The program ends with its replay.
        Ok(Box::leak(Box::new(journal)))
    }

    fn case(&self, journal: &'static Journal) -> Case {
        let workers = self.workers.map_or_else(|| journal.workers(), |workers| workers as usize);
        let token_time = Duration::from_millis(u64::from(self.token_ms));
        Case {
            concurrency: self.concurrency as usize,
            engine: Engine { prefill_rate: f64::from(self.prefill_rate), token_time },
            ..Case::of_journal(journal, workers, (self.cache / BLOCK_TOKENS) as usize)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replay(arguments: &[&str], journal: &str) -> Result<Vec<Row>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests.jsonl");
        std::fs::write(&path, journal).unwrap();
        let program = ["replay-placement", "--journal", path.to_str().unwrap()];
        Cli::try_parse_from(program.iter().chain(arguments)).unwrap().replay_journal()
    }

    /// Turns of seven conversations in parallel, each with a prompt that grows by 4,000 tokens a turn.
    fn journal() -> String {
        let mut turns = [0_u64; 7];
        let mut line = |number: u64| {
            let conversation = (number * number + number / 7) % 7;
            let turn = &mut turns[conversation as usize];
            *turn += 1;
            let line = serde_json::json!({
                "at_ms": 1_800_000_000_000_u64 + 300 * number, "model": "m", "endpoint": "messages",
                "body_bytes": 16_000 * *turn, "conversation": format!("{conversation:032x}"),
                "worker": format!("gpu-{}", number % 3), "ttft_ms": 1000, "duration_ms": 6000,
                "input_tokens": 4000 * *turn, "cached_tokens": 0, "output_tokens": 50 + number * 37 % 400, "outcome": "ok",
            });
            format!("{line}\n")
        };
        (0..120).map(&mut line).collect()
    }

    #[test]
    fn journal_is_replayed_with_other_settings() {
        let rows = replay(&["--prefill-rate", "20000", "--cache", "600000"], &journal()).unwrap();
        let policies: Vec<_> = rows.iter().map(|row| row.policy).collect();
        assert_eq!(policies, ["recorded", "least-load", "cache", "cache-2", "oracle"]);
        assert!(rows.iter().all(|row| (row.turns - 120.0).abs() < 0.1), "{rows:#?}");
        let [recorded, least, cache, ..] = &rows[..] else { panic!("{rows:#?}") };
        assert!(recorded.hit_rate < 0.01 && (recorded.ttft_mean - 1.0).abs() < 0.001, "{recorded:?}");
        assert!(cache.hit_rate > 0.85 && cache.hit_rate > least.hit_rate, "{cache:?} {least:?}");
        assert!(cache.ttft_mean < least.ttft_mean, "{cache:?} {least:?}");
        let one = replay(&["--workers", "1", "--policy", "cache", "--cache", "600000"], &journal()).unwrap();
        assert!(one.len() == 2 && one[1].moves < 0.1, "{one:#?}");
        let slow = replay(&["--policy", "cache", "--prefill-rate", "500", "--cache", "600000"], &journal()).unwrap();
        assert!(slow[1].ttft_mean > 10.0 * cache.ttft_mean, "{slow:#?}");
        let small = replay(&["--policy", "cache", "--cache", "4096"], &journal()).unwrap();
        assert!(small[1].hit_rate < 0.1, "{small:#?}");
    }

    #[test]
    fn invalid_journal_is_named() {
        let error = replay(&[], &(journal() + "{}\n")).unwrap_err();
        assert!(error.ends_with("requests.jsonl, line 121: missing field `at_ms` (column 2)"), "{error}");
        let program = ["replay-placement", "--journal", "absent.jsonl"];
        let error = Cli::try_parse_from(program).unwrap().replay_journal().unwrap_err();
        assert!(error.starts_with("cannot read absent.jsonl: "), "{error}");
    }

    #[test]
    fn settings_of_workers_require_journal() {
        for arguments in [["--workers", "2"], ["--cache", "1000"], ["--model", "m"]] {
            assert!(Cli::try_parse_from(["replay-placement"].iter().chain(&arguments)).is_err(), "{arguments:?}");
        }
        assert!(Cli::try_parse_from(["replay-placement", "--journal", "f", "--case", "agents"]).is_err());
    }
}
