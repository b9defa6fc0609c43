//! Decides on a Pod, as a pure function of the Pod and of whether its pool exists.
//!
//! A Pod without a controller whose pool does not exist is rejected, and its creator sees the reason in the response. A
//! rejected Pod of a controller is easily missed, and the controller waits minutes before it retries. Such a Pod is
//! admitted with a scheduling gate, and the operator deletes it when the pool appears, so that the controller creates a
//! new one at once.
//!
//! A pool that is being deleted, or whose objects cannot be created, is treated as missing: a Pod with its worker would
//! wait for the worker's ConfigMap indefinitely.

use serde_json::{Value, json};

use super::review::Review;
use crate::conditions::STALLED;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::Mode;
use crate::defaults::WorkerDefaults;
use crate::manifests::sidecar::{self, Inputs};
use crate::names::{NO_POOL, NO_SUCH_POOL_GATE, POOL_LABEL};
use crate::worker_pool::reasons::Reason;
use crate::worker_pool::validate;

/// The longest name of a pool.
const MAX_POOL_NAME: usize = 52;
/// The longest name of a namespace.
const MAX_NAMESPACE: usize = 63;

/// The lookup that a decision on a Pod needs.
#[derive(Clone, Debug, PartialEq)]
pub enum Question<'a> {
    /// No lookup is needed.
    Settled(Decision),
    /// Look up the pool of this name.
    Pool(&'a str),
}

/// The result of looking up a pool.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// The pool exists.
    Found(Box<WorkerPool>),
    /// There is no pool of that name.
    Missing,
}

/// The decision on a Pod.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    /// The Pod is created unchanged, for this reason.
    Unchanged(&'static str),
    /// The Pod gets a worker.
    Injected {
        /// The whole Pod.
        pod: Value,
        /// Warnings for the creator.
        warnings: Vec<String>,
    },
    /// The Pod waits for its pool.
    Gated {
        /// The whole Pod.
        pod: Value,
        /// The message for the creator.
        message: String,
    },
    /// The Pod is rejected, for this reason.
    Refused(String),
}

impl Decision {
    /// One of [`super::RESULTS`].
    pub fn result(&self) -> &'static str {
        match self {
            Self::Unchanged(_) => "skipped",
            Self::Injected { .. } => "injected",
            Self::Gated { .. } => "gated",
            Self::Refused(_) => "refused",
        }
    }
}

/// Returns the lookup that the Pod in `review` needs. The webhook's configuration already excludes most of these Pods,
/// but a chart writes it, and an omission there must do no harm.
pub fn question(review: &Review) -> Question<'_> {
    let unchanged = |why| Question::Settled(Decision::Unchanged(why));
    let Some(pod) = review.created_pod() else {
        return unchanged("not the creation of a Pod");
    };
    let metadata = |key: &str| pod.get("metadata").and_then(|metadata| metadata.get(key));
    let labels = metadata("labels");
    let Some(pool) = labels.and_then(|labels| labels.get(POOL_LABEL)).and_then(Value::as_str) else {
        return unchanged("no pool label");
    };
    if pool == NO_POOL {
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
    Question::Pool(pool)
}

/// True if such a pool can exist. Labels are not validated before a webhook sees them, and both names become parts of a
/// path.
pub fn may_exist(namespace: &str, pool: &str) -> bool {
    is_label(namespace, MAX_NAMESPACE) && is_label(pool, MAX_POOL_NAME)
}

fn is_label(name: &str, max: usize) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=max).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

/// Decides on a Pod of `pool`. `token` is used only if the Pod gets a worker.
pub fn decide(review: &Review, pool: &str, lookup: &Lookup, defaults: &WorkerDefaults, token: &str) -> Decision {
    let Some(pod) = review.created_pod() else {
        return Decision::Unchanged("not the creation of a Pod");
    };
    let namespace = review.namespace();
    let found = match lookup {
        Lookup::Found(found) if found.metadata.deletion_timestamp.is_none() => found,
        Lookup::Found(_) | Lookup::Missing => return without_pool(pod, namespace, pool),
    };
    let refused = |why: &dyn std::fmt::Display| Decision::Refused(format!("WorkerPool {pool}: {why}"));
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
            let inputs = Inputs { pool: found, defaults, drain_token: token };
            match sidecar::add_to_pod(&mut pod, &inputs) {
                Ok(notes) => {
                    sidecar::mark(&mut pod, &inputs);
                    Decision::Injected { pod, warnings: notes.iter().map(ToString::to_string).collect() }
                }
                Err(refusal) => refused(&refusal),
            }
        }
    }
}

/// Returns the reason that the pool's workers will not get their configuration until something changes.
fn unusable(pool: &WorkerPool) -> Option<String> {
    if let Err(error) = validate::validate(pool) {
        return Some(error.to_string());
    }
    let conditions = pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let taken = |reason: &str| reason == Reason::NameTaken.as_str();
    let stalled = conditions.iter().find(|one| one.type_ == STALLED && one.status == "True" && taken(&one.reason))?;
    Some(stalled.message.clone())
}

fn without_pool(pod: &Value, namespace: &str, pool: &str) -> Decision {
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

fn gated_or_refused(pod: &Value, why: String) -> Decision {
    // A Pod that is already bound to a node cannot be gated.
    let bound = pod.pointer("/spec/nodeName").and_then(Value::as_str).is_some_and(|node| !node.is_empty());
    if bound || !has_controller(pod) {
        return Decision::Refused(why);
    }
    match gated(pod) {
        Some(pod) => Decision::Gated { pod, message: format!("{why}; until then this Pod is not scheduled") },
        None => Decision::Refused(why),
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
