//! ServiceAccounts that call a relay with their own token instead of an API key.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A namespace or a ServiceAccount whose Pods may call the relay with their own token, for the audience
/// modelrelay-clients, in place of an API key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tenant {
    /// Namespace of the Pods.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub namespace: String,
    /// ServiceAccount of the Pods. Empty: every ServiceAccount of the namespace that is not listed itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253), regex(pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"), extend("default" = ""))]
    pub service_account: String,
    /// Name in usage, metrics and lists. Default: NAMESPACE/NAME of the ServiceAccount, or the namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    pub name: Option<String>,
    /// Share of the workers among keys and tenants of one class, from 0.01 to 100 with at most two decimals. Default:
    /// 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 100.0))]
    pub weight: Option<f64>,
    /// Class of its requests. Default: normal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<RequestClass>,
    /// Models that it may use, by id or alias. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 256)))]
    pub models: Vec<String>,
    /// Maximum number of its requests at once, waiting or running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight: Option<i32>,
    /// Share of the queue that its waiting requests may fill, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub max_queue_percent: Option<i32>,
    /// Maximum number of tokens of its requests within a minute, input and output together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub tokens_per_minute: Option<i64>,
    /// Maximum number of tokens of its requests within a day in UTC, input and output together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub tokens_per_day: Option<i64>,
}

/// How urgent requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RequestClass {
    /// A person waits for them.
    Interactive,
    /// The default.
    Normal,
    /// They wait while others do not.
    Batch,
}
