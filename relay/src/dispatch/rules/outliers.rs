//! Workers whose backend fails the requests for a model, although its health check succeeds.
//!
//! Such a backend responds at once, so by its load alone it would attract most requests. A worker that reports a model
//! as failing is passed over for that model while a sound worker serves it: one that has not reported it, accepts
//! requests, has the model open, and may be sent the request in question. Requests wait for a busy sound worker.
//! Without a sound worker the failing ones are used like any other, so the last ones are never ejected. A request that
//! is pinned to a worker goes there.
//!
//! Workers that were passed over become due when the last sound one leaves, or changes. All waiting requests are then
//! placed in order, since several workers may accept them.

use crate::dispatch::Dispatch;
use crate::dispatch::model::event::WorkerKey;
use crate::dispatch::model::models::{Group, ModelId};
use crate::dispatch::model::queue::LaneKey;
use crate::dispatch::model::registry::Worker;

impl Dispatch {
    /// True if a worker fails the model and a sound one that `suits` serves it.
    pub(super) fn is_passed_over(
        &self,
        group: &Group,
        worker: WorkerKey,
        needs_core1: bool,
        suits: impl Fn(&Worker) -> bool,
    ) -> bool {
        group.failing.contains(&worker)
            && group.sound.able(needs_core1).any(|sound| self.workers.get(&sound).is_some_and(&suits))
    }

    /// The same for all requests of a lane.
    pub(super) fn passes_over(&self, group: &Group, worker: WorkerKey, lane: &LaneKey) -> bool {
        self.is_passed_over(group, worker, lane.needs_core1, |sound| lane.admits(sound))
    }

    /// Records that the servers of a model have changed, and with them the demand of its failing workers.
    pub(super) fn mark_failing(&mut self, model: ModelId) {
        if self.models[model].failing.is_empty() {
            return;
        }
        self.unsettled.are_servers_changed = true;
        for worker in self.models[model].failing.clone() {
            self.mark(worker);
        }
    }

    /// Places all waiting requests, in their order, if the servers of a failing model have changed.
    pub(super) fn place_if_servers_changed(&mut self) {
        if !std::mem::take(&mut self.unsettled.are_servers_changed) {
            return;
        }
        self.refresh_ranks();
        while let Some(key) = self.placeable_choice().chosen() {
            self.place(key);
            self.refresh_ranks();
        }
    }
}
