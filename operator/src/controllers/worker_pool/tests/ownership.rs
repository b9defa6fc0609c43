//! Ownership of a Deployment's number of replicas, tracked as a real API server does in `managedFields`.

use serde_json::{Value, json};

use crate::resources::names;

/// The operator applies, by force. A manager that wrote the same number co-owns it; one that wrote another number loses
/// it. An omitted number stays unless the operator was its only owner: then it becomes the API server's default.
pub(super) fn apply(before: Option<&Value>, object: &mut Value) {
    let (had, applied) = (before.map(|before| &before["spec"]["replicas"]), object["spec"].get("replicas").cloned());
    let mut entries: Vec<Value> = before.map(entries).unwrap_or_default();
    let ours = entries.iter().position(is_operator_entry).map(|at| entries.remove(at));
    match &applied {
        Some(number) if had != Some(number) => entries.retain(|entry| !owns(entry)),
        Some(_) => {}
        None => {
            let is_given_up = !entries.iter().any(owns) && ours.is_some_and(|ours| owns(&ours));
            object["spec"]["replicas"] = had.filter(|_| !is_given_up).cloned().unwrap_or(json!(1));
        }
    }
    entries.push(operator_entry(applied.is_some()));
    object["metadata"]["managedFields"] = json!(entries);
}

/// Another manager scales: an update, which takes the number from its owners if it differs.
pub(super) fn scale(object: &mut Value, manager: &str, number: i32, second: u64) {
    if object["spec"]["replicas"] == json!(number) {
        return;
    }
    object["spec"]["replicas"] = json!(number);
    object["metadata"]["managedFields"] = json!([
        operator_entry(false),
        {
            "manager": manager, "operation": "Update", "subresource": "scale",
            "time": format!("2026-01-01T00:00:{:02}Z", second % 60), "fieldsV1": {"f:spec": {"f:replicas": {}}},
        },
    ]);
}

/// Returns the owners of the number.
pub(super) fn owners(object: &Value) -> Vec<String> {
    let owning = entries(object).into_iter().filter(owns);
    owning.map(|entry| entry["manager"].as_str().unwrap_or_default().to_owned()).collect()
}

fn operator_entry(replicas: bool) -> Value {
    let mut fields = json!({"f:spec": {"f:template": {}}});
    if replicas {
        fields["f:spec"]["f:replicas"] = json!({});
    }
    json!({"manager": names::FIELD_MANAGER, "operation": "Apply", "fieldsV1": fields})
}

fn entries(object: &Value) -> Vec<Value> {
    object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default()
}

fn is_operator_entry(entry: &Value) -> bool {
    entry["manager"] == names::FIELD_MANAGER
}

fn owns(entry: &Value) -> bool {
    entry.pointer("/fieldsV1/f:spec/f:replicas").is_some()
}
