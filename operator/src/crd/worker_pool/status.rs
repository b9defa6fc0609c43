//! The status of a `WorkerPool`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Mode;
use crate::crd::schema;

/// The state that the operator observed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerPoolStatus {
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions: Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// Mode of the pool: injected, from a template, or standalone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Label selector of the pool's Pods, for autoscalers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub selector: Option<String>,
    /// Number of Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Number of Pods with a worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injected: Option<i32>,
    /// First 32 labelled Pods without a worker.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 253)))]
    pub not_injected: Vec<String>,
    /// Number of Pods whose worker differs from the one that a new Pod would get.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outdated: Option<i32>,
    /// Number of workers that are connected to the relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<i32>,
    /// First 32 models that the workers advertise. Kept while there is no Pod, because a request for one of them may
    /// wake the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 256)))]
    pub models: Vec<String>,
    /// Number of models that the workers advertise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_count: Option<i32>,
    /// State of the first 32 slots of the pool's workers, with a multiplexer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub slots: Vec<SlotStatus>,
    /// Number of slots of the pool's workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_count: Option<i32>,
    /// Number of slots that load no model, because their memory could not be freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantined: Option<i32>,
}

/// The state of a worker's slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotStatus {
    /// Name of the worker's Pod.
    #[schemars(length(max = 253))]
    pub worker: String,
    /// Id of the slot.
    #[schemars(length(max = 64))]
    pub slot: String,
    /// State of the slot.
    pub state: SlotState,
    /// Model that the slot holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub resident: Option<String>,
    /// Model that the slot is going to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub target: Option<String>,
    /// Time of the last change of state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Last failed load, until that model is loaded or ten minutes have passed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<SlotFailure>,
}

/// The failure of a model's load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotFailure {
    /// Model that could not be loaded.
    #[schemars(length(max = 256))]
    pub model: String,
    /// Error code that clients receive, such as backend_unavailable or insufficient_memory.
    #[schemars(length(max = 64))]
    pub code: String,
    /// Description of the failure; empty if the worker reported none.
    #[schemars(length(max = 256))]
    pub message: String,
}

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum SlotState {
    /// No model is loaded.
    Empty,
    /// The model is loaded and serves requests.
    Ready,
    /// A swap waits for running requests.
    Draining,
    /// Running requests that did not finish in time are cut off.
    Severing,
    /// The model is being unloaded.
    Evicting,
    /// A model is being loaded.
    Loading,
    /// The previous model is being loaded again.
    RollingBack,
    /// No model is loaded after a failure; the load is retried after a delay.
    Backoff,
    /// The worker is stopping.
    Stopping,
    /// No model is loaded, because memory could not be freed.
    Quarantined,
}
