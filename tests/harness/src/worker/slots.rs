//! A hand-played multiplexer: its reports about its slots, and the relay's orders.

use serde_json::{Value, json};

use super::{FakeWorker, core1_registration, new_instance_id};

/// An empty slot in this state that can hold these models, each able to run 4 requests.
#[must_use]
pub fn slot(id: &str, state: &str, models: &[&str]) -> Value {
    let models: Vec<Value> = models
        .iter()
        .map(|id| json!({"id": id, "status": "unloaded", "capacity": 4, "swap_cost_ms": 3000, "pinned": false}))
        .collect();
    json!({"id": id, "state": state, "resident": null, "generation": 0, "target": null, "eta_ms": null, "since_ms": 0,
        "idle_ms": 0, "wanted": 0, "models": models})
}

/// The same slot, in which the load of one of its models failed.
#[must_use]
pub fn failed(mut slot: Value, model: &str, code: &str, message: &str, retry_ms: u64) -> Value {
    let models = slot["models"].as_array_mut().expect("a slot has models");
    let entry = models.iter_mut().find(|entry| entry["id"] == model).expect("a model of the slot");
    *entry = json!({"id": model, "status": "failed", "code": code, "message": message, "retry_ms": retry_ms});
    slot
}

/// The `register` message of a worker with a multiplexer.
#[must_use]
pub fn slots1_registration(models: &[&str], slots: &[Value], instance_id: &str) -> Value {
    let mut message = core1_registration(models, 4, instance_id);
    message["capabilities"] = json!(["core1", "slots1"]);
    message["slots"] = json!(slots);
    message
}

impl FakeWorker {
    /// Registers with a multiplexer and a fresh `instance_id`. No gate is open yet.
    pub async fn register_slots1(&mut self, models: &[&str], slots: &[Value]) -> Value {
        self.register_with(slots1_registration(models, slots, &new_instance_id())).await
    }

    /// Opens the gates of these models, each with `slots` of its 4 slots for this relay, and closes all others.
    pub async fn open_gates(&mut self, gates: &[(&str, u64)]) {
        let entry = |(id, slots): &(&str, u64)| json!({"id": id, "slots": slots, "others": 0, "capacity": 4});
        let models: Vec<Value> = gates.iter().map(entry).collect();
        let slots: u64 = gates.iter().map(|(_, slots)| slots).sum();
        let grant = json!({"type": "grant", "slots": slots, "others": 0, "capacity": 4 * gates.len(), "links": 1,
            "models": models});
        self.send(&grant).await;
    }

    /// Sends `slots`.
    pub async fn send_slots(&mut self, slots: &[Value]) {
        self.send(&json!({"type": "slots", "slots": slots})).await;
    }

    /// Sends `command_result`.
    pub async fn send_command_result(&mut self, op_id: &str, error: Option<&str>) {
        let mut result = json!({"type": "command_result", "op_id": op_id, "ok": error.is_none()});
        if let Some(error) = error {
            result["error"] = json!(error);
        }
        self.send(&result).await;
    }
}
