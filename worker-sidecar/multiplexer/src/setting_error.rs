//! A setting that cannot be used, as one line.

/// A setting that cannot be used. Displayed as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingError {
    setting: String,
    value: Option<String>,
    allowed: String,
}

impl SettingError {
    /// Creates an error about a value, of which the first 200 characters are shown. `allowed` describes the allowed
    /// values.
    pub fn new(setting: impl Into<String>, value: impl Into<String>, allowed: impl Into<String>) -> Self {
        let value: String = value.into();
        let value = value.chars().take(200).collect();
        Self { setting: setting.into(), value: Some(value), allowed: allowed.into() }
    }

    /// Creates an error about a value that must not be shown, or that is missing.
    pub fn hidden(setting: impl Into<String>, allowed: impl Into<String>) -> Self {
        Self { setting: setting.into(), value: None, allowed: allowed.into() }
    }

    /// Creates an error about a URL that cannot be used. The URL is repeated only if it cannot contain a password or a
    /// token.
    pub fn url(setting: &str, url: &str, allowed: &str) -> Self {
        if url.contains(['@', '?', '#']) {
            Self::hidden(setting, format!("its value (not shown) is not allowed: {allowed}"))
        } else {
            Self::new(setting, url, allowed)
        }
    }
}

impl std::fmt::Display for SettingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // One line without control characters for a terminal, whatever a file or a library put into it.
        let line = |text: &str| {
            let text = text.replace(char::is_control, " ");
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        match &self.value {
            Some(value) => write!(f, "{}: {value:?} is not allowed: {}", self.setting, line(&self.allowed)),
            None => write!(f, "{}: {}", self.setting, line(&self.allowed)),
        }
    }
}

impl std::error::Error for SettingError {}
