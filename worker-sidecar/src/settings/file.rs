//! The schema of `worker.yaml`. An unknown key is an error: a misspelt setting must not be silently ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use modelrelay_protocol::secret::Secret;
use modelrelay_protocol::units::{ByteSize, HumanDuration};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::SettingError;
use super::multiplexer::FileMultiplexer;

/// `worker.yaml`; only its schema is validated.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct File {
    pub(super) relay: Option<String>,
    pub(super) provider: Option<String>,
    pub(super) worker_secret: Hidden<Option<Secret>>,
    pub(super) worker_secret_file: Option<PathBuf>,
    pub(super) worker_token_file: Option<PathBuf>,
    pub(super) name: Option<String>,
    pub(super) pool: Option<String>,
    pub(super) zone: Option<String>,
    pub(super) cluster: Option<String>,
    pub(super) backend: Option<FileBackend>,
    pub(super) models: Option<Vec<String>>,
    pub(super) model_details: Option<BTreeMap<String, Map<String, Value>>>,
    pub(super) max_concurrency: Option<i64>,
    pub(super) max_buffered_bytes: Option<ByteSize>,
    pub(super) shutdown_timeout: Option<HumanDuration>,
    pub(super) probe_listen: Option<String>,
    pub(super) drain_token: Hidden<Option<Secret>>,
    pub(super) drain_token_file: Option<PathBuf>,
    pub(super) relay_ca_file: Option<PathBuf>,
    pub(super) relay_headers: Hidden<Option<BTreeMap<String, String>>>,
    pub(super) relay_headers_file: Option<PathBuf>,
    pub(super) otlp_endpoint: Option<String>,
    pub(super) log_level: Option<String>,
    pub(super) log_format: Option<String>,
    pub(super) multiplexer: Option<FileMultiplexer>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct FileBackend {
    pub(super) url: Option<String>,
    pub(super) engine: Option<String>,
    pub(super) api_key_file: Option<PathBuf>,
    pub(super) headers: Hidden<Option<BTreeMap<String, String>>>,
}

/// A value that `Debug` does not show.
#[derive(Clone, Default)]
pub(super) struct Hidden<T>(pub(super) T);

impl<T> std::fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl<'de> Deserialize<'de> for Hidden<Option<Secret>> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Option::<String>::deserialize(from).map(|text| Self(text.map(Secret::new)))
    }
}

impl<'de> Deserialize<'de> for Hidden<Option<BTreeMap<String, String>>> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Option::deserialize(from).map(Self)
    }
}

impl File {
    /// Parses the file's text. An empty file has no settings.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, SettingError> {
        let empty = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if empty {
            return Ok(Self::default());
        }
        serde_yaml::from_str(text).map_err(|error| {
            SettingError::new("--config", path.display().to_string(), without_values(&error.to_string()))
        })
    }
}

/// Returns the library's error without the values that it found: a value in the wrong place may be a secret, or contain
/// one.
fn without_values(message: &str) -> String {
    for (before, after) in [("invalid type: ", ", expected "), ("invalid value: ", ", expected ")] {
        if let (Some(start), Some(end)) = (message.find(before), message.rfind(after)) {
            let start = start + before.len();
            // `string "…"`, `integer `…``: the kind comes first.
            let kind = message.get(start..end).unwrap_or_default().split(['"', '`']).next().unwrap_or_default();
            let (found, expected) = (kind.trim_end(), in_yaml(&message[end + after.len()..]));
            return format!("{}{found}{after}{expected}", &message[..start]);
        }
    }
    for before in ["unknown field `", "unknown variant `"] {
        if let Some((place, name)) = message.split_once(before) {
            let end = name.rfind("`, expected").or_else(|| name.find("`, there are no")).unwrap_or(name.len());
            // A key without the blank after its colon, or a whole line: the text after the name is a value.
            let shown = name[..end].split([':', '=', ' ', '\t', '\n']).next().unwrap_or_default();
            return format!("{place}{before}{shown}{}", &name[end..]);
        }
    }
    message.to_owned()
}

/// Translates the library's names for types into those of YAML; the position, which the library usually knows, follows
/// them.
fn in_yaml(expected: &str) -> String {
    let (shape, at) = expected.split_at(expected.find(" at line ").unwrap_or(expected.len()));
    let shape = match shape {
        "a sequence" => "a list",
        of_settings if of_settings.starts_with("struct ") => "a map",
        other => other,
    };
    format!("{shape}{at}")
}
