//! Builds the worker in a Pod, for the webhook, for templates and for standalone pools.
//!
//! It works on a Pod as raw JSON, never on a typed one: fields that a newer API server or another injector added and
//! this program does not know must be preserved. It adds:
//! - the worker's container, last of the init containers (so that model downloads run first) or last of the containers,
//!   with the whole security context that the Pod Security Standard `restricted` requires;
//! - its volumes: the pool's worker.yaml, the Provider's secret (optional, so that a rotation or an absent Provider
//!   delays no backend), and the backend's key; and an empty folder in place of the Pod's ServiceAccount token, which
//!   the API server would mount into the worker as well;
//! - a preStop hook on the backend's container that waits in the worker's `/drain`. The kubelet runs all preStop hooks
//!   at once and sends SIGTERM to a container when its own hook has ended, so only a container with the hook outlives
//!   its requests. [`backend`] decides which containers need it;
//! - enough time for all that in `terminationGracePeriodSeconds`;
//! - annotations for Prometheus, unless the Pod has its own, and for the parts of a multiplexer that a running worker
//!   cannot reload.
//!
//! A worker that starts its engines itself runs in their image instead: see [`engine`].

use k8s_openapi::api::core::v1::{Container, Pod};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::crd::worker_pool::InjectMode;
use crate::crd::{WorkerPool, WorkerPoolSpec};
use crate::resources::names::{self, SIDECAR_PORT, WORKER_CONTAINER};
use crate::settings::defaults::WorkerDefaults;

pub mod backend;
mod container;
mod engine;
mod refusal;

pub use backend::{backend_engine, backend_port, backend_url};
use container::is_worker_setting;
pub use container::{BACKEND_KEY_FILE, CONFIG_FILE, SECRET_FILE, container, volumes};
pub use engine::{run_in_engine, runs_in_engine};
pub use refusal::{NODE_NAMES, Note, Refusal};

/// The header in which a preStop hook sends the drain token.
pub const DRAIN_TOKEN_HEADER: &str = "x-modelrelay-drain-token";

/// The seconds that a backend may take from SIGTERM to its end, once no request runs. Engines that hold a GPU take 2 to
/// 15 to free it.
const BACKEND_STOP_SECS: i64 = 20;
/// The seconds for the kubelet's work in between, and for the worker to end after the backend.
const MARGIN_SECS: i64 = 10;
/// The API server's default for a Pod that sets no grace period.
const DEFAULT_GRACE_SECS: i64 = 30;

/// The inputs of a worker's container.
#[derive(Clone, Copy)]
pub struct SidecarInputs<'a> {
    /// Its pool.
    pub pool: &'a WorkerPool,
    /// Defaults for fields that the pool omits.
    pub defaults: &'a WorkerDefaults,
    /// The token that a request to drain the worker must present: per Pod when injected, per pool in a template.
    pub drain_token: &'a str,
}

impl SidecarInputs<'_> {
    fn spec(&self) -> &WorkerPoolSpec {
        &self.pool.spec
    }

    fn pool_name(&self) -> &str {
        self.pool.metadata.name.as_deref().unwrap_or_default()
    }
}

/// Adds the worker to `pod`, which is `{metadata, spec}`: a Pod, or the template of a Deployment. A Pod that has a
/// worker is unchanged. A refusal leaves `pod` untouched.
pub fn add_to_pod(pod: &mut Value, inputs: &SidecarInputs<'_>) -> Result<Vec<Note>, Refusal> {
    if has_worker(pod) {
        return Ok(Vec::new());
    }
    let mut changed = pod.clone();
    let root = as_object(&mut changed, "the Pod")?;
    let mut metadata = take_object(root, "metadata")?;
    let mut spec = take_object(root, "spec")?;

    check(&spec, inputs)?;
    check_names(&spec)?;
    let mut worker = container(inputs, false);
    // If the Pod has resources at Pod level, the API server has already set its requests to the sum of its containers'
    // and would reject more. The worker then shares the Pod's resources, unless the pool sets others.
    let has_whole = spec.get("resources").is_some_and(|resources| !resources.is_null());
    if has_whole && inputs.spec().sidecar.resources.is_empty() {
        worker.as_object_mut().map(|worker| worker.remove("resources"));
    }
    let mut notes = backend::add_hooks(&mut spec, &metadata, inputs)?;
    notes.extend(names_note(&spec));
    // The kubelet starts all hooks of a Pod at once, including the worker's. If a backend has its own preStop hook, the
    // worker accepts no new requests from that moment, and running requests have as long as the backend's hook takes.
    if notes.iter().any(|note| matches!(note, Note::HasPreStop { .. }))
        && let Some(worker) = worker.as_object_mut()
    {
        worker.insert("lifecycle".to_owned(), json!({"preStop": backend::hook(inputs)}));
    }
    if is_guaranteed(&spec)? && !has_equal_limits(&worker) {
        notes.push(Note::LosesGuaranteed);
    }
    let list = match inputs.spec().inject_mode {
        InjectMode::NativeSidecar => "initContainers",
        InjectMode::Container => "containers",
    };
    array(&mut spec, list)?.push(worker);
    if inputs.spec().inject_mode == InjectMode::Container && may_complete(&spec) {
        notes.push(Note::NeverCompletes);
    }
    let all = array(&mut spec, "volumes")?;
    all.extend(volumes(inputs));
    all.push(container::no_token_volume());
    add_pull_secrets(&mut spec, inputs)?;
    let wanted = grace_seconds(inputs.spec())?;
    let given = spec.get("terminationGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(DEFAULT_GRACE_SECS);
    spec.insert("terminationGracePeriodSeconds".to_owned(), wanted.max(given).into());
    annotate(&mut metadata, inputs.spec())?;

    root.insert("metadata".to_owned(), metadata.into());
    root.insert("spec".to_owned(), spec.into());
    *pod = changed;
    Ok(notes)
}

/// Records the hash of the worker that `pod` was just given, so that a later change can be detected. Only for injected
/// Pods; for those of a template, the template itself shows changes.
pub fn mark(pod: &mut Value, inputs: &SidecarInputs<'_>) {
    set_metadata(pod, "annotations", names::WORKER_HASH_ANNOTATION, &hash(inputs));
}

/// Sets one of a Pod's labels or annotations, which may be absent or null.
pub fn set_metadata(pod: &mut Value, field: &str, key: &str, value: &str) {
    if let Some(metadata) = pod.pointer_mut("/metadata").and_then(Value::as_object_mut) {
        let entries = metadata.entry(field).or_insert(Value::Null);
        if entries.is_null() {
            *entries = json!({});
        }
        if let Some(entries) = entries.as_object_mut() {
            entries.insert(key.to_owned(), value.into());
        }
    }
}

/// Returns the hash of everything that pool and defaults put into a Pod. It covers nothing that depends on the Pod, nor
/// the drain token, which differs for each Pod.
pub fn hash(inputs: &SidecarInputs<'_>) -> String {
    let inputs = SidecarInputs { drain_token: "", ..*inputs };
    let written = json!([
        container(&inputs, false),
        volumes(&inputs),
        inputs.defaults.image_pull_secrets,
        inputs.spec().backend.as_ref().and_then(|backend| backend.container.as_deref()),
        grace_seconds(inputs.spec()).ok(),
    ]);
    let slots = slots_hash(inputs.spec()).unwrap_or_default();
    let digest = Sha256::digest(written.to_string() + &slots);
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the hash of the parts of a multiplexer that a running worker cannot reload, or `None` without one.
pub fn slots_hash(spec: &WorkerPoolSpec) -> Option<String> {
    let fixed = serde_json::to_string(&spec.slots()?.fixed()).unwrap_or_default();
    Some(Sha256::digest(fixed)[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// True if the Pod or template has a worker.
pub fn has_worker(pod: &Value) -> bool {
    worker(pod).is_some()
}

/// Returns the worker's container in a Pod or a template. A container of that name whose settings the operator did not
/// write is not a worker.
pub fn worker(pod: &Value) -> Option<&Value> {
    let lists = ["initContainers", "containers"];
    lists.iter().filter_map(|list| pod.get("spec")?.get(list)?.as_array()).flatten().find(|container| {
        let env = container.get("env").and_then(Value::as_array).into_iter().flatten();
        let mut env = env.map(|variable| (backend::name(variable), variable.get("value").and_then(Value::as_str)));
        backend::name(container) == WORKER_CONTAINER && env.any(|(name, value)| is_worker_setting(name, value))
    })
}

/// The same for a Pod of the API. An annotation would be no proof, because it could be arbitrary.
pub fn worker_of(pod: &Pod) -> Option<&Container> {
    let spec = pod.spec.as_ref()?;
    spec.containers.iter().chain(spec.init_containers.iter().flatten()).find(|container| {
        let mut env = container.env.iter().flatten();
        container.name == WORKER_CONTAINER
            && env.any(|variable| is_worker_setting(&variable.name, variable.value.as_deref()))
    })
}

/// Returns the drain token in a Pod or a template. It is read back from the live object, so that rendering it again
/// changes nothing.
pub fn drain_token_of(pod: &Value) -> Option<&str> {
    let env = worker(pod)?.get("env")?.as_array()?;
    let token = env.iter().find(|variable| variable.get("name").and_then(Value::as_str) == Some("DRAIN_TOKEN"))?;
    token.get("value")?.as_str().filter(|token| !token.is_empty())
}

/// Returns the reason that a Pod with a pool's label is deliberately left without a worker: only the leader of such a
/// group serves requests, and its other members have no reachable backend.
pub fn exemption(labels: Option<&Value>) -> Option<&'static str> {
    let label = |name| labels?.get(name)?.as_str();
    if label("leaderworkerset.sigs.k8s.io/worker-index").is_some_and(|index| index != "0") {
        return Some("a LeaderWorkerSet's worker");
    }
    (label("ray.io/node-type") == Some("worker")).then_some("a Ray worker")
}

/// Returns the port of the worker's probes, drain and metrics.
pub fn sidecar_port(spec: &WorkerPoolSpec) -> i32 {
    spec.sidecar.port.unwrap_or(SIDECAR_PORT)
}

/// Returns the seconds that a Pod with a backend needs from its deletion to its end.
pub fn grace_seconds(spec: &WorkerPoolSpec) -> Result<i64, Refusal> {
    Ok(drain_seconds(spec)? + BACKEND_STOP_SECS)
}

/// Returns the same for a standalone worker. One that starts its backends stops them after the last request.
pub fn standalone_grace_seconds(spec: &WorkerPoolSpec) -> Result<i64, Refusal> {
    let backends = if spec.runs_commands() { BACKEND_STOP_SECS } else { 0 };
    Ok(drain_seconds(spec)? + backends)
}

fn drain_seconds(spec: &WorkerPoolSpec) -> Result<i64, Refusal> {
    let timeout = spec.shutdown_timeout.parse().map_err(Refusal::ShutdownTimeout)?;
    let seconds = i64::try_from(timeout.as_millis().div_ceil(1000)).unwrap_or(i64::MAX / 2);
    Ok(seconds + MARGIN_SECS)
}

/// Rejects a Pod that would break the worker, or that the worker would break.
fn check(spec: &Map<String, Value>, inputs: &SidecarInputs<'_>) -> Result<(), Refusal> {
    let pool = inputs.spec();
    let port = sidecar_port(pool);
    container::check_env("spec.sidecar.env of the pool", &pool.sidecar.env)?;
    if runs_windows(spec) {
        return Err(Refusal::Windows);
    }
    // A port of the Pod would be one of the node, and two Pods of one pool would conflict.
    if spec.get("hostNetwork").and_then(Value::as_bool) == Some(true) && pool.sidecar.port.is_none() {
        return Err(Refusal::HostNetwork);
    }
    if backend::ports(pool).contains(&port) {
        return Err(Refusal::BackendPort { port });
    }
    // The worker binds first, so the other container would crash repeatedly. Only containers that run at the same time
    // matter.
    let init = items(spec, "initContainers")?.iter().filter(|container| restarts(container));
    for other in items(spec, "containers")?.iter().chain(init) {
        if backend::declares(other, port) {
            return Err(Refusal::PortTaken { port, container: backend::name(other).to_owned() });
        }
    }
    for volume in items(spec, "volumes")? {
        let name = backend::name(volume);
        if container::VOLUMES.contains(&name) {
            return Err(Refusal::VolumeTaken { name: name.to_owned() });
        }
    }
    Ok(())
}

/// True if a Pod resolves names as its node does. ClusterFirst, the default, means that under hostNetwork.
pub fn uses_node_names(host_network: bool, dns_policy: Option<&str>) -> bool {
    match dns_policy {
        Some("Default") => true,
        Some("ClusterFirst") | None => host_network,
        Some(_) => false,
    }
}

fn names_note(spec: &Map<String, Value>) -> Option<Note> {
    let host_network = spec.get("hostNetwork").and_then(Value::as_bool) == Some(true);
    uses_node_names(host_network, spec.get("dnsPolicy").and_then(Value::as_str)).then_some(Note::NodeNames)
}

/// Rejects a Pod with a container that has the worker's name.
fn check_names(spec: &Map<String, Value>) -> Result<(), Refusal> {
    for list in ["initContainers", "containers"] {
        if items(spec, list)?.iter().any(|container| backend::name(container) == WORKER_CONTAINER) {
            return Err(Refusal::ContainerTaken { list });
        }
    }
    Ok(())
}

/// True for a Windows Pod. The worker is a Linux program, and the API server rejects its security context on Windows.
fn runs_windows(spec: &Map<String, Value>) -> bool {
    let os = spec.get("os").and_then(|os| os.get("name")).and_then(Value::as_str);
    let node = spec.get("nodeSelector").and_then(|labels| labels.get("kubernetes.io/os")).and_then(Value::as_str);
    os == Some("windows") || node == Some("windows")
}

/// True if the Pod is meant to end by itself.
fn may_complete(spec: &Map<String, Value>) -> bool {
    matches!(spec.get("restartPolicy").and_then(Value::as_str), Some("Never" | "OnFailure"))
}

/// True if an init container keeps running.
fn restarts(container: &Value) -> bool {
    container.get("restartPolicy").and_then(Value::as_str) == Some("Always")
}

/// True if the kubelet would classify the Pod as Guaranteed: every container has equal requests and limits.
fn is_guaranteed(spec: &Map<String, Value>) -> Result<bool, Refusal> {
    Ok(items(spec, "containers")?.iter().chain(items(spec, "initContainers")?).all(has_equal_limits))
}

/// True if a container has limits of cpu and memory, and no requests that differ from them.
fn has_equal_limits(container: &Value) -> bool {
    let amount = |kind: &str, resource: &str| container.get("resources")?.get(kind)?.get(resource);
    ["cpu", "memory"].into_iter().all(|resource| {
        let limit = amount("limits", resource);
        limit.is_some() && amount("requests", resource).is_none_or(|request| Some(request) == limit)
    })
}

fn add_pull_secrets(spec: &mut Map<String, Value>, inputs: &SidecarInputs<'_>) -> Result<(), Refusal> {
    if inputs.defaults.image_pull_secrets.is_empty() {
        return Ok(());
    }
    let present = array(spec, "imagePullSecrets")?;
    for secret in &inputs.defaults.image_pull_secrets {
        if !present.iter().any(|one| backend::name(one) == secret.name) {
            present.push(json!({"name": secret.name}));
        }
    }
    Ok(())
}

/// Adds annotations. A Pod with its own scrape annotations keeps them, because it can have only one set.
fn annotate(metadata: &mut Map<String, Value>, spec: &WorkerPoolSpec) -> Result<(), Refusal> {
    let port = sidecar_port(spec);
    let mut annotations = take_object(metadata, "annotations")?;
    if let Some(hash) = slots_hash(spec) {
        annotations.insert(names::SLOTS_HASH_ANNOTATION.to_owned(), hash.into());
    }
    if !annotations.keys().any(|key| key.starts_with("prometheus.io/")) {
        for (key, value) in [("scrape", "true".to_owned()), ("port", port.to_string()), ("path", "/metrics".to_owned())]
        {
            annotations.insert(format!("prometheus.io/{key}"), value.into());
        }
    }
    if !annotations.is_empty() {
        metadata.insert("annotations".to_owned(), annotations.into());
    }
    Ok(())
}

fn as_object<'a>(value: &'a mut Value, field: &'static str) -> Result<&'a mut Map<String, Value>, Refusal> {
    value.as_object_mut().ok_or(Refusal::Malformed { field, wanted: "an object" })
}

/// Removes and returns a field; absent and null are an empty object, as in the API.
fn take_object(parent: &mut Map<String, Value>, field: &'static str) -> Result<Map<String, Value>, Refusal> {
    match parent.remove(field) {
        None | Some(Value::Null) => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map),
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            Err(Refusal::Malformed { field, wanted: "an object" })
        }
    }
}

/// Returns a list of the spec, created if absent or null.
fn array<'a>(spec: &'a mut Map<String, Value>, field: &'static str) -> Result<&'a mut Vec<Value>, Refusal> {
    let list = spec.entry(field).or_insert(Value::Null);
    if list.is_null() {
        *list = Value::Array(Vec::new());
    }
    list.as_array_mut().ok_or(Refusal::Malformed { field, wanted: "a list" })
}

/// Returns a list of the spec; absent and null are empty.
fn items<'a>(spec: &'a Map<String, Value>, field: &'static str) -> Result<&'a [Value], Refusal> {
    match spec.get(field) {
        None | Some(Value::Null) => Ok(&[]),
        Some(Value::Array(items)) => Ok(items),
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_)) => {
            Err(Refusal::Malformed { field, wanted: "a list" })
        }
    }
}

#[cfg(test)]
mod tests;
