//! Whole runs: conservation of requests, time and tokens under each policy, and the rules that `make replay` checks, on
//! short parts of the cases.

use std::collections::{BTreeMap, HashMap};

use super::cache::{BLOCK_TOKENS, Block};
use super::cases::Requests;
use super::report::{broken_rules, rows};
use super::*;

fn short(name: &str) -> Case {
    let case = Case::ALL.into_iter().find(|case| case.name == name).unwrap();
    Case { length: Duration::from_secs(300), ..case }
}

#[test]
fn same_seed_gives_same_figures() {
    for policy in Policy::ALL {
        let figures = |seed| {
            let outcome = run(&short("agents-tight"), policy, seed);
            (outcome.turns, outcome.cached, outcome.waits)
        };
        assert_eq!(figures(1), figures(1), "{policy:?}");
        assert_ne!(figures(1), figures(2), "{policy:?}");
    }
}

#[test]
fn unique_prompts_have_no_hits() {
    let case = Case { requests: Requests::Unique { rate: 2.0, alike: false }, ..short("agents-tight") };
    for policy in Policy::ALL {
        let outcome = run(&case, policy, 3);
        assert_eq!(outcome.cached, 0, "{policy:?}");
        assert!(outcome.turns > 500 && outcome.turns as usize <= outcome.waits.len(), "{policy:?}");
    }
}

/// The least recently used blocks of a worker, in the plainest form.
#[derive(Default)]
struct PlainCache {
    used: HashMap<Block, u64>,
    order: BTreeMap<u64, Block>,
    clock: u64,
}

impl PlainCache {
    /// Returns the blocks of a prompt's beginning that are known, and then uses all of its blocks.
    fn serve(&mut self, prompt: &[Block], capacity: usize) -> usize {
        let known = prompt.iter().take_while(|block| self.used.contains_key(block)).count();
        for block in prompt.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(*block, self.clock) {
                self.order.remove(&before);
            }
            self.order.insert(self.clock, *block);
        }
        while self.used.len() > capacity {
            let (_, block) = self.order.pop_first().unwrap();
            self.used.remove(&block);
        }
        known
    }
}

/// Checks one worker's requests, in the order in which they were sent.
fn check_worker(case: &Case, requests: &[(&Turn, Time, Served)]) {
    let mut cache = PlainCache::default();
    let mut computed = Time::ZERO;
    let mut ends: Vec<Time> = Vec::new();
    for (turn, at, served) in requests {
        let known = cache.serve(&turn.blocks, case.cache) as u32 * BLOCK_TOKENS;
        assert_eq!(served.cached, known.min(turn.tokens - 1), "{turn:?}");
        let start = served.first - case.engine.prefill(turn.tokens - served.cached);
        assert!(*at >= turn.at && start >= *at, "{turn:?} is computed before it is sent");
        assert!(start >= computed, "{turn:?} is computed while another prompt is");
        let running = ends.iter().filter(|end| **end > start).count();
        assert!(running < case.concurrency, "{turn:?} runs beyond the concurrency");
        let freed = ends.iter().copied().filter(|end| *end <= start).max().unwrap_or_default();
        let is_idle = start > computed.max(*at) && start > freed;
        assert!(!is_idle, "{turn:?} waits for nothing");
        computed = served.first;
        assert_eq!(served.end, computed + case.engine.token_time * turn.output);
        ends.push(served.end);
    }
}

#[test]
fn workers_conserve_requests_time_and_tokens() {
    let crowded = Case { concurrency: 3, ..short("agents-tight") };
    for (case, policy) in [short("agents-tight"), crowded].iter().flat_map(|case| Policy::ALL.map(|it| (case, it))) {
        let run = simulate(case, policy, 5);
        let mut sent: Vec<_> =
            run.arrived.iter().enumerate().filter_map(|(id, it)| it.sent.map(|sent| (id, sent))).collect();
        sent.sort_by_key(|(id, (_, at, served))| (*at, served.first, *id));
        for worker in 0..case.workers {
            let own = sent.iter().filter(|(_, (to, ..))| *to == worker);
            let own: Vec<_> = own.map(|(id, (_, at, served))| (&run.arrived[*id].turn, *at, *served)).collect();
            check_worker(case, &own);
        }
        let Requests::Agents(sessions) = case.requests else { panic!("{case:?}") };
        let (turns, arrived) = (run.outcome.turns as usize, run.arrived.len());
        assert!(arrived >= turns && arrived - turns <= sessions, "{policy:?}: {turns} of {arrived}");
        assert_eq!(run.planned.len(), sessions + turns, "{policy:?}: an agent lost its turn");
        let tokens = |of: fn(&Turn, &Served) -> u32| -> u64 {
            sent.iter().map(|(id, (.., served))| u64::from(of(&run.arrived[*id].turn, served))).sum()
        };
        assert_eq!(run.outcome.tokens, tokens(|turn, _| turn.tokens));
        assert_eq!(run.outcome.cached, tokens(|_, served| served.cached));
    }
}

#[test]
fn cache_beats_least_load_for_agents() {
    let case = short("agents");
    let [least, cache] = [Policy::LeastLoad, Policy::Cache].map(|policy| run(&case, policy, 1));
    let mean = |outcome: &Outcome| outcome.waits.iter().sum::<Duration>() / outcome.waits.len() as u32;
    assert!(2 * mean(&cache) < mean(&least), "{:?}, {:?}", mean(&cache), mean(&least));
    let hit_rate = |outcome: &Outcome| outcome.cached as f64 / outcome.tokens as f64;
    assert!(hit_rate(&cache) > 0.9 && hit_rate(&cache) > hit_rate(&least), "{} {}", hit_rate(&cache), hit_rate(&least));
}

#[test]
fn short_cases_break_no_rule() {
    let cases = Case::ALL.map(|case| short(case.name));
    let policies = [Policy::LeastLoad, Policy::Cache, Policy::TwoReported, Policy::Oracle];
    assert_eq!(broken_rules(&rows(&cases, &policies, 3)), Vec::<String>::new());
}
