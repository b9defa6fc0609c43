//! Determines which containers of a Pod are backends, and adds the hook that lets their requests finish.
//!
//! Only containers to which the worker sends requests get the hook: one for a plain backend, and with a multiplexer
//! every container that declares a slot's port. Others (a log shipper, for example) get SIGTERM at once, as usual: a
//! hook on a container that serves nothing would only delay its end. An engine behind a proxy in its own Pod is an
//! exception; `backend.container` names the container that must outlive the requests.

use http::Uri;
use serde_json::{Map, Value, json};

use super::{DRAIN_TOKEN_HEADER, Note, Refusal, SidecarInputs, array, items, restarts, sidecar_port};
use crate::crd::WorkerPoolSpec;
use crate::crd::worker_pool::{Engine, Mode};
use crate::resources::names::WORKER_CONTAINER;

/// The annotation from which kubectl takes the default container; charts set it to the main container.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// Returns the backend's port in the worker's Pod.
pub fn backend_port(spec: &WorkerPoolSpec) -> i32 {
    let port = spec.backend.as_ref().and_then(|backend| backend.port);
    port.unwrap_or_else(|| backend_engine(spec).default_port())
}

/// Returns the URL of the worker's backend: in the same Pod, or elsewhere for a standalone worker.
pub fn backend_url(spec: &WorkerPoolSpec) -> String {
    let backend = spec.backend.as_ref();
    let path = backend.and_then(|backend| backend.base_path.as_deref()).unwrap_or_default().trim_matches('/');
    let elsewhere = backend.and_then(|backend| backend.url.as_deref()).filter(|_| spec.mode() == Mode::Standalone);
    let url = elsewhere
        .map_or_else(|| format!("http://127.0.0.1:{}", backend_port(spec)), |url| url.trim_end_matches('/').to_owned());
    if path.is_empty() { url } else { format!("{url}/{path}") }
}

/// Returns the backend's engine.
pub fn backend_engine(spec: &WorkerPoolSpec) -> Engine {
    spec.backend.as_ref().map(|backend| backend.engine).unwrap_or_default()
}

/// True if the worker's backends are the slots of a multiplexer.
pub(super) fn has_slots(spec: &WorkerPoolSpec) -> bool {
    spec.slots().is_some()
}

/// Returns every port of the Pod to which the worker sends requests: the backend's, or those of a multiplexer's slots.
pub(super) fn ports(spec: &WorkerPoolSpec) -> Vec<i32> {
    let slots = spec.multiplexer.as_ref().map(|multiplexer| multiplexer.slots.as_slice()).unwrap_or_default();
    if slots.is_empty() {
        return vec![backend_port(spec)];
    }
    let of_slots = slots.iter().filter_map(|slot| slot.url.as_deref());
    let of_models = slots.iter().flat_map(|slot| &slot.models).filter_map(|model| model.url.as_deref());
    of_slots.chain(of_models).filter_map(local_port).collect()
}

/// Adds the hook to the backends.
pub(super) fn add_hooks(
    spec: &mut Map<String, Value>,
    metadata: &Map<String, Value>,
    inputs: &SidecarInputs<'_>,
) -> Result<Vec<Note>, Refusal> {
    if items(spec, "containers")?.is_empty() {
        return Err(Refusal::NoContainers);
    }
    let chosen = choose(spec, metadata, inputs.spec())?;
    let mut notes = Vec::new();
    // A worker that runs the engines itself stops them after the last request.
    if chosen.is_empty() && !ports(inputs.spec()).is_empty() && !super::runs_in_engine(inputs.spec()) {
        notes.push(Note::NoSlotContainer);
    }
    let hook = hook(inputs);
    for (list, index) in chosen {
        let Some(container) = array(spec, list)?.get_mut(index).and_then(Value::as_object_mut) else {
            return Err(Refusal::Malformed { field: list, wanted: "a list of objects" });
        };
        let lifecycle = container.entry("lifecycle").or_insert(Value::Null);
        if lifecycle.is_null() {
            *lifecycle = Value::Object(Map::new());
        }
        let lifecycle =
            lifecycle.as_object_mut().ok_or(Refusal::Malformed { field: "lifecycle", wanted: "an object" })?;
        if lifecycle.get("preStop").is_none_or(Value::is_null) {
            lifecycle.insert("preStop".to_owned(), hook.clone());
        } else {
            let container = container.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
            notes.push(Note::HasPreStop { container });
        }
    }
    Ok(notes)
}

/// Returns the hook, which waits in the worker's `/drain`.
pub(super) fn hook(inputs: &SidecarInputs<'_>) -> Value {
    json!({"httpGet": {
        "path": "/drain",
        // A number, because a name would be resolved in the ports of the container that has the hook.
        "port": sidecar_port(inputs.spec()),
        "httpHeaders": [{"name": DRAIN_TOKEN_HEADER, "value": inputs.drain_token}],
    }})
}

/// The position of a container: its list and the index in it.
type ContainerPosition = (&'static str, usize);

fn choose(
    spec: &Map<String, Value>,
    metadata: &Map<String, Value>,
    pool: &WorkerPoolSpec,
) -> Result<Vec<ContainerPosition>, Refusal> {
    let places = candidates(spec)?;
    let named = |wanted: &str| places.iter().find(|(_, container)| name(container) == wanted).map(|(place, _)| *place);

    let ports = ports(pool);
    // The worker's own container needs no hook: it drains on SIGTERM.
    let others = places.iter().filter(|(_, container)| name(container) != WORKER_CONTAINER);
    let serving = others.filter(|(_, container)| ports.iter().any(|port| declares(container, *port)));
    let mut serving = serving.map(|(place, _)| *place);
    if has_slots(pool) {
        return Ok(serving.collect());
    }
    if let Some(wanted) = pool.backend.as_ref().and_then(|backend| backend.container.as_deref()) {
        let present = || places.iter().map(|(_, container)| name(container).to_owned()).collect();
        return named(wanted)
            .map(|place| vec![place])
            .ok_or_else(|| Refusal::NoSuchContainer { name: wanted.to_owned(), present: present() });
    }
    let annotated =
        metadata.get("annotations").and_then(|annotations| annotations.get(DEFAULT_CONTAINER)).and_then(Value::as_str);
    let place = serving.next().or_else(|| annotated.and_then(named)).unwrap_or(("containers", 0));
    Ok(vec![place])
}

/// Returns the containers that run while the Pod serves: first the regular ones, then restartable init containers.
fn candidates(spec: &Map<String, Value>) -> Result<Vec<(ContainerPosition, &Value)>, Refusal> {
    let plain = items(spec, "containers")?.iter().enumerate();
    let init = items(spec, "initContainers")?.iter().enumerate().filter(|(_, container)| restarts(container));
    Ok(plain
        .map(|(index, container)| (("containers", index), container))
        .chain(init.map(|(index, container)| (("initContainers", index), container)))
        .collect())
}

/// Returns the name of a container, a volume or a reference.
pub(super) fn name(item: &Value) -> &str {
    item.get("name").and_then(Value::as_str).unwrap_or_default()
}

/// True if a container declares a TCP port.
pub(super) fn declares(container: &Value, port: i32) -> bool {
    let ports = container.get("ports").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    ports.iter().any(|one| {
        let protocol = one.get("protocol").and_then(Value::as_str).unwrap_or("TCP");
        one.get("containerPort").and_then(Value::as_i64) == Some(i64::from(port)) && protocol == "TCP"
    })
}

/// Returns the port of an address within the Pod.
fn local_port(url: &str) -> Option<i32> {
    let uri: Uri = url.parse().ok()?;
    let local = matches!(uri.host()?, "127.0.0.1" | "localhost" | "[::1]" | "0.0.0.0");
    let by_scheme = if uri.scheme_str() == Some("https") { 443 } else { 80 };
    local.then(|| i32::from(uri.port_u16().unwrap_or(by_scheme)))
}
