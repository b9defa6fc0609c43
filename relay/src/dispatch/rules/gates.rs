//! Reports of a multiplexer: the models that it serves now, and the state of its slots.

use modelrelay_protocol::message::Slot;

use crate::dispatch::Dispatch;
use crate::dispatch::model::event::{Gate, Grant, Model, WorkerKey};
use crate::dispatch::model::models::{Group, ModelId};
use crate::dispatch::model::queue::{LaneKey, Waiting};
use crate::dispatch::model::registry::Worker;

/// The reported demand is at most this multiple of the model's capacity: more changes nothing for the worker, and an
/// unchanged number need not be reported again.
const MAX_REPORTED: u32 = 2;

impl Dispatch {
    /// Applies the gates that a worker reported. A model that is not among `gates` is not served, whatever else the
    /// worker reported.
    pub(in super::super) fn handle_gates(&mut self, key: WorkerKey, sums: Grant, gates: &[(Model, Gate)]) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let Some(multiplexer) = &mut worker.multiplexer else {
            return;
        };
        let toggled = multiplexer.set_gates(gates);
        let is_toggled = |model: &ModelId| toggled.contains(multiplexer.id(&self.models[*model].name));
        let toggled: Vec<_> = worker.models.iter().copied().filter(is_toggled).collect();
        if !toggled.is_empty() {
            // A model that is ready again is treated as newly advertised: earlier failures there are forgiven. They are
            // also forgiven when the gate closes: no requests go there until the model is ready again, and the failed
            // requests may be all that has it loaded.
            worker.handle_toggled(&toggled);
            toggled.iter().for_each(|model| self.models.touch(*model));
        }
        worker.grant = Some(sums);
        worker.granted_at = self.turn;
        let is_new = |model: &ModelId| {
            let group = &self.models[*model];
            group.open.core1.contains(&key) != worker.is_open_for(&group.name)
        };
        let new: Vec<_> = worker.models.iter().copied().filter(is_new).collect();
        if !toggled.is_empty() {
            self.forget_homes(key, &toggled);
        }
        for model in new {
            self.begin_serving(key, model);
        }
        self.note_freed(key);
        self.settle();
        self.mark(key);
        self.answer_gates(key);
    }

    /// Replies to the gates as to every grant, if requests wait for one of their models.
    fn answer_gates(&mut self, key: WorkerKey) {
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        if worker.demand.has_reported_demand(|model| worker.is_open_for(model)) {
            self.answer_grant(key);
        }
    }

    /// Applies the slot states, which only influence the assignment of loads, and the names of the slots' models.
    pub(in super::super) fn handle_slots(&mut self, key: WorkerKey, slots: &[Slot]) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let Some(multiplexer) = &mut worker.multiplexer else {
            return;
        };
        let are_renamed = multiplexer.set_slots(slots, self.clock.now);
        worker.demand.handle_forgotten(|name| multiplexer.has_forgotten(name) && multiplexer.gate(name).is_none());
        for model in &worker.models {
            self.models[*model].update_demand(key, multiplexer);
            self.models.mark_reported(*model);
        }
        if are_renamed {
            for model in worker.models.clone() {
                self.begin_serving(key, model);
            }
        }
        self.mark(key);
    }
}

impl Group {
    /// Returns the demand to report to a worker. A multiplexer that does not serve the model receives it only if it was
    /// assigned to load the model, or for requests that no other worker may serve.
    pub(super) fn reported_demand(&self, worker: &Worker, is_due: impl Fn(&LaneKey) -> bool) -> Waiting {
        if !self.concerns(worker) {
            return self.queue.pinned_waiting_for(worker);
        }
        let mut waiting = self.queue.waiting_for(worker, &is_due);
        let gate = worker.multiplexer.as_ref().and_then(|multiplexer| multiplexer.gate(&self.name));
        let most = gate.filter(|gate| gate.capacity > 0).map(|gate| gate.capacity.saturating_mul(MAX_REPORTED));
        if let Some(most) = most.filter(|most| *most < waiting.count) {
            waiting.count = most;
            waiting.arrivals = self.queue.first_arrivals(worker, most, is_due);
        }
        waiting
    }

    /// True if this worker receives the demand for the model. The many multiplexers that do not hold the model do not,
    /// so that a request costs no check of them.
    pub(super) fn concerns(&self, worker: &Worker) -> bool {
        worker.is_open_for(&self.name) || self.assignment.is_some_and(|assignment| assignment.worker == worker.key)
    }
}
