//! How a provider chooses workers: by load alone, or by the prompts that their caches hold.

pub use crate::dispatch::Placement;
use crate::dispatch::Spill;

/// The default number of conversations whose home is remembered.
pub const MAX_HOMES: usize = 100_000;
/// The most conversations whose home may be remembered; each takes about 50 bytes.
pub const MOST_HOMES: usize = 10_000_000;
/// The most requests that a nearer worker may run more than a farther one: more than any worker runs.
pub const MOST_SPILL_REQUESTS: u32 = 1_000_000;

/// The settings of placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementConfig {
    /// How a worker is chosen among those with room.
    pub mode: Placement,
    /// Which requests may share a home.
    pub cache_isolation: CacheIsolation,
    /// The most conversations whose home is remembered.
    pub max_homes: usize,
    /// How much more load a nearer worker may have than a farther one and still be chosen.
    pub spill: Spill,
}

/// Which requests may share a home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheIsolation {
    /// All requests with the same prompt.
    #[default]
    None,
    /// Requests of one API key.
    Key,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self {
            mode: Placement::default(),
            cache_isolation: CacheIsolation::default(),
            max_homes: MAX_HOMES,
            spill: Spill::default(),
        }
    }
}

impl Placement {
    /// The values that [`Placement::parse`] accepts.
    pub const ALLOWED: &'static str = "least-load or cache";

    /// Parses a value of `PLACEMENT` or `placement.mode`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "least-load" => Some(Self::LeastLoad),
            "cache" => Some(Self::Cache),
            _ => None,
        }
    }
}

impl CacheIsolation {
    /// The values that [`CacheIsolation::parse`] accepts.
    pub const ALLOWED: &'static str = "none or key";

    /// Parses a value of `CACHE_ISOLATION` or `placement.cacheIsolation`.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "none" => Some(Self::None),
            "key" => Some(Self::Key),
            _ => None,
        }
    }
}
