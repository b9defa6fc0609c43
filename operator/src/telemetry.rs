//! The log, which goes to standard error, and metrics.

pub mod metrics;

use tracing::subscriber::{SetGlobalDefaultError, set_global_default};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;

use crate::crd::LogFormat;

/// The reason that logging could not be started.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The level is invalid.
    #[error("--log-level: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// A global subscriber is already set.
    #[error(transparent)]
    Started(#[from] SetGlobalDefaultError),
}

/// Starts logging for the whole process.
pub fn init(level: &str, format: LogFormat) -> Result<(), TelemetryError> {
    let registry = tracing_subscriber::registry().with(EnvFilter::try_new(level)?);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    match format {
        LogFormat::Text => set_global_default(registry.with(lines))?,
        LogFormat::Json => {
            let lines = lines.json().flatten_event(true).with_current_span(false).with_span_list(false);
            set_global_default(registry.with(lines))?;
        }
    }
    Ok(())
}
