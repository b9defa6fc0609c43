//! The table of the replay, and the rules that it must keep.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde::Serialize;

use super::cases::Case;
use super::journal::Journal;
use super::policy::Policy;
use super::{Outcome, run};

/// The policy of the row with a journal's own figures.
const RECORDED: &str = "recorded";

/// The mean over all seeds of one case under one policy. Times are in seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The case.
    pub case: &'static str,
    /// The policy.
    pub policy: &'static str,
    /// The part of all tokens of prompts that was cached.
    pub hit_rate: f64,
    /// The mean time to the first token.
    pub ttft_mean: f64,
    /// Its median.
    pub ttft_p50: f64,
    /// Its 99th percentile.
    pub ttft_p99: f64,
    /// Complete responses.
    pub turns: f64,
    /// Requests that were sent while an earlier one waited.
    pub overtakes: f64,
    /// Requests that were not sent where the previous one of their conversation was.
    pub moves: f64,
    /// Requests that the policy did not send to their conversation's home, by reason.
    pub reasons: BTreeMap<&'static str, f64>,
}

/// Runs all cases under all policies with the seeds 1 to `seeds`, on all processors.
pub fn rows(cases: &[Case], policies: &[Policy], seeds: u64) -> Vec<Row> {
    let groups: Vec<_> = cases.iter().flat_map(|case| policies.iter().map(move |policy| (case, *policy))).collect();
    let jobs: Vec<_> =
        groups.iter().flat_map(|(case, policy)| (1..=seeds).map(move |seed| (case, *policy, seed))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((case, policy, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let figures = figures(run(case, *policy, *seed));
            done.push(((case.name, policy.name(), *seed), figures));
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let results: BTreeMap<_, _> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a run does not panic")).collect()
    });
    let row = |(case, policy): &(&Case, Policy)| {
        let runs: Vec<_> = (1..=seeds).map(|seed| &results[&(case.name, policy.name(), seed)]).collect();
        mean(case.name, policy.name(), &runs)
    };
    groups.iter().map(row).collect()
}

/// The figures that a journal recorded, as a row.
pub fn recorded(journal: &Journal) -> Row {
    let outcome = journal.outcome();
    let has_tokens = outcome.tokens > 0;
    let row = mean(Case::JOURNAL, RECORDED, &[&figures(outcome)]);
    // Numbers that are not recorded.
    Row { hit_rate: if has_tokens { row.hit_rate } else { f64::NAN }, overtakes: f64::NAN, ..row }
}

/// The figures of one run: hit rate, mean, median and 99th percentile of the time to the first token, turns, overtakes,
/// moves; and the reasons of moves.
type Figures = ([f64; 7], BTreeMap<&'static str, u64>);

fn figures(outcome: Outcome) -> Figures {
    let Outcome { turns, tokens, cached, mut waits, overtakes, moves, reasons } = outcome;
    waits.sort_unstable();
    let total: Duration = waits.iter().sum();
    let quantile = |share: f64| {
        let rank = (share * waits.len() as f64).ceil() as usize;
        waits.get(rank.max(1) - 1).copied().unwrap_or_default().as_secs_f64()
    };
    let hit_rate = cached as f64 / tokens.max(1) as f64;
    let mean = total.as_secs_f64() / waits.len().max(1) as f64;
    ([hit_rate, mean, quantile(0.5), quantile(0.99), turns as f64, overtakes as f64, moves as f64], reasons)
}

fn mean(case: &'static str, policy: &'static str, runs: &[&Figures]) -> Row {
    let count = runs.len() as f64;
    let [hit_rate, ttft_mean, ttft_p50, ttft_p99, turns, overtakes, moves] =
        std::array::from_fn(|index| runs.iter().map(|(figures, _)| figures[index]).sum::<f64>() / count);
    let mut reasons: BTreeMap<_, f64> = BTreeMap::new();
    for (reason, number) in runs.iter().flat_map(|(_, reasons)| reasons) {
        *reasons.entry(*reason).or_default() += *number as f64 / count;
    }
    Row { case, policy, hit_rate, ttft_mean, ttft_p50, ttft_p99, turns, overtakes, moves, reasons }
}

/// The table, as Markdown.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| case | policy | hit rate | TTFT mean | p50 | p99 | turns | overtakes | moves |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut previous = "";
    for row in rows {
        let title = Case::ALL.iter().find(|case| case.name == row.case).map_or(row.case, |case| case.title);
        let title = if previous == row.case { "〃" } else { title };
        previous = row.case;
        let Row { policy, ttft_mean, ttft_p50, ttft_p99, turns, moves, .. } = row;
        let shown = |number: f64, digits| if number.is_nan() { "–".to_owned() } else { format!("{number:.digits$}") };
        let (hit_rate, overtakes) = (shown(row.hit_rate, 2), shown(row.overtakes, 0));
        let _ = writeln!(
            text,
            "| {title} | `{policy}` | {hit_rate} | {ttft_mean:.2} s | {ttft_p50:.2} s | {ttft_p99:.1} s | {turns:.0} | {overtakes} | {moves:.0} |"
        );
    }
    text
}

/// The mean time to the first token under `cache`, as a multiple of that under `least-load`.
const LIMIT: f64 = 1.02;

/// The hits of two relays, as a part of the oracle's.
const SHARE: f64 = 0.9;

/// The rules that the rows break, one line each. Rules about policies without a row are not checked.
pub fn broken_rules(rows: &[Row]) -> Vec<String> {
    let find = |case: &str, policy: &str| rows.iter().find(|row| row.case == case && row.policy == policy);
    let mut broken = Vec::new();
    for row in rows {
        let case = row.case;
        if row.policy == "cache"
            && let Some(least) = find(case, "least-load")
            && row.ttft_mean > LIMIT * least.ttft_mean
        {
            let (mean, least) = (row.ttft_mean, least.ttft_mean);
            broken.push(format!("{case}: the mean TTFT is {mean:.3} s under cache and {least:.3} s under least-load"));
        }
        if row.policy == "cache-2"
            && let Some(oracle) = find(case, "oracle")
            && row.hit_rate < SHARE * oracle.hit_rate
        {
            let (rate, oracle) = (row.hit_rate, oracle.hit_rate);
            broken.push(format!("{case}: the hit rate is {rate:.3} with two relays and {oracle:.3} with the oracle"));
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &'static str, hit_rate: f64, ttft_mean: f64) -> Row {
        let reasons = BTreeMap::from([("busy", 2.0)]);
        let [ttft_p50, ttft_p99, turns, overtakes, moves] = [0.1, 9.0, 1.0, 2.0, 3.0];
        Row { case: "agents", policy, hit_rate, ttft_mean, ttft_p50, ttft_p99, turns, overtakes, moves, reasons }
    }

    #[test]
    fn slow_cache_and_few_hits_break_rules() {
        let rows = |mean, hits| {
            [row("least-load", 0.1, 1.0), row("cache", 0.9, mean), row("cache-2", hits, 1.0), row("oracle", 1.0, 1.0)]
        };
        assert_eq!(broken_rules(&rows(1.019, 0.901)), Vec::<String>::new());
        assert_eq!(broken_rules(&rows(1.021, 0.901)).len(), 1);
        assert_eq!(broken_rules(&rows(1.019, 0.899)).len(), 1);
    }

    #[test]
    fn table_names_case_once() {
        let text = table(&[row("cache", 0.5, 1.0), row("oracle", 0.5, 1.0)]);
        assert_eq!(text.matches("80 agents, 8 workers").count(), 1, "{text}");
        assert!(text.ends_with("| 〃 | `oracle` | 0.50 | 1.00 s | 0.10 s | 9.0 s | 1 | 2 | 3 |\n"), "{text}");
    }

    #[test]
    fn quantiles_and_means_describe_waits() {
        let waits = (1..=100).rev().map(Duration::from_secs).collect();
        let outcome = Outcome { turns: 7, tokens: 10, cached: 4, waits, overtakes: 2, moves: 3, ..Outcome::default() };
        assert_eq!(figures(outcome).0, [0.4, 50.5, 50.0, 99.0, 7.0, 2.0, 3.0]);
    }
}
