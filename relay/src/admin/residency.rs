//! The slots of multiplexers and their models, for admins and machines.

use std::time::Duration;

use modelrelay_protocol::message::{Slot, SlotModel};
use serde::Serialize;
use serde_json::{Value, json};

use crate::dispatch::{Gate, Model};
use crate::provider::WorkerState;
use crate::provider::worker::failures::SlotFailure;

/// The longest message of a slot's last failure in the snapshot for machines.
const MAX_SHORT_CHARS: usize = 256;

/// The human-readable messages in the failures of slots, up to a kilobyte for each model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Messages {
    /// The worker's full messages.
    Told,
    /// No messages for models, whose failures keep their codes; the message of the slot's last failure is truncated.
    LeftOut,
}

/// A slot, and its last failure in the relay's memory.
#[derive(Serialize)]
struct SlotView {
    #[serde(flatten)]
    slot: Slot,
    last_failure: Option<Value>,
}

/// The slots of a worker with their times as of now; null without a multiplexer.
pub(super) fn slots(worker: &WorkerState, messages: Messages) -> Value {
    if !worker.link.info.slots1 {
        return Value::Null;
    }
    let (slots, age) = worker.link.slots();
    let seen = |slot: &Slot| {
        let mut slot = aged(slot, age);
        if messages == Messages::LeftOut {
            slot.models.iter_mut().for_each(|model| model.message = None);
        }
        let last_failure = worker.link.last_failure(&slot.id).map(|failure| failure_json(&failure, messages));
        SlotView { slot, last_failure }
    };
    json!(slots.iter().map(seen).collect::<Vec<_>>())
}

fn failure_json(failure: &SlotFailure, messages: Messages) -> Value {
    let longest = if messages == Messages::LeftOut { MAX_SHORT_CHARS } else { usize::MAX };
    let message = failure.message.as_ref().map(|message| message.chars().take(longest).collect::<String>());
    json!({
        "model": failure.model,
        "code": failure.code,
        "message": message,
        "age_ms": millis(failure.at.elapsed()),
    })
}

/// The open gates of a worker's multiplexer, by model; null without one.
pub(super) fn gates(worker: &WorkerState) -> Value {
    let Some(gates) = &worker.core.gates else { return Value::Null };
    let gate = |(model, gate): &(Model, Gate)| json!({ "id": &**model, "slots": gate.slots, "others": gate.others, "capacity": gate.capacity });
    gates.iter().map(gate).collect()
}

/// The places of a model, by any of its names: each slot that can hold it, and whether its worker accepts requests for
/// it.
pub(super) fn of_model(model: &str, workers: &[WorkerState]) -> Vec<Value> {
    let mut residency = Vec::new();
    for worker in workers.iter().filter(|worker| worker.link.info.slots1) {
        let gates = worker.core.gates.as_deref().unwrap_or_default();
        let is_open = |id: &str| gates.iter().any(|(open, _)| **open == *id);
        let has_name = |entry: &&SlotModel| entry.id == model || entry.aliases.iter().any(|alias| alias == model);
        for slot in worker.link.slots().0.iter() {
            residency.extend(slot.models.iter().filter(has_name).map(|entry| {
                json!({
                    "worker_id": &*worker.link.info.id,
                    "slot": slot.id,
                    "slot_state": slot.state,
                    "status": entry.status,
                    "open": is_open(&entry.id),
                })
            }));
        }
    }
    residency
}

fn aged(slot: &Slot, age: Duration) -> Slot {
    let age = millis(age);
    let mut slot = slot.clone();
    slot.since_ms = slot.since_ms.saturating_add(age);
    // A busy slot reports 0, and another value once it is idle.
    if slot.idle_ms > 0 {
        slot.idle_ms = slot.idle_ms.saturating_add(age);
    }
    slot.eta_ms = slot.eta_ms.map(|eta| eta.saturating_sub(age));
    for model in &mut slot.models {
        model.retry_ms = model.retry_ms.map(|retry| retry.saturating_sub(age));
    }
    slot
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_times_advance_with_age() {
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
