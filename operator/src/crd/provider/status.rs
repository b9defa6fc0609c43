//! The status of a Provider.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::crd::schema;

/// The state that the operator observed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderStatus {
    /// Generation of the spec that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Conditions: Ready, Programmed, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// Base URL for clients inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub endpoint: Option<String>,
    /// Base URL for workers inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub worker_endpoint: Option<String>,
    /// Provider whose relay serves this one: its own name, or that of another Provider, with its namespace if that
    /// differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub relay: Option<String>,
    /// Name of this Provider at that relay, for the header x-modelrelay-provider and for workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub name_at_relay: Option<String>,
    /// Progress of a move from a relay of its own to the relay of relayRef; absent if it is refused, and once the
    /// former has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moving: Option<MovingStep>,
    /// Secret that workers present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_secret: Option<WorkerSecretStatus>,
    /// Number of connected workers. A worker that is connected to several relays counts once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<i32>,
    /// First 32 served models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 256)))]
    pub models: Vec<String>,
    /// Number of served models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_count: Option<i32>,
    /// Number of queued requests of all relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_depth: Option<i32>,
    /// Number of running requests of all relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<i32>,
    /// Requests and tokens of all relays since they started, updated once a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<UsageStatus>,
}

/// A step of a move from a relay of its own to another Provider's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum MovingStep {
    /// The other relay does not serve this Provider yet. relayRef can still be changed or removed.
    WaitingForRelay,
    /// Workers are connecting to the other relay, and keep their links to the former one. relayRef can still be
    /// removed.
    ConnectingWorkers,
    /// The Service of this Provider leads to the other relay, and the former one finishes its requests.
    Draining,
}

/// Requests and tokens of a Provider's relays since they started.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UsageStatus {
    /// Start of the oldest relay. A relay that ends takes its sums with it.
    pub since: Time,
    /// Number of requests that ended, whatever their outcome.
    pub requests: i64,
    /// Number of input tokens that backends reported.
    pub input_tokens: i64,
    /// Number of output tokens that backends reported.
    pub output_tokens: i64,
}

/// The Secret that workers present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerSecretStatus {
    /// Name of the Secret.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Time until which relays accept the value before the last rotation. Values of earlier rotations expire earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_until: Option<Time>,
    /// Last value of the annotation modelrelay.io/rotate that was handled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub rotation: Option<String>,
}
