//! `Provider`: one named queue with its own secret, limits and address, served by a relay of its own.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::common::{DurationText, LogFormat, RawObject, SecretKeyRef, SizeText, null_is_default};
use super::schema;

/// A named queue for model requests, with an address for clients, an address for workers, and a relay of its own.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "modelrelay.io",
    version = "v1alpha1",
    kind = "Provider",
    namespaced,
    plural = "providers",
    shortname = "prov",
    category = "modelrelay",
    status = "ProviderStatus",
    derive = "PartialEq",
    doc = "A named queue for model requests, with an address for clients, an address for workers, and a relay of its own.",
    printcolumn(name = "Ready", type_ = "string", json_path = r#".status.conditions[?(@.type=="Ready")].status"#),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".status.endpoint"),
    printcolumn(name = "Workers", type_ = "integer", json_path = ".status.workers"),
    printcolumn(name = "Models", type_ = "integer", json_path = ".status.modelCount"),
    printcolumn(name = "Queued", type_ = "integer", json_path = ".status.queueDepth"),
    printcolumn(name = "In-Flight", type_ = "integer", json_path = ".status.inFlight"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= 52")
        .message("the name becomes that of a Service: at most 52 of a-z, 0-9 and -, the first a letter, the last not -")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!self.metadata.name.endsWith('-workers')")
        .message("names that end in -workers are those of the Services for workers")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
pub struct ProviderSpec {
    /// While false, requests are refused with provider_disabled and workers are turned away; nothing is deleted.
    #[serde(default = "yes")]
    pub enabled: bool,

    /// The models that may be served, with their aliases. Without a list: whatever workers advertise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub models: Vec<CatalogueModel>,

    /// Further names of models, with or without a list of models: maps each name to a model. A served model of that name takes
    /// precedence.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 256))]
    pub aliases: BTreeMap<String, String>,

    /// Model of requests that name none. Default: they are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub default_model: Option<String>,

    /// Model of requests for an unknown name. Default: they are refused with 404.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub fallback_model: Option<String>,

    /// Bounds of the queue.
    #[serde(default)]
    pub queue: Queue,

    /// A request's whole time: queue, first byte and stream to its end; waiting for a model to be loaded excepted. Default: none;
    /// an answer ends when it stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_timeout: Option<DurationText>,

    /// How long an answer may stand still: its worker sends nothing, or its client reads nothing. Default 5m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_idle_timeout: Option<DurationText>,

    /// How long a worker may send nothing of a response while another worker has room; the request then goes to that one. A response
    /// that is not streamed begins when it is complete. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_byte_timeout: Option<DurationText>,

    /// Models that one worker may advertise; more are dropped with a warning.
    #[serde(default = "max_models_per_worker")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_models_per_worker: i32,

    /// Turn away workers that state no protocol version.
    #[serde(default)]
    pub require_protocol_version: bool,

    /// Secret that workers present. Without one the operator makes and owns the Secret named after the Provider, with -worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_secret_ref: Option<SecretKeyRef>,

    /// ServiceAccounts whose Pods may be workers by their own token, without the secret: NAMESPACE/NAME, or NAME in this namespace.
    /// Pools get that token by their field credential.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(
            length(min = 1, max = 317),
            regex(pattern = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
        )
    )]
    pub worker_service_accounts: Vec<String>,

    /// What happens to the generated Secrets when the Provider is deleted.
    #[serde(default)]
    pub secrets_policy: SecretsPolicy,

    /// The relay that serves this Provider.
    #[serde(default)]
    pub relay: Relay,
}

/// A model of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CatalogueModel {
    /// What backends call it.
    #[schemars(length(min = 1, max = 256))]
    pub id: String,
    /// Further names that clients may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 256)))]
    pub aliases: Vec<String>,
}

/// Bounds of the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// Requests that may wait; one more is refused with 429.
    #[serde(default = "max_length")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_length: i32,
    /// Bytes of request bodies that may wait.
    #[serde(default = "max_bytes", deserialize_with = "max_bytes_or_null")]
    pub max_bytes: SizeText,
    /// How long a request waits for a worker while some worker serves its model. Default: as long as a request may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
    /// How long it waits while no worker serves its model yet: being loaded, scaled from zero. Default: timeout if it is set, else 30s,
    /// but at least 10m for a model that is known and may be loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_timeout: Option<DurationText>,
}

/// What happens to the generated Secrets when their Provider is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SecretsPolicy {
    /// They stay, and a Provider of that name adopts them again: a mistake must not destroy every client's key.
    #[default]
    Retain,
    /// They go.
    Delete,
}

/// The relay that serves a Provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Relay {
    /// Relay Pods; every worker connects to each.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub replicas: i32,
    /// Ask clients for an API key on every route.
    #[serde(default)]
    pub require_api_keys: bool,
    /// Token of the admin API. Without one the operator makes the Secret named after the Provider, with -admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_token_secret_ref: Option<SecretKeyRef>,
    /// How long running requests may take to finish when a relay Pod stops.
    #[serde(default = "half_a_minute")]
    pub drain_timeout: DurationText,
    /// Speak TLS on every port, with a certificate of yours. Without it: plain HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// Be unready while no worker is attached. Ignored while a pool may be at zero.
    #[serde(default)]
    pub expect_workers: bool,
    /// Be unready while the queue is full, instead of answering 429.
    #[serde(default)]
    pub unready_when_saturated: bool,
    /// The Service that clients use.
    #[serde(default)]
    pub service: Service,
    /// Who may reach the relay.
    #[serde(default)]
    pub network_policy: NetworkPolicy,
    /// Image of the relay. Default: that of the operator's own release.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// error, warn, info, debug, trace, or directives such as info,modelrelay_relay=debug.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub log_level: Option<String>,
    /// Log lines as text or as JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Requests and limits of the relay's container.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub resources: RawObject,
    /// What else its Pods should carry.
    #[serde(default)]
    pub pod_template: PodTemplate,
}

/// The certificate that a relay shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tls {
    /// Secret of type kubernetes.io/tls in this namespace: tls.crt, for at least PROVIDER-workers.NAMESPACE.svc, its key tls.key, and
    /// where the system's roots do not know it, the authority ca.crt. A renewed one is served without a restart.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,
}

/// The Service that clients use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// How it is reached.
    #[serde(default, rename = "type")]
    pub type_: ServiceType,
    /// Its port for clients. Default: 80, or 443 with tls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// Also carry the port 8081 for workers outside the cluster.
    #[serde(default)]
    pub workers: bool,
    /// Annotations of the Service.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub annotations: BTreeMap<String, String>,
    /// Implementation of the load balancer, for type LoadBalancer.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub load_balancer_class: String,
}

/// Types of Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    /// Inside the cluster.
    #[default]
    ClusterIP,
    /// On a port of every node.
    NodePort,
    /// Through a load balancer.
    LoadBalancer,
}

/// Who may reach the relay. It restricts ingress only, and of clients nobody.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicy {
    /// Whether there is one.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Peers that may connect as workers, besides this namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub from: Vec<Value>,
    /// Peers that may connect to the admin port (metrics, admin API), besides the operator. Default: the chart's relay.metricsFrom,
    /// which is empty. With the chart's webhook.hostNetwork no rule can name the operator: this list must then include the nodes,
    /// and while both lists are empty, the admin port is open to every address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub metrics_from: Vec<Value>,
}

/// What else the relay's Pods should carry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodTemplate {
    /// Labels, besides the operator's own.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub annotations: BTreeMap<String, String>,
    /// Nodes by label.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that are no obstacle.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub tolerations: Vec<Value>,
    /// Affinity.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub affinity: RawObject,
    /// Spread. Default: over host names, where possible.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub topology_spread_constraints: Vec<Value>,
    /// Priority class.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub priority_class_name: String,
    /// Pull secrets, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub image_pull_secrets: Vec<Value>,
    /// Security context of the Pod, merged over the restricted one.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub security_context: RawObject,
    /// Runtime class.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub runtime_class_name: String,
    /// Environment of the relay's container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub env: Vec<Value>,
    /// Volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub volumes: Vec<Value>,
    /// Where the relay's container mounts them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub volume_mounts: Vec<Value>,
}

/// What the operator found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProviderStatus {
    /// Generation of the spec that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, Programmed, Reconciling, Stalled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// Base URL for clients inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub endpoint: Option<String>,
    /// Base URL for workers inside the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub worker_endpoint: Option<String>,
    /// The Secret that workers present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_secret: Option<WorkerSecretStatus>,
    /// Workers that are connected, each counted once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<i32>,
    /// The first 32 models that are served.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 256)))]
    pub models: Vec<String>,
    /// How many models are served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_count: Option<i32>,
    /// Requests that wait, over all relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_depth: Option<i32>,
    /// Requests that run, over all relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<i32>,
}

/// The Secret that workers present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkerSecretStatus {
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Until when the value before the last rotation still admits workers. Those of rotations before it end earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_until: Option<Time>,
    /// The value of the annotation modelrelay.io/rotate that was acted on last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub rotation: Option<String>,
}

impl Default for Queue {
    fn default() -> Self {
        Self { max_length: max_length(), max_bytes: max_bytes(), timeout: None, cold_timeout: None }
    }
}

impl Default for Relay {
    fn default() -> Self {
        Self {
            replicas: one(),
            require_api_keys: false,
            admin_token_secret_ref: None,
            drain_timeout: half_a_minute(),
            tls: None,
            expect_workers: false,
            unready_when_saturated: false,
            service: Service::default(),
            network_policy: NetworkPolicy::default(),
            image: String::new(),
            log_level: None,
            log_format: None,
            resources: RawObject::default(),
            pod_template: PodTemplate::default(),
        }
    }
}

impl Relay {
    /// The Service's port for clients.
    pub fn client_port(&self) -> i32 {
        self.service.port.unwrap_or(if self.tls.is_some() { 443 } else { 80 })
    }

    /// What clients, workers, probes and the operator speak.
    pub fn scheme(&self) -> &'static str {
        if self.tls.is_some() { "https" } else { "http" }
    }
}

impl Default for NetworkPolicy {
    fn default() -> Self {
        Self { enabled: true, from: Vec::new(), metrics_from: Vec::new() }
    }
}

fn yes() -> bool {
    true
}

fn one() -> i32 {
    1
}

fn max_length() -> i32 {
    1000
}

fn max_models_per_worker() -> i32 {
    256
}

fn max_bytes() -> SizeText {
    SizeText::of("256Mi")
}

fn max_bytes_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SizeText, D::Error> {
    null_is_default(deserializer, max_bytes)
}

fn half_a_minute() -> DurationText {
    DurationText::of("30s")
}
