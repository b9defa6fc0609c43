//! A replay of requests against the relay's dispatch core in simulated time, and against other routers' rules.
//!
//! Discrete events, so that an hour takes a second and every run can be repeated. A [worker](worker) computes prompts
//! one after the other, keeps their blocks in a cache, and needs the same time for each token of a response, however
//! many responses run. There is no network. Responses are not cached until they are part of the next prompt.
//!
//! The relay's policies are not implemented here: [`core`] drives the core that the relay runs. The [`rivals`] are, as
//! plainly as their rules are.

pub mod cache;
pub mod cases;
pub mod cli;
pub mod core;
pub mod policy;
pub mod report;
pub mod rivals;
pub mod worker;
pub mod workload;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use cases::Case;
use policy::{Counts, Policy, Router, Sent};
use worker::{Served, Worker};
use workload::{Turn, Workload};

/// Time since the beginning.
pub type Time = Duration;

/// The results of one run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Complete responses.
    pub turns: u64,
    /// Tokens of prompts that were sent to workers.
    pub tokens: u64,
    /// Those that were cached.
    pub cached: u64,
    /// Times from arrival to the first token. For requests without one, the time to the end of the run.
    pub waits: Vec<Duration>,
    /// The policy's counters.
    pub counts: Counts,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Happening {
    End(usize),
    Begin(usize),
    /// The index in the list of planned requests.
    Arrive(usize),
}

struct Run<'a> {
    workload: Box<dyn Workload>,
    router: Box<dyn Router>,
    workers: Vec<Worker>,
    case: &'a Case,
    planned: Vec<Turn>,
    /// By the number of the request.
    arrived: Vec<(Turn, Option<Served>)>,
    happenings: BinaryHeap<Reverse<(Time, Happening)>>,
    outcome: Outcome,
}

/// Runs a case under a policy.
pub fn run(case: &Case, policy: Policy, seed: u64) -> Outcome {
    let mut run = Run {
        workload: case.workload(seed),
        router: policy.start(case, seed),
        workers: vec![Worker::new(case.cache, case.concurrency); case.workers],
        case,
        planned: Vec::new(),
        arrived: Vec::new(),
        happenings: BinaryHeap::new(),
        outcome: Outcome::default(),
    };
    for turn in run.workload.begin() {
        run.plan(turn);
    }
    while let Some(now) = run.next().filter(|now| *now <= case.length) {
        run.step(now);
    }
    run.close()
}

impl Run<'_> {
    fn plan(&mut self, turn: Turn) {
        self.happenings.push(Reverse((turn.at, Happening::Arrive(self.planned.len()))));
        self.planned.push(turn);
    }

    fn next(&self) -> Option<Time> {
        let happening = self.happenings.peek().map(|Reverse((at, _))| *at);
        happening.into_iter().chain(self.router.next_timeout()).min()
    }

    fn step(&mut self, now: Time) {
        let mut sent = Vec::new();
        match self.happenings.peek().filter(|Reverse((at, _))| *at <= now).map(|Reverse((_, what))| *what) {
            Some(what) => {
                self.happenings.pop();
                self.handle(what, now, &mut sent);
            }
            None => self.router.tick(now, &mut sent),
        }
        for Sent { id, worker } in sent {
            let (turn, served) = &mut self.arrived[id];
            let result = self.workers[worker].serve(turn, now);
            assert!(served.replace(result).is_none(), "request {id} was sent twice");
            self.outcome.tokens += u64::from(turn.tokens);
            self.outcome.cached += u64::from(result.cached);
            self.happenings.push(Reverse((result.first, Happening::Begin(id))));
            self.happenings.push(Reverse((result.end, Happening::End(id))));
        }
    }

    fn handle(&mut self, what: Happening, now: Time, sent: &mut Vec<Sent>) {
        match what {
            Happening::Arrive(index) => {
                let id = self.arrived.len();
                self.arrived.push((self.planned[index].clone(), None));
                self.router.arrive(id, &self.planned[index], now, sent);
            }
            Happening::Begin(id) => self.router.begin(id, now, sent),
            Happening::End(id) => {
                self.outcome.turns += 1;
                let (turn, served) = &self.arrived[id];
                let served = served.as_ref().expect("a response belongs to a request that was sent");
                self.router.end(id, turn, served, now, sent);
                if let Some(next) = self.workload.after(turn, now) {
                    self.plan(next);
                }
            }
        }
    }

    fn close(mut self) -> Outcome {
        let length = self.case.length;
        let first = |served: &Option<Served>| served.map_or(length, |served| served.first.min(length));
        self.outcome.waits = self.arrived.iter().map(|(turn, served)| first(served) - turn.at).collect();
        self.outcome.counts = self.router.counts();
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short() -> Case {
        let agents = Case::ALL.into_iter().find(|case| case.name == "agents-tight").unwrap();
        Case { length: Duration::from_secs(300), ..agents }
    }

    #[test]
    fn same_seed_gives_same_figures() {
        for policy in Policy::ALL {
            let figures = |seed| {
                let outcome = run(&short(), policy, seed);
                (outcome.turns, outcome.cached, outcome.waits)
            };
            assert_eq!(figures(1), figures(1), "{policy:?}");
            assert_ne!(figures(1), figures(2), "{policy:?}");
        }
    }

    #[test]
    fn unique_prompts_have_no_hits() {
        let case = Case { requests: cases::Requests::Unique(2.0), ..short() };
        for policy in Policy::ALL {
            let outcome = run(&case, policy, 3);
            assert_eq!(outcome.cached, 0, "{policy:?}");
            assert!(outcome.turns > 500 && outcome.turns as usize <= outcome.waits.len(), "{policy:?}");
        }
    }

    #[test]
    fn cache_reuses_more_than_least_load() {
        let hit_rate = |policy| {
            let outcome = run(&short(), policy, 1);
            outcome.cached as f64 / outcome.tokens as f64
        };
        let least = hit_rate(Policy::LeastLoad);
        for policy in [Policy::Cache, Policy::TwoCaches, Policy::Oracle] {
            assert!(hit_rate(policy) > 1.3 * least, "{policy:?}");
        }
    }
}
