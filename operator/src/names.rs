//! Names that several parts agree on: labels, annotations, and what belongs to which resource.

use std::collections::BTreeMap;

/// On everything that belongs to a Provider: the Provider's name.
pub const PROVIDER_LABEL: &str = "modelrelay.io/provider";
/// On Pods that belong to a pool: the pool's name. It is also what asks for injection.
pub const POOL_LABEL: &str = "modelrelay.io/pool";
/// Value of [`POOL_LABEL`] that keeps a Pod out of every pool.
pub const NO_POOL: &str = "none";
/// On a Provider: any new value rotates the worker secret; `revoke` also ends the old one at once.
pub const ROTATE_ANNOTATION: &str = "modelrelay.io/rotate";
/// On a WorkerPool: any new value renders the worker anew with this operator's version.
pub const UPGRADE_ANNOTATION: &str = "modelrelay.io/upgrade";
/// On a WorkerPool: the number of replicas that the operator last wrote, so that somebody else's can be told.
pub const SCALED_ANNOTATION: &str = "modelrelay.io/scaled-to";
/// On relay Pods, so that the kubelet refreshes the mounted configuration at once.
pub const CONFIG_HASH_ANNOTATION: &str = "modelrelay.io/config-hash";
/// On relay Pods, so that the kubelet refreshes the mounted certificate at once: the Secret's resourceVersion.
pub const TLS_VERSION_ANNOTATION: &str = "modelrelay.io/tls-version";
/// On relay Pods, so that the kubelet refreshes the mounted API keys at once.
pub const API_KEYS_VERSION_ANNOTATION: &str = "modelrelay.io/api-keys-version";
/// On worker Pods, so that the kubelet refreshes the mounted secret at once: the Secret's resourceVersion.
pub const SECRET_VERSION_ANNOTATION: &str = "modelrelay.io/secret-version";
/// On the Secret that workers mount: when its value last changed. Younger Pods have mounted the new one anyway.
pub const SECRET_CHANGED_ANNOTATION: &str = "modelrelay.io/changed-at";
/// On relay Pods whose mounted configuration is late: asks the kubelet to look once more.
pub const NUDGE_ANNOTATION: &str = "modelrelay.io/nudged-at";
/// On Pods that were injected: hash of the worker as it was put there.
pub const WORKER_HASH_ANNOTATION: &str = "modelrelay.io/worker-hash";
/// On Pods whose worker has a multiplexer: hash of what of it a running worker cannot take over.
pub const SLOTS_HASH_ANNOTATION: &str = "modelrelay.io/slots-hash";
/// Keeps a Pod whose pool does not exist from being scheduled.
pub const NO_SUCH_POOL_GATE: &str = "modelrelay.io/no-such-pool";
/// The worker's container, in every mode.
pub const WORKER_CONTAINER: &str = "modelrelay-worker";
/// Brings the worker's program into the engine's image, where the worker starts the engines itself.
pub const WORKER_BINARY_CONTAINER: &str = "modelrelay-worker-binary";
/// The relay's container.
pub const RELAY_CONTAINER: &str = "relay";

/// Writes the objects that belong to a Provider or a WorkerPool.
pub const FIELD_MANAGER: &str = "modelrelay-operator";
/// Writes status, so that a status can be told from a spec in `managedFields`.
pub const STATUS_MANAGER: &str = "modelrelay-operator-status";
/// Value of `app.kubernetes.io/managed-by` on everything that the operator applies.
pub const MANAGED_BY: &str = "modelrelay-operator";

/// Port of the relay for clients.
pub const CLIENT_PORT: i32 = 8080;
/// Port of the relay for workers.
pub const WORKER_PORT: i32 = 8081;
/// Port of the relay for the admin API, metrics and probes.
pub const ADMIN_PORT: i32 = 8082;
/// Port of a worker for probes, drain and metrics, unless the pool names another.
pub const SIDECAR_PORT: i32 = 17990;

/// What part of the system an object is: the value of `app.kubernetes.io/component`.
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
    /// As it is written in the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Worker => "worker",
            Self::Backend => "backend",
        }
    }
}

/// The recommended labels; they select nothing alone.
pub fn labels(component: Component, instance: &str) -> BTreeMap<String, String> {
    let pairs = [
        ("app.kubernetes.io/name", "modelrelay"),
        ("app.kubernetes.io/part-of", "modelrelay"),
        ("app.kubernetes.io/managed-by", MANAGED_BY),
        ("app.kubernetes.io/component", component.as_str()),
        ("app.kubernetes.io/instance", instance),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Labels of everything that belongs to a Provider.
pub fn provider_labels(component: Component, provider: &str) -> BTreeMap<String, String> {
    let mut labels = labels(component, provider);
    labels.insert(PROVIDER_LABEL.to_owned(), provider.to_owned());
    labels
}

/// Labels of everything that belongs to a WorkerPool.
pub fn pool_labels(component: Component, pool: &str) -> BTreeMap<String, String> {
    let mut labels = labels(component, pool);
    labels.insert(POOL_LABEL.to_owned(), pool.to_owned());
    labels
}

/// Labels of the operator's own Pods, in the chart and in the kustomize base.
pub const OPERATOR_LABELS: [(&str, &str); 2] =
    [("app.kubernetes.io/name", "modelrelay"), ("app.kubernetes.io/component", "operator")];

/// Deployment, ServiceAccount, Role, RoleBinding, PodDisruptionBudget, NetworkPolicy and configuration Secret of a Provider.
pub fn relay(provider: &str) -> String {
    format!("{provider}-relay")
}

/// Headless Service of a Provider that workers dial.
pub fn workers_service(provider: &str) -> String {
    format!("{provider}-workers")
}

/// Secret that a Provider's workers mount.
pub fn worker_secret(provider: &str) -> String {
    format!("{provider}-worker")
}

/// Secret with the token of a Provider's admin API.
pub fn admin_secret(provider: &str) -> String {
    format!("{provider}-admin")
}

/// Secret with the API keys of a Provider's clients.
pub fn api_keys_secret(provider: &str) -> String {
    format!("{provider}-api-keys")
}

/// ConfigMap of a pool; of a standalone one also Deployment, ServiceAccount, Role and RoleBinding.
pub fn worker(pool: &str) -> String {
    format!("{pool}-worker")
}

/// Deployment or DaemonSet of a pool's backends.
pub fn backend(pool: &str) -> String {
    format!("{pool}-backend")
}

/// On a Provider's configuration Secret: until when an old worker secret still admits workers. `age` counts from 0, the newest
/// of them.
pub fn previous_until_annotation(age: usize) -> String {
    match age {
        0 => "modelrelay.io/previous-until".to_owned(),
        older => format!("modelrelay.io/previous-until-{}", older + 1),
    }
}

/// The name that workers in the cluster dial: every relay Pod is behind it.
pub fn worker_host(provider: &str, namespace: &str) -> String {
    format!("{}.{namespace}.svc", workers_service(provider))
}

/// The address that workers in the cluster dial, without scheme.
pub fn worker_address(provider: &str, namespace: &str) -> String {
    format!("{}:{WORKER_PORT}", worker_host(provider, namespace))
}
