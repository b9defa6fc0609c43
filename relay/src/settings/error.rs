//! The error of a setting.

use std::fmt;

use modelrelay_traces::SettingError;

/// An error in the settings: one line with the place, the value and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(String);

impl ConfigError {
    /// Replaces control characters, which a file name or a parser's message may contain, with spaces.
    pub(crate) fn new(line: impl AsRef<str>) -> Self {
        Self(line.as_ref().replace(char::is_control, " "))
    }

    pub(crate) fn refused(place: &str, value: &str, allowed: &str) -> Self {
        let shown: String = value.chars().take(64).collect();
        Self::new(format!("{place}: {shown:?} is not allowed: {allowed}"))
    }
}

impl From<SettingError> for ConfigError {
    fn from(error: SettingError) -> Self {
        Self::new(error.to_string())
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}
