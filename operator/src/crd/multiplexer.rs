//! The `multiplexer` block of a WorkerPool: many models on one GPU, one resident at a time. The same shape as in worker.yaml,
//! which it becomes as it is written here: a field that worker.yaml does not know would stop every worker of the pool.

use std::collections::{BTreeMap, BTreeSet};

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::common::{DurationOrZeroText, DurationText, SizeText};
use super::schema;

/// Many models on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Multiplexer {
    /// How long running requests may take before a swap cuts them; 0s cuts them at once. Default 5m.
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
    /// How long a loaded model stays at least; 0s turns it off. Default 5s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_residency: Option<DurationOrZeroText>,
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

impl Driver {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
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
}

impl Multiplexer {
    /// Whether the worker starts programs itself, which must be in its own container then.
    pub fn runs_commands(&self) -> bool {
        self.slots.iter().any(Slot::runs_commands)
    }

    /// Whether the worker scales Deployments.
    pub fn scales_deployments(&self) -> bool {
        self.slots.iter().any(|slot| slot.driver == Driver::Kubernetes)
    }

    /// The Deployments that it scales, sorted.
    pub fn deployments(&self) -> BTreeSet<&str> {
        let models = self.slots.iter().filter(|slot| slot.driver == Driver::Kubernetes).flat_map(|slot| &slot.models);
        models.filter_map(|model| model.deployment.as_deref()).collect()
    }

    /// Every name that clients may ask for.
    pub fn models(&self) -> impl Iterator<Item = &String> {
        let models = self.slots.iter().flat_map(|slot| &slot.models);
        models.flat_map(|model| std::iter::once(&model.id).chain(&model.aliases))
    }

    /// Requests that one worker runs at once: each slot holds one model, at most the one that takes the most.
    pub fn capacity(&self) -> i32 {
        let largest = |slot: &Slot| slot.models.iter().map(|model| model.max_concurrency.unwrap_or(1)).max();
        self.slots.iter().filter_map(largest).fold(0, i32::saturating_add)
    }
}

impl Multiplexer {
    /// The part that a running worker cannot take over: with another, its Pod has to be replaced. The rest (times, sizes, numbers,
    /// names, which model comes first) it reads again. Sorted, because a manifest that is only written in another order is the same.
    pub fn fixed(&self) -> Self {
        let model = |model: &SlotModel| SlotModel {
            aliases: Vec::new(),
            memory: None,
            max_concurrency: None,
            pin: false,
            idle_ttl: None,
            ..model.clone()
        };
        let slot = |slot: &Slot| {
            let mut models: Vec<SlotModel> = slot.models.iter().map(model).collect();
            models.sort_by(|one, other| one.id.cmp(&other.id));
            Slot { memory: None, default: None, return_to_default_after: None, models, ..slot.clone() }
        };
        let mut slots: Vec<Slot> = self.slots.iter().map(slot).collect();
        slots.sort_by(|one, other| one.id.cmp(&other.id));
        Self { slots, ..Self::default() }
    }
}

impl Slot {
    /// Whether its driver starts programs.
    pub fn runs_commands(&self) -> bool {
        match self.driver {
            Driver::Process | Driver::Hooks => true,
            Driver::VllmSleep | Driver::Sglang => self.models.iter().any(|model| !model.command.is_empty()),
            Driver::Static | Driver::LlamaServer | Driver::Ollama | Driver::Kubernetes => false,
        }
    }
}

/// Holds one model at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.driver in ['llama-server', 'ollama']) == has(self.url)")
    .message("url of a slot is needed by the drivers llama-server and ollama, and by no other: those have it at each model").field_path(".url"))]
#[x_kube(validation = Rule::new("!(self.driver in ['static', 'vllm-sleep', 'sglang', 'hooks']) || self.models.all(m, has(m.url))")
    .message("the drivers static, vllm-sleep, sglang and hooks need url at each model").field_path(".models"))]
#[x_kube(validation = Rule::new("!(self.driver in ['llama-server', 'ollama']) || self.models.all(m, !has(m.url) && !has(m.healthPath) && !has(m.expectModel))")
    .message("the drivers llama-server and ollama read no url, healthPath and expectModel of a model").field_path(".models"))]
#[x_kube(validation = Rule::new("self.driver in ['process', 'vllm-sleep', 'sglang'] || self.models.all(m, !has(m.command) && !has(m.env))")
    .message("command and env are for the drivers process, vllm-sleep and sglang").field_path(".models"))]
#[x_kube(validation = Rule::new("self.driver != 'process' || self.models.all(m, has(m.command))")
    .message("the driver process needs command at each model").field_path(".models"))]
#[x_kube(validation = Rule::new("self.driver == 'vllm-sleep' || self.models.all(m, !has(m.level))")
    .message("level is for the driver vllm-sleep").field_path(".models"))]
#[x_kube(validation = Rule::new("self.models.all(m, (self.driver == 'kubernetes') == has(m.deployment))")
    .message("deployment is needed by the driver kubernetes, and read by no other").field_path(".models"))]
#[x_kube(validation = Rule::new("self.models.all(m, (self.driver == 'hooks') == (has(m.load) && has(m.evict)) && (self.driver == 'hooks' || !(has(m.load) || has(m.evict) || has(m.alive))))")
    .message("load and evict are needed by the driver hooks; they and alive are read by no other").field_path(".models"))]
#[x_kube(validation = Rule::new("!has(self.default) || self.models.exists(m, m.id == self.default)")
    .message("default must be the id of one of the slot's models").field_path(".default"))]
#[x_kube(validation = Rule::new("!has(self.returnToDefaultAfter) || has(self.default)")
    .message("returnToDefaultAfter needs a default to return to").field_path(".returnToDefaultAfter"))]
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
    /// Its GPUs, by index or UUID, for measuring what is free. Default: all that the worker sees if no other slot loads
    /// models (`static` does not), else nothing is measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 128)))]
    pub devices: Vec<String>,
    /// Loaded at start, and again after returnToDefaultAfter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub default: Option<String>,
    /// How long it idles before the default is loaded again; 0s turns it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub return_to_default_after: Option<DurationOrZeroText>,
    /// Its models.
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub models: Vec<SlotModel>,
}

/// A model that a slot can hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotModel {
    /// What clients call it, and the backend too unless expectModel says otherwise.
    #[schemars(length(min = 1, max = 256))]
    pub id: String,
    /// Further names that clients may use; none may be another model's id or alias.
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
    /// Requests to run at once. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub max_concurrency: Option<i32>,
    /// Path that answers 200 when it is loaded. Default /health.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub health_path: Option<String>,
    /// The backend's own name for it: requests ask for that, and /v1/models must list it. Default: id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub expect_model: Option<String>,
    /// Never evict it.
    #[serde(default)]
    pub pin: bool,
    /// Evict it after it idled for so long; 0s turns it off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl: Option<DurationOrZeroText>,
    /// Depth of vLLM's sleep, the same for all models of a slot. Default 1.
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
