//! The progress of a Deployment or DaemonSet, from its own status: pure, on raw JSON.

use serde_json::Value;

use crate::manifests::backend::Workload;
use crate::words;

/// The progress of a rollout.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rollout {
    /// True if its number of replicas is configurable.
    pub scaled: bool,
    /// The desired number of Pods.
    pub desired: i32,
    /// The number of Pods of an older template.
    pub old: i32,
    /// True if every Pod has the newest template and is available, and none is left over.
    pub done: bool,
    /// Human-readable progress.
    pub message: String,
    /// The reason that Pods cannot be created.
    pub failure: Option<String>,
}

impl Rollout {
    /// Returns the progress of the object as the API server returned it.
    pub fn of(workload: Workload, object: &Value) -> Self {
        let number = |pointer: &str| object.pointer(pointer).and_then(Value::as_i64).unwrap_or_default();
        let (desired, total, updated, available) = match workload {
            Workload::Backend | Workload::Workers => (
                number("/spec/replicas"),
                number("/status/replicas"),
                number("/status/updatedReplicas"),
                number("/status/availableReplicas"),
            ),
            Workload::BackendOnNodes => (
                number("/status/desiredNumberScheduled"),
                number("/status/currentNumberScheduled") + number("/status/numberMisscheduled"),
                number("/status/updatedNumberScheduled"),
                number("/status/numberAvailable"),
            ),
        };
        let seen = number("/status/observedGeneration") >= number("/metadata/generation");
        let count = |number: i64| i32::try_from(number).unwrap_or(i32::MAX);
        Self {
            scaled: workload.is_scaled(),
            desired: count(desired),
            old: count((total - updated).max(0)),
            done: seen && updated >= desired && total <= updated && available >= desired,
            message: format!(
                "{updated} of {desired} Pods {} up to date, {}",
                words::one_or(updated, "is", "are"),
                words::counted(available, "is available", "are available"),
            ),
            failure: failure(object),
        }
    }
}

/// Returns the reason that a Deployment's Pods cannot be created, as its own controller reports it; works for any
/// Deployment.
pub fn failure(object: &Value) -> Option<String> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    let failed = conditions.iter().find(|one| one["type"] == "ReplicaFailure" && one["status"] == "True")?;
    Some(failed["message"].as_str().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn deployment(replicas: i64, status: &Value) -> Rollout {
        let object = json!({"metadata": {"generation": 3}, "spec": {"replicas": replicas}, "status": status});
        Rollout::of(Workload::Backend, &object)
    }

    #[test]
    fn rollout_completes_when_new_pods_are_available() {
        let done = json!({"observedGeneration": 3, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2});
        assert!(deployment(2, &done).done);
        for (field, value) in
            [("observedGeneration", 2), ("replicas", 3), ("updatedReplicas", 1), ("availableReplicas", 1)]
        {
            let mut status = done.clone();
            status[field] = json!(value);
            assert!(!deployment(2, &status).done, "{field}");
        }
        assert!(deployment(0, &json!({"observedGeneration": 3})).done);
        assert!(!deployment(1, &json!({})).done);
    }

    #[test]
    fn message_uses_singular_and_plural() {
        let message = |updated: i64, available: i64| {
            deployment(2, &json!({"updatedReplicas": updated, "availableReplicas": available})).message
        };
        assert_eq!(message(2, 1), "2 of 2 Pods are up to date, 1 is available");
        assert_eq!(message(1, 0), "1 of 2 Pods is up to date, 0 are available");
    }

    #[test]
    fn old_pods_belong_to_older_template() {
        let status = json!({"observedGeneration": 3, "replicas": 5, "updatedReplicas": 2});
        assert_eq!(deployment(5, &status).old, 3);
    }

    #[test]
    fn daemon_set_wants_one_pod_per_matching_node() {
        let object = json!({"metadata": {"generation": 1}, "status": {
            "observedGeneration": 1, "desiredNumberScheduled": 4, "currentNumberScheduled": 4,
            "updatedNumberScheduled": 4, "numberAvailable": 3,
        }});
        let rollout = Rollout::of(Workload::BackendOnNodes, &object);
        assert_eq!((rollout.desired, rollout.scaled, rollout.done), (4, false, false));
    }

    #[test]
    fn pod_creation_failure_is_passed_on() {
        let status = json!({"conditions": [
            {"type": "Available", "status": "False", "message": "no"},
            {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"},
        ]});
        assert_eq!(deployment(1, &status).failure.as_deref(), Some("exceeded quota"));
    }
}
