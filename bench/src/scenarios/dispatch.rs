//! What the relay's dispatch core needs to choose a worker, apart from any socket: among few workers and many, with a short
//! queue and a long one.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use modelrelay_relay::dispatch::{
    Dispatch, Effect, Event, Model, NewRequest, NewWorker, RequestKey, Settings, WorkerKey,
};

use crate::figures::{Figure, Figures};
use crate::samples::Samples;

const MODELS: u64 = 50;
const MODELS_EACH: u64 = 5;
const FEW: u64 = 10;

/// Dispatches that are timed, after as many that are not.
const ROUNDS: u64 = 50_000;

/// The core's cost among 10 and `workers` workers, and with 10 and `queue` waiting requests.
pub fn costs(workers: u64, queue: u64) -> Figures {
    Figures::from([
        (Figure::DispatchFew, among(FEW).as_nanos() as f64),
        (Figure::DispatchMany, among(workers).as_nanos() as f64),
        (Figure::QueueShort, behind(FEW).as_secs_f64() * 1e6),
        (Figure::QueueLong, behind(queue).as_secs_f64() * 1e6),
    ])
}

/// The median time of a request's submission and completion among so many workers.
fn among(workers: u64) -> Duration {
    let mut core = Core::new();
    for worker in 0..workers {
        core.join(worker, (0..MODELS_EACH).map(|n| (worker * MODELS_EACH + n) % MODELS), 1000);
    }
    let mut samples = Samples::default();
    for round in 0..2 * ROUNDS {
        let begun = Instant::now();
        core.submit();
        if core.running.len() > 20 {
            core.complete_oldest();
        }
        if round >= ROUNDS {
            samples.add(begun.elapsed());
        }
    }
    samples.quantile(0.5)
}

/// 99 of 100 completions, each of which sends the next of so many waiting requests, take no longer. Of as many models as the
/// shorter queue has requests: only the length differs.
fn behind(queue: u64) -> Duration {
    let mut core = Core { asked: FEW, ..Core::new() };
    core.join(0, 0..FEW, 1);
    for _ in 0..=queue {
        core.submit();
    }
    let mut samples = Samples::default();
    for round in 0..2 * ROUNDS {
        let begun = Instant::now();
        core.complete_oldest();
        if round >= ROUNDS {
            samples.add(begun.elapsed());
        }
        core.submit();
    }
    assert_eq!(core.dispatch.queue_len() as u64, queue, "the queue is as long as it was");
    samples.quantile(0.99)
}

/// A core, and what it sent out.
struct Core {
    dispatch: Dispatch,
    models: Vec<Model>,
    /// How many of them are asked for.
    asked: u64,
    next: u64,
    now: Instant,
    effects: Vec<Effect>,
    running: VecDeque<(WorkerKey, RequestKey, u32)>,
}

impl Core {
    fn new() -> Self {
        let hour = Duration::from_secs(3600);
        let settings = Settings {
            enabled: true,
            max_queue_len: usize::MAX,
            max_queue_bytes: u64::MAX,
            queue_timeout: hour,
            cold_timeout: None,
            cold_models: HashSet::new(),
            request_timeout: hour,
        };
        Self {
            dispatch: Dispatch::new(settings),
            models: (0..MODELS).map(|number| Model::from(format!("model-{number}"))).collect(),
            asked: MODELS,
            next: 0,
            now: Instant::now(),
            effects: Vec::new(),
            running: VecDeque::new(),
        }
    }

    fn join(&mut self, worker: u64, models: impl Iterator<Item = u64>, concurrency: u32) {
        let models = models.map(|number| Model::clone(&self.models[number as usize])).collect();
        self.handle(Event::WorkerJoined(NewWorker {
            key: WorkerKey(worker),
            models,
            max_concurrent: concurrency,
            load: 0,
            core1: false,
            multiplexer: None,
        }));
    }

    fn submit(&mut self) {
        let key = self.next;
        self.next += 1;
        let model = Model::clone(&self.models[(key * 7 % self.asked) as usize]);
        self.handle(Event::Submit(NewRequest {
            key: RequestKey(key),
            model,
            bytes: 352,
            pin: None,
            needs_core1: false,
            allowed: None,
        }));
    }

    fn complete_oldest(&mut self) {
        if let Some((worker, request, attempt)) = self.running.pop_front() {
            self.handle(Event::Completed { worker, request, attempt });
        }
    }

    fn handle(&mut self, event: Event) {
        self.now += Duration::from_micros(1);
        self.dispatch.handle(event, self.now, &mut self.effects);
        for effect in self.effects.drain(..) {
            if let Effect::Send { worker, request, attempt, .. } = effect {
                self.running.push_back((worker, request, attempt));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_sent_and_the_queue_stays_full() {
        let mut core = Core::new();
        core.join(0, 0..MODELS, 1);
        for _ in 0..11 {
            core.submit();
        }
        assert_eq!((core.running.len(), core.dispatch.queue_len()), (1, 10));
        core.complete_oldest();
        assert_eq!((core.running.len(), core.dispatch.queue_len()), (1, 9));
    }

    #[test]
    fn all_models_have_a_worker_among_ten() {
        let mut core = Core::new();
        for worker in 0..FEW {
            core.join(worker, (0..MODELS_EACH).map(|n| (worker * MODELS_EACH + n) % MODELS), 1000);
        }
        for _ in 0..MODELS {
            core.submit();
        }
        assert_eq!(core.running.len() as u64, MODELS);
    }
}
