//! A multiplexer's words: which models it serves now, and what its slots are doing.

use modelrelay_protocol::message::Slot;

use super::Dispatch;
use super::clock::Moment;
use super::effect::Effect;
use super::event::{Gate, Grant, Model, WorkerKey};
use super::models::{Group, ModelId};
use super::queue::{LaneKey, Waiting};
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
        let turned = multiplexer.set_gates(gates);
        let is_turned = |model: &ModelId| turned.contains(multiplexer.id(&self.models[*model].name));
        let turned: Vec<_> = worker.models.iter().copied().filter(is_turned).collect();
        if !turned.is_empty() {
            // A model that is ready anew is as good as advertised anew: what failed there before is forgiven. It is when the
            // gate shuts, too: nothing goes there until it is ready anew, and what failed may be all that has it loaded.
            worker.handle_turned(&turned);
            turned.iter().for_each(|model| self.models.touch(*model));
        }
        worker.grant = Some(sums);
        worker.granted_at = self.turn;
        let is_new = |model: &ModelId| {
            let group = &self.models[*model];
            group.open.core1.contains(&key) != worker.is_open_for(&group.name)
        };
        let new: Vec<_> = worker.models.iter().copied().filter(is_new).collect();
        self.serve_anew(key, new, now, out);
        self.mark(key, now);
        self.answer_gates(key, now);
    }

    /// These models of a multiplexer have opened, shut, or become others.
    fn serve_anew(&mut self, key: WorkerKey, models: Vec<ModelId>, now: Moment, out: &mut Vec<Effect>) {
        for model in models {
            self.begin_serving(key, model, now);
        }
        self.refresh_rank(key);
        self.fill(key, now, out);
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

    /// What the slots are doing, which informs the choice of whom to ask and nothing else; and what their models are called.
    pub(super) fn handle_slots(&mut self, key: WorkerKey, slots: &[Slot], now: Moment, out: &mut Vec<Effect>) {
        let Some(worker) = self.workers.get_mut(&key) else {
            return;
        };
        let Some(multiplexer) = &mut worker.multiplexer else {
            return;
        };
        let are_renamed = multiplexer.set_slots(slots, now);
        worker.demand.handle_forgotten(|name| multiplexer.has_forgotten(name) && multiplexer.gate(name).is_none());
        for model in &worker.models {
            self.models[*model].note_asked(key, multiplexer);
            self.models.touch_told(*model);
        }
        if are_renamed {
            let models = worker.models.clone();
            self.serve_anew(key, models.clone(), now, out);
            // Nobody else may mean what these may be answered by.
            models.into_iter().for_each(|model| self.fail_hopeless(model, now, out));
        }
        self.mark(key, now);
    }
}

impl Group {
    /// What is told to a worker to be waiting. A multiplexer that does not serve the model is told only if it was chosen to
    /// load it, or of what nobody else may serve.
    pub(super) fn told(&self, worker: &Worker, is_due: impl Fn(&LaneKey) -> bool) -> Waiting {
        if !self.concerns(worker) {
            return self.queue.pinned_waiting_for(worker);
        }
        let mut waiting = self.queue.waiting_for(worker, &is_due);
        let gate = worker.multiplexer.as_ref().and_then(|multiplexer| multiplexer.gate(&self.name));
        let most = gate.filter(|gate| gate.capacity > 0).map(|gate| gate.capacity.saturating_mul(MOST_TOLD));
        if let Some(most) = most.filter(|most| *most < waiting.count) {
            waiting.count = most;
            waiting.arrivals = self.queue.first_arrivals(worker, most, is_due);
        }
        waiting
    }

    /// Whether what waits for the model is this worker's business. It is not that of the many multiplexers that do not hold
    /// it, so that a request costs no look at them.
    pub(super) fn concerns(&self, worker: &Worker) -> bool {
        worker.is_open_for(&self.name) || self.choice.is_some_and(|choice| choice.worker == worker.key)
    }
}
