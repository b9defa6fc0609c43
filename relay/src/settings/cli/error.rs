//! The errors of the argument parser, as one line.

use std::fmt;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Why the program ends before it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CliError {
    /// `--help` or `--version`: for standard output, exit code 0.
    Information(String),
    /// A wrong setting: one line for standard error, exit code 1.
    Invalid(String),
}

impl CliError {
    /// Converts the parser's error for this command line.
    pub fn new(command: &Command, error: &clap::Error) -> Self {
        if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
            return Self::Information(error.to_string());
        }
        Self::Invalid(wrong_value(command, error).unwrap_or_else(|| first_line(error)))
    }

    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Information(_) => 0,
            Self::Invalid(_) => 1,
        }
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Information(text) | Self::Invalid(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for CliError {}

/// `VARIABLE (--flag): "value" is not allowed: …`; the parsers of this crate supply the rest.
fn wrong_value(command: &Command, error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    let text = |kind| {
        let Some(ContextValue::String(text)) = error.get(kind) else {
            return None;
        };
        Some(text.as_str())
    };
    let shown = text(ContextKind::InvalidArg)?;
    let flag = shown.split([' ', '[']).next().unwrap_or(shown);
    let value: String = text(ContextKind::InvalidValue)?.chars().take(64).collect();
    let allowed = std::error::Error::source(error)?;
    Some(format!("{}: {value:?} is not allowed: {allowed}", name_of(command, flag)))
}

fn name_of(command: &Command, flag: &str) -> String {
    let long = flag.trim_start_matches('-');
    let argument = command.get_arguments().find(|argument| argument.get_long() == Some(long));
    match argument.and_then(clap::Arg::get_env) {
        Some(variable) => format!("{} ({flag})", variable.to_string_lossy()),
        None => flag.to_owned(),
    }
}

fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or("invalid arguments");
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}
