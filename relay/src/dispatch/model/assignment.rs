//! The assignment of a model's load to a multiplexer.

use super::clock::{Moment, Span};
use super::event::WorkerKey;

/// The least time that an assignment holds without success, in nanoseconds.
const MIN_TIMEOUT: Span = 60_000_000_000;

/// The multiple of the worker's first reported ETA after which an assignment expires.
const ETA_MULTIPLE: Span = 2;

/// The worker that was assigned to load a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LoadAssignment {
    pub(crate) worker: WorkerKey,
    since: Moment,
    pub(crate) until: Moment,
    /// True once the worker has reported an ETA, which is used only once.
    has_eta: bool,
}

impl LoadAssignment {
    pub(crate) fn new(worker: WorkerKey, now: Moment) -> Self {
        Self { worker, since: now, until: now.plus(MIN_TIMEOUT), has_eta: false }
    }

    pub(crate) fn handle_eta(mut self, eta: Option<Span>) -> Self {
        if let Some(eta) = eta.filter(|_| !self.has_eta) {
            self.has_eta = true;
            self.until = self.since.plus(eta.saturating_mul(ETA_MULTIPLE).max(MIN_TIMEOUT));
        }
        self
    }
}
