//! The consequences of an event. A handler records which workers and models it has changed; everything that depends on
//! them is updated here, in one order.

use std::cmp::Reverse;

use crate::dispatch::Dispatch;
use crate::dispatch::model::effect::Effect;
use crate::dispatch::model::event::WorkerKey;
use crate::dispatch::model::models::ModelId;

/// The changes that have not been settled. Empty between two events.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Unsettled {
    /// Workers whose rank among the available workers is out of date.
    ranks: Vec<WorkerKey>,
    /// Workers that may have room for queued requests, or have nothing left in flight.
    freed: Vec<WorkerKey>,
    /// Models whose queued requests may have lost the last worker that could serve them. Each is retained.
    suspects: Vec<ModelId>,
    /// True if a worker that was passed over may be due for queued requests.
    pub(super) are_servers_changed: bool,
}

impl Dispatch {
    /// Records a change of a worker's load.
    pub(in super::super) fn note_load(&mut self, key: WorkerKey) {
        // A worker is often sent several requests in a row.
        if self.unsettled.ranks.last() != Some(&key) {
            self.unsettled.ranks.push(key);
        }
    }

    /// Records that a worker may have room for queued requests, or is draining.
    pub(super) fn note_freed(&mut self, key: WorkerKey) {
        self.note_load(key);
        if self.unsettled.freed.last() != Some(&key) {
            self.unsettled.freed.push(key);
        }
    }

    /// Records that perhaps no worker can serve some of a model's queued requests any more.
    pub(super) fn note_suspect(&mut self, model: ModelId) {
        self.models.retain(model);
        self.unsettled.suspects.push(model);
    }

    /// Dispatches queued requests to the workers that have room for them, reports draining workers that are idle, and
    /// ends the requests that no worker can serve any more.
    pub(in super::super) fn settle(&mut self) {
        self.place_if_servers_changed();
        // In the order in which they joined.
        self.unsettled.freed.sort_unstable_by_key(|key| Reverse(*key));
        while let Some(key) = self.unsettled.freed.pop() {
            self.dispatch_queued(key);
            self.report_idle(key);
        }
        let mut suspects = std::mem::take(&mut self.unsettled.suspects);
        for model in suspects.drain(..) {
            self.fail_unservable(model);
            self.models.release(model);
        }
        self.unsettled.suspects = suspects;
        self.refresh_ranks();
    }

    /// Updates the ranks that are out of date. They must be up to date before a worker is picked.
    pub(super) fn refresh_ranks(&mut self) {
        while let Some(key) = self.unsettled.ranks.pop() {
            self.refresh_rank(key);
        }
    }

    /// Reports a draining worker that has nothing left in flight, once.
    fn report_idle(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        if worker.draining && worker.in_flight.is_empty() && !worker.is_idle_reported {
            worker.is_idle_reported = true;
            self.out.push(Effect::DrainedIdle { worker: key });
        }
    }
}
