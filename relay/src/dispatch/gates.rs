//! A multiplexer's words: which models it serves now, and what its slots are doing.

use modelrelay_protocol::message::Slot;

use super::Dispatch;
use super::clock::Moment;
use super::effect::Effect;
use super::event::{Gate, Grant, Model, WorkerKey};
use super::models::{Group, ModelId};
use super::queue::Waiting;
use super::registry::Worker;

/// So many times what a model can run is told to be waiting for it at most: more changes nothing for the worker, and a
/// number that stands still need not be told again.
const MOST_TOLD: u32 = 2;

impl Dispatch {
    /// What may be sent from now on. A model that is not among `gates` is not served, whatever else the worker said.
    pub(super) fn handle_gates(
        &mut self,
        key: WorkerKey,
        sums: Grant,
        gates: &[(Model, Gate)],
        now: Moment,
        out: &mut Vec<Effect>,
    ) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let Some(multiplexer) = &mut worker.multiplexer else {
            return;
        };
        if multiplexer.set_gates(gates) {
            // A model that is ready anew is as good as advertised anew: what failed there before is forgiven.
            worker.announcements += 1;
            worker.models.iter().for_each(|model| self.models.touch(*model));
        }
        worker.grant = Some(sums);
        worker.granted_at = self.turn;
        let is_new = |model: &ModelId| {
            let group = &self.models[*model];
            group.open.core1.contains(&key) != worker.is_open_for(&group.name)
        };
        for model in worker.models.iter().copied().filter(is_new).collect::<Vec<_>>() {
            self.begin_serving(key, model, now);
        }
        self.refresh_rank(key);
        self.fill(key, now, out);
        self.mark(key, now);
        self.answer_gates(key, now);
    }

    /// As every grant is answered, if something waits for a model that it is about.
    fn answer_gates(&mut self, key: WorkerKey, now: Moment) {
        let Some(worker) = self.workers.get(&key) else {
            return;
        };
        if worker.demand.believes_in(|model| worker.is_open_for(model)) {
            self.answer_grant(key, now);
        }
    }

    /// What the slots are doing. It informs the choice of whom to ask, and nothing else.
    pub(super) fn handle_slots(&mut self, key: WorkerKey, slots: &[Slot], now: Moment) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let Some(multiplexer) = &mut worker.multiplexer else {
            return;
        };
        multiplexer.set_slots(slots, now);
        for model in &worker.models {
            let name = &self.models[*model].name;
            if multiplexer.has_forgotten(name) && multiplexer.gate(name).is_none() {
                worker.demand.handle_forgotten(name);
            }
            self.models.touch(*model);
        }
        self.mark(key, now);
    }
}

impl Group {
    /// What is told to a worker to be waiting. A multiplexer that does not serve the model is told only if it was chosen to
    /// load it, or of what nobody else may serve.
    pub(super) fn told(&self, worker: &Worker) -> Waiting {
        if !self.concerns(worker) {
            return self.queue.pinned_waiting_for(worker);
        }
        let mut waiting = self.queue.waiting_for(worker);
        let gate = worker.multiplexer.as_ref().and_then(|multiplexer| multiplexer.gate(&self.name));
        if let Some(gate) = gate.filter(|gate| gate.capacity > 0) {
            waiting.count = waiting.count.min(gate.capacity.saturating_mul(MOST_TOLD));
        }
        waiting
    }

    /// Whether what waits for the model is this worker's business. It is not that of the many multiplexers that do not hold
    /// it, so that a request costs no look at them.
    pub(super) fn concerns(&self, worker: &Worker) -> bool {
        worker.is_open_for(&self.name) || self.choice.is_some_and(|choice| choice.worker == worker.key)
    }
}
