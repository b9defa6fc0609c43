//! The shape of `worker.yaml`. An unknown key is an error: a misspelt setting must not be silently ignored.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use modelrelay_protocol::units::HumanDuration;
use serde::Deserialize;

use super::SettingError;

/// `worker.yaml`, unjudged but for its shape.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct File {
    pub(super) relay: Option<String>,
    pub(super) provider: Option<String>,
    pub(super) worker_secret: Option<String>,
    pub(super) worker_secret_file: Option<PathBuf>,
    pub(super) name: Option<String>,
    pub(super) pool: Option<String>,
    pub(super) backend: FileBackend,
    pub(super) models: Option<Vec<String>>,
    pub(super) max_concurrency: Option<i64>,
    pub(super) shutdown_timeout: Option<HumanDuration>,
    pub(super) probe_listen: Option<String>,
    pub(super) drain_token: Option<String>,
    pub(super) drain_token_file: Option<PathBuf>,
    pub(super) relay_ca_file: Option<PathBuf>,
    pub(super) log_level: Option<String>,
    pub(super) log_format: Option<String>,
    pub(super) multiplexer: Option<serde_yaml::Value>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct FileBackend {
    pub(super) url: Option<String>,
    pub(super) engine: Option<String>,
    pub(super) api_key_file: Option<PathBuf>,
    pub(super) headers: BTreeMap<String, String>,
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
