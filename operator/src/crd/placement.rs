//! How a Provider's relay chooses the worker for a request.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Choice of the worker for a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    /// least-load takes the least loaded worker; cache weighs the prompts that workers have cached against the work that waits at them.
    #[serde(default)]
    pub mode: PlacementMode,
    /// Requests that may share a cached prompt: none means all of them, key those of one API key.
    #[serde(default)]
    pub cache_isolation: CacheIsolation,
    /// Maximum number of conversations whose worker is remembered; the one unused for longest is forgotten first.
    #[serde(default = "max_homes")]
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_homes: i32,
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
