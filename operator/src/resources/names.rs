//! Names that several parts share: labels, annotations, and the objects of each resource.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

/// The namespace and the name of an object.
pub type ObjectKey = (String, String);

/// Returns a key that orders objects by age; those of the same second are ordered by namespace and name.
pub fn age(object: &impl ResourceExt) -> (Option<Timestamp>, Option<String>, String) {
    (object.creation_timestamp().map(|made| made.0), object.namespace(), object.name_any())
}

/// Label of everything that belongs to a Provider: the Provider's name.
pub const PROVIDER_LABEL: &str = "modelrelay.io/provider";
/// Label of Pods that belong to a pool: the pool's name. It also requests injection.
pub const POOL_LABEL: &str = "modelrelay.io/pool";
/// Value of [`POOL_LABEL`] that keeps a Pod out of every pool.
pub const NO_POOL: &str = "none";
/// Label of a namespace in which pools may select Pods by other labels than [`POOL_LABEL`].
pub const SELECT_LABEL: &str = "modelrelay.io/select-pods";
/// Value of [`SELECT_LABEL`].
pub const SELECT_ENABLED: &str = "enabled";
/// Annotation of a Provider: any new value rotates the worker secret; `revoke` also ends the old one at once.
pub const ROTATE_ANNOTATION: &str = "modelrelay.io/rotate";
/// Annotation of a WorkerPool: any new value renders the worker again with this operator's version.
pub const UPGRADE_ANNOTATION: &str = "modelrelay.io/upgrade";
/// Annotation of a WorkerPool: the number of replicas that the operator last wrote, to detect changes by others.
pub const SCALED_ANNOTATION: &str = "modelrelay.io/scaled-to";
/// Annotation of relay Pods that makes the kubelet refresh the mounted configuration at once.
pub const CONFIG_HASH_ANNOTATION: &str = "modelrelay.io/config-hash";
/// Annotation of relay Pods that makes the kubelet refresh the mounted certificate at once: the Secret's
/// resourceVersion.
pub const TLS_VERSION_ANNOTATION: &str = "modelrelay.io/tls-version";
/// Annotation of relay Pods that makes the kubelet refresh the mounted API keys at once.
pub const API_KEYS_VERSION_ANNOTATION: &str = "modelrelay.io/api-keys-version";
/// Annotation of worker Pods that makes the kubelet refresh the mounted secret at once: the Secret's resourceVersion.
pub const SECRET_VERSION_ANNOTATION: &str = "modelrelay.io/secret-version";
/// Annotation of the Secret that workers mount: the time when its value last changed. Pods created later have mounted
/// the new value anyway.
pub const SECRET_CHANGED_ANNOTATION: &str = "modelrelay.io/changed-at";
/// Annotation of relay and worker Pods whose mounted configuration is late: makes the kubelet check once more.
pub const NUDGE_ANNOTATION: &str = "modelrelay.io/nudged-at";
/// Annotation of injected Pods: hash of the worker as it was injected.
pub const WORKER_HASH_ANNOTATION: &str = "modelrelay.io/worker-hash";
/// Annotation of Pods that a pool selected by other labels than [`POOL_LABEL`], and that wait for it: they do not name
/// the pool themselves.
pub const SELECTED_ANNOTATION: &str = "modelrelay.io/selected";
/// Annotation of Pods whose worker has a multiplexer: hash of the parts that a running worker cannot reload.
pub const SLOTS_HASH_ANNOTATION: &str = "modelrelay.io/slots-hash";
/// Scheduling gate of a Pod whose pool does not exist.
pub const NO_SUCH_POOL_GATE: &str = "modelrelay.io/no-such-pool";
/// The worker's container, in every mode.
pub const WORKER_CONTAINER: &str = "modelrelay-worker";
/// The container that copies the worker's program into the engine's container, if the worker starts the engines itself.
pub const WORKER_BINARY_CONTAINER: &str = "modelrelay-worker-binary";
/// The relay's container.
pub const RELAY_CONTAINER: &str = "relay";

/// Label of the resource that an object was made for. It is a recommended label of Kubernetes, and the one by which
/// Argo CD recognizes objects of an Application if it tracks them by label.
pub const INSTANCE_LABEL: &str = "app.kubernetes.io/instance";

/// The field manager of the objects that belong to a Provider or a WorkerPool.
pub const FIELD_MANAGER: &str = "modelrelay-operator";
/// The field manager of statuses, which distinguishes status from spec in `managedFields`.
pub const STATUS_MANAGER: &str = "modelrelay-operator-status";
/// Value of `app.kubernetes.io/managed-by` on everything that the operator applies.
pub const MANAGED_BY: &str = "modelrelay-operator";

/// The relay's port for clients.
pub const CLIENT_PORT: i32 = 8080;
/// The relay's port for workers.
pub const WORKER_PORT: i32 = 8081;
/// The relay's port for the admin API, metrics and probes.
pub const ADMIN_PORT: i32 = 8082;
/// A worker's port for probes, drain and metrics, unless the pool sets another.
pub const SIDECAR_PORT: i32 = 17990;

/// The folder whose content belongs to the operator.
pub const RESERVED_PATH: &str = "/etc/modelrelay";
/// The operator's volumes; a user's volumes must have other names.
pub const RESERVED_VOLUMES: [&str; 5] = ["config", "admin", "api-keys", "api-access", "tls"];
/// Enables TLS in a relay: the path of its certificate.
pub const TLS_ENV: &str = "TLS_CERT_FILE";
/// Variables that the operator sets; a user's variables must have other names.
pub const RESERVED_ENV: [&str; 15] = [
    "LISTEN_ADDR",
    "WORKER_LISTEN_ADDR",
    "WORKERS_ON_CLIENT_PORT",
    "ADMIN_LISTEN_ADDR",
    "MODELRELAY_CONFIG",
    "MODELRELAY_ADMIN_TOKEN_FILE",
    "SHUTDOWN_GRACE_SECS",
    "DRAIN_TIMEOUT_SECS",
    "LOG_LEVEL",
    "LOG_FORMAT",
    "API_KEYS_SECRET",
    "API_KEYS_FILE",
    TLS_ENV,
    "TLS_KEY_FILE",
    // Workers of pools have tokens for the default audience.
    "WORKER_TOKEN_AUDIENCE",
];

/// The part of the system that an object belongs to: the value of `app.kubernetes.io/component`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// A Provider's relay.
    Relay,
    /// Workers and their configuration.
    Worker,
    /// Backends that the operator runs.
    Backend,
}

impl Component {
    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Worker => "worker",
            Self::Backend => "backend",
        }
    }
}

/// Returns the recommended labels, which are no selector on their own.
pub fn labels(component: Component, instance: &str) -> BTreeMap<String, String> {
    let pairs = [
        ("app.kubernetes.io/name", "modelrelay"),
        ("app.kubernetes.io/part-of", "modelrelay"),
        ("app.kubernetes.io/managed-by", MANAGED_BY),
        ("app.kubernetes.io/component", component.as_str()),
        (INSTANCE_LABEL, instance),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Returns the labels of everything that belongs to a Provider.
pub fn provider_labels(component: Component, provider: &str) -> BTreeMap<String, String> {
    let mut labels = labels(component, provider);
    labels.insert(PROVIDER_LABEL.to_owned(), provider.to_owned());
    labels
}

/// Returns the labels that select a Provider's relay Pods. They never change, because a Deployment's selector cannot.
pub fn relay_selector(provider: &str) -> BTreeMap<String, String> {
    let pairs = [
        ("app.kubernetes.io/name", "modelrelay"),
        ("app.kubernetes.io/component", Component::Relay.as_str()),
        (PROVIDER_LABEL, provider),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Returns the labels of everything that belongs to a WorkerPool.
pub fn pool_labels(component: Component, pool: &str) -> BTreeMap<String, String> {
    let mut labels = labels(component, pool);
    labels.insert(POOL_LABEL.to_owned(), pool.to_owned());
    labels
}

/// Labels of the operator's own Pods, in the chart and in the kustomize base.
pub const OPERATOR_LABELS: [(&str, &str); 2] =
    [("app.kubernetes.io/name", "modelrelay"), ("app.kubernetes.io/component", "operator")];

/// Returns the name of a Provider's Deployment, ServiceAccount, Role, RoleBinding, PodDisruptionBudget, NetworkPolicy
/// and configuration Secret.
pub fn relay(provider: &str) -> String {
    format!("{provider}-relay")
}

/// Returns the name of a Provider's headless Service that workers dial.
pub fn workers_service(provider: &str) -> String {
    format!("{provider}-workers")
}

/// Returns the name of the Secret that a Provider's workers mount.
pub fn worker_secret(provider: &str) -> String {
    format!("{provider}-worker")
}

/// Returns the name of the Secret with the token of a Provider's admin API.
pub fn admin_secret(provider: &str) -> String {
    format!("{provider}-admin")
}

/// Returns the name of the Secret with the API keys of a Provider's clients.
pub fn api_keys_secret(provider: &str) -> String {
    format!("{provider}-api-keys")
}

/// Returns the name of a pool's ConfigMap; of a standalone pool also Deployment, ServiceAccount, Role and RoleBinding.
pub fn worker(pool: &str) -> String {
    format!("{pool}-worker")
}

/// Returns the name of the Deployment or DaemonSet of a pool's backends.
pub fn backend(pool: &str) -> String {
    format!("{pool}-backend")
}

/// Returns the annotation of a Provider's configuration Secret that holds the time until which an old worker secret
/// still admits workers. `age` counts from 0, the newest of them.
pub fn previous_until_annotation(age: usize) -> String {
    match age {
        0 => "modelrelay.io/previous-until".to_owned(),
        older => format!("modelrelay.io/previous-until-{}", older + 1),
    }
}

/// Returns the host name that workers in the cluster dial, which resolves to every relay Pod.
pub fn worker_host(provider: &str, namespace: &str) -> String {
    format!("{}.{namespace}.svc", workers_service(provider))
}

/// Returns the address that workers in the cluster dial, without scheme.
pub fn worker_address(provider: &str, namespace: &str) -> String {
    format!("{}:{WORKER_PORT}", worker_host(provider, namespace))
}
