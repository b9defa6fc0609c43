//! The output of the log: standard error, or the file of a Windows service, as text or as JSON, filtered by
//! `LOG_LEVEL`.
//!
//! Colours are used only on a terminal: an escape sequence in a log file breaks every search for a phrase.

use std::fmt;
use std::str::FromStr;

use modelrelay_platform::log::{self, LineFields};
use tracing::subscriber::{SetGlobalDefaultError, set_global_default};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer};

use super::journal::Journal;

/// The format of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Human-readable text.
    #[default]
    Text,
    /// One object per line, with the event's fields at its top level.
    Json,
}

/// A validated `LOG_LEVEL`: a level, or directives such as `info,modelrelay_relay=debug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFilter(String);

/// Starts logging for the whole process, including the returned journal. An error if logging was started before.
///
/// Only `tracing`'s events are logged. Records of the older `log` crate, which some libraries use, are dropped on
/// purpose: the WebSocket library writes whole frames there at its lowest level, and frames contain prompts and
/// responses.
pub fn init(filter: &LogFilter, format: LogFormat) -> Result<Journal, SetGlobalDefaultError> {
    let journal = Journal::default();
    let registry = tracing_subscriber::registry().with(journal.clone().with_filter(filter_fn(Journal::keeps)));
    let lines = tracing_subscriber::fmt::layer().fmt_fields(LineFields::new());
    let lines = lines.with_writer(log::start()).with_ansi(log::is_terminal());
    match format {
        LogFormat::Text => set_global_default(registry.with(lines.with_filter(filter.to_env_filter())))?,
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true).with_current_span(false).with_span_list(false);
            set_global_default(registry.with(lines.with_filter(filter.to_env_filter())))?;
        }
    }
    Ok(journal)
}

impl LogFilter {
    fn to_env_filter(&self) -> EnvFilter {
        // Parsed before, in `from_str`; a lossy second parse cannot lose anything.
        EnvFilter::new(&self.0)
    }
}

impl Default for LogFilter {
    fn default() -> Self {
        Self("info".to_owned())
    }
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for LogFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
        let allowed =
            || "error, warn, info, debug, trace, or directives such as info,modelrelay_relay=debug".to_owned();
        let text = text.trim();
        // Text that is not a level would be parsed as a target and silence everything else.
        let known = |part: &str| part.contains('=') || LEVELS.contains(&part.trim().to_ascii_lowercase().as_str());
        if text.is_empty() || text.len() > 1024 || !text.split(',').any(known) {
            return Err(allowed());
        }
        let text = with_own_target(text);
        EnvFilter::try_new(&text).map_err(|_| allowed())?;
        Ok(Self(text))
    }
}

/// Replaces the target of the published relay with this one's: its directives would silence all lines of this program.
fn with_own_target(directives: &str) -> String {
    let own = |directive: &str| match directive.trim().strip_prefix("modelrelay_server") {
        Some(rest) if rest.is_empty() || rest.starts_with(['=', ':', '[']) => format!("modelrelay_relay{rest}"),
        Some(_) | None => directive.to_owned(),
    };
    directives.split(',').map(own).collect::<Vec<_>>().join(",")
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("text or json".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_directives_are_accepted() {
        for text in [
            "error",
            "WARN",
            "info",
            "debug",
            "trace",
            "off",
            "info,modelrelay_relay=debug",
            "modelrelay_relay::http=trace",
        ] {
            assert!(text.parse::<LogFilter>().is_ok(), "{text}");
        }
    }

    #[test]
    fn directives_of_published_relay_apply_to_this_one() {
        for (given, meant) in [
            ("modelrelay_server=debug", "modelrelay_relay=debug"),
            ("info,modelrelay_server::http=trace", "info,modelrelay_relay::http=trace"),
            ("modelrelay_servers=debug", "modelrelay_servers=debug"),
        ] {
            assert_eq!(given.parse::<LogFilter>().map(|filter| filter.to_string()), Ok(meant.to_owned()));
        }
    }

    #[test]
    fn unknown_level_is_rejected() {
        for text in ["", "loud", "verbose", "loud=noise", "info,,="] {
            assert!(text.parse::<LogFilter>().is_err(), "{text}");
        }
    }

    #[test]
    fn log_format_is_text_or_json() {
        assert_eq!("JSON".parse(), Ok(LogFormat::Json));
        assert!("xml".parse::<LogFormat>().is_err());
    }
}
