//! `Provider`: a named queue with its own secret, limits and address, served by its own relay.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::common::{
    DurationText, IpFamily, IpFamilyPolicy, LogFormat, RawObject, SecretKeyRef, SizeText, null_is_default,
};
use super::fairness::Fairness;
use super::placement::Placement;
use super::schema;
use super::tenants::Tenant;

mod sharing;
mod status;

pub use sharing::{RelayRef, SharedWith};
pub use status::{MovingStep, ProviderStatus, UsageStatus, WorkerSecretStatus};

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
    printcolumn(name = "Relay", type_ = "string", json_path = ".status.relay"),
    printcolumn(name = "Workers", type_ = "integer", json_path = ".status.workers"),
    printcolumn(name = "Models", type_ = "integer", json_path = ".status.modelCount"),
    printcolumn(name = "Queued", type_ = "integer", json_path = ".status.queueDepth"),
    printcolumn(name = "In-Flight", type_ = "integer", json_path = ".status.inFlight"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && self.metadata.name.size() <= 52")
        .message("the name is used for a Service: at most 52 characters of a-z, 0-9 and -, starting with a letter and not ending with -")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!self.metadata.name.endsWith('-workers')")
        .message("names that end in -workers are reserved for the Services for workers")
        .reason(Reason::FieldValueInvalid),
    // The API server adds the defaults of relay, so a relay section that repeats them looks the same.
    validation = Rule::new(RELAY_HAS_DEFAULTS)
        .message("spec.relay must be omitted with spec.relayRef: the named Provider owns replicas, TLS, API keys and Service")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!has(oldSelf.spec.relayRef) || (has(self.spec.relayRef) && self.spec.relayRef == oldSelf.spec.relayRef) || (has(oldSelf.status) && (has(oldSelf.status.moving) ? oldSelf.status.moving in ['WaitingForRelay', 'ConnectingWorkers'] : has(oldSelf.status.relay) && oldSelf.status.relay == oldSelf.metadata.name))")
        .message("spec.relayRef cannot be changed or removed once that relay serves this Provider: create another Provider, and delete this one when clients use the other")
        .reason(Reason::FieldValueInvalid),
    validation = Rule::new("!has(self.spec.relayRef) || !has(self.spec.relayRef.namespace) || (has(oldSelf.spec.relayRef) && self.spec.relayRef == oldSelf.spec.relayRef)")
        .message("a Provider with a relay of its own can move only to a relay of its namespace: omit spec.relayRef.namespace, or create another Provider")
        .reason(Reason::FieldValueInvalid),
)]
#[serde(rename_all = "camelCase")]
pub struct ProviderSpec {
    /// If false, the relays reject requests (with provider_disabled) and workers; nothing is deleted.
    #[serde(default = "yes")]
    pub enabled: bool,

    /// Models that may be served, with their aliases. Default: every model that workers advertise.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["id".into()]))]
    pub models: Vec<CatalogueModel>,

    /// Map of additional names to models, independent of the list of models. A served model with the same name takes
    /// precedence.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 256))]
    pub aliases: BTreeMap<String, String>,

    /// Model of requests without a model. Default: such requests are rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub default_model: Option<String>,

    /// Model of requests with an unknown model name. Default: such requests are rejected with 404.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub fallback_model: Option<String>,

    /// Limits of the queue.
    #[serde(default)]
    pub queue: Queue,

    /// Choice of the worker for a request. Default: the least loaded one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,

    /// Order of waiting requests. Default: each API key gets its share of the workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fairness: Option<Fairness>,

    /// Maximum total time of a request, from the queue to the end of the response, without the wait for a model to
    /// load. Default: none; a response ends when it stalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_timeout: Option<DurationText>,

    /// Maximum time that a response may stall because its worker sends nothing or its client reads nothing. Default 5m.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_idle_timeout: Option<DurationText>,

    /// Time without the first byte of a response after which a request moves to another worker that has a free worker
    /// slot. A response that is not streamed begins when it is complete. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_byte_timeout: Option<DurationText>,

    /// Maximum number of models that one worker may advertise; more are dropped with a warning.
    #[serde(default = "max_models_per_worker")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_models_per_worker: i32,

    /// If true, workers that send no protocol version are rejected.
    #[serde(default)]
    pub require_protocol_version: bool,

    /// Secret that workers present. Default: the operator creates and owns the Secret PROVIDER-worker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_secret_ref: Option<SecretKeyRef>,

    /// ServiceAccounts whose Pods may connect as workers with their own token instead of the secret: NAMESPACE/NAME, or
    /// NAME in this namespace. A pool uses such tokens if its field credential is ServiceAccountToken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(
            length(min = 1, max = 317),
            regex(pattern = r"^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
        )
    )]
    pub worker_service_accounts: Vec<String>,

    /// Handling of the generated Secrets when the Provider is deleted.
    #[serde(default)]
    pub secrets_policy: SecretsPolicy,

    /// Relay that serves this Provider.
    #[serde(default)]
    pub relay: Relay,

    /// Provider whose relay serves this one too, at its address. This Provider then has no relay and keys of its own;
    /// queue, worker secret, models and status stay its own. Can be added later if that Provider is in the same
    /// namespace, and cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_ref: Option<RelayRef>,
}

/// The rule for a Provider whose relay is another one's: every field of `relay` has its default.
const RELAY_HAS_DEFAULTS: &str = "!has(self.spec.relayRef) || (self.spec.relay.replicas == 1 && !self.spec.relay.requireApiKeys \
     && !has(self.spec.relay.tenants) && !has(self.spec.relay.sharedWith) && !has(self.spec.relay.adminTokenSecretRef) \
     && self.spec.relay.drainTimeout == '30s' && !has(self.spec.relay.tls) && !self.spec.relay.expectWorkers \
     && !self.spec.relay.unreadyWhenSaturated && self.spec.relay.service.type == 'ClusterIP' \
     && !has(self.spec.relay.service.port) && !self.spec.relay.service.workers && !has(self.spec.relay.service.annotations) \
     && !has(self.spec.relay.service.loadBalancerClass) && !has(self.spec.relay.service.ipFamilyPolicy) \
     && !has(self.spec.relay.service.ipFamilies) && self.spec.relay.networkPolicy.enabled \
     && !has(self.spec.relay.networkPolicy.from) && !has(self.spec.relay.networkPolicy.metricsFrom) \
     && !has(self.spec.relay.image) && !has(self.spec.relay.logLevel) && !has(self.spec.relay.logFormat) \
     && !has(self.spec.relay.resources) \
     && !has(self.spec.relay.podTemplate.labels) && !has(self.spec.relay.podTemplate.annotations) \
     && !has(self.spec.relay.podTemplate.nodeSelector) && !has(self.spec.relay.podTemplate.tolerations) \
     && !has(self.spec.relay.podTemplate.affinity) && !has(self.spec.relay.podTemplate.topologySpreadConstraints) \
     && !has(self.spec.relay.podTemplate.priorityClassName) && !has(self.spec.relay.podTemplate.imagePullSecrets) \
     && !has(self.spec.relay.podTemplate.securityContext) && !has(self.spec.relay.podTemplate.runtimeClassName) \
     && !has(self.spec.relay.podTemplate.env) && !has(self.spec.relay.podTemplate.volumes) \
     && !has(self.spec.relay.podTemplate.volumeMounts))";

/// A model of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CatalogueModel {
    /// Name of the model at the backends.
    #[schemars(length(min = 1, max = 256))]
    pub id: String,
    /// Additional names that clients may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 256)))]
    pub aliases: Vec<String>,
}

/// Limits of the queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// Maximum number of queued requests; further ones are rejected with 429.
    #[serde(default = "max_length")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub max_length: i32,
    /// Maximum total size of the bodies of queued requests.
    #[serde(default = "max_bytes", deserialize_with = "max_bytes_or_null")]
    pub max_bytes: SizeText,
    /// Maximum time that a request is queued while some worker serves its model. Default: requestTimeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<DurationText>,
    /// Maximum time that a request is queued while no worker serves its model, for example because it is being loaded
    /// or its pool scales from zero. Default: timeout if it is set, else 30s, but at least 10m for a known model that
    /// may be loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cold_timeout: Option<DurationText>,
}

/// Handling of the generated Secrets when their Provider is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SecretsPolicy {
    /// They are kept, and a new Provider of the same name adopts them: a mistake must not destroy every client's key.
    #[default]
    Retain,
    /// They are deleted.
    Delete,
}

/// The relay that serves a Provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.requireApiKeys || !has(self.tenants) || self.tenants.size() == 0")
    .message("tenants need requireApiKeys: true, without which no client is identified").field_path(".tenants"))]
pub struct Relay {
    /// Number of relay Pods. Every worker connects to each of them.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 64))]
    pub replicas: i32,
    /// If true, every route requires an API key.
    #[serde(default)]
    pub require_api_keys: bool,
    /// Namespaces and ServiceAccounts that use their own token in place of an API key. The more exact entry applies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 128))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".into(), "serviceAccount".into()]))]
    #[x_kube(validation = Rule::new("self.all(a, !has(a.name) || self.exists_one(b, has(b.name) && a.name == b.name))")
        .message("the names of tenants must be unique"))]
    pub tenants: Vec<Tenant>,
    /// Providers of other namespaces that may name this one in relayRef. Those of this namespace may without an entry.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["namespace".into(), "provider".into()]))]
    pub shared_with: Vec<SharedWith>,
    /// Token of the admin API. Default: the operator creates the Secret PROVIDER-admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_token_secret_ref: Option<SecretKeyRef>,
    /// Maximum time that running requests may take to finish when a relay Pod stops.
    #[serde(default = "half_a_minute")]
    pub drain_timeout: DurationText,
    /// Serves every port with TLS, with a certificate that you provide. Default: plain HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// If true, relays are unready while no worker is connected. Ignored while a pool may be scaled to zero.
    #[serde(default)]
    pub expect_workers: bool,
    /// If true, relays are unready while the queue is full, so that clients use another relay instead of getting 429.
    #[serde(default)]
    pub unready_when_saturated: bool,
    /// Service that clients use.
    #[serde(default)]
    pub service: Service,
    /// NetworkPolicy that restricts access to the relay.
    #[serde(default)]
    pub network_policy: NetworkPolicy,
    /// Image of the relay. Default: that of the operator's own release.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub image: String,
    /// Log level: error, warn, info, debug, trace, or directives such as info,modelrelay_relay=debug.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub log_level: Option<String>,
    /// Log format: text or JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Resource requests and limits of the relay's container.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub resources: RawObject,
    /// Additional settings of the relay's Pods.
    #[serde(default)]
    pub pod_template: PodTemplate,
}

/// The TLS certificate of a relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Tls {
    /// Secret of type kubernetes.io/tls in this namespace, with the certificate tls.crt, valid at least for
    /// PROVIDER-workers.NAMESPACE.svc, its key tls.key, and ca.crt if its authority is not one of the system's roots. A
    /// renewed certificate is loaded without a restart.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,
}

/// The Service that clients use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// Type of the Service.
    #[serde(default, rename = "type")]
    pub type_: ServiceType,
    /// Port for clients. Default: 80, or 443 with tls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<i32>,
    /// If true, the Service also has port 8081, for workers outside the cluster.
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
    /// Number of IP versions of the Service, in a cluster that has IPv4 and IPv6. Default: the cluster's, SingleStack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ip_family_policy: Option<IpFamilyPolicy>,
    /// IP versions of the Service, the primary one first. Default: the cluster's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2))]
    pub ip_families: Vec<IpFamily>,
}

/// Types of Service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    /// An address inside the cluster.
    #[default]
    ClusterIP,
    /// A port on every node.
    NodePort,
    /// A load balancer.
    LoadBalancer,
}

/// Restricts access to the relay's worker and admin ports. It restricts ingress only, and never clients.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicy {
    /// If true, the operator creates a NetworkPolicy.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Peers that may connect as workers, in addition to this namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub from: Vec<Value>,
    /// Peers that may connect to the admin port (metrics, admin API), in addition to the operator. Default: the chart's
    /// relay.metricsFrom, which is empty by default. With the chart's webhook.hostNetwork no rule can match the
    /// operator: this list must then include the nodes, and while both lists are empty, the admin port is open to every
    /// address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub metrics_from: Vec<Value>,
}

/// Additional settings of the relay's Pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodTemplate {
    /// Labels, in addition to the operator's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub annotations: BTreeMap<String, String>,
    /// Labels of the nodes to run on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::text_map")]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerated taints.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub tolerations: Vec<Value>,
    /// Affinity.
    #[serde(default, skip_serializing_if = "RawObject::is_empty")]
    pub affinity: RawObject,
    /// Topology spread constraints. Default: spread over nodes if possible.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub topology_spread_constraints: Vec<Value>,
    /// Priority class.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub priority_class_name: String,
    /// Image pull secrets, by name.
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
    /// Environment variables of the relay's container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub env: Vec<Value>,
    /// Volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::named_items")]
    pub volumes: Vec<Value>,
    /// Mounts of the volumes in the relay's container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::raw_items")]
    pub volume_mounts: Vec<Value>,
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
            tenants: Vec::new(),
            shared_with: Vec::new(),
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

impl ProviderSpec {
    /// True if the relay has tokens reviewed: those of workers or of tenants.
    pub fn reviews_tokens(&self) -> bool {
        !self.worker_service_accounts.is_empty() || !self.relay.tenants.is_empty()
    }
}

impl Relay {
    /// Returns the Service's port for clients.
    pub fn client_port(&self) -> i32 {
        self.service.port.unwrap_or(if self.tls.is_some() { 443 } else { 80 })
    }

    /// Returns the URL scheme that clients, workers, probes and the operator use.
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
