//! The schema of `worker.yaml`'s `multiplexer`. As everywhere in the file, an unknown key is an error.

use std::collections::BTreeMap;
use std::path::PathBuf;

use modelrelay_protocol::units::{ByteSize, HumanDuration, HumanDurationOrZero};
use serde::Deserialize;

use crate::settings::file::Hidden;

/// The block; only its schema is validated.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(in crate::settings) struct FileMultiplexer {
    pub(super) drain_timeout: Option<HumanDurationOrZero>,
    pub(super) load_timeout: Option<HumanDuration>,
    pub(super) hold_budget: Option<HumanDuration>,
    pub(super) max_wait: Option<String>,
    pub(super) min_residency: Option<HumanDurationOrZero>,
    pub(super) linger: Option<String>,
    pub(super) rollback: Option<bool>,
    pub(super) slots: Vec<FileSlot>,
}

impl FileMultiplexer {
    /// The files with the API keys of backends: their content is part of the settings.
    pub(in crate::settings) fn key_files(&self) -> impl Iterator<Item = &PathBuf> {
        self.slots.iter().filter_map(|slot| slot.api_key_file.as_ref())
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct FileSlot {
    pub(super) id: String,
    pub(super) driver: DriverKind,
    pub(super) url: Option<String>,
    pub(super) memory: Option<ByteSize>,
    pub(super) api_key_file: Option<PathBuf>,
    #[serde(default)]
    pub(super) devices: Vec<String>,
    pub(super) default: Option<String>,
    pub(super) return_to_default_after: Option<HumanDurationOrZero>,
    #[serde(default)]
    pub(super) models: Vec<FileModel>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct FileModel {
    pub(super) id: String,
    #[serde(default)]
    pub(super) aliases: Vec<String>,
    pub(super) command: Option<Vec<String>>,
    #[serde(default)]
    pub(super) env: Hidden<Option<BTreeMap<String, String>>>,
    pub(super) url: Option<String>,
    pub(super) memory: Option<ByteSize>,
    pub(super) max_concurrency: Option<i64>,
    pub(super) health_path: Option<String>,
    pub(super) expect_model: Option<String>,
    #[serde(default)]
    pub(super) pin: bool,
    pub(super) idle_ttl: Option<HumanDurationOrZero>,
    pub(super) level: Option<u8>,
    pub(super) deployment: Option<String>,
    pub(super) load: Option<Vec<String>>,
    pub(super) evict: Option<Vec<String>>,
    pub(super) alive: Option<Vec<String>>,
}

/// The kind of driver of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DriverKind {
    Static,
    Process,
    LlamaServer,
    Ollama,
    VllmSleep,
    Kubernetes,
    Sglang,
    Hooks,
}

impl DriverKind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Process => "process",
            Self::LlamaServer => "llama-server",
            Self::Ollama => "ollama",
            Self::VllmSleep => "vllm-sleep",
            Self::Kubernetes => "kubernetes",
            Self::Sglang => "sglang",
            Self::Hooks => "hooks",
        }
    }

    /// Returns the model keys that this driver reads, in addition to those that every driver reads.
    pub(super) fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Static => &["url", "healthPath", "expectModel"],
            Self::Process => &["command", "env", "url", "healthPath", "expectModel"],
            Self::LlamaServer | Self::Ollama => &[],
            Self::VllmSleep => &["command", "env", "url", "healthPath", "expectModel", "level"],
            Self::Kubernetes => &["deployment", "url", "healthPath", "expectModel"],
            Self::Sglang => &["command", "env", "url", "healthPath", "expectModel"],
            Self::Hooks => &["url", "healthPath", "expectModel", "load", "evict", "alive"],
        }
    }
}

impl FileModel {
    /// Returns the given keys that only some drivers read.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static str> {
        [
            ("command", self.command.is_some()),
            ("env", self.env.0.is_some()),
            ("url", self.url.is_some()),
            ("healthPath", self.health_path.is_some()),
            ("expectModel", self.expect_model.is_some()),
            ("level", self.level.is_some()),
            ("deployment", self.deployment.is_some()),
            ("load", self.load.is_some()),
            ("evict", self.evict.is_some()),
            ("alive", self.alive.is_some()),
        ]
        .into_iter()
        .filter_map(|(key, given)| given.then_some(key))
    }
}
