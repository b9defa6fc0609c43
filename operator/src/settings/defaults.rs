//! Defaults for fields that Providers and WorkerPools omit, from the chart's values: `--defaults`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::crd::LogFormat;
use crate::crd::common::RawObject;

/// The file's content.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Defaults {
    /// Defaults for relays.
    pub relay: RelayDefaults,
    /// Defaults for workers.
    pub worker: WorkerDefaults,
}

/// Defaults for relays.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RelayDefaults {
    /// The image, with the tag of the operator's own release.
    pub image: String,
    /// The pull policy; the cluster's default if absent.
    #[serde(default)]
    pub image_pull_policy: Option<String>,
    /// Pull secrets, in the namespaces of the Providers.
    #[serde(default)]
    pub image_pull_secrets: Vec<NamedRef>,
    /// Requests and limits.
    #[serde(default)]
    pub resources: RawObject,
    /// Node labels to select.
    #[serde(default)]
    pub node_selector: BTreeMap<String, String>,
    /// Taints to tolerate.
    #[serde(default)]
    pub tolerations: Vec<Value>,
    /// Affinity.
    #[serde(default)]
    pub affinity: RawObject,
    /// Topology spread constraints.
    #[serde(default)]
    pub topology_spread_constraints: Vec<Value>,
    /// Priority class.
    #[serde(default)]
    pub priority_class_name: Option<String>,
    /// Log level or directives; info if absent.
    #[serde(default)]
    pub log_level: Option<String>,
    /// Text or JSON; JSON if absent.
    #[serde(default)]
    pub log_format: Option<LogFormat>,
    /// Peers that may connect to the admin port, in addition to the operator.
    #[serde(default)]
    pub metrics_from: Vec<Value>,
    /// Omits user and group ids from Pods, because the cluster assigns them.
    #[serde(default)]
    pub omit_ids: bool,
    /// The ClusterRoleBinding of the accounts that may create TokenReviews. Without one, no relay may.
    #[serde(default)]
    pub token_review_binding: Option<String>,
}

/// Defaults for workers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerDefaults {
    /// The image, with the tag of the operator's own release.
    pub image: String,
    /// The pull policy; the cluster's default if absent.
    #[serde(default)]
    pub image_pull_policy: Option<String>,
    /// Pull secrets, in the namespaces of the pools.
    #[serde(default)]
    pub image_pull_secrets: Vec<NamedRef>,
    /// Requests and limits.
    #[serde(default)]
    pub resources: RawObject,
    /// Log level or directives; info if absent.
    #[serde(default)]
    pub log_level: Option<String>,
    /// Text or JSON; JSON if absent.
    #[serde(default)]
    pub log_format: Option<LogFormat>,
    /// Omits user and group ids from containers, because the cluster assigns them.
    #[serde(default)]
    pub omit_ids: bool,
}

impl WorkerDefaults {
    /// Returns the defaults for a namespace in which the cluster does or does not assign ids.
    pub fn for_namespace(&self, assigns_ids: bool) -> Cow<'_, Self> {
        if self.omit_ids || !assigns_ids {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Self { omit_ids: true, ..self.clone() })
    }
}

/// A reference by name, as in `imagePullSecrets`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NamedRef {
    /// The name.
    pub name: String,
}

/// The reason that the file was rejected.
#[derive(Debug, thiserror::Error)]
pub enum DefaultsError {
    /// The file does not exist or cannot be read.
    #[error("--defaults: {path}: failed to read the file: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file contains something that is not understood.
    #[error("--defaults: {path}: {source}")]
    Invalid {
        /// The file.
        path: String,
        /// The position and what was expected there.
        source: serde_yaml::Error,
    },
    /// An image is missing.
    #[error("--defaults: {path}: {field}: must be an image, such as registry.example/modelrelay-relay:1.2.3")]
    NoImage {
        /// The file.
        path: String,
        /// The field.
        field: &'static str,
    },
}

impl Defaults {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self, DefaultsError> {
        let shown = || path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| DefaultsError::Unreadable { path: shown(), source })?;
        Self::parse(&shown(), &text)
    }

    fn parse(path: &str, text: &str) -> Result<Self, DefaultsError> {
        let path = || path.to_owned();
        let defaults: Self =
            serde_yaml::from_str(text).map_err(|source| DefaultsError::Invalid { path: path(), source })?;
        for (field, image) in [("relay.image", &defaults.relay.image), ("worker.image", &defaults.worker.image)] {
            if image.trim().is_empty() {
                return Err(DefaultsError::NoImage { path: path(), field });
            }
        }
        Ok(defaults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_images_are_required() {
        let defaults = Defaults::parse("d.yaml", "relay: {image: r:1}\nworker: {image: w:1}\n").unwrap();
        assert_eq!((defaults.relay.image.as_str(), defaults.worker.image.as_str()), ("r:1", "w:1"));
        assert_eq!(defaults.relay.log_format, None);
    }

    #[test]
    fn empty_image_is_rejected_by_name() {
        let error = Defaults::parse("d.yaml", "relay: {image: r:1}\nworker: {image: ''}\n").unwrap_err();
        assert!(error.to_string().starts_with("--defaults: d.yaml: worker.image: must be an image"), "{error}");
    }

    #[test]
    fn unknown_key_is_rejected_with_its_path() {
        let error = Defaults::parse("d.yaml", "relay: {image: r:1, imag: x}\nworker: {image: w:1}\n").unwrap_err();
        assert!(error.to_string().contains("unknown field `imag`"), "{error}");
    }
}
