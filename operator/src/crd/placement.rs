//! How a Provider's relay chooses the worker for a request.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::common::SizeText;

/// Choice of the worker for a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// least-load takes the least loaded worker; cache weighs the prompts that workers have cached against the work
    /// that waits at them.
    #[serde(default)]
    pub mode: PlacementMode,
    /// Requests that may share a cached prompt: none means all of them, key those of one API key.
    #[serde(default)]
    pub cache_isolation: CacheIsolation,
    /// Maximum number of conversations whose worker is remembered; the one unused for longest is forgotten first.
    #[serde(default = "max_homes")]
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_homes: i32,
    /// Number of running requests by which a worker in the zone or cluster of the relay may exceed a farther one and
    /// still be chosen. Default 4. Only for relays with ZONE or CLUSTER.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub spill_requests: Option<i32>,
    /// The same with mode cache, for conversations: size of the requests that still have to be computed. Default 64Ki.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spill_bytes: Option<SizeText>,
}

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementMode {
    /// By load.
    #[default]
    LeastLoad,
    /// By the prompts that caches hold.
    Cache,
}

/// Which requests may share a cached prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CacheIsolation {
    /// All of them.
    #[default]
    None,
    /// Those of one API key.
    Key,
}

fn max_homes() -> i32 {
    100_000
}
