//! How waiting requests share a provider's workers.

use std::time::Duration;

use crate::dispatch::Fairness;

/// The default wait after which a request competes with higher classes.
const PROMOTE_AFTER: Duration = Duration::from_secs(15);

/// The order of waiting requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FairnessMode {
    /// By class, then by the service that each API key has attained, then by arrival.
    #[default]
    Shared,
    /// By arrival.
    Fifo,
}

/// The settings of fair shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FairnessConfig {
    /// The order of waiting requests.
    pub mode: FairnessMode,
    /// The wait after which a request competes with higher classes, unless the order is that of arrival.
    pub promote_after: Duration,
}

impl Default for FairnessConfig {
    fn default() -> Self {
        Self { mode: FairnessMode::default(), promote_after: PROMOTE_AFTER }
    }
}

impl FairnessMode {
    /// The values that [`FairnessMode::parse`] accepts.
    pub const ALLOWED: &'static str = "shared or fifo";

    /// Parses a value of `FAIRNESS_MODE` or `fairness.mode`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "shared" => Some(Self::Shared),
            "fifo" => Some(Self::Fifo),
            _ => None,
        }
    }
}

impl From<FairnessConfig> for Fairness {
    fn from(config: FairnessConfig) -> Self {
        match config.mode {
            FairnessMode::Shared => Self::Shared { promote_after: config.promote_after },
            FairnessMode::Fifo => Self::Fifo,
        }
    }
}
