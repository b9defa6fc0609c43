//! The policies of other programs, as plainly as their rules are. The common part is in one place; each decision is one
//! function.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Job, JobId, ModelId, PLACES, Scheduler, Time};

/// A rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// All requests in order of arrival; each request for another model drains the resident and swaps.
    ArrivalOrder,
    /// The first request for another model closes the gate. After the swap, all requests that wait for the new model
    /// are served together.
    ImmediateAndBatch,
    /// The resident stays as long as it has requests.
    StickyUntilIdle,
}

/// A rival.
#[derive(Debug)]
pub struct Rival {
    rule: Rule,
    load: Duration,
    resident: Option<ModelId>,
    loading: Option<(ModelId, Time)>,
    running: u32,
    /// In order of arrival. `admitted`: the request waited when its model was loaded, and so belongs to the batch.
    waiting: VecDeque<Waiter>,
    loads: u32,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    id: JobId,
    model: ModelId,
    admitted: bool,
}

impl Rival {
    /// Creates an empty GPU under this rule, with this duration of a load.
    pub fn new(rule: Rule, load: Duration) -> Self {
        Self { rule, load, resident: None, loading: None, running: 0, waiting: VecDeque::new(), loads: 0 }
    }

    /// Begins the requests that may run, and swaps if the rule requires it.
    fn settle(&mut self, now: Time, begin: &mut Vec<JobId>) {
        if self.loading.is_some() {
            return;
        }
        while self.running < PLACES
            && let Some(index) = self.next()
            && let Some(waiter) = self.waiting.remove(index)
        {
            self.running += 1;
            begin.push(waiter.id);
        }
        if self.running == 0
            && let Some(first) = self.waiting.iter().find(|waiter| Some(waiter.model) != self.resident)
        {
            self.loading = Some((first.model, now + self.load));
            self.resident = None;
            self.loads += 1;
        }
    }

    /// The next request that may begin with the resident.
    fn next(&self) -> Option<usize> {
        let resident = self.resident?;
        let own = |waiter: &Waiter| waiter.model == resident;
        match self.rule {
            Rule::ArrivalOrder => self.waiting.front().filter(|first| own(first)).map(|_| 0),
            Rule::ImmediateAndBatch => {
                let foreign = self.waiting.iter().any(|waiter| !own(waiter));
                self.waiting.iter().position(|waiter| own(waiter) && (waiter.admitted || !foreign))
            }
            Rule::StickyUntilIdle => self.waiting.iter().position(own),
        }
    }
}

impl Scheduler for Rival {
    fn arrive(&mut self, id: JobId, &Job { model, .. }: &Job, now: Time, begin: &mut Vec<JobId>) {
        self.waiting.push_back(Waiter { id, model, admitted: false });
        self.settle(now, begin);
    }

    fn finish(&mut self, _: JobId, now: Time, begin: &mut Vec<JobId>) -> bool {
        self.running -= 1;
        self.settle(now, begin);
        true
    }

    fn tick(&mut self, now: Time, begin: &mut Vec<JobId>) {
        if let Some((model, due)) = self.loading
            && due <= now
        {
            self.loading = None;
            self.resident = Some(model);
            for waiter in self.waiting.iter_mut().filter(|waiter| waiter.model == model) {
                waiter.admitted = true;
            }
        }
        self.settle(now, begin);
    }

    fn next_timeout(&self) -> Option<Time> {
        self.loading.map(|(_, due)| due)
    }

    fn loads(&self) -> u32 {
        self.loads
    }
}
