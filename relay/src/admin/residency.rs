//! What multiplexers hold, as admins and machines see it.

use std::time::Duration;

use modelrelay_protocol::message::Slot;
use serde_json::{Value, json};

use crate::dispatch::{Gate, Model};
use crate::provider::WorkerState;

/// The slots of a worker with their times as of now; nothing without a multiplexer.
pub(super) fn slots(worker: &WorkerState) -> Value {
    if !worker.link.info.slots1 {
        return Value::Null;
    }
    let (slots, age) = worker.link.slots();
    json!(slots.iter().map(|slot| aged(slot, age)).collect::<Vec<Slot>>())
}

/// What may be sent to a worker's multiplexer, by model; nothing without one.
pub(super) fn gates(worker: &WorkerState) -> Value {
    let Some(gates) = &worker.core.gates else { return Value::Null };
    let gate = |(model, gate): &(Model, Gate)| json!({ "id": &**model, "slots": gate.slots, "others": gate.others, "capacity": gate.capacity });
    gates.iter().map(gate).collect()
}

/// Where a model is: each slot that can hold it, and whether the worker may be sent requests for it.
pub(super) fn of_model(model: &str, workers: &[WorkerState]) -> Vec<Value> {
    let mut residency = Vec::new();
    for worker in workers.iter().filter(|worker| worker.link.info.slots1) {
        let gates = worker.core.gates.as_deref().unwrap_or_default();
        let open = gates.iter().any(|(open, _)| **open == *model);
        for slot in worker.link.slots().0.iter() {
            residency.extend(slot.models.iter().filter(|entry| entry.id == model).map(|entry| {
                json!({
                    "worker_id": &*worker.link.info.id,
                    "slot": slot.id,
                    "slot_state": slot.state,
                    "status": entry.status,
                    "open": open,
                })
            }));
        }
    }
    residency
}

fn aged(slot: &Slot, age: Duration) -> Slot {
    let age = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
    let mut slot = slot.clone();
    slot.since_ms = slot.since_ms.saturating_add(age);
    // A slot at work says 0, and says something else when it is not.
    if slot.idle_ms > 0 {
        slot.idle_ms = slot.idle_ms.saturating_add(age);
    }
    slot.eta_ms = slot.eta_ms.map(|eta| eta.saturating_sub(age));
    for model in &mut slot.models {
        model.retry_ms = model.retry_ms.map(|retry| retry.saturating_sub(age));
    }
    slot
}

#[cfg(test)]
mod tests {
    use modelrelay_protocol::message::SlotModel;

    use super::*;

    #[test]
    fn times_go_on_after_they_were_told() {
        let model = |retry_ms| SlotModel { retry_ms, ..SlotModel::default() };
        let slot = Slot {
            since_ms: 100,
            idle_ms: 50,
            eta_ms: Some(900),
            models: vec![model(Some(2_000)), model(Some(10)), model(None)],
            ..Slot::default()
        };
        let now = aged(&slot, Duration::from_secs(1));
        assert_eq!((now.since_ms, now.idle_ms, now.eta_ms), (1_100, 1_050, Some(0)));
        let retries: Vec<_> = now.models.iter().map(|model| model.retry_ms).collect();
        assert_eq!(retries, [Some(1_000), Some(0), None]);
        assert_eq!(aged(&Slot::default(), Duration::from_secs(9)).idle_ms, 0, "at work is not idle");
    }
}
