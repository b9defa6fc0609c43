//! Decides on a Pod, as a pure function of the Pod and of whether its pool exists.
//!
//! A Pod without a controller whose pool does not exist is rejected, and its creator sees the reason in the response. A
//! rejected Pod of a controller is easily missed, and the controller waits minutes before it retries. Such a Pod is
//! admitted with a scheduling gate, and the operator deletes it when the pool appears, so that the controller creates a
//! new one at once.
//!
//! A pool that is being deleted, or whose objects cannot be created, is treated as missing: a Pod with its worker would
//! wait for the worker's ConfigMap indefinitely.

use std::collections::BTreeMap;

use kube::ResourceExt;
use serde_json::{Value, json};

use super::review::{AdmissionDecision, Review};
use crate::crd::WorkerPool;
use crate::crd::worker_pool::Mode;
use crate::manifests::sidecar::{self, SidecarInputs};
use crate::resources::conditions::STALLED;
use crate::resources::names::{NO_POOL, NO_SUCH_POOL_GATE, POOL_LABEL, SELECTED_ANNOTATION};
use crate::settings::defaults::WorkerDefaults;
use crate::spec::worker_pool::reasons::Reason;
use crate::spec::worker_pool::selection::selecting;
use crate::spec::worker_pool::validate;

/// The longest name of a pool.
const MAX_POOL_NAME: usize = 52;
/// The longest name of a namespace.
const MAX_NAMESPACE: usize = 63;

/// The lookup that a decision on a Pod needs.
#[derive(Clone, Debug, PartialEq)]
pub enum Question<'a> {
    /// No lookup is needed.
    Settled(AdmissionDecision),
    /// Look up the pool of this name.
    Pool(&'a str),
    /// Look up the pools that select a Pod with these labels.
    Selection(BTreeMap<String, String>),
}

/// The result of looking up a pool.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The pool exists.
    Found(Box<WorkerPool>),
    /// There is no pool of that name.
    Missing,
}

/// Returns the lookup that the Pod in `review` needs. The webhook's configuration already excludes most of these Pods,
/// but a chart writes it, and an omission there must do no harm.
pub fn question(review: &Review) -> Question<'_> {
    let unchanged = |why| Question::Settled(AdmissionDecision::Unchanged(why));
    let Some(pod) = review.created_pod() else {
        return unchanged("not the creation of a Pod");
    };
    let metadata = |key: &str| pod.get("metadata").and_then(|metadata| metadata.get(key));
    let labels = metadata("labels");
    let pool = labels.and_then(|labels| labels.get(POOL_LABEL)).and_then(Value::as_str);
    if pool == Some(NO_POOL) {
        return unchanged("opted out");
    }
    if sidecar::has_worker(pod) {
        return unchanged("already has a worker");
    }
    // The kubelet runs the original, whatever happens to its mirror.
    if metadata("annotations").and_then(|annotations| annotations.get("kubernetes.io/config.mirror")).is_some() {
        return unchanged("mirror of a static Pod");
    }
    if let Some(why) = sidecar::exemption(labels) {
        return unchanged(why);
    }
    match pool {
        Some(pool) => Question::Pool(pool),
        None => match labels.and_then(|labels| serde_json::from_value::<BTreeMap<String, String>>(labels.clone()).ok())
        {
            Some(labels) if !labels.is_empty() => Question::Selection(labels),
            Some(_) | None => unchanged("no labels"),
        },
    }
}

/// Decides on a Pod without the label that `pools` of its namespace may select.
pub fn decide_selected(
    review: &Review,
    labels: &BTreeMap<String, String>,
    pools: &[WorkerPool],
    defaults: &WorkerDefaults,
    token: &str,
) -> AdmissionDecision {
    let selecting = selecting(pools, labels);
    let Some((first, others)) = selecting.split_first() else {
        return AdmissionDecision::Unchanged("no pool selects it");
    };
    let name = first.name_any();
    let mut decision = decide(review, &name, &Lookup::Found(Box::new((*first).clone())), defaults, token);
    match &mut decision {
        AdmissionDecision::Injected { pod, warnings } => {
            mark_selected(pod, &name);
            warnings.extend(others.iter().map(|other| {
                let other = other.name_any();
                format!("WorkerPools {name} and {other} both select this Pod, which belongs to the older one, {name}")
            }));
        }
        AdmissionDecision::Gated { pod, .. } => {
            mark_selected(pod, &name);
            mark_waiting(pod);
        }
        // The Pod's creator did not request a worker.
        AdmissionDecision::Refused(why) => {
            let namespace = first.namespace();
            tracing::warn!(namespace, workerpool = name, %why, "admitted a selected Pod without a worker");
            decision = AdmissionDecision::Unchanged("the pool that selects it cannot give it a worker");
        }
        AdmissionDecision::Unchanged(_) => {}
    }
    decision
}

/// Labels a Pod, which then counts as one of the pool.
fn mark_selected(pod: &mut Value, pool: &str) {
    sidecar::set_metadata(pod, "labels", POOL_LABEL, pool);
}

/// Annotates a Pod that waits for a pool which its creator did not name. Without the pool, it need not wait.
fn mark_waiting(pod: &mut Value) {
    sidecar::set_metadata(pod, "annotations", SELECTED_ANNOTATION, "true");
}

/// True if such a pool can exist. Labels are not validated before a webhook sees them, and both names become parts of a
/// path.
pub fn may_exist(namespace: &str, pool: &str) -> bool {
    is_label(namespace, MAX_NAMESPACE) && is_label(pool, MAX_POOL_NAME)
}

/// True if a namespace can have this name.
pub fn is_namespace(namespace: &str) -> bool {
    is_label(namespace, MAX_NAMESPACE)
}

fn is_label(name: &str, max: usize) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=max).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

/// Decides on a Pod of `pool`. `token` is used only if the Pod gets a worker.
pub fn decide(
    review: &Review,
    pool: &str,
    lookup: &Lookup,
    defaults: &WorkerDefaults,
    token: &str,
) -> AdmissionDecision {
    let Some(pod) = review.created_pod() else {
        return AdmissionDecision::Unchanged("not the creation of a Pod");
    };
    let namespace = review.namespace();
    let found = match lookup {
        Lookup::Found(found) if found.metadata.deletion_timestamp.is_none() => found,
        Lookup::Found(_) | Lookup::Missing => return without_pool(pod, namespace, pool),
    };
    let refused = |why: &dyn std::fmt::Display| AdmissionDecision::Refused(format!("WorkerPool {pool}: {why}"));
    match found.spec.mode() {
        Mode::Standalone => {
            refused(&"the pool runs standalone workers; to inject a worker, use a pool without standalone")
        }
        Mode::Template => {
            refused(&"the pool runs Pods from its template; to inject a worker, use a pool without template")
        }
        Mode::Inject => {
            if let Some(why) = unusable(found) {
                return gated_or_refused(pod, format!("WorkerPool {pool}: {why}"));
            }
            let mut pod = pod.clone();
            let inputs = SidecarInputs { pool: found, defaults, drain_token: token };
            match sidecar::add_to_pod(&mut pod, &inputs) {
                Ok(notes) => {
                    sidecar::mark(&mut pod, &inputs);
                    AdmissionDecision::Injected { pod, warnings: notes.iter().map(ToString::to_string).collect() }
                }
                Err(refusal) => refused(&refusal),
            }
        }
    }
}

/// Returns the reason that the pool's workers will not get their configuration until something changes.
fn unusable(pool: &WorkerPool) -> Option<String> {
    if let Err(error) = validate(pool) {
        return Some(error.to_string());
    }
    let conditions = pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let taken = |reason: &str| reason == Reason::NameTaken.as_str();
    let stalled = conditions.iter().find(|one| one.type_ == STALLED && one.status == "True" && taken(&one.reason))?;
    Some(stalled.message.clone())
}

fn without_pool(pod: &Value, namespace: &str, pool: &str) -> AdmissionDecision {
    let missing = if pool.is_empty() {
        format!(
            "label {POOL_LABEL} is empty: set it to the name of a WorkerPool in namespace {namespace}, or to {NO_POOL}"
        )
    } else {
        let pool: String = pool.chars().take(MAX_POOL_NAME + 12).collect();
        format!("namespace {namespace} has no WorkerPool {pool}: create it, or set label {POOL_LABEL} to {NO_POOL}")
    };
    gated_or_refused(pod, missing)
}

fn gated_or_refused(pod: &Value, why: String) -> AdmissionDecision {
    // A Pod that is already bound to a node cannot be gated.
    let bound = pod.pointer("/spec/nodeName").and_then(Value::as_str).is_some_and(|node| !node.is_empty());
    if bound || !has_controller(pod) {
        return AdmissionDecision::Refused(why);
    }
    match gated(pod) {
        Some(pod) => AdmissionDecision::Gated { pod, message: format!("{why}; until then this Pod is not scheduled") },
        None => AdmissionDecision::Refused(why),
    }
}

fn has_controller(pod: &Value) -> bool {
    let owners = pod.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    owners.is_some_and(|owners| owners.iter().any(|owner| owner.get("controller") == Some(&Value::Bool(true))))
}

/// Returns the Pod with the gate, or `None` if the value is not a valid Pod.
fn gated(pod: &Value) -> Option<Value> {
    let gate = json!({"name": NO_SUCH_POOL_GATE});
    let mut pod = pod.clone();
    let gates = pod.get_mut("spec")?.as_object_mut()?.entry("schedulingGates").or_insert(Value::Null);
    if gates.is_null() {
        *gates = json!([]);
    }
    let gates = gates.as_array_mut()?;
    if !gates.contains(&gate) {
        gates.push(gate);
    }
    Some(pod)
}

#[cfg(test)]
pub(super) mod tests;
