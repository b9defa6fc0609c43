//! The orders of admins to multiplexers, and their results.
//!
//! A worker executes an order, which may take minutes, so the admin gets an id at once. Orders and results are deleted
//! after an hour, and their number is bounded: a worker that never reports does not occupy memory indefinitely.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use modelrelay_protocol::names::printable;

use crate::dispatch::WorkerKey;
use crate::system::ids;

/// The most orders that are stored at once.
const MOST: usize = 1_024;

/// How long the relay waits for the result of an order, and then keeps it.
const KEPT_FOR: Duration = Duration::from_secs(3_600);

/// The longest message of a worker about its failure.
const MAX_ERROR_CHARS: usize = 1_024;

/// The progress of an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperationProgress {
    /// Its worker has not reported yet.
    Running,
    /// It was executed.
    Done,
    /// It failed, with the reason.
    Failed(String),
}

struct Operation {
    /// The worker's current link.
    worker: WorkerKey,
    /// The worker's link before that one. It may still report there.
    earlier: Option<WorkerKey>,
    /// When its progress last changed.
    since: Instant,
    progress: OperationProgress,
}

/// All orders of one relay.
#[derive(Default)]
pub struct Operations {
    /// Held for one lookup or change.
    all: Mutex<HashMap<Arc<str>, Operation>>,
}

impl Operations {
    /// Adds an order to a worker and returns its id; `None` while too many are running.
    pub fn begin(&self, worker: WorkerKey, now: Instant) -> Option<Arc<str>> {
        let mut all = self.current(now);
        if all.len() >= MOST {
            let ended = all.iter().filter(|(_, operation)| operation.progress != OperationProgress::Running);
            let oldest = ended.min_by_key(|(_, operation)| operation.since).map(|(id, _)| Arc::clone(id))?;
            all.remove(&oldest);
        }
        let id: Arc<str> = ids::operation_id().into();
        all.insert(
            Arc::clone(&id),
            Operation { worker, earlier: None, since: now, progress: OperationProgress::Running },
        );
        Some(id)
    }

    /// Handles a worker's report on an order. Returns `false`, and does nothing, if the order is not the worker's.
    pub fn finish(&self, worker: WorkerKey, id: &str, result: Result<(), &str>, now: Instant) -> bool {
        let mut all = self.current(now);
        let is_its = |operation: &Operation| operation.worker == worker || operation.earlier == Some(worker);
        let running =
            |operation: &&mut Operation| is_its(operation) && operation.progress == OperationProgress::Running;
        let Some(operation) = all.get_mut(id).filter(running) else { return false };
        operation.since = now;
        operation.progress = match result {
            Ok(()) => OperationProgress::Done,
            Err(error) => {
                let error = printable(error, MAX_ERROR_CHARS);
                OperationProgress::Failed(if error.is_empty() {
                    "the worker reported no reason".to_owned()
                } else {
                    error
                })
            }
        };
        true
    }

    /// Handles the move of a worker to another link: its orders move with it.
    pub fn worker_moved(&self, older: WorkerKey, newer: WorkerKey, now: Instant) {
        for operation in self.current(now).values_mut().filter(|operation| operation.worker == older) {
            operation.worker = newer;
            operation.earlier = Some(older);
        }
    }

    /// Handles the loss of a worker, which will report nothing more.
    pub fn worker_left(&self, worker: WorkerKey, now: Instant) {
        let mut all = self.current(now);
        for operation in all.values_mut().filter(|operation| operation.worker == worker) {
            if operation.progress == OperationProgress::Running {
                operation.since = now;
                operation.progress =
                    OperationProgress::Failed("the worker disconnected before reporting a result".to_owned());
            }
        }
    }

    /// The progress of an order; `None` if it is unknown or deleted.
    pub fn progress(&self, id: &str, now: Instant) -> Option<OperationProgress> {
        self.current(now).get(id).map(|operation| operation.progress.clone())
    }

    /// Returns the orders after deleting and failing old ones.
    fn current(&self, now: Instant) -> MutexGuard<'_, HashMap<Arc<str>, Operation>> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |operation: &Operation| now.saturating_duration_since(operation.since) >= KEPT_FOR;
        all.retain(|_, operation| !is_old(operation) || operation.progress == OperationProgress::Running);
        for operation in all.values_mut().filter(|operation| is_old(operation)) {
            operation.since = now;
            operation.progress = OperationProgress::Failed("the worker reported no result within an hour".to_owned());
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: WorkerKey = WorkerKey(1);
    const TWO: WorkerKey = WorkerKey(2);

    #[test]
    fn operation_is_finished_once_by_its_worker() {
        let (all, now) = (Operations::default(), Instant::now());
        let id = all.begin(ONE, now).expect("room");
        assert_eq!(all.progress(&id, now), Some(OperationProgress::Running));
        assert!(!all.finish(TWO, &id, Ok(()), now));
        assert!(all.finish(ONE, &id, Err("no\nroom"), now));
        assert!(!all.finish(ONE, &id, Ok(()), now));
        assert_eq!(all.progress(&id, now), Some(OperationProgress::Failed("noroom".into())));
        assert_eq!(all.progress("another", now), None);
    }

    #[test]
    fn operations_of_lost_worker_fail() {
        let (all, now) = (Operations::default(), Instant::now());
        let (done, open, other) =
            (all.begin(ONE, now).unwrap(), all.begin(ONE, now).unwrap(), all.begin(TWO, now).unwrap());
        all.finish(ONE, &done, Ok(()), now);
        all.worker_left(ONE, now);
        assert_eq!(all.progress(&done, now), Some(OperationProgress::Done));
        assert!(matches!(all.progress(&open, now), Some(OperationProgress::Failed(_))));
        assert_eq!(all.progress(&other, now), Some(OperationProgress::Running));
    }

    #[test]
    fn operations_follow_moved_worker() {
        let (all, now) = (Operations::default(), Instant::now());
        let (early, late, lost) =
            (all.begin(ONE, now).unwrap(), all.begin(ONE, now).unwrap(), all.begin(ONE, now).unwrap());
        all.worker_moved(ONE, TWO, now);
        assert!(all.finish(ONE, &early, Ok(()), now), "reported before it had read of its newer link");
        all.worker_left(ONE, now);
        assert!(all.finish(TWO, &late, Ok(()), now));
        all.worker_left(TWO, now);
        assert!(matches!(all.progress(&lost, now), Some(OperationProgress::Failed(_))));
    }

    #[test]
    fn results_and_operations_expire_after_one_hour() {
        let (all, start) = (Operations::default(), Instant::now());
        let (done, open) = (all.begin(ONE, start).unwrap(), all.begin(ONE, start).unwrap());
        all.finish(ONE, &done, Ok(()), start);
        let later = start + KEPT_FOR;
        assert_eq!(all.progress(&done, later), None);
        assert!(matches!(all.progress(&open, later), Some(OperationProgress::Failed(_))));
        assert_eq!(all.progress(&open, later + KEPT_FOR), None);
    }

    #[test]
    fn new_operations_evict_results_but_not_running_ones() {
        let (all, start) = (Operations::default(), Instant::now());
        let first = all.begin(ONE, start).unwrap();
        all.finish(ONE, &first, Ok(()), start);
        for _ in 1..MOST {
            all.begin(ONE, start).unwrap();
        }
        assert!(all.begin(ONE, start).is_some());
        assert_eq!(all.progress(&first, start), None);
        assert_eq!(all.begin(ONE, start), None);
    }
}
