//! The worker's container and its volumes.

use serde_json::{Map, Value, json};

use super::{Refusal, SidecarInputs, backend, sidecar_port};
use crate::crd::WorkerPoolSpec;
use crate::crd::worker_pool::{Credential, InjectMode, Mode};
use crate::resources::names;

/// The path of the worker's configuration.
pub const CONFIG_FILE: &str = "/etc/modelrelay/config/worker.yaml";
/// The variable with that path.
const CONFIG_ENV: &str = "WORKER_CONFIG";
/// The path of the secret with which the worker authenticates to the Provider's relays.
pub const SECRET_FILE: &str = "/etc/modelrelay/secret/worker-secret";
/// The path of the token that replaces that secret.
const TOKEN_FILE: &str = "/etc/modelrelay/token/token";
/// The path of the key that the worker sends to the backend.
pub const BACKEND_KEY_FILE: &str = "/etc/modelrelay/backend-key/key";

/// The variable with the worker's zone.
pub(super) const ZONE: &str = "ZONE";
/// The Pod's label with the zone of its node.
const ZONE_FIELD: &str = "metadata.labels['topology.kubernetes.io/zone']";

const CONFIG_VOLUME: &str = "modelrelay-config";
const SECRET_VOLUME: &str = "modelrelay-secret";
const TOKEN_VOLUME: &str = "modelrelay-token";
const BACKEND_KEY_VOLUME: &str = "modelrelay-backend-key";
const NO_TOKEN_VOLUME: &str = "modelrelay-no-token";
const TMP_VOLUME: &str = "modelrelay-tmp";
pub(super) const BINARY_VOLUME: &str = "modelrelay-binary";
/// The names of all volumes of the worker.
pub(super) const VOLUMES: [&str; 7] =
    [CONFIG_VOLUME, SECRET_VOLUME, TOKEN_VOLUME, BACKEND_KEY_VOLUME, NO_TOKEN_VOLUME, TMP_VOLUME, BINARY_VOLUME];

/// The folder in which the API server mounts a ServiceAccount's token, in each container that mounts nothing there.
const TOKEN_FOLDER: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The audience of workers' tokens: the relay's default.
const TOKEN_AUDIENCE: &str = "modelrelay";
/// The lifetime of a token in seconds; the kubelet renews it after four fifths of that.
const TOKEN_SECS: i64 = 3600;

/// The user and group of the images' programs.
const UID: i64 = 65532;
/// The worker's own server responds within milliseconds; a minute is for nodes that start a hundred Pods at once.
const STARTUP_ATTEMPTS: i32 = 60;

/// The seconds between two checks of whether the backend has loaded its model: the rollout waits for it, Pod after Pod.
const BACKEND_PERIOD_SECS: i32 = 2;

/// Settings of the worker that a pool's fields determine. In the environment they would override worker.yaml, and the
/// worker would differ from its resource.
const RESERVED_ENV: [(&str, &str); 21] = [
    ("BACKEND_API_KEY", "spec.backend.apiKeySecretRef"),
    ("BACKEND_API_KEY_FILE", "spec.backend.apiKeySecretRef"),
    ("BACKEND_ENGINE", "spec.backend.engine"),
    ("BACKEND_URL", "spec.backend"),
    ("DRAIN_TIMEOUT", "spec.multiplexer.drainTimeout"),
    ("DRAIN_TOKEN", "the operator"),
    ("DRAIN_TOKEN_FILE", "the operator"),
    ("LOG_FORMAT", "spec.sidecar.logFormat"),
    ("LOG_LEVEL", "spec.sidecar.logLevel"),
    ("MAX_CONCURRENCY", "spec.maxConcurrency"),
    ("MODELS", "spec.models"),
    ("PROBE_ADDR", "spec.sidecar.port"),
    ("PROVIDER_NAME", "spec.provider"),
    ("PROXY_URL", "spec.provider"),
    ("SHUTDOWN_TIMEOUT_SECS", "spec.shutdownTimeout"),
    ("WORKER_CONFIG", "the operator"),
    ("WORKER_NAME", "the Pod's name"),
    ("WORKER_POOL", "the pool's name"),
    ("WORKER_SECRET", "spec.provider"),
    ("WORKER_SECRET_FILE", "spec.provider"),
    ("WORKER_TOKEN_FILE", "spec.credential"),
];

/// True for the variable that only the operator sets, which distinguishes its worker from any other container.
pub(super) fn is_worker_setting(name: &str, value: Option<&str>) -> bool {
    name == CONFIG_ENV && value == Some(CONFIG_FILE)
}

/// Returns the worker's container. With `alone`, it is the Pod's only container and not a sidecar.
pub fn container(inputs: &SidecarInputs<'_>, alone: bool) -> Value {
    let spec = inputs.spec();
    let port = sidecar_port(spec);
    let mut container = json!({
        "name": names::WORKER_CONTAINER,
        "image": image(inputs),
        "env": env(inputs, alone),
        "ports": [{"name": "relay-metrics", "containerPort": port, "protocol": "TCP"}],
        "startupProbe": startup(spec),
        "readinessProbe": readiness(spec, alone),
        "volumeMounts": mounts(spec, alone),
        "securityContext": restricted(inputs),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    if let Some(map) = container.as_object_mut() {
        add_choices(map, inputs, alone);
    }
    container
}

/// Returns the security context that the Pod Security Standard `restricted` requires, and a little more.
pub(super) fn restricted(inputs: &SidecarInputs<'_>) -> Value {
    let mut context = json!({
        "runAsNonRoot": true,
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    if !inputs.defaults.omit_ids {
        context["runAsUser"] = json!(UID);
        context["runAsGroup"] = json!(UID);
    }
    context
}

/// Returns an empty folder, mounted where the Pod's own ServiceAccount token would appear: a sidecar has no use for
/// that token.
pub(super) fn no_token_volume() -> Value {
    json!({"name": NO_TOKEN_VOLUME, "emptyDir": {}})
}

/// Returns the worker's volumes for its Pod.
pub fn volumes(inputs: &SidecarInputs<'_>) -> Vec<Value> {
    let spec = inputs.spec();
    let mut volumes = vec![
        json!({"name": CONFIG_VOLUME, "configMap": {"name": names::worker(inputs.pool_name())}}),
        credential_volume(spec),
    ];
    if let Some(key) = backend_key(spec) {
        volumes.push(json!({
            "name": BACKEND_KEY_VOLUME,
            "secret": {"secretName": key.name, "items": [{"key": key.key, "path": "key"}]},
        }));
    }
    if writes_to_tmp(spec) {
        volumes.push(json!({"name": TMP_VOLUME, "emptyDir": {}}));
    }
    volumes
}

fn credential_volume(spec: &WorkerPoolSpec) -> Value {
    match spec.credential {
        // Optional: without the Secret, the worker waits for the Provider. If it were required, the backend would wait
        // too.
        Credential::Secret => json!({
            "name": SECRET_VOLUME,
            "secret": {"secretName": names::worker_secret(&spec.provider), "optional": true},
        }),
        // A token of the Pod's account that only relays accept: it grants no access to the API server.
        Credential::ServiceAccountToken => json!({"name": TOKEN_VOLUME, "projected": {"sources": [
            {"serviceAccountToken": {"path": "token", "audience": TOKEN_AUDIENCE, "expirationSeconds": TOKEN_SECS}},
        ]}}),
    }
}

/// True if engines run in the worker's own container, whose root is read-only: nearly all of them write to /tmp.
fn writes_to_tmp(spec: &WorkerPoolSpec) -> bool {
    spec.runs_commands() && !super::runs_in_engine(spec)
}

/// Rejects environment variables that the pool's fields determine.
pub(super) fn check_env(place: &'static str, env: &[Value]) -> Result<(), Refusal> {
    for variable in env {
        let name = backend::name(variable);
        if let Some((_, source_field)) = RESERVED_ENV.iter().find(|(reserved, _)| *reserved == name) {
            return Err(Refusal::ReservedEnv { place, name: name.to_owned(), source_field });
        }
    }
    Ok(())
}

fn add_choices(map: &mut Map<String, Value>, inputs: &SidecarInputs<'_>, alone: bool) {
    let spec = inputs.spec();
    if !alone && spec.inject_mode == InjectMode::NativeSidecar {
        map.insert("restartPolicy".to_owned(), "Always".into());
    }
    if let Some(policy) = inputs.defaults.image_pull_policy.as_deref().filter(|policy| !policy.is_empty()) {
        map.insert("imagePullPolicy".to_owned(), policy.into());
    }
    let resources = [&spec.sidecar.resources, &inputs.defaults.resources].into_iter().find(|one| !one.is_empty());
    if let Some(resources) = resources {
        map.insert("resources".to_owned(), resources.0.clone());
    }
}

pub(super) fn image(inputs: &SidecarInputs<'_>) -> String {
    let own = inputs.spec().sidecar.image.trim();
    if own.is_empty() { inputs.defaults.image.clone() } else { own.to_owned() }
}

pub(super) fn env(inputs: &SidecarInputs<'_>, alone: bool) -> Vec<Value> {
    let spec = inputs.spec();
    let mut env = vec![
        json!({"name": CONFIG_ENV, "value": CONFIG_FILE}),
        json!({"name": "WORKER_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}),
        json!({"name": "DRAIN_TOKEN", "value": inputs.drain_token}),
        // The kubelet's probes and preStop hooks use the Pod's address.
        json!({"name": "PROBE_ADDR", "value": format!("[::]:{}", sidecar_port(spec))}),
    ];
    // Empty on a cluster that does not copy the label of the node to its Pods.
    if !spec.sidecar.env.iter().any(|variable| backend::name(variable) == ZONE) {
        env.push(node_zone());
    }
    // Not in worker.yaml, which also reaches running Pods, whose mounts are fixed. It overrides the secret there.
    if spec.credential == Credential::ServiceAccountToken {
        env.push(json!({"name": "WORKER_TOKEN_FILE", "value": TOKEN_FILE}));
    }
    if backend_key(spec).is_some() {
        env.push(json!({"name": "BACKEND_API_KEY_FILE", "value": BACKEND_KEY_FILE}));
    }
    // Not in worker.yaml, which also reaches running Pods, whose backends have not moved.
    if !alone && !backend::has_slots(spec) {
        env.push(json!({"name": "BACKEND_URL", "value": backend::backend_url(spec)}));
        env.push(json!({"name": "BACKEND_ENGINE", "value": backend::backend_engine(spec).as_str()}));
    }
    env.extend(spec.sidecar.env.iter().cloned());
    env
}

/// Returns the worker's zone by default: that of the node.
pub(super) fn node_zone() -> Value {
    json!({"name": ZONE, "valueFrom": {"fieldRef": {"fieldPath": ZONE_FIELD}}})
}

/// Returns the readiness probe. It never depends on the relay, whose outage would stop backends. In a template, the
/// operator controls how Pods are replaced, and a rollout must not pass through all of them before one has loaded its
/// model. The worker therefore keeps its Pod unready until its backend has served for the first time, and never again
/// after that; with a multiplexer, until each slot that has a default has held a model. In other modes, the Pod's
/// creator decides.
pub(super) fn readiness(spec: &WorkerPoolSpec, alone: bool) -> Value {
    let port = sidecar_port(spec);
    if spec.mode() == Mode::Template && !alone {
        return probe("/backendz", port, BACKEND_PERIOD_SECS, 15);
    }
    probe("/readyz", port, 10, 3)
}

/// Returns the startup probe, which checks only the worker's own server: a native sidecar that waited for the backend
/// would wait for a container that starts after it.
pub(super) fn startup(spec: &WorkerPoolSpec) -> Value {
    probe("/livez", sidecar_port(spec), 1, STARTUP_ATTEMPTS)
}

fn probe(path: &str, port: i32, period: i32, attempts: i32) -> Value {
    json!({
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period, "timeoutSeconds": 2, "failureThreshold": attempts,
    })
}

pub(super) fn mounts(spec: &WorkerPoolSpec, alone: bool) -> Vec<Value> {
    let folder = |file: &'static str| file.rsplit_once('/').map_or(file, |(folder, _)| folder);
    let credential = match spec.credential {
        Credential::Secret => (SECRET_VOLUME, folder(SECRET_FILE)),
        Credential::ServiceAccountToken => (TOKEN_VOLUME, folder(TOKEN_FILE)),
    };
    let mut mounts = vec![(CONFIG_VOLUME, folder(CONFIG_FILE)), credential];
    if backend_key(spec).is_some() {
        mounts.push((BACKEND_KEY_VOLUME, folder(BACKEND_KEY_FILE)));
    }
    if writes_to_tmp(spec) {
        mounts.push((TMP_VOLUME, "/tmp"));
    }
    // A standalone Pod belongs to the operator and sets its own token mount.
    if !alone {
        mounts.push((NO_TOKEN_VOLUME, TOKEN_FOLDER));
    }
    let mount = |(name, path)| json!({"name": name, "mountPath": path, "readOnly": name != TMP_VOLUME});
    mounts.into_iter().map(mount).collect()
}

fn backend_key(spec: &WorkerPoolSpec) -> Option<&crate::crd::SecretKeyRef> {
    spec.backend.as_ref()?.api_key_secret_ref.as_ref()
}
