//! The settings of the usage ledger.

use std::path::{Path, PathBuf};

use crate::settings::cli::Args;

/// The default number of days: a year and a month, so that a month can be compared with the same one a year ago.
pub const USAGE_DAYS: u32 = 400;
/// The most days: ten years.
pub const MOST_USAGE_DAYS: u32 = 3660;

/// The file of a relay whose keys are in a file.
const DEFAULT_NAME: &str = "modelrelay-usage.jsonl";

/// The settings of the usage ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageSettings {
    /// The file; `None` to keep usage in memory only.
    pub file: Option<PathBuf>,
    /// True if no setting names the file. A relay starts without it if it cannot be written.
    pub is_default_file: bool,
    /// The number of days to keep, including the present one.
    pub days: u32,
}

impl UsageSettings {
    /// A relay with a place for its keys has one for their usage too. A mounted Secret is no such place.
    pub(super) fn of(args: &Args) -> Self {
        let has_place = args.api_keys_file_given && args.api_keys_secret.as_ref().is_none_or(|name| name.0.is_none());
        let (file, is_default_file) = match &args.usage_file {
            Some(path) => (path.0.clone(), false),
            None if has_place => (Some(next_to(&args.api_keys_file)), true),
            None => (None, false),
        };
        Self { file, is_default_file, days: args.usage_days }
    }
}

fn next_to(keys: &Path) -> PathBuf {
    keys.with_file_name(DEFAULT_NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(arguments: &[&str]) -> (Option<String>, bool) {
        let arguments = ["modelrelay-relay", "--worker-secret", "0123456789abcdef"].iter().chain(arguments);
        let usage = UsageSettings::of(&Args::load_from(arguments).expect("valid"));
        (usage.file.map(|path| path.display().to_string()), usage.is_default_file)
    }

    #[test]
    fn file_is_next_to_stored_keys_unless_set() {
        assert_eq!(file(&[]), (None, false));
        let default = (Some("/data/modelrelay-usage.jsonl".to_owned()), true);
        assert_eq!(file(&["--api-keys-file", "/data/keys.json"]), default);
        assert_eq!(file(&["--api-keys-file", "/data/keys.json", "--api-keys-secret", ""]), default);
        assert_eq!(file(&["--api-keys-file", "/data/keys.json", "--api-keys-secret", "local"]), (None, false));
        assert_eq!(file(&["--api-keys-file", "/data/keys.json", "--usage-file", ""]), (None, false));
        assert_eq!(file(&["--usage-file", "usage.jsonl"]), (Some("usage.jsonl".to_owned()), false));
    }
}
