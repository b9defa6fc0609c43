//! `WorkerPool`: how the workers of a Provider come to be.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::common::{DurationText, LogFormat, RawObject, SecretKeyRef};
use super::multiplexer::Multiplexer;
use super::schema;

/// How the workers of a Provider come to be: injected into labelled Pods, run from a template, or standing alone.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "modelrelay.io",
    version = "v1alpha1",
    kind = "WorkerPool",
    namespaced,
    plural = "workerpools",
    shortname = "wp",
    category = "modelrelay",
    status = "WorkerPoolStatus",
    derive = "PartialEq",
    doc = "How the workers of a Provider come to be: injected into labelled Pods, run from a template, or standing alone.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Provider", type_ = "string", json_path = ".spec.provider"),
    printcolumn(name = "Mode", type_ = "string", json_path = ".status.mode"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(name = "Connected", type_ = "integer", json_path = ".status.connected"),
    printcolumn(name = "Models", type_ = "integer", json_path = ".status.modelCount"),
    printcolumn(name = "Slots", type_ = "integer", json_path = ".status.slotCount", priority = 1),
    printcolumn(name = "Quarantined", type_ = "integer", json_path = ".status.quarantined", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    selectable = ".spec.provider",
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= 52")
        .message("the name becomes a label's value: at most 52 of a-z, 0-9 and -, neither the first nor the last a -")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("self.metadata.name != 'none'")
        .message("none is what a Pod's label says to stay out of every pool")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.template) == has(oldSelf.template) && has(self.standalone) == has(oldSelf.standalone)")
    .message("a pool stays what it is (injecting, template or standalone); make another pool"))]
#[x_kube(validation = Rule::new("!(has(self.template) && has(self.standalone))")
    .message("template and standalone exclude each other"))]
#[x_kube(validation = Rule::new("!has(self.backend) || !has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.size() == 0")
    .message("backend and multiplexer.slots exclude each other: each slot says where its backend is"))]
#[x_kube(validation = Rule::new("!has(self.backend) || !has(self.backend.url) || has(self.standalone)")
    .message("backend.url is for standalone pools; beside a container use backend.port").field_path(".backend"))]
#[x_kube(validation = Rule::new("!has(self.standalone) || (has(self.backend) && has(self.backend.url)) || (has(self.multiplexer) && has(self.multiplexer.slots))")
    .message("a standalone pool needs backend.url, or multiplexer.slots").field_path(".standalone"))]
#[x_kube(validation = Rule::new("!has(self.scaling) || (has(self.template) && self.template.kind == 'Deployment')")
    .message("scaling needs a template of kind Deployment").field_path(".scaling"))]
#[x_kube(validation = Rule::new("!has(self.replicas) || has(self.standalone) || (has(self.template) && self.template.kind == 'Deployment')")
    .message("replicas needs standalone, or a template of kind Deployment; injected Pods are scaled where they come from").field_path(".replicas"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || has(self.standalone) || self.multiplexer.slots.all(s, s.driver != 'kubernetes')")
    .message("the driver kubernetes needs standalone").field_path(".multiplexer"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.size() == 0 || self.models == ['*']")
    .message("models and multiplexer.slots exclude each other: the models are those of the slots").field_path(".models"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.size() == 0 || !has(self.maxConcurrency)")
    .message("maxConcurrency and multiplexer.slots exclude each other: each model of a slot has its own").field_path(".maxConcurrency"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || has(self.template) || (has(self.sidecar.image) && self.sidecar.image != '') || self.multiplexer.slots.all(s, !(s.driver in ['process', 'hooks']) && s.models.all(m, !has(m.command)))")
    .message("the drivers process and hooks, and command, run programs in the worker's container: they need template, or sidecar.image with an image that has these programs").field_path(".multiplexer"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.all(s, s.driver != 'kubernetes') || ((!has(self.replicas) || self.replicas <= 1) && (!has(self.standalone) || !has(self.standalone.replicas) || self.standalone.replicas <= 1))")
    .message("one worker scales the Deployments of the driver kubernetes: replicas is 0 or 1").field_path(".multiplexer"))]
pub struct WorkerPoolSpec {
    /// Provider, in the same namespace, that the workers serve.
    #[schemars(length(min = 1, max = 52))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("provider is immutable; make another pool"))]
    pub provider: String,

    /// The backend beside each worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<Backend>,

    /// Models to advertise; * asks the backend.
    #[serde(default = "any_model")]
    #[schemars(length(min = 1, max = 256), inner(length(min = 1, max = 256)))]
    pub models: Vec<String>,

    /// Requests that one backend runs at once. Default 16. With multiplexer.slots, each model has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub max_concurrency: Option<i32>,

    /// How long running requests may take to finish when a Pod stops; raises its terminationGracePeriodSeconds as needed.
    #[serde(default = "one_minute")]
    pub shutdown_timeout: DurationText,

    /// What its workers show the relays: the Provider's secret, or the token of their Pod's ServiceAccount, which the Provider lists in
    /// workerServiceAccounts; standalone workers without the driver kubernetes have that of the namespace, default. Counts for new Pods.
    #[serde(default, skip_serializing_if = "Credential::is_default")]
    pub credential: Credential,

    /// How the worker is put into Pods.
    #[serde(default)]
    pub inject_mode: InjectMode,

    /// The worker's container.
    #[serde(default)]
    pub sidecar: Sidecar,

    /// Many models on one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiplexer: Option<Multiplexer>,

    /// Pods of a template, or standalone workers. Absent: kept as it is, else scaling.minReplicas, else 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10_000))]
    pub replicas: Option<i32>,

    /// Let the operator scale the template's Deployment by queue and load, to zero and from zero too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,

    /// Workers without a backend container: for backends at a URL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standalone: Option<Standalone>,

    /// Backend Pods that the operator runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Template>,
}

/// The backend beside each worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    /// Kind of backend: decides health path, readiness, metrics and the default port.
    #[serde(default)]
    pub engine: Engine,
    /// Its port. Default by engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// Its container. Default: the one that names the port, else that of the annotation kubectl.kubernetes.io/default-container, else the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub container: Option<String>,
    /// Path before /v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub base_path: Option<String>,
    /// Address of a backend elsewhere; standalone pools only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048), regex(pattern = r"^https?://"))]
    pub url: Option<String>,
    /// Key sent to the backend in place of the client's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKeyRef>,
}

/// What workers show their relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Credential {
    /// The Provider's secret.
    #[default]
    Secret,
    /// The token of their Pod's ServiceAccount.
    ServiceAccountToken,
}

impl Credential {
    /// What is said by nobody changes nothing of what was rendered before anybody could.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde wants")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Kinds of backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// vLLM, port 8000.
    Vllm,
    /// SGLang, port 30000.
    Sglang,
    /// llama.cpp's server, port 8080.
    LlamaServer,
    /// Ollama, port 11434.
    Ollama,
    /// Anything that speaks OpenAI's API, port 8000.
    #[default]
    Openai,
}

impl Engine {
    /// As the worker's settings spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaServer => "llama-server",
            Self::Ollama => "ollama",
            Self::Openai => "openai",
        }
    }

    /// The port that the backend listens on unless told otherwise.
    pub fn default_port(self) -> i32 {
        match self {
            Self::Vllm | Self::Openai => 8000,
            Self::Sglang => 30000,
            Self::LlamaServer => 8080,
            Self::Ollama => 11434,
        }
    }
}

/// How the worker is put into Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum InjectMode {
    /// An init container that stays: starts before the backend and ends after it.
    #[default]
    NativeSidecar,
    /// A container, for clusters before 1.29.
    Container,
}

/// The worker's container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sidecar {
    /// Its image. Default: that of the operator's own release.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// Port of probes, drain and metrics. Default 17990.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// error, warn, info, debug, trace, or directives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub log_level: Option<String>,
    /// Log lines as text or as JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Requests and limits.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub resources: RawObject,
    /// Environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub env: Vec<Value>,
}

/// Scaling by the operator itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.minReplicas <= self.maxReplicas")
    .message("minReplicas is greater than maxReplicas").field_path(".minReplicas"))]
pub struct Scaling {
    /// Pods at least; 0 lets an idle pool go away, and a request bring it back.
    #[serde(default)]
    #[schemars(range(min = 0, max = 10_000))]
    pub min_replicas: i32,
    /// Pods at most.
    #[schemars(range(min = 1, max = 10_000))]
    pub max_replicas: i32,
    /// Queued and running requests that one Pod should have. Default: maxConcurrency, or with multiplexer.slots the sum over
    /// slots of what each slot's largest model runs at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub target_requests_per_replica: Option<i32>,
    /// How long fewer Pods must be enough before some go.
    #[serde(default = "ten_minutes")]
    pub scale_down_delay: DurationText,
}

/// Workers without a backend container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Standalone {
    /// Workers, while spec.replicas is absent. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10_000))]
    pub replicas: Option<i32>,
}

/// Backend Pods that the operator runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.kind == oldSelf.kind").message("template.kind is immutable; make another pool"))]
pub struct Template {
    /// What runs them.
    #[serde(default)]
    pub kind: TemplateKind,
    /// Strategy of updates. Default: maxSurge 0, maxUnavailable 1, because GPU nodes have no spare.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub strategy: RawObject,
    /// Metadata of the Pods.
    #[serde(default)]
    pub metadata: TemplateMetadata,
    /// The Pods, as any PodSpec.
    #[schemars(schema_with = "schema::pod_spec")]
    pub spec: Value,
}

/// What runs the Pods of a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TemplateKind {
    /// So many Pods.
    #[default]
    Deployment,
    /// One Pod on each matching node.
    DaemonSet,
}

/// Metadata of a template's Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateMetadata {
    /// Labels, besides the operator's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub annotations: BTreeMap<String, String>,
}

/// What the operator found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerPoolStatus {
    /// Generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// How its workers come to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Label selector of its Pods, for autoscalers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub selector: Option<String>,
    /// Its Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Pods that have the worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub injected: Option<i32>,
    /// The first 32 labelled Pods that lack it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 253)))]
    pub not_injected: Vec<String>,
    /// Pods whose worker is not the one that would be rendered now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outdated: Option<i32>,
    /// Workers that the relays know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<i32>,
    /// The first 32 models they advertise; kept while there is no Pod, because a request for one of them may wake the pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 256)))]
    pub models: Vec<String>,
    /// How many models they advertise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_count: Option<i32>,
    /// What the first 32 slots of its workers hold, with a multiplexer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub slots: Vec<SlotStatus>,
    /// How many slots its workers have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_count: Option<i32>,
    /// How many of them take nothing, because their memory could not be freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quarantined: Option<i32>,
}

/// What a slot of a worker holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotStatus {
    /// The worker: the name of its Pod.
    #[schemars(length(max = 253))]
    pub worker: String,
    /// The slot.
    #[schemars(length(max = 64))]
    pub slot: String,
    /// What it does.
    pub state: SlotState,
    /// The model that it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub resident: Option<String>,
    /// The model that it is going to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub target: Option<String>,
    /// Since when it does that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// The last of its loads that failed, until that model is loaded or ten minutes have gone by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<SlotFailure>,
}

/// Why a model could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlotFailure {
    /// The model.
    #[schemars(length(max = 256))]
    pub model: String,
    /// Kind of failure, as clients get it: backend_unavailable, insufficient_memory.
    #[schemars(length(max = 64))]
    pub code: String,
    /// What went wrong, or nothing where the worker did not say.
    #[schemars(length(max = 256))]
    pub message: String,
}

/// What a slot does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum SlotState {
    /// It holds nothing.
    Empty,
    /// Its model serves.
    Ready,
    /// It waits for running requests before a swap.
    Draining,
    /// It ends those that did not finish.
    Severing,
    /// It unloads.
    Evicting,
    /// It loads.
    Loading,
    /// It loads the former model again.
    RollingBack,
    /// It holds nothing after a failure, and tries again soon.
    Backoff,
    /// Its worker is ending.
    Stopping,
    /// It takes nothing, because its memory could not be freed.
    Quarantined,
}

/// How the workers of a pool come to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// Put into labelled Pods as these are created.
    Inject,
    /// In Pods that the operator runs.
    Template,
    /// Alone.
    Standalone,
}

impl WorkerPoolSpec {
    /// Its multiplexer, if that has slots: without, it counts as none.
    pub fn slots(&self) -> Option<&Multiplexer> {
        self.multiplexer.as_ref().filter(|multiplexer| !multiplexer.slots.is_empty())
    }

    /// Whether its workers start programs, in a container of their own image or of the engine's.
    pub fn runs_commands(&self) -> bool {
        self.slots().is_some_and(Multiplexer::runs_commands)
    }

    /// Whether its worker scales Deployments.
    pub fn scales_deployments(&self) -> bool {
        self.slots().is_some_and(Multiplexer::scales_deployments)
    }

    /// How its workers come to be.
    pub fn mode(&self) -> Mode {
        match (&self.template, &self.standalone) {
            (Some(_), _) => Mode::Template,
            (None, Some(_)) => Mode::Standalone,
            (None, None) => Mode::Inject,
        }
    }
}

fn any_model() -> Vec<String> {
    vec!["*".to_owned()]
}

fn one_minute() -> DurationText {
    DurationText::of("60s")
}

fn ten_minutes() -> DurationText {
    DurationText::of("10m")
}
