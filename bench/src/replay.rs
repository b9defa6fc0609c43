//! A replay of requests against the relay's dispatch core in simulated time, and against other routers' rules.
//!
//! Discrete events, so that an hour takes a second and every run can be repeated. A [worker] computes prompts
//! one after the other, keeps their blocks in a cache, and needs the same time for each token of a response, however
//! many responses run. There is no network. Responses are not cached until they are part of the next prompt.
//!
//! The relay's policies are not implemented here: [`relays`] drives the core that the relay runs. The [`rivals`] are,
//! as plainly as their rules are.

pub mod cache;
pub mod cases;
pub mod cli;
pub mod journal;
pub mod policy;
pub mod relays;
pub mod report;
pub mod rivals;
pub mod worker;
pub mod workload;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::time::Duration;

use cases::Case;
use policy::{Policy, Router, Sent};
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
    /// Requests that were sent while an earlier one waited.
    pub overtakes: u64,
    /// Requests that were not sent where the previous one of their conversation was.
    pub moves: u64,
    /// Requests that the policy did not send to their conversation's home, by reason.
    pub reasons: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Happening {
    End(usize),
    Begin(usize),
    /// The index in the list of planned requests.
    Arrive(usize),
}

/// A request that has arrived.
struct Arrived {
    turn: Turn,
    /// Its worker, the time at which it was sent, and the result.
    sent: Option<(usize, Time, Served)>,
}

struct Run<'a> {
    workload: Box<dyn Workload>,
    router: Box<dyn Router>,
    workers: Vec<Worker>,
    case: &'a Case,
    planned: Vec<Turn>,
    /// By the number of the request.
    arrived: Vec<Arrived>,
    happenings: BinaryHeap<Reverse<(Time, Happening)>>,
    /// The worker of each conversation's last request.
    previous: HashMap<u64, usize>,
    outcome: Outcome,
}

/// Runs a case under a policy.
pub fn run(case: &Case, policy: Policy, seed: u64) -> Outcome {
    simulate(case, policy, seed).outcome
}

fn simulate(case: &Case, policy: Policy, seed: u64) -> Run<'_> {
    let mut run = Run {
        workload: case.workload(seed),
        router: policy.start(case, seed),
        workers: vec![Worker::new(case.engine, case.cache, case.concurrency); case.workers],
        case,
        planned: Vec::new(),
        arrived: Vec::new(),
        happenings: BinaryHeap::new(),
        previous: HashMap::new(),
        outcome: Outcome::default(),
    };
    for turn in run.workload.begin() {
        run.plan(turn);
    }
    while let Some(now) = run.next().filter(|now| *now <= case.length) {
        run.step(now);
    }
    run.close();
    run
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
            let Arrived { turn, sent } = &mut self.arrived[id];
            let served = self.workers[worker].serve(turn, now);
            assert!(sent.replace((worker, now, served)).is_none(), "request {id} was sent twice");
            self.outcome.tokens += u64::from(turn.tokens);
            self.outcome.cached += u64::from(served.cached);
            let previous = self.previous.insert(turn.conversation, worker);
            self.outcome.moves += u64::from(previous.is_some_and(|previous| previous != worker));
            self.happenings.push(Reverse((served.first, Happening::Begin(id))));
            self.happenings.push(Reverse((served.end, Happening::End(id))));
        }
    }

    fn handle(&mut self, what: Happening, now: Time, sent: &mut Vec<Sent>) {
        match what {
            Happening::Arrive(index) => {
                let id = self.arrived.len();
                self.arrived.push(Arrived { turn: self.planned[index].clone(), sent: None });
                self.router.arrive(id, &self.planned[index], now, sent);
            }
            Happening::Begin(id) => self.router.begin(id, now, sent),
            Happening::End(id) => {
                self.outcome.turns += 1;
                let Arrived { turn, sent: result } = &self.arrived[id];
                let (.., served) = result.as_ref().expect("a response belongs to a request that was sent");
                self.router.end(id, turn, served, now, sent);
                if let Some(next) = self.workload.after(turn, now) {
                    self.plan(next);
                }
            }
        }
    }

    fn close(&mut self) {
        let length = self.case.length;
        let wait =
            |Arrived { turn, sent }: &Arrived| sent.map_or(length, |(.., served)| served.first.min(length)) - turn.at;
        self.outcome.waits = self.arrived.iter().map(wait).collect();
        self.outcome.overtakes = self.router.overtakes();
        self.outcome.reasons = self.router.reasons();
    }
}

#[cfg(test)]
mod tests;
