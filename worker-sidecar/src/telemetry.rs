//! Log lines, on standard error, or in the file of a Windows service. Logs never contain a prompt, a response, a key, a
//! secret or a query string.

use modelrelay_platform::log::{self, LineFields};
use tracing::subscriber::set_global_default;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// A validated `LOG_LEVEL`: a level, or directives such as `info,modelrelay_worker=debug`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter(String);

impl Default for LogFilter {
    fn default() -> Self {
        Self("info".to_owned())
    }
}

impl LogFilter {
    /// The values that [`LogFilter::parse`] accepts, in human-readable form.
    pub const ALLOWED: &str = "error, warn, info, debug, trace, or directives such as info,modelrelay_worker=debug";

    /// Parses a level or directives. A word that is no level would be treated as a target and silence everything else,
    /// so it is rejected.
    pub fn parse(text: &str) -> Option<Self> {
        const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
        let known = |part: &str| part.contains('=') || LEVELS.contains(&part.trim().to_ascii_lowercase().as_str());
        let text = text.trim();
        (text.split(',').all(known) && EnvFilter::try_new(text).is_ok()).then(|| Self(text.to_owned()))
    }
}

/// Starts logging for the process. A second call changes nothing.
///
/// Only `tracing`'s events are logged. Records of the older `log` crate are dropped on purpose: at their lowest level
/// the WebSocket library writes whole frames there, which contain prompts and responses, and the secret of the
/// handshake.
pub fn init(filter: &LogFilter, format: LogFormat) {
    let registry = tracing_subscriber::registry().with(EnvFilter::new(&filter.0));
    let lines = tracing_subscriber::fmt::layer()
        .fmt_fields(LineFields::new())
        .with_writer(log::start())
        .with_target(false)
        // An escape sequence in a log file breaks searches for a phrase.
        .with_ansi(log::is_terminal());
    let _ = match format {
        LogFormat::Text => set_global_default(registry.with(lines)),
        LogFormat::Json => set_global_default(registry.with(lines.json().flatten_event(true).with_current_span(false))),
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_filter_accepts_only_levels_and_directives() {
        for text in ["error", "WARN", "info,modelrelay_worker=debug", "modelrelay_worker::forward=trace"] {
            assert!(LogFilter::parse(text).is_some(), "{text}");
        }
        for text in ["", "loud", "loud=noise", "info,verbose"] {
            assert!(LogFilter::parse(text).is_none(), "{text}");
        }
    }
}
