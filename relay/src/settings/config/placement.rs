//! How a provider chooses workers: by load alone, or by the prompts that their caches hold.

use super::validate::within;
use super::{ConfigError, raw::RawPlacement};

/// The default number of conversations whose home is remembered.
pub const MAX_HOMES: usize = 100_000;
/// The most conversations whose home may be remembered; each takes about 50 bytes.
pub const MOST_HOMES: usize = 10_000_000;

/// The settings of placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementConfig {
    /// How a worker is chosen among those with room.
    pub mode: PlacementMode,
    /// Which requests may share a home.
    pub cache_isolation: CacheIsolation,
    /// The most conversations whose home is remembered.
    pub max_homes: usize,
}

/// How a worker is chosen among those with room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlacementMode {
    /// The least loaded one; a conversation's home among equally loaded ones.
    #[default]
    LeastLoad,
    /// The one that can begin the response first, given the prompts that caches hold.
    Cache,
}

/// Which requests may share a home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheIsolation {
    /// Requests with the same prompt, whoever sends them.
    #[default]
    None,
    /// Requests of one API key.
    Key,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self { mode: PlacementMode::default(), cache_isolation: CacheIsolation::default(), max_homes: MAX_HOMES }
    }
}

impl PlacementMode {
    /// The values that [`PlacementMode::parse`] accepts.
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

pub(super) fn placement(place: &str, raw: Option<&RawPlacement>) -> Result<PlacementConfig, ConfigError> {
    let default = PlacementConfig::default();
    let Some(raw) = raw else { return Ok(default) };
    within(&format!("{place}.maxHomes"), raw.max_homes, 1, MOST_HOMES)?;
    let mode = raw.mode.as_deref().map(|text| {
        let refused = || ConfigError::refused(&format!("{place}.mode"), text, PlacementMode::ALLOWED);
        PlacementMode::parse(text).ok_or_else(refused)
    });
    let cache_isolation = raw.cache_isolation.as_deref().map(|text| {
        let refused = || ConfigError::refused(&format!("{place}.cacheIsolation"), text, CacheIsolation::ALLOWED);
        CacheIsolation::parse(text).ok_or_else(refused)
    });
    Ok(PlacementConfig {
        mode: mode.transpose()?.unwrap_or(default.mode),
        cache_isolation: cache_isolation.transpose()?.unwrap_or(default.cache_isolation),
        max_homes: raw.max_homes.unwrap_or(default.max_homes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(yaml: &str) -> Result<PlacementConfig, String> {
        let raw: RawPlacement = serde_yaml::from_str(yaml).map_err(|error| error.to_string())?;
        placement("providers[0].placement", Some(&raw)).map_err(|error| error.to_string())
    }

    #[test]
    fn omitted_parts_of_placement_have_defaults() {
        assert_eq!(parse("{}"), Ok(PlacementConfig::default()));
        let cache = PlacementConfig { mode: PlacementMode::Cache, ..PlacementConfig::default() };
        assert_eq!(parse("{mode: cache}"), Ok(cache));
        let all = PlacementConfig { cache_isolation: CacheIsolation::Key, max_homes: 7, ..cache };
        assert_eq!(parse("{mode: cache, cacheIsolation: key, maxHomes: 7}"), Ok(all));
    }

    #[test]
    fn bad_placement_names_field_and_allowed_values() {
        let cases = [
            ("{mode: least}", "placement.mode", "least-load or cache"),
            ("{cacheIsolation: keys}", "placement.cacheIsolation", "none or key"),
            ("{maxHomes: 0}", "placement.maxHomes", "an integer from 1 to 10000000"),
        ];
        for (yaml, field, allowed) in cases {
            let error = parse(yaml).expect_err(yaml);
            assert!(error.contains(field) && error.contains(allowed), "{error}");
        }
    }
}
