//! `WorkerPool`: the workers of a Provider and the way they are run.

mod scaling;
mod status;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::common::{DurationText, LogFormat, RawObject, SecretKeyRef};
use super::multiplexer::Multiplexer;
use super::schema;
pub use scaling::{Scaling, TargetApiVersion, TargetKind, TargetRef};
pub use status::{SlotFailure, SlotState, SlotStatus, WorkerPoolStatus};

/// The workers of a Provider: injected into labelled Pods, run from a template, or standalone.
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
    doc = "The workers of a Provider: injected into labelled Pods, run from a template, or standalone.",
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
        .message("the name is used as a label value: at most 52 characters of a-z, 0-9 and -, not starting or ending with -")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("self.metadata.name != 'none'")
        .message("the name none is reserved: as a Pod's label it keeps the Pod out of every pool")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.template) == has(oldSelf.template) && has(self.standalone) == has(oldSelf.standalone)")
    .message("the mode of a pool (injected, template or standalone) is immutable; create another pool"))]
#[x_kube(validation = Rule::new("!(has(self.template) && has(self.standalone))")
    .message("template and standalone exclude each other"))]
#[x_kube(validation = Rule::new("!has(self.backend) || !has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.size() == 0")
    .message("backend and multiplexer.slots exclude each other: each slot has its own backends"))]
#[x_kube(validation = Rule::new("!has(self.backend) || !has(self.backend.url) || has(self.standalone)")
    .message("backend.url is only for standalone pools; for a container in the same Pod use backend.port").field_path(".backend"))]
#[x_kube(validation = Rule::new("!has(self.standalone) || (has(self.backend) && has(self.backend.url)) || (has(self.multiplexer) && has(self.multiplexer.slots))")
    .message("a standalone pool needs backend.url, or multiplexer.slots").field_path(".standalone"))]
#[x_kube(validation = Rule::new("!has(self.scaling) || has(self.scaling.targetRef) || (has(self.template) && self.template.kind == 'Deployment')")
    .message("scaling needs a template of kind Deployment, or scaling.targetRef").field_path(".scaling"))]
#[x_kube(validation = Rule::new("!has(self.scaling) || !has(self.scaling.targetRef) || !(has(self.template) || has(self.standalone))")
    .message("scaling.targetRef excludes template and standalone: the operator scales their Pods without it").field_path(".scaling"))]
#[x_kube(validation = Rule::new("!has(self.replicas) || has(self.standalone) || (has(self.template) && self.template.kind == 'Deployment')")
    .message("replicas needs standalone, or a template of kind Deployment; scale injected Pods through their own controller").field_path(".replicas"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || has(self.standalone) || self.multiplexer.slots.all(s, s.driver != 'kubernetes')")
    .message("the driver kubernetes needs standalone").field_path(".multiplexer"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.size() == 0 || self.models == ['*']")
    .message("models and multiplexer.slots exclude each other: the models are those of the slots").field_path(".models"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.size() == 0 || !has(self.maxConcurrency)")
    .message("maxConcurrency and multiplexer.slots exclude each other: each model of a slot has its own limit").field_path(".maxConcurrency"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || has(self.template) || (has(self.sidecar.image) && self.sidecar.image != '') || self.multiplexer.slots.all(s, !(s.driver in ['process', 'hooks']) && s.models.all(m, !has(m.command)))")
    .message("the drivers process and hooks, and command, run programs in the worker's container: set template, or sidecar.image to an image that contains these programs").field_path(".multiplexer"))]
#[x_kube(validation = Rule::new("!has(self.multiplexer) || !has(self.multiplexer.slots) || self.multiplexer.slots.all(s, s.driver != 'kubernetes') || ((!has(self.replicas) || self.replicas <= 1) && (!has(self.standalone) || !has(self.standalone.replicas) || self.standalone.replicas <= 1))")
    .message("only one worker may scale the Deployments of the driver kubernetes: set replicas to 0 or 1").field_path(".multiplexer"))]
#[x_kube(validation = Rule::new("!has(self.selector) || !(has(self.template) || has(self.standalone))")
    .message("selector excludes template and standalone: the operator creates their Pods with its label").field_path(".selector"))]
pub struct WorkerPoolSpec {
    /// Provider in the same namespace that the workers serve.
    #[schemars(length(min = 1, max = 52))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("provider is immutable; create another pool"))]
    pub provider: String,

    /// Backend of each worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<Backend>,

    /// Labels of the Pods of the pool, instead of the label modelrelay.io/pool, for Pods that cannot have that label.
    /// Only for namespaces with the label modelrelay.io/select-pods: enabled, and for new Pods, which get the label. A
    /// Pod that several pools select belongs to the oldest of them. Excludes template and standalone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_selector")]
    pub selector: Option<LabelSelector>,

    /// Models to advertise; * stands for all models that the backend lists.
    #[serde(default = "any_model")]
    #[schemars(length(min = 1, max = 256), inner(length(min = 1, max = 256)))]
    pub models: Vec<String>,

    /// Maximum number of requests that one backend runs at once. Default 16. With multiplexer.slots, each model has its
    /// own limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub max_concurrency: Option<i32>,

    /// Maximum time that running requests may take to finish when a Pod stops. The Pod's terminationGracePeriodSeconds
    /// is raised as needed.
    #[serde(default = "one_minute")]
    pub shutdown_timeout: DurationText,

    /// Credential that workers present to the relays: the Provider's secret, or the token of their Pod's
    /// ServiceAccount, which must be listed in the Provider's workerServiceAccounts. Standalone workers without the
    /// driver kubernetes use the ServiceAccount default of the namespace. A change applies to new Pods.
    #[serde(default, skip_serializing_if = "Credential::is_default")]
    pub credential: Credential,

    /// Form of the worker in Pods.
    #[serde(default)]
    pub inject_mode: InjectMode,

    /// Container of the worker.
    #[serde(default)]
    pub sidecar: Sidecar,

    /// Serves many models on one GPU, one at a time per slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiplexer: Option<Multiplexer>,

    /// Number of Pods of a template, or of standalone workers. Default: the present number, else scaling.minReplicas,
    /// else 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10_000))]
    pub replicas: Option<i32>,

    /// Makes the operator scale the template's Deployment, or that of targetRef, by queue and load, including to and
    /// from zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,

    /// Runs workers without a backend container, for backends at a URL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standalone: Option<Standalone>,

    /// Backend Pods that the operator runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<Template>,
}

/// The backend of each worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    /// Type of backend, which determines the health path, readiness, metrics and the default port.
    #[serde(default)]
    pub engine: Engine,
    /// Port of the backend. Default: depends on the engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// Container of the backend. Default: the container that declares the port, else that of the annotation
    /// kubectl.kubernetes.io/default-container, else the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub container: Option<String>,
    /// Path prefix before /v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub base_path: Option<String>,
    /// Address of a backend outside the Pod. Standalone pools only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048), regex(pattern = r"^https?://"))]
    pub url: Option<String>,
    /// API key that is sent to the backend instead of the client's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret_ref: Option<SecretKeyRef>,
}

/// The credential that workers present to relays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Credential {
    /// The Provider's secret.
    #[default]
    Secret,
    /// The token of their Pod's ServiceAccount.
    ServiceAccountToken,
}

impl Credential {
    /// True for the default, which is not serialized: a manifest without the field must render as before it existed.
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde wants")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Types of backend.
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
    /// Any server with OpenAI's API, port 8000.
    #[default]
    Openai,
}

impl Engine {
    /// Returns the value that the worker's settings use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaServer => "llama-server",
            Self::Ollama => "ollama",
            Self::Openai => "openai",
        }
    }

    /// Returns the backend's default port.
    pub fn default_port(self) -> i32 {
        match self {
            Self::Vllm | Self::Openai => 8000,
            Self::Sglang => 30000,
            Self::LlamaServer => 8080,
            Self::Ollama => 11434,
        }
    }
}

/// The form of the worker in Pods.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum InjectMode {
    /// A restartable init container, which starts before the backend and ends after it.
    #[default]
    NativeSidecar,
    /// A regular container, for clusters before 1.29.
    Container,
}

/// The worker's container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sidecar {
    /// Image of the worker. Default: that of the operator's release.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// Port for probes, drain and metrics. Default 17990.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// Log level: error, warn, info, debug, trace, or directives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub log_level: Option<String>,
    /// Log format: text or JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Resource requests and limits.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub resources: RawObject,
    /// Environment variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub env: Vec<Value>,
}

/// Workers without a backend container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Standalone {
    /// Number of workers if spec.replicas is absent. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10_000))]
    pub replicas: Option<i32>,
}

/// Backend Pods that the operator runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.kind == oldSelf.kind").message("template.kind is immutable; create another pool"))]
pub struct Template {
    /// Kind of workload that runs the Pods.
    #[serde(default)]
    pub kind: TemplateKind,
    /// Update strategy. Default: maxSurge 0 and maxUnavailable 1, because GPU nodes rarely have room for another Pod.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub strategy: RawObject,
    /// Metadata of the Pods.
    #[serde(default)]
    pub metadata: TemplateMetadata,
    /// PodSpec of the Pods.
    #[schemars(schema_with = "schema::pod_spec")]
    pub spec: Value,
}

/// The kind of workload that runs the Pods of a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TemplateKind {
    /// A number of Pods.
    #[default]
    Deployment,
    /// One Pod on each matching node.
    DaemonSet,
}

/// Metadata of a template's Pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateMetadata {
    /// Labels, in addition to the operator's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub annotations: BTreeMap<String, String>,
}

/// The way that a pool's workers are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Mode {
    /// Injected into labelled Pods when these are created.
    Inject,
    /// In backend Pods that the operator runs.
    Template,
    /// In Pods of their own, without a backend.
    Standalone,
}

impl WorkerPoolSpec {
    /// Returns the multiplexer if it has slots; without slots it is treated as absent.
    pub fn slots(&self) -> Option<&Multiplexer> {
        self.multiplexer.as_ref().filter(|multiplexer| !multiplexer.slots.is_empty())
    }

    /// True if the workers start programs, in a container of their own image or of the engine's.
    pub fn runs_commands(&self) -> bool {
        self.slots().is_some_and(Multiplexer::runs_commands)
    }

    /// True if the worker scales Deployments.
    pub fn scales_deployments(&self) -> bool {
        self.slots().is_some_and(Multiplexer::scales_deployments)
    }

    /// Returns the workload of another owner that the operator scales.
    pub fn target(&self) -> Option<&TargetRef> {
        self.scaling.as_ref()?.target_ref.as_ref()
    }

    /// Returns the mode of the pool.
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
