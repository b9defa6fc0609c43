//! The cost of the relay's dispatch core without any socket: to choose a worker among few and among many, and to
//! accept, send, cancel and expire requests behind a short queue and behind a long one.
//!
//! Sizes are compared, so the figures must not contain anything that does not depend on size. The clock's own time is
//! subtracted
//! from each sample, and samples are whole nanoseconds. The short queue stays in the processor's first cache, which it
//! would not
//! in a relay that does other work in between. That makes the ratios worse than they are in practice.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use modelrelay_relay::dispatch::{
    CancelReason, Dispatch, Distance, Effect, Event, Model, NewRequest, NewWorker, RequestKey, Settings, WorkerKey,
};

use crate::dispatch_core::unlimited;
use crate::figures::{Figure, Figures};
use crate::usage;

const MODELS: u64 = 50;
const MODELS_EACH: u64 = 5;
const FEW: u64 = 10;

/// Timed operations.
const ROUNDS: u64 = 50_000;

/// Untimed operations per waiting request that come first, at least as many as the timed ones. They touch all memory
/// that the core uses, which has a cost only once.
const WARM_UP: u64 = 3;

/// Dispatches among workers whose processor time is measured, after the same number of unmeasured ones. The number
/// makes the scheduler's next tick negligible.
const CPU_ROUNDS: u64 = 400_000;

/// The queue timeout; longer than the submission of the longest queue, in the core's time.
const PATIENCE: Duration = Duration::from_secs(3600);

/// The core's cost among 10 and `workers` workers, and with 10 and `queue` waiting requests.
pub fn costs(workers: u64, queue: u64) -> io::Result<Figures> {
    let mut figures = Figures::from([
        (Figure::DispatchFew, among(FEW)?.as_nanos() as f64),
        (Figure::DispatchMany, among(workers)?.as_nanos() as f64),
    ]);
    for (operation, all) in Operation::ALL {
        let [short, long, short_models, long_models] = all;
        for (figure, queue, models) in
            [(short, FEW, 1), (long, queue, 1), (short_models, FEW, MODELS), (long_models, queue, MODELS)]
        {
            figures.insert(figure, behind(operation, queue, models).as_nanos() as f64);
        }
    }
    Ok(figures)
}

/// The mean processor time of a request's submission, sending and completion among `workers` workers, each with 5 of 50
/// models. No request waits.
fn among(workers: u64) -> io::Result<Duration> {
    let mut core = Core::new(MODELS);
    for worker in 0..workers {
        core.join(worker, (0..MODELS_EACH).map(|n| (worker * MODELS_EACH + n) % MODELS), 1000);
    }
    let mut dispatch = || {
        for _ in 0..CPU_ROUNDS {
            core.submit();
            if core.running.len() > 20 {
                core.complete_oldest();
            }
        }
    };
    dispatch();
    let before = usage::cpu_of_this_thread()?;
    dispatch();
    let used = usage::cpu_of_this_thread()? - before;
    Ok(used / u32::try_from(CPU_ROUNDS).expect("a constant that fits"))
}

/// An operation that is timed while requests wait for one worker, whose only slot is busy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Operation {
    /// A completion, which sends the oldest waiting request.
    Dispatch,
    /// A submission that waits.
    Submit,
    /// The cancellation of a waiting request, anywhere in the queue.
    Cancel,
    /// A tick at which the oldest request expires.
    Expire,
}

impl Operation {
    /// All operations with their figures: a short and a long queue of one model, a short and a long one of 50.
    const ALL: [(Self, [Figure; 4]); 4] = {
        use Figure::{
            CancelLong, CancelLongModels, CancelShort, CancelShortModels, ExpireLong, ExpireLongModels, ExpireShort,
            ExpireShortModels, QueueLong, QueueLongModels, QueueShort, QueueShortModels, SubmitLong, SubmitLongModels,
            SubmitShort, SubmitShortModels,
        };
        [
            (Self::Dispatch, [QueueShort, QueueLong, QueueShortModels, QueueLongModels]),
            (Self::Submit, [SubmitShort, SubmitLong, SubmitShortModels, SubmitLongModels]),
            (Self::Cancel, [CancelShort, CancelLong, CancelShortModels, CancelLongModels]),
            (Self::Expire, [ExpireShort, ExpireLong, ExpireShortModels, ExpireLongModels]),
        ]
    };

    /// Runs the operation; returns the time that it took.
    fn time(self, core: &mut Core) -> Duration {
        let event = match self {
            Self::Dispatch => core.completion().expect("the worker has a request"),
            Self::Submit => core.submission(),
            Self::Cancel => core.cancellation(),
            Self::Expire => {
                core.now = core.dispatch.next_timeout().expect("a request waits");
                Event::Tick
            }
        };
        let begun = Instant::now();
        core.dispatch.handle(event, core.now, &mut core.effects);
        let took = begun.elapsed();
        core.note_effects();
        took
    }

    /// Restores the length of the queue.
    fn undo(self, core: &mut Core) {
        match self {
            Self::Submit => core.complete_oldest(),
            Self::Dispatch | Self::Cancel => core.submit(),
            // At the moment of the expiry, or the next one would be due.
            Self::Expire => core.submit_now(),
        }
    }
}

/// The 99th percentile of an operation's time behind `queue` waiting requests of `models` models.
fn behind(operation: Operation, queue: u64, models: u64) -> Duration {
    let mut core = Core::new(models);
    core.join(0, 0..models, 1);
    for _ in 0..=queue {
        core.submit();
    }
    let mut samples = Vec::new();
    let warm_up = (WARM_UP * queue).max(ROUNDS);
    for round in 0..warm_up + ROUNDS {
        let took = operation.time(&mut core);
        if round >= warm_up {
            samples.push(took);
        }
        operation.undo(&mut core);
        assert_eq!(core.dispatch.queue_len() as u64, queue, "the queue is as long as it was");
    }
    quantile(samples, 0.99).saturating_sub(clock_time())
}

/// The time that reading the clock twice takes.
fn clock_time() -> Duration {
    quantile((0..ROUNDS).map(|_| Instant::now().elapsed()).collect(), 0.5)
}

/// A quantile to the nanosecond, for operations that take a few hundred of them.
fn quantile(mut samples: Vec<Duration>, share: f64) -> Duration {
    samples.sort_unstable();
    let rank = (share * samples.len() as f64).ceil() as usize;
    samples[rank.max(1) - 1]
}

/// A core, its waiting requests, and its effects.
struct Core {
    dispatch: Dispatch,
    models: Vec<Model>,
    next: u64,
    now: Instant,
    effects: Vec<Effect>,
    /// Requests that were submitted and neither sent at once nor cancelled, in no order.
    waiting: Vec<RequestKey>,
    running: VecDeque<(WorkerKey, RequestKey, u32)>,
    random: u64,
}

impl Core {
    fn new(models: u64) -> Self {
        // The running request stays.
        let settings = Settings { queue_timeout: PATIENCE, request_timeout: Duration::MAX, ..unlimited() };
        Self {
            dispatch: Dispatch::new(settings),
            models: (0..models).map(|number| Model::from(format!("model-{number}"))).collect(),
            next: 0,
            now: Instant::now(),
            effects: Vec::new(),
            waiting: Vec::new(),
            running: VecDeque::new(),
            random: 1,
        }
    }

    fn join(&mut self, worker: u64, models: impl Iterator<Item = u64>, concurrency: u32) {
        let models = models.map(|number| Model::clone(&self.models[number as usize])).collect();
        self.handle(Event::WorkerJoined(NewWorker {
            key: WorkerKey(worker),
            models,
            failing: Vec::new(),
            max_concurrent: concurrency,
            load: 0,
            core1: false,
            multiplexer: None,
            instance: None,
            distance: Distance::default(),
        }));
    }

    fn submit(&mut self) {
        self.now += Duration::from_micros(1);
        self.submit_now();
    }

    fn submit_now(&mut self) {
        let submission = self.submission();
        self.handle(submission);
    }

    fn submission(&mut self) -> Event {
        let key = RequestKey(self.next);
        self.next += 1;
        self.waiting.push(key);
        let model = Model::clone(&self.models[(key.0 * 7 % self.models.len() as u64) as usize]);
        Event::Submit(NewRequest::new(key, model, 352))
    }

    fn complete_oldest(&mut self) {
        if let Some(completion) = self.completion() {
            self.handle(completion);
        }
    }

    fn completion(&mut self) -> Option<Event> {
        let (worker, request, attempt) = self.running.pop_front()?;
        Some(Event::Completed { worker, request, attempt, cached: None, usage: None })
    }

    /// The cancellation of any waiting request, all with the same probability.
    fn cancellation(&mut self) -> Event {
        // Knuth's generator, whose high bits are the random ones.
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = (self.random >> 33) as usize % self.waiting.len();
        Event::Cancel { request: self.waiting.swap_remove(place), reason: CancelReason::ClientDisconnect }
    }

    fn handle(&mut self, event: Event) {
        self.dispatch.handle(event, self.now, &mut self.effects);
        self.note_effects();
    }

    fn note_effects(&mut self) {
        for effect in self.effects.drain(..) {
            if let Effect::Send { worker, request, attempt, .. } = effect {
                if self.waiting.last() == Some(&request) {
                    self.waiting.pop();
                }
                self.running.push_back((worker, request, attempt));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_changes_queue_and_undo_restores_it() {
        for (operation, _) in Operation::ALL {
            let mut core = Core::new(MODELS);
            core.join(0, 0..MODELS, 1);
            for _ in 0..=FEW {
                core.submit();
            }
            let ran = core.running.front().copied();
            for _ in 0..3 * FEW {
                let before = core.dispatch.queue_len();
                operation.time(&mut core);
                let after = if operation == Operation::Submit { before + 1 } else { before - 1 };
                assert_eq!(core.dispatch.queue_len(), after, "{operation:?}");
                operation.undo(&mut core);
                assert_eq!((core.dispatch.queue_len(), core.dispatch.in_flight()), (before, 1), "{operation:?}");
            }
            let sends = matches!(operation, Operation::Dispatch | Operation::Submit);
            assert_eq!(core.running.front().copied() != ran, sends, "{operation:?}");
        }
    }

    #[test]
    fn cancellations_spread_over_whole_queue() {
        let mut core = Core::new(1);
        core.join(0, 0..1, 1);
        for _ in 0..=1000 {
            core.submit();
        }
        let key = |event| {
            let Event::Cancel { request, .. } = event else { panic!("{event:?}") };
            request.0
        };
        let mut places: Vec<_> = (0..100).map(|_| key(core.cancellation())).collect();
        places.sort_unstable();
        assert!(places[10] < 300 && places[90] > 700, "{places:?}");
    }

    #[test]
    fn ten_workers_cover_all_models() {
        let mut core = Core::new(MODELS);
        for worker in 0..FEW {
            core.join(worker, (0..MODELS_EACH).map(|n| (worker * MODELS_EACH + n) % MODELS), 1000);
        }
        for _ in 0..MODELS {
            core.submit();
        }
        assert_eq!(core.running.len() as u64, MODELS);
    }

    #[test]
    fn quantiles_are_observed_times() {
        let times = || (1..=100).rev().map(Duration::from_nanos).collect::<Vec<_>>();
        assert_eq!(quantile(times(), 0.99), Duration::from_nanos(99));
        assert_eq!(quantile(times(), 0.5), Duration::from_nanos(50));
        assert_eq!(quantile(vec![Duration::from_nanos(7)], 0.99), Duration::from_nanos(7));
    }
}
