//! The demand reported to a worker.

use std::collections::{BTreeMap, BTreeSet};

use super::clock::Moment;
use super::event::{Model, WorkerKey};
use super::owner::Class;

/// The demand reported to one worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct DemandState {
    /// The worker's own count of waiting requests, and their highest class; models without waiting requests are absent.
    pub(crate) worker_counts: BTreeMap<Model, (u32, Class)>,
    /// True if the demand is reported even if the count seems right: the worker adds its refusals to a count that may
    /// have been zero or below, and subtracts the requests it received.
    pub(crate) doubtful: bool,
    pub(crate) reported_at: Option<Moment>,
    /// When the report is due, if the worker is marked.
    pub(crate) marked: Option<Moment>,
}

impl DemandState {
    /// True if the worker has a count for such a model.
    pub(crate) fn has_reported_demand(&self, is_such: impl Fn(&Model) -> bool) -> bool {
        self.worker_counts.keys().any(is_such)
    }

    /// The worker could not load such models and has discarded their demand, whether it serves them now or not.
    pub(crate) fn handle_forgotten(&mut self, is_such: impl Fn(&Model) -> bool) {
        let before = self.worker_counts.len();
        self.worker_counts.retain(|model, _| !is_such(model));
        self.doubtful |= self.worker_counts.len() < before;
    }

    /// The worker was sent a request and subtracts one. Returns true if its count for the model has now reached zero.
    pub(crate) fn handle_sent(&mut self, model: &Model) -> bool {
        // The last state is always reported, also to a worker that counts for itself; and a worker that sums its models
        // up subtracts every request, whatever its model.
        self.doubtful |= !self.worker_counts.is_empty();
        let Some((count, _)) = self.worker_counts.get_mut(model) else { return false };
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.worker_counts.remove(model);
        }
        is_last
    }
}

/// The workers whose report is due, and when.
pub(crate) type PendingDemand = BTreeSet<(Moment, WorkerKey)>;
