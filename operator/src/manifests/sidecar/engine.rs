//! The worker in an engine's own image. If a multiplexer's drivers start the engines, they are children of the worker,
//! which therefore needs the engine's files, environment and GPU.
//!
//! The template provides the container. It is named `modelrelay-worker`, like the worker's container in every mode, and
//! the author defines everything else: image, GPU, volumes, user. The operator adds the worker's program, its settings,
//! its probes and its volumes. An init container of the worker's image copies the program into an empty folder, because
//! an engine's image has no worker and the worker's image no shell. The worker is process 1 in that container. Each
//! engine runs under its own supervisor, which adopts its orphans, so no other process has to reap them.

use serde_json::{Map, Value, json};

use super::container::{self, BINARY_VOLUME};
use super::{DEFAULT_GRACE_SECS, sidecar_port};
use super::{
    Note, Refusal, SidecarInputs, add_pull_secrets, annotate, array, as_object, backend, check, grace_seconds,
    names_note, take_object,
};
use crate::crd::WorkerPoolSpec;
use crate::crd::worker_pool::Mode;
use crate::resources::names::{WORKER_BINARY_CONTAINER, WORKER_CONTAINER};

/// The folder of the program, for the init container that writes it and the one that runs it.
const FOLDER: &str = "/modelrelay";
/// The program in the worker's image.
const PROGRAM: &str = "/modelrelay-worker";
/// The resources that every container has: copying needs no GPU.
const PLAIN_RESOURCES: [&str; 2] = ["cpu", "memory"];

/// True if the pool's worker runs in the image of its engines. If the pool's own image contains both, the worker is a
/// sidecar of that image.
pub fn runs_in_engine(spec: &WorkerPoolSpec) -> bool {
    spec.mode() == Mode::Template && spec.runs_commands() && spec.sidecar.image.trim().is_empty()
}

/// Makes the container `modelrelay-worker` of a template, `{metadata, spec}`, run the worker. A refusal leaves it
/// untouched.
pub fn run_in_engine(pod: &mut Value, inputs: &SidecarInputs<'_>) -> Result<Vec<Note>, Refusal> {
    let mut changed = pod.clone();
    let root = as_object(&mut changed, "the Pod")?;
    let mut metadata = take_object(root, "metadata")?;
    let mut spec = take_object(root, "spec")?;

    check(&spec, inputs)?;
    let mut notes = backend::add_hooks(&mut spec, &metadata, inputs)?;
    notes.extend(names_note(&spec));
    let engine = array(&mut spec, "containers")?
        .iter_mut()
        .filter_map(Value::as_object_mut)
        .find(|container| container.get("name").and_then(Value::as_str) == Some(WORKER_CONTAINER))
        .ok_or(Refusal::NoEngineContainer)?;
    take_over(engine, inputs)?;
    let bringer = bringer(engine, inputs);
    array(&mut spec, "initContainers")?.push(bringer);
    let volumes = array(&mut spec, "volumes")?;
    volumes.extend(container::volumes(inputs));
    volumes.push(json!({"name": BINARY_VOLUME, "emptyDir": {}}));
    add_pull_secrets(&mut spec, inputs)?;
    let given = spec.get("terminationGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(DEFAULT_GRACE_SECS);
    let wanted = grace_seconds(inputs.spec())?;
    spec.insert("terminationGracePeriodSeconds".to_owned(), wanted.max(given).into());
    annotate(&mut metadata, inputs.spec())?;

    root.insert("metadata".to_owned(), metadata.into());
    root.insert("spec".to_owned(), spec.into());
    *pod = changed;
    Ok(notes)
}

fn take_over(engine: &mut Map<String, Value>, inputs: &SidecarInputs<'_>) -> Result<(), Refusal> {
    for field in ["command", "args"] {
        if engine
            .get(field)
            .is_some_and(|given| !given.is_null() && given.as_array().is_none_or(|words| !words.is_empty()))
        {
            return Err(Refusal::EngineCommand { field });
        }
        engine.remove(field);
    }
    engine.insert("command".to_owned(), json!([format!("{FOLDER}{PROGRAM}")]));
    let has_env_from = engine.get("envFrom").and_then(Value::as_array).is_some_and(|from| !from.is_empty());
    let env = array(engine, "env")?;
    container::check_env("env of container modelrelay-worker", env)?;
    // The zone that the template names takes precedence over the node's. It may be in the objects of `envFrom`.
    let may_name_zone = has_env_from || env.iter().any(|given| backend::name(given) == container::ZONE);
    let node_zone = may_name_zone.then(container::node_zone);
    for variable in container::env(inputs, true).into_iter().filter(|variable| Some(variable) != node_zone.as_ref()) {
        env.retain(|given| backend::name(given) != backend::name(&variable));
        env.push(variable);
    }
    array(engine, "ports")?
        .push(json!({"name": "relay-metrics", "containerPort": sidecar_port(inputs.spec()), "protocol": "TCP"}));
    let mounts = array(engine, "volumeMounts")?;
    // The engine keeps the ServiceAccount's token: access to buckets with models may require it.
    mounts.extend(container::mounts(inputs.spec(), true));
    mounts.push(json!({"name": BINARY_VOLUME, "mountPath": FOLDER, "readOnly": true}));
    // Probes that the author sets are kept.
    let ours = [
        ("startupProbe", container::startup(inputs.spec())),
        ("readinessProbe", container::readiness(inputs.spec(), false)),
        ("terminationMessagePolicy", json!("FallbackToLogsOnError")),
    ];
    for (field, value) in ours {
        engine.entry(field).or_insert(value);
    }
    Ok(())
}

/// Returns the init container that copies the program. It has the engine's resources without devices, so that a
/// Guaranteed Pod stays one and a quota is met. It ends before the engine starts, so the Pod requests no more in total.
fn bringer(engine: &Map<String, Value>, inputs: &SidecarInputs<'_>) -> Value {
    let mut bringer = json!({
        "name": WORKER_BINARY_CONTAINER,
        "image": container::image(inputs),
        "args": ["install", FOLDER],
        "volumeMounts": [{"name": BINARY_VOLUME, "mountPath": FOLDER}],
        "securityContext": container::restricted(inputs),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    let Some(map) = bringer.as_object_mut() else { return bringer };
    if let Some(policy) = inputs.defaults.image_pull_policy.as_deref().filter(|policy| !policy.is_empty()) {
        map.insert("imagePullPolicy".to_owned(), policy.into());
    }
    let mut resources = engine.get("resources").cloned().unwrap_or_default();
    for kind in ["requests", "limits"] {
        if let Some(amounts) = resources.get_mut(kind).and_then(Value::as_object_mut) {
            amounts.retain(|resource, _| PLAIN_RESOURCES.contains(&resource.as_str()));
        }
    }
    if let Some(resources) = resources.as_object_mut() {
        resources.remove("claims");
        resources.retain(|_, amounts| amounts.as_object().is_some_and(|amounts| !amounts.is_empty()));
        if !resources.is_empty() {
            map.insert("resources".to_owned(), Value::Object(resources.clone()));
        }
    }
    bringer
}

#[cfg(test)]
mod tests;
