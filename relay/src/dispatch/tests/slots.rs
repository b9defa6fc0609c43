//! Multiplexers for tests: short constructors of slot reports.

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState};

use super::harness::{Provider, worker};
use crate::dispatch::{Event, Gate, Grant, Model, NewMultiplexer, WorkerKey};

/// A slot that can hold these models and is empty.
pub(super) fn empty(models: &[&str]) -> Slot {
    let models = models.iter().map(|id| SlotModel { id: (*id).to_owned(), ..SlotModel::default() });
    Slot { id: "gpu0".to_owned(), state: SlotState::Empty, models: models.collect(), ..Slot::default() }
}

/// The same slot, holding the first model, idle for this time.
pub(super) fn idle(models: &[&str], idle_ms: u64) -> Slot {
    Slot { state: SlotState::Ready, resident: Some(models[0].to_owned()), idle_ms, ..empty(models) }
}

/// The same slot, busy.
pub(super) fn busy(models: &[&str], wanted: u32) -> Slot {
    Slot { wanted, ..idle(models, 0) }
}

/// The same slot, swapping from the first to the last model.
pub(super) fn loading(models: &[&str], eta_ms: u64) -> Slot {
    let target = models.last().map(|id| (*id).to_owned());
    Slot { state: SlotState::Loading, resident: None, target, eta_ms: Some(eta_ms), ..empty(models) }
}

/// Changes a slot's report on one of its models.
pub(super) fn with(mut slot: Slot, model: &str, change: impl FnOnce(&mut SlotModel)) -> Slot {
    change(slot.models.iter_mut().find(|entry| entry.id == model).expect("a model of the slot"));
    slot
}

/// The same slot, in which a model has aliases.
pub(super) fn also(slot: Slot, model: &str, aliases: &[&str]) -> Slot {
    with(slot, model, |entry| entry.aliases = aliases.iter().map(|alias| (*alias).to_owned()).collect())
}

/// The same slot, in which a model sleeps that needs this time to wake.
pub(super) fn sleeping(slot: Slot, model: &str, swap_cost_ms: u64) -> Slot {
    with(slot, model, |entry| {
        entry.status = SlotModelStatus::Sleeping;
        entry.swap_cost_ms = swap_cost_ms;
    })
}

/// The same slot, in which the load of a model failed.
pub(super) fn failed(slot: Slot, model: &str, code: &str, retry_ms: Option<u64>) -> Slot {
    with(slot, model, |entry| {
        entry.status = SlotModelStatus::Failed;
        entry.code = Some(code.to_owned());
        entry.message = Some(format!("no {model} here"));
        entry.retry_ms = retry_ms;
    })
}

impl Provider {
    /// Adds a worker with a multiplexer, before its first grant.
    pub(super) fn join_slots(&mut self, key: u64, models: &[&str], slots: Vec<Slot>) -> Vec<String> {
        let mut new = worker(key, models, 8, true);
        new.multiplexer = Some(NewMultiplexer { instance: format!("i{key}").into(), slots });
        self.handle(Event::WorkerJoined(new))
    }

    /// A multiplexer opens these gates, each with the given number of 4 slots, and closes all others.
    pub(super) fn gates(&mut self, key: u64, gates: &[(&str, u32)]) -> Vec<String> {
        let gate = |slots| Gate { slots, others: 0, capacity: 4 };
        let gates: Vec<_> = gates.iter().map(|(model, slots)| (Model::from(*model), gate(*slots))).collect();
        self.gates_of(key, gates)
    }

    pub(super) fn gates_of(&mut self, key: u64, gates: Vec<(Model, Gate)>) -> Vec<String> {
        let sum = |of: fn(&Gate) -> u32| gates.iter().map(|(_, gate)| of(gate)).sum();
        let sums = Grant {
            slots: sum(|gate| gate.slots),
            others: sum(|gate| gate.others),
            capacity: sum(|gate| gate.capacity),
            links: 1,
        };
        self.handle(Event::GatesSet { worker: WorkerKey(key), sums, gates })
    }

    pub(super) fn slots(&mut self, key: u64, slots: Vec<Slot>) -> Vec<String> {
        self.handle(Event::SlotsReported { worker: WorkerKey(key), slots })
    }
}
