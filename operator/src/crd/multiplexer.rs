//! The `multiplexer` block of a WorkerPool: many models on one GPU, one resident at a time. It is copied to worker.yaml
//! as written, so a field that worker.yaml does not have would stop every worker of the pool.

use std::collections::{BTreeMap, BTreeSet};

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::common::{DurationOrZeroText, DurationText, SizeText};
use super::schema;

/// Serves many models on one GPU, one at a time per slot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Multiplexer {
    /// Maximum time that a swap waits for running requests before it cuts them off; 0s cuts them off at once. Default
    /// 5m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain_timeout: Option<DurationOrZeroText>,
    /// Maximum time that a model may take to load. Default 10m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_timeout: Option<DurationText>,
    /// Maximum time that a worker holds requests of relays that do not support slots. Default 5m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_budget: Option<DurationText>,
    /// Maximum time that a model should wait for its turn under load: auto, or a duration. Default auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^(auto|([0-9]+(ms|s|m|h))+)$"))]
    pub max_wait: Option<String>,
    /// Minimum time that a loaded model stays loaded; 0s disables it. Default 5s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_residency: Option<DurationOrZeroText>,
    /// Time that an idle model stays loaded while requests for others wait: auto, off, or a duration. Default auto.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = r"^(auto|off|([0-9]+(ms|s|m|h))+)$"))]
    pub linger: Option<String>,
    /// If true, a failed load is followed by loading the previous model again. Default true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<bool>,
    /// Slots, each of which holds one model at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub slots: Vec<Slot>,
}

/// Method of loading and evicting a slot's models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// One model that is always loaded.
    Static,
    /// A process per model, which the worker starts and stops.
    Process,
    /// llama-server's router mode.
    LlamaServer,
    /// Ollama.
    Ollama,
    /// vLLM's sleep mode.
    VllmSleep,
    /// A Deployment per model, which the worker scales.
    Kubernetes,
    /// SGLang's memory release.
    Sglang,
    /// Custom commands.
    Hooks,
}

impl Driver {
    /// Returns the driver's name in the resource and in worker.yaml.
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
    /// True if the worker starts programs, which must then be in its own container.
    pub fn runs_commands(&self) -> bool {
        self.slots.iter().any(Slot::runs_commands)
    }

    /// True if the worker scales Deployments.
    pub fn scales_deployments(&self) -> bool {
        self.slots.iter().any(|slot| slot.driver == Driver::Kubernetes)
    }

    /// Returns the Deployments that the worker scales, sorted.
    pub fn deployments(&self) -> BTreeSet<&str> {
        let models = self.slots.iter().filter(|slot| slot.driver == Driver::Kubernetes).flat_map(|slot| &slot.models);
        models.filter_map(|model| model.deployment.as_deref()).collect()
    }

    /// Returns every name that clients may request.
    pub fn models(&self) -> impl Iterator<Item = &String> {
        let models = self.slots.iter().flat_map(|slot| &slot.models);
        models.flat_map(|model| std::iter::once(&model.id).chain(&model.aliases))
    }

    /// Returns the number of requests that one worker can run at once: the sum over slots of the largest model's limit.
    pub fn capacity(&self) -> i32 {
        let largest = |slot: &Slot| slot.models.iter().map(|model| model.max_concurrency.unwrap_or(1)).max();
        self.slots.iter().filter_map(largest).fold(0, i32::saturating_add)
    }
}

impl Multiplexer {
    /// Returns the part that a running worker cannot reload: if it changes, the Pod has to be replaced. A worker
    /// reloads the rest (durations, sizes, limits, names, the default). Sorted, so that the order in a manifest makes
    /// no difference.
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
    /// True if the slot's driver starts programs.
    pub fn runs_commands(&self) -> bool {
        match self.driver {
            Driver::Process | Driver::Hooks => true,
            Driver::VllmSleep | Driver::Sglang => self.models.iter().any(|model| !model.command.is_empty()),
            Driver::Static | Driver::LlamaServer | Driver::Ollama | Driver::Kubernetes => false,
        }
    }
}

/// A place for one loaded model at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.driver in ['llama-server', 'ollama']) == has(self.url)")
    .message("the drivers llama-server and ollama need url of the slot; with other drivers, set url of each model instead").field_path(".url"))]
#[x_kube(validation = Rule::new("!(self.driver in ['static', 'vllm-sleep', 'sglang', 'hooks']) || self.models.all(m, has(m.url))")
    .message("the drivers static, vllm-sleep, sglang and hooks need url of each model").field_path(".models"))]
#[x_kube(validation = Rule::new("!(self.driver in ['llama-server', 'ollama']) || self.models.all(m, !has(m.url) && !has(m.healthPath) && !has(m.expectModel))")
    .message("the drivers llama-server and ollama do not support url, healthPath and expectModel of a model").field_path(".models"))]
#[x_kube(validation = Rule::new("self.driver in ['process', 'vllm-sleep', 'sglang'] || self.models.all(m, !has(m.command) && !has(m.env))")
    .message("only the drivers process, vllm-sleep and sglang support command and env").field_path(".models"))]
#[x_kube(validation = Rule::new("self.driver != 'process' || self.models.all(m, has(m.command))")
    .message("the driver process needs command of each model").field_path(".models"))]
#[x_kube(validation = Rule::new("self.driver == 'vllm-sleep' || self.models.all(m, !has(m.level))")
    .message("only the driver vllm-sleep supports level").field_path(".models"))]
#[x_kube(validation = Rule::new("self.models.all(m, (self.driver == 'kubernetes') == has(m.deployment))")
    .message("the driver kubernetes needs deployment of each model; other drivers do not support it").field_path(".models"))]
#[x_kube(validation = Rule::new("self.models.all(m, (self.driver == 'hooks') == (has(m.load) && has(m.evict)) && (self.driver == 'hooks' || !(has(m.load) || has(m.evict) || has(m.alive))))")
    .message("the driver hooks needs load and evict of each model; other drivers support neither these nor alive").field_path(".models"))]
#[x_kube(validation = Rule::new("!has(self.default) || self.models.exists(m, m.id == self.default)")
    .message("default must be the id of one of the slot's models").field_path(".default"))]
#[x_kube(validation = Rule::new("!has(self.returnToDefaultAfter) || has(self.default)")
    .message("returnToDefaultAfter needs default").field_path(".returnToDefaultAfter"))]
pub struct Slot {
    /// Name of the slot.
    #[schemars(length(min = 1, max = 64))]
    pub id: String,
    /// Method of loading and evicting the slot's models.
    pub driver: Driver,
    /// Address of the backend that all models of the slot share. Drivers llama-server and ollama only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub url: Option<String>,
    /// Memory of the slot. If absent, the models' memory is not checked against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SizeText>,
    /// GPUs of the slot, by index or UUID, whose free memory is measured. Default: all GPUs that the worker sees if no
    /// other slot loads models (`static` does not), else none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 128)))]
    pub devices: Vec<String>,
    /// Model to load at start, and again after returnToDefaultAfter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub default: Option<String>,
    /// Idle time after which the default model is loaded again; 0s disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub return_to_default_after: Option<DurationOrZeroText>,
    /// Models that the slot can load.
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub models: Vec<SlotModel>,
}

/// A model that a slot can load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotModel {
    /// Name of the model in clients' requests, and at the backend unless expectModel is set.
    #[schemars(length(min = 1, max = 256))]
    pub id: String,
    /// Additional names that clients may use; none may be another model's id or alias.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 256)))]
    pub aliases: Vec<String>,
    /// Command that serves the model. ${PORT} is replaced by a free port unless url is set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub command: Vec<String>,
    /// Environment variables of the command.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub env: BTreeMap<String, String>,
    /// Address of the model's backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub url: Option<String>,
    /// Memory that the model needs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SizeText>,
    /// Maximum number of requests that run at once. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub max_concurrency: Option<i32>,
    /// Path that returns 200 when the model is loaded. Default /health.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub health_path: Option<String>,
    /// Name of the model at the backend: requests are sent with this name, and /v1/models must list it. Default: id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub expect_model: Option<String>,
    /// If true, the model is never evicted.
    #[serde(default)]
    pub pin: bool,
    /// Idle time after which the model is evicted; 0s disables it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_ttl: Option<DurationOrZeroText>,
    /// Level of vLLM's sleep mode, the same for all models of a slot. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2))]
    pub level: Option<i32>,
    /// Deployment in the pool's namespace that serves the model. Driver kubernetes only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub deployment: Option<String>,
    /// Command that loads the model. Driver hooks only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub load: Vec<String>,
    /// Command that evicts the model. Driver hooks only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub evict: Vec<String>,
    /// Command that exits with 0 while the model is loaded. Driver hooks only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128), inner(length(max = 4096)))]
    pub alive: Vec<String>,
}
