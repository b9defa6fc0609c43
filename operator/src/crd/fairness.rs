//! How waiting requests share the workers of a Provider.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::common::DurationText;

/// Order of waiting requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fairness {
    /// shared gives each API key its share of the workers; fifo is the order of arrival.
    #[serde(default)]
    pub mode: FairnessMode,
    /// Wait after which a request competes with requests of higher classes, if the mode is shared.
    #[serde(default = "promote_after")]
    pub promote_after: DurationText,
}

/// How waiting requests are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FairnessMode {
    /// By class, then by the service that each API key has attained.
    #[default]
    Shared,
    /// By arrival.
    Fifo,
}

fn promote_after() -> DurationText {
    DurationText("15s".to_owned())
}
