//! The `multiplexer` block of a WorkerPool: many models on one GPU, one resident at a time. The same shape as in worker.yaml.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::common::{DurationOrZeroText, DurationText, SizeText};
use super::schema;

/// Many models on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Multiplexer {
    /// How long running requests may take before a swap cuts them; 0s cuts them at once. Default 30s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_timeout: Option<DurationOrZeroText>,
    /// How long a model may take to load. Default 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_timeout: Option<DurationText>,
    /// How long requests are held for relays that keep no queue themselves. Default 5m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_budget: Option<DurationText>,
    /// Longest wait for another model under load: auto, or a duration. Default auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^(auto|([0-9]+(ms|s|m|h))+)$"))]
    pub max_wait: Option<String>,
    /// How long a loaded model stays at least. Default 5s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_residency: Option<DurationText>,
    /// How long an idle model is kept while others wait: auto, off, or a duration. Default auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^(auto|off|([0-9]+(ms|s|m|h))+)$"))]
    pub linger: Option<String>,
    /// Load the previous model again when a load fails. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<bool>,
    /// Slots: each holds one model at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub slots: Vec<Slot>,
}

/// What loads and evicts the models of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// One model that is always there.
    Static,
    /// A command per model, started and stopped.
    Process,
    /// llama-server's router mode.
    LlamaServer,
    /// Ollama.
    Ollama,
    /// vLLM's sleep mode.
    VllmSleep,
    /// A Deployment per model, scaled.
    Kubernetes,
    /// SGLang's memory release.
    Sglang,
    /// Commands of one's own.
    Hooks,
}

/// Holds one model at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Slot {
    /// Its name.
    #[schemars(length(min = 1, max = 64))]
    pub id: String,
    /// What loads and evicts its models.
    pub driver: Driver,
    /// Address of the backend that all its models share: drivers llama-server and ollama.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub url: Option<String>,
    /// What it can hold; not checked without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SizeText>,
    /// Loaded at start, and again after returnToDefaultAfter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub default: Option<String>,
    /// How long it idles before the default is loaded again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub return_to_default_after: Option<DurationText>,
    /// Its models.
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub models: Vec<SlotModel>,
}

/// A model that a slot can hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotModel {
    /// What clients, and the backend, call it.
    #[schemars(length(min = 1, max = 256))]
    pub id: String,
    /// Further names that clients may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 256)))]
    pub aliases: Vec<String>,
    /// Command that serves it; ${PORT} is a free port unless url is given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub command: Vec<String>,
    /// Environment of the command.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub env: BTreeMap<String, String>,
    /// Address of its backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub url: Option<String>,
    /// What it needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SizeText>,
    /// Requests to run at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub max_concurrency: Option<i32>,
    /// Path that answers 200 when it is loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub health_path: Option<String>,
    /// What the backend must list in /v1/models. Default: id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub expect_model: Option<String>,
    /// Never evict it.
    #[serde(default)]
    pub pin: bool,
    /// Evict it after it idled for so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl: Option<DurationText>,
    /// Depth of vLLM's sleep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2))]
    pub level: Option<i32>,
    /// Deployment that serves it, in the pool's namespace: driver kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub deployment: Option<String>,
    /// Command that loads it: driver hooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub load: Vec<String>,
    /// Command that evicts it: driver hooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub evict: Vec<String>,
    /// Command that ends with 0 while it is loaded: driver hooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub alive: Vec<String>,
}
