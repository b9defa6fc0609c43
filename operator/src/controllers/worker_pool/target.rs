//! Scales a Deployment or StatefulSet of another owner, through its subresource `scale`.
//!
//! The pool works like an autoscaler: the target has the number, which the pool does not repeat, and nothing of the
//! target changes when the pool is deleted. The reconciler reads the number every [`INTERVAL`], because no watch
//! reports StatefulSets. The ticker writes it, after it has checked that the number is still the one it decided on.

use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v1::Scale;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use serde_json::json;

use super::rivals::Rival;
use super::rollout::Rollout;
use super::writers::{ReplicaWrite, Writers};
use super::{PoolContext, ReconcileError, claims};
use crate::cluster::apply::{ApplyError, patch_params};
use crate::crd::WorkerPool;
use crate::crd::worker_pool::{TargetKind, TargetRef};
use crate::spec::worker_pool::reasons::Reason;

/// The interval between two reads of a target.
pub(super) const INTERVAL: Duration = Duration::from_secs(10);

/// The known state of a pool's target.
#[derive(Debug, Default)]
pub struct TargetState {
    /// The last observation; `None` while the target cannot be scaled.
    observed: Option<ObservedTarget>,
    /// The target that was last observed.
    last: Option<TargetRef>,
    /// The target whose scale the API server did not permit to write.
    refused: Option<TargetRef>,
    /// The target whose number was replaced while it was written, with the number written and the number stored.
    overruled: Option<(TargetRef, i32, i32)>,
    /// The number of writes that began or ended. A read that overlaps with one may be outdated.
    writes: u64,
}

/// A target that can be scaled.
#[derive(Clone, Debug)]
struct ObservedTarget {
    target: TargetRef,
    replicas: i32,
    /// The number of Pods that exist.
    running: i32,
    /// The number of a write that failed without a response: it may have succeeded.
    unconfirmed: Option<i32>,
}

impl TargetState {
    /// Returns the number of replicas of the target, and the operator's own number if its write is unconfirmed.
    pub fn replicas(&self, target: &TargetRef) -> Option<(i32, Option<i32>)> {
        let observed = self.observed.as_ref().filter(|observed| observed.target == *target)?;
        Some((observed.replicas, observed.unconfirmed))
    }

    /// Returns the number of Pods of the target that exist.
    pub fn running(&self, target: &TargetRef) -> i32 {
        self.observed.as_ref().filter(|observed| observed.target == *target).map_or(0, |observed| observed.running)
    }

    /// Returns the numbers written and stored, if the API server did not store the operator's last number.
    pub fn overruled(&self, target: &TargetRef) -> Option<(i32, i32)> {
        self.overruled.as_ref().filter(|overruled| overruled.0 == *target).map(|(_, wanted, stored)| (*wanted, *stored))
    }

    /// Records that the target has the number that the operator wants.
    pub fn agree(&mut self) {
        self.overruled = None;
    }

    fn observe(&mut self, target: &TargetRef, scale: &Scale) {
        let unconfirmed = self.observed.take().filter(|observed| observed.target == *target);
        let unconfirmed = unconfirmed.and_then(|observed| observed.unconfirmed);
        let (replicas, running) = (wanted(scale), running(scale));
        self.observed = Some(ObservedTarget { target: target.clone(), replicas, running, unconfirmed });
    }
}

/// The result of reading a target.
pub(super) enum TargetReading {
    /// It cannot be scaled, for this reason.
    Stalled(Reason, String),
    /// It exists.
    There {
        /// Its numbers.
        rollout: Rollout,
        /// The autoscaler that scales it instead.
        rival: Option<Rival>,
    },
}

/// True if a Pod is one of the target's.
pub(super) fn has_pod(target: &TargetRef, pod: &Pod) -> bool {
    let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
    owner.is_some_and(|owner| match target.kind {
        TargetKind::StatefulSet => owner.kind == "StatefulSet" && owner.name == target.name,
        // Kubernetes names a ReplicaSet after its Deployment and the hash of its template, which its Pods have as a
        // label.
        TargetKind::Deployment => pod.labels().get("pod-template-hash").is_some_and(|hash| {
            owner.kind == "ReplicaSet" && owner.name.strip_prefix(&target.name) == Some(&format!("-{hash}"))
        }),
    })
}

/// Reads the target, and remembers its number for the ticker.
pub(super) async fn reconcile(
    pool: &WorkerPool,
    shared: &PoolContext,
    target: &TargetRef,
) -> Result<TargetReading, ReconcileError> {
    let stalled = |reason, message: String| {
        shared.memory.with(pool, |entry| entry.target.observed = None);
        Ok(TargetReading::Stalled(reason, message))
    };
    if let Some(dispute) = claims::target_dispute(&shared.caches, pool, target) {
        return stalled(Reason::InvalidSpec, dispute);
    }
    let (writes, refused) = shared
        .memory
        .with(pool, |entry| (entry.target.writes, entry.target.refused.take().filter(|refused| refused == target)));
    let api = api(pool, shared, target);
    let found = match refused {
        None => api.get_scale(&target.name).await,
        // A trial shows whether the right was granted meanwhile.
        Some(_) => trial(&api, target).await,
    };
    let scale = match found {
        Ok(scale) => scale,
        Err(kube::Error::Api(status)) if status.code == 404 => {
            return stalled(Reason::TargetNotFound, format!("{} does not exist in this namespace", target.display()));
        }
        Err(error) => match ApplyError::api(format!("scale of {}", target.display()), error) {
            error if error.is_forbidden() => {
                shared.memory.with(pool, |entry| entry.target.refused = refused);
                return stalled(Reason::Forbidden, error.to_string());
            }
            error => return Err(error.into()),
        },
    };
    let rollout = rollout(&scale);
    if let Some(rival) = autoscaler(pool, shared, target).await? {
        shared.memory.with(pool, |entry| entry.target.observed = None);
        return Ok(TargetReading::There { rollout, rival: Some(rival) });
    }
    shared.memory.with(pool, |entry| {
        if entry.target.writes == writes {
            if entry.target.last.replace(target.clone()).is_some_and(|last| last != *target) {
                // The number of another workload is no write of another writer, and begins its own delay.
                entry.writers = Writers::default();
                entry.target.overruled = None;
                entry.history.begin_again(Instant::now());
            }
            entry.target.observe(target, &scale);
        }
    });
    Ok(TargetReading::There { rollout, rival: None })
}

/// Scales the target from one number to another.
pub(super) async fn write(
    pool: &WorkerPool,
    shared: &PoolContext,
    target: &TargetRef,
    from: i32,
    to: i32,
) -> Result<ReplicaWrite, kube::Error> {
    let api = api(pool, shared, target);
    let note = |note: &dyn Fn(&mut TargetState)| {
        shared.memory.with(pool, |entry| {
            entry.target.writes += 1;
            note(&mut entry.target);
        });
    };
    note(&|_| {});
    let written = replace(&api, target, from, to).await;
    note(&|state| match &written {
        Ok(Replaced { scale: Some(scale), patched }) => {
            state.observe(target, scale);
            state.observed.as_mut().map(|observed| observed.unconfirmed.take());
            let stored = wanted(scale);
            state.overruled = (*patched && stored != to).then(|| (target.clone(), to, stored));
        }
        Ok(Replaced { scale: None, .. }) => state.observed = None,
        Err(kube::Error::Api(status)) if status.code == 403 => {
            state.observed = None;
            state.refused = Some(target.clone());
        }
        Err(_) => state.observed.iter_mut().for_each(|observed| observed.unconfirmed = Some(to)),
    });
    // The status shows the new number, or the reason that there is none.
    shared.caches.triggers.pool(&pool.namespace().unwrap_or_default(), &pool.name_any());
    Ok(match written? {
        Replaced { scale: Some(scale), .. } if wanted(&scale) == to => ReplicaWrite::Done(0),
        Replaced { scale: Some(scale), patched: true } => ReplicaWrite::Overruled(wanted(&scale)),
        Replaced { .. } => ReplicaWrite::Outdated,
    })
}

/// The target after an attempt to replace its number.
struct Replaced {
    /// Its scale, or `None` if it must be read again.
    scale: Option<Scale>,
    /// True if the API server accepted the write.
    patched: bool,
}

/// Replaces one number by another.
async fn replace(api: &Api<DynamicObject>, target: &TargetRef, from: i32, to: i32) -> Result<Replaced, kube::Error> {
    let outdated = |error: kube::Error| {
        let passes = matches!(&error, kube::Error::Api(status) if matches!(status.code, 404 | 409));
        if passes { Ok(Replaced { scale: None, patched: false }) } else { Err(error) }
    };
    let there = match api.get_scale(&target.name).await {
        Ok(scale) if wanted(&scale) == from => scale,
        Ok(scale) => return Ok(Replaced { scale: Some(scale), patched: false }),
        Err(error) => return outdated(error),
    };
    // Another writer's number in between must not be overwritten.
    let patch = json!({"metadata": {"resourceVersion": there.metadata.resource_version}, "spec": {"replicas": to}});
    match api.patch_scale(&target.name, &patch_params(), &Patch::Merge(&patch)).await {
        Ok(scale) => Ok(Replaced { scale: Some(scale), patched: true }),
        Err(error) => outdated(error),
    }
}

/// Writes nothing, and fails as a write would.
async fn trial(api: &Api<DynamicObject>, target: &TargetRef) -> Result<Scale, kube::Error> {
    let there = api.get_scale(&target.name).await?;
    let patch = json!({"spec": {"replicas": wanted(&there)}});
    api.patch_scale(&target.name, &PatchParams { dry_run: true, ..patch_params() }, &Patch::Merge(&patch)).await?;
    Ok(there)
}

/// Returns the autoscaler that last set the number of a Deployment. The operator has no right to read StatefulSets;
/// their autoscalers are detected by their writes.
async fn autoscaler(
    pool: &WorkerPool,
    shared: &PoolContext,
    target: &TargetRef,
) -> Result<Option<Rival>, ReconcileError> {
    if target.kind != TargetKind::Deployment {
        return Ok(None);
    }
    let api = api(pool, shared, target);
    let there = api.get_metadata_opt(&target.name).await.map_err(|error| ApplyError::api(target.display(), error))?;
    Ok(there.and_then(|there| Rival::of(&there.metadata)).filter(|rival| rival.autoscaler))
}

fn rollout(scale: &Scale) -> Rollout {
    let (desired, running) = (wanted(scale), running(scale));
    Rollout {
        scaled: true,
        desired,
        done: running == desired,
        message: format!("{running} of {desired} Pods exist"),
        ..Rollout::default()
    }
}

/// Returns the desired number. The kind omits a zero.
fn wanted(scale: &Scale) -> i32 {
    scale.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or_default()
}

/// Returns the number of Pods that exist.
fn running(scale: &Scale) -> i32 {
    scale.status.as_ref().map_or(0, |status| status.replicas)
}

fn api(pool: &WorkerPool, shared: &PoolContext, target: &TargetRef) -> Api<DynamicObject> {
    let resource = match target.kind {
        TargetKind::Deployment => ApiResource::erase::<Deployment>(&()),
        TargetKind::StatefulSet => ApiResource::erase::<StatefulSet>(&()),
    };
    Api::namespaced_with(shared.ctx.client.clone(), &pool.namespace().unwrap_or_default(), &resource)
}
