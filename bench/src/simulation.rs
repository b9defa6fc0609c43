//! A simulation of a GPU that holds one of several models, with clients that request them, and of policies for swaps.
//!
//! Discrete events, so that an hour takes milliseconds and every run can be repeated. Only waiting is simulated: a
//! request occupies one of a model's places for the length of its response, and a load takes its time. There is no
//! network, no prefill, and no cache that is lost with a swap.
//!
//! The rivals in [`rivals`] are implemented here, as plainly as their rules are. The worker's policy is not: [`worker`]
//! drives the slot machine that the worker runs. [`fleet`] also has the relay's dispatch core: one of each for figures,
//! several for its tests.

pub mod fleet;
pub mod report;
pub mod rivals;
pub mod rng;
pub mod slot;
pub mod worker;
pub mod workload;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use workload::Workload;

/// Time since the beginning.
pub type Time = Duration;

/// Identifies a request.
pub type JobId = usize;

/// A model, by number.
pub type ModelId = usize;

/// Concurrent requests of one model.
pub const PLACES: u32 = 4;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// The client.
    pub client: usize,
    /// The model.
    pub model: ModelId,
    /// The duration of its response once it runs.
    pub service: Duration,
}

/// Decides which requests run, and which model is loaded.
pub trait Scheduler {
    /// Handles an arrived request. Appends the requests that begin now.
    fn arrive(&mut self, id: JobId, job: &Job, now: Time, begin: &mut Vec<JobId>);
    /// Handles a response that has had its time. Returns false if it was interrupted before.
    fn finish(&mut self, id: JobId, now: Time, begin: &mut Vec<JobId>) -> bool;
    /// Handles the timeout.
    fn tick(&mut self, now: Time, begin: &mut Vec<JobId>);
    /// The next timeout.
    fn next_timeout(&self) -> Option<Time>;
    /// Loads that were begun.
    fn loads(&self) -> u32;
    /// True if responses can be lost after their end, so that their requests begin again.
    fn loses_responses(&self) -> bool {
        false
    }
}

/// The results of one simulated run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Responses.
    pub done: u32,
    /// Loads that were begun.
    pub loads: u32,
    /// The time at which the last response ended.
    pub ended: Time,
    /// Per model: responses, and the waiting time of each request until it began. For those that never began, it is
    /// counted to the end.
    pub models: BTreeMap<ModelId, (u32, Vec<Duration>)>,
}

impl Outcome {
    /// The longest wait for a model.
    pub fn worst(&self, model: ModelId) -> Duration {
        self.models.get(&model).and_then(|(_, waits)| waits.iter().max().copied()).unwrap_or_default()
    }

    /// The longest wait for any model.
    pub fn worst_of_all(&self) -> Duration {
        self.models.keys().map(|model| self.worst(*model)).max().unwrap_or_default()
    }

    /// Responses of one model.
    pub fn done_of(&self, model: ModelId) -> u32 {
        self.models.get(&model).map_or(0, |(done, _)| *done)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// First, so that a place that becomes free in an instant can be occupied in it.
    Finish(JobId),
    Arrive(JobId),
}

struct Run<'a> {
    scheduler: &'a mut dyn Scheduler,
    jobs: Vec<Job>,
    arrived: Vec<Option<Time>>,
    began: Vec<Option<Time>>,
    /// The end of each response that has begun; one that is interrupted begins again.
    due: Vec<Option<Time>>,
    ended: Vec<bool>,
    happenings: BinaryHeap<Reverse<(Time, Happening)>>,
    outcome: Outcome,
}

/// Runs the clients of `workload` for this time.
pub fn run(workload: &mut dyn Workload, scheduler: &mut dyn Scheduler, length: Duration) -> Outcome {
    let mut run = Run {
        scheduler,
        jobs: Vec::new(),
        arrived: Vec::new(),
        began: Vec::new(),
        due: Vec::new(),
        ended: Vec::new(),
        happenings: BinaryHeap::new(),
        outcome: Outcome::default(),
    };
    for (at, job) in workload.begin() {
        run.plan(at, job);
    }
    while let Some(now) = run.next().filter(|now| *now <= length) {
        run.step(now, workload);
    }
    run.close(length)
}

impl Run<'_> {
    fn plan(&mut self, at: Time, job: Job) {
        self.happenings.push(Reverse((at, Happening::Arrive(self.jobs.len()))));
        self.jobs.push(job);
        self.arrived.push(None);
        self.began.push(None);
        self.due.push(None);
        self.ended.push(false);
    }

    fn next(&self) -> Option<Time> {
        let happening = self.happenings.peek().map(|Reverse((at, _))| *at);
        happening.into_iter().chain(self.scheduler.next_timeout()).min()
    }

    fn step(&mut self, now: Time, workload: &mut dyn Workload) {
        let mut begin = Vec::new();
        let due = self.happenings.peek().filter(|Reverse((at, _))| *at <= now).map(|Reverse((_, what))| *what);
        match due {
            Some(Happening::Arrive(id)) => {
                self.happenings.pop();
                self.arrived[id] = Some(now);
                self.scheduler.arrive(id, &self.jobs[id], now, &mut begin);
            }
            Some(Happening::Finish(id)) => {
                self.happenings.pop();
                if self.due[id] == Some(now) && self.scheduler.finish(id, now, &mut begin) {
                    self.finish(id, now, workload);
                }
            }
            None => self.scheduler.tick(now, &mut begin),
        }
        for id in begin {
            assert!(!self.ended[id] || self.scheduler.loses_responses(), "request {id} began after its end");
            let due = now + self.jobs[id].service;
            (self.began[id], self.due[id]) = (Some(now), Some(due));
            self.happenings.push(Reverse((due, Happening::Finish(id))));
        }
    }

    fn finish(&mut self, id: JobId, now: Time, workload: &mut dyn Workload) {
        if std::mem::replace(&mut self.ended[id], true) {
            return;
        }
        self.outcome.done += 1;
        self.outcome.ended = now;
        self.outcome.models.entry(self.jobs[id].model).or_default().0 += 1;
        for (at, job) in workload.after(&self.jobs[id], now) {
            self.plan(at, job);
        }
    }

    fn close(mut self, length: Duration) -> Outcome {
        for (id, job) in self.jobs.iter().enumerate() {
            let Some(arrived) = self.arrived[id] else { continue };
            let wait = self.began[id].unwrap_or(length) - arrived;
            self.outcome.models.entry(job.model).or_default().1.push(wait);
        }
        self.outcome.loads = self.scheduler.loads();
        self.outcome
    }
}
