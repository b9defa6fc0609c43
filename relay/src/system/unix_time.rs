//! Points in time for other programs.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970; 0 before that.
pub fn unix_millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
