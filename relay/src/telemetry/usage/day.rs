//! Days in UTC.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const SECONDS: u64 = 86_400;

/// A day in UTC, as the number of days since 1970-01-01.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Day(u32);

impl Day {
    /// 9999-12-31: later days have no text.
    const LAST: Self = Self(2_932_896);

    /// The day of a time; the first or the last one for a time beyond them.
    pub fn of(time: SystemTime) -> Self {
        let days = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() / SECONDS;
        u32::try_from(days).map_or(Self::LAST, |days| Self(days).min(Self::LAST))
    }

    /// Parses `2026-11-25`.
    pub fn parse(text: &str) -> Option<Self> {
        let is_date = text.len() == 10 && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
        let start = is_date.then(|| humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).ok())??;
        Some(Self::of(start))
    }

    /// Its first moment.
    pub fn start(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(u64::from(self.0) * SECONDS)
    }

    /// The day that is this number of days earlier.
    pub fn before(self, days: u32) -> Self {
        Self(self.0.saturating_sub(days))
    }
}

impl fmt::Display for Day {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = humantime::format_rfc3339_seconds(self.start()).to_string();
        f.write_str(text.get(..10).unwrap_or(&text))
    }
}

impl Serialize for Day {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Day {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom("expected a day such as \"2026-11-25\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn day_is_parsed_and_shown() {
        for text in ["1970-01-01", "2024-02-29", "2026-11-25", "9999-12-31"] {
            assert_eq!(Day::parse(text).map(|day| day.to_string()).as_deref(), Some(text));
        }
        for text in
            ["", "2026-11-31", "2026-1-5", "2025-02-29", "25.11.2026", "2026-11-25T", "1969-12-31", "+026-11-25"]
        {
            assert_eq!(Day::parse(text), None, "{text}");
        }
    }

    #[test]
    fn day_changes_at_midnight_utc() {
        let midnight = Day::parse("2026-11-25").unwrap().start();
        assert_eq!(Day::of(midnight - Duration::from_millis(1)).to_string(), "2026-11-24");
        assert_eq!(Day::of(midnight).to_string(), "2026-11-25");
        assert_eq!(Day::of(midnight).before(25).to_string(), "2026-10-31");
        assert_eq!(Day::of(UNIX_EPOCH).before(1), Day::of(UNIX_EPOCH));
        assert_eq!(Day::of(UNIX_EPOCH + Duration::from_secs(u64::MAX / 4)), Day::LAST);
    }
}
