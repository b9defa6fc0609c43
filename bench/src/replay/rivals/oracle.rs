//! A relay that knows everything about its workers but the future.

use std::collections::{HashMap, VecDeque};

use super::super::Time;
use super::super::cases::Case;
use super::super::policy::{Router, Sent};
use super::super::worker::{Served, Worker};
use super::super::workload::Turn;

/// Sends the oldest request to the worker with room whose first token comes first. It has a copy of each worker, which
/// stays exact because workers serve requests in the order in which they were sent.
#[derive(Debug)]
pub struct Oracle {
    workers: Vec<Worker>,
    free: Vec<usize>,
    running: HashMap<usize, usize>,
    waiting: VecDeque<(usize, Turn)>,
}

impl Oracle {
    /// Creates copies of the workers of a case.
    pub fn new(case: &Case) -> Self {
        Self {
            workers: vec![Worker::new(case.engine, case.cache, case.concurrency); case.workers],
            free: vec![case.concurrency; case.workers],
            running: HashMap::new(),
            waiting: VecDeque::new(),
        }
    }

    fn dispatch(&mut self, now: Time, sent: &mut Vec<Sent>) {
        while let Some((_, turn)) = self.waiting.front() {
            let open = (0..self.workers.len()).filter(|worker| self.free[*worker] > 0);
            let key = |worker: &usize| (self.workers[*worker].estimate(turn, now), usize::MAX - self.free[*worker]);
            let Some(worker) = open.min_by_key(key) else { return };
            let Some((id, turn)) = self.waiting.pop_front() else { return };
            self.workers[worker].serve(&turn, now);
            self.free[worker] -= 1;
            self.running.insert(id, worker);
            sent.push(Sent { id, worker });
        }
    }
}

impl Router for Oracle {
    fn arrive(&mut self, id: usize, turn: &Turn, now: Time, sent: &mut Vec<Sent>) {
        self.waiting.push_back((id, turn.clone()));
        self.dispatch(now, sent);
    }

    fn end(&mut self, id: usize, _: &Turn, _: &Served, now: Time, sent: &mut Vec<Sent>) {
        if let Some(worker) = self.running.remove(&id) {
            self.free[worker] += 1;
        }
        self.dispatch(now, sent);
    }
}
