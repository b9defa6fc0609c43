//! The shape of `worker.yaml`. An unknown key is an error: a misspelt setting must not be silently ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use modelrelay_protocol::secret::Secret;
use modelrelay_protocol::units::HumanDuration;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::SettingError;
use super::multiplexer::FileMultiplexer;

/// `worker.yaml`, unjudged but for its shape.
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
    pub(super) backend: Option<FileBackend>,
    pub(super) models: Option<Vec<String>>,
    pub(super) max_concurrency: Option<i64>,
    pub(super) shutdown_timeout: Option<HumanDuration>,
    pub(super) probe_listen: Option<String>,
    pub(super) drain_token: Hidden<Option<Secret>>,
    pub(super) drain_token_file: Option<PathBuf>,
    pub(super) relay_ca_file: Option<PathBuf>,
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
    #[serde(deserialize_with = "headers")]
    pub(super) headers: Hidden<BTreeMap<String, String>>,
}

/// A value that neither `Debug` nor an error about its type shows.
#[derive(Clone, Default)]
pub(super) struct Hidden<T>(pub(super) T);

impl<T> std::fmt::Debug for Hidden<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl<'de> Deserialize<'de> for Hidden<Option<Secret>> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        // Every scalar is text here, and of a list or a map an error names only the kind.
        Option::<String>::deserialize(from).map(|text| Self(text.map(Secret::new)))
    }
}

/// Texts by name, for the key `key`.
pub(super) fn hidden_texts<'de, D: Deserializer<'de>>(
    from: D,
    key: &str,
) -> Result<Hidden<BTreeMap<String, String>>, D::Error> {
    // The library's error would repeat a scalar.
    let refuse = |_| D::Error::custom(format!("`{key}` must be a map from names to text"));
    BTreeMap::deserialize(from).map(Hidden).map_err(refuse)
}

fn headers<'de, D: Deserializer<'de>>(from: D) -> Result<Hidden<BTreeMap<String, String>>, D::Error> {
    hidden_texts(from, "headers")
}

impl File {
    /// Reads the file's text. An empty file is one without settings.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, SettingError> {
        let empty = text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if empty {
            return Ok(Self::default());
        }
        serde_yaml::from_str(text)
            .map_err(|error| SettingError::new("--config", path.display().to_string(), error.to_string()))
    }
}
