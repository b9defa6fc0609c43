//! One pass over a pool's objects: configuration, rights, and the Deployment or DaemonSet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::DynamicObject;
use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt};

use super::render::{self, Rendered};
use super::rivals::{Dispute, Rival};
use super::rollout::Rollout;
use super::status::ProviderState;
use super::target::TargetReading;
use super::{FetchedPool, PoolContext, ReconcileError, access, claims, fetch, objects, pods, replicas, target};
use crate::cluster::apply::ApplyError;
use crate::crd::WorkerPool;
use crate::manifests::{backend, sidecar, worker_config};
use crate::spec::worker_pool::reasons::Reason;
use crate::spec::worker_pool::{Validated, validate};
use crate::spec::workload::Workload;

/// The time to wait for the relays' report of idle workers before Pods are removed. Relays respond within milliseconds.
const RANK_TIMEOUT: Duration = Duration::from_secs(1);

/// The result of applying a pool.
#[derive(Default)]
pub(super) struct PoolOutcome {
    /// The reason that the pool could not be applied.
    pub(super) stall: Option<(Reason, String)>,
    /// True if that reason may pass without a change of the pool.
    pub(super) heals: bool,
    pub(super) rollout: Option<Rollout>,
    /// Another manager's number of replicas.
    pub(super) dispute: Option<Dispute>,
    /// True if the template differs from the one that would be rendered now.
    pub(super) outdated: bool,
}

impl PoolOutcome {
    fn stalled(reason: Reason, message: impl Into<String>) -> Self {
        Self { stall: Some((reason, message.into())), ..Self::default() }
    }
}

/// Validates a pool and applies its objects. Errors that a user must see are part of the outcome.
pub(super) async fn advance(
    pool: &WorkerPool,
    shared: &PoolContext,
    fetched: &FetchedPool,
) -> Result<PoolOutcome, ReconcileError> {
    match validate(pool) {
        Ok(validated) => {
            reconcile_objects(pool, shared, fetched, &validated).await.or_else(|error| healing(&error).ok_or(error))
        }
        Err(error) => Ok(PoolOutcome::stalled(error.reason(), error.to_string())),
    }
}

/// Returns an outcome for errors that the user must see, and that may pass without a change of the pool.
fn healing(error: &ReconcileError) -> Option<PoolOutcome> {
    let heals = |reason| Some(PoolOutcome { heals: true, ..PoolOutcome::stalled(reason, error.to_string()) });
    match error {
        ReconcileError::Apply(ApplyError::NameTaken { .. }) => heals(Reason::NameTaken),
        ReconcileError::Apply(refused) if refused.is_forbidden() => heals(Reason::Forbidden),
        ReconcileError::Fetch(fetch) if fetch.is_forbidden() => heals(Reason::Forbidden),
        ReconcileError::Apply(ApplyError::Refused { .. }) => {
            Some(PoolOutcome::stalled(Reason::TemplateInvalid, error.to_string()))
        }
        ReconcileError::Fetch(_)
        | ReconcileError::Apply(ApplyError::Terminating { .. } | ApplyError::Api { .. })
        | ReconcileError::Write { .. }
        | ReconcileError::Stalled { .. } => None,
    }
}

async fn reconcile_objects(
    pool: &WorkerPool,
    shared: &PoolContext,
    fetched: &FetchedPool,
    validated: &Validated,
) -> Result<PoolOutcome, ReconcileError> {
    let relay = fetch::relay_target(&shared.ctx.client, &shared.caches, pool).await?;
    let config = worker_config::config_map(pool, &shared.ctx.defaults.worker, &relay);
    objects::unread(shared, pool, &config).await?;
    let Some(workload) = validated.workload else {
        return match &validated.target {
            Some(target) => {
                let reading = target::reconcile(pool, shared, target).await?;
                let overruled = shared.memory.with(pool, |entry| entry.target.overruled(target));
                Ok(target_outcome(reading, overruled))
            }
            None => Ok(PoolOutcome::default()),
        };
    };

    if let Some(dispute) = claims::dispute(&shared.caches, pool) {
        access::withhold(pool, shared).await?;
        return Ok(PoolOutcome { heals: true, ..PoolOutcome::stalled(Reason::InvalidSpec, dispute) });
    }
    let live = fetch::workload(&shared.ctx.client, pool, workload).await?;
    if live.is_none() && fetched.provider == ProviderState::Missing {
        // Backends without relays would hold GPUs for nothing. Running ones stay.
        return Ok(PoolOutcome::default());
    }
    let rendered = match rendered(pool, shared, workload, live.as_ref()) {
        Ok(rendered) => rendered,
        Err(refusal) => return Ok(PoolOutcome::stalled(Reason::TemplateInvalid, refusal.to_string())),
    };
    let (replicas, dispute) = choose_replicas(pool, shared, workload, live.as_ref());
    let runs = replicas.wanted > 0;
    // The worker's rights are created before the worker and removed after it.
    let needs_access = pool.spec.scales_deployments() && runs;
    if needs_access {
        access::ensure(pool, shared, &fetched.pods, runs).await?;
    }
    let object = ensure_workload(pool, shared, fetched, workload, live, &rendered, replicas).await?;
    if workload == Workload::Workers && !needs_access {
        access::ensure(pool, shared, &fetched.pods, runs).await?;
    }
    let rollout = Some(Rollout::of(workload, &object));
    Ok(PoolOutcome { rollout, dispute, outdated: rendered.outdated, ..PoolOutcome::default() })
}

fn target_outcome(reading: TargetReading, overruled: Option<(i32, i32)>) -> PoolOutcome {
    match reading {
        TargetReading::Stalled(reason, message) => PoolOutcome::stalled(reason, message),
        TargetReading::There { rollout, rival } => {
            let overruled = overruled.map(|(wanted, stored)| Dispute::Overruled { wanted, stored });
            let dispute = rival.map(Dispute::Left).or(overruled);
            PoolOutcome { rollout: Some(rollout), dispute, ..PoolOutcome::default() }
        }
    }
}

/// The number of Pods of a Deployment.
struct Replicas {
    wanted: i32,
    /// True if another manager owns the number, and keeps it as long as the operator does not apply it.
    left_out: bool,
}

/// Returns the number, and whether another manager writes a different one.
fn choose_replicas(
    pool: &WorkerPool,
    shared: &PoolContext,
    workload: Workload,
    live: Option<&DynamicObject>,
) -> (Replicas, Option<Dispute>) {
    let has = live.and_then(fetch::replicas).filter(|_| workload.is_scaled());
    let wanted = replicas::choose(pool, workload, has);
    let (Some(has), Some(live)) = (has, live) else { return (Replicas { wanted, left_out: false }, None) };
    let rival = Rival::of(&live.metadata);
    let owned = rival.is_some();
    let dispute = shared.memory.with(pool, |entry| entry.rivals.observe(Instant::now(), rival, has, wanted));
    match dispute {
        // If it is omitted while no other manager owns it, the API server sets it to 1.
        Some(Dispute::Left(_)) => (Replicas { wanted: has, left_out: owned }, dispute),
        Some(Dispute::Settled(_) | Dispute::Overruled { .. }) | None => (Replicas { wanted, left_out: false }, dispute),
    }
}

fn rendered(
    pool: &WorkerPool,
    shared: &PoolContext,
    workload: Workload,
    live: Option<&DynamicObject>,
) -> Result<Rendered, sidecar::Refusal> {
    let spare = shared.memory.with(pool, |entry| entry.drain_token.get_or_insert_with(random_token).clone());
    let defaults = shared.ctx.worker_defaults(pool.metadata.namespace.as_deref().unwrap_or_default());
    render::render(workload, pool, &defaults, &fetch::live(live), &spare)
}

/// Applies the Deployment or DaemonSet and returns the resulting object.
async fn ensure_workload(
    pool: &WorkerPool,
    shared: &PoolContext,
    fetched: &FetchedPool,
    workload: Workload,
    live: Option<DynamicObject>,
    rendered: &Rendered,
    replicas: Replicas,
) -> Result<serde_json::Value, ReconcileError> {
    let wanted = replicas.wanted;
    let has = live.as_ref().and_then(fetch::replicas);
    if workload.is_scaled() && has.is_some_and(|has| wanted < has) {
        rank(pool, shared, &fetched.pods).await;
    }
    let manifest = backend::workload(
        workload,
        pool,
        &rendered.template,
        &rendered.annotation,
        (!replicas.left_out).then_some(wanted),
    );
    let ensured = objects::ensure(shared, pool, &manifest, live.as_ref().map(|live| &live.metadata)).await?;
    if ensured.applied && rendered.is_new {
        for note in &rendered.notes {
            let about = pool.object_ref(&());
            shared.ctx.publish(&about, EventType::Warning, note.event_reason(), "Render", note.to_string()).await;
        }
    }
    if workload == Workload::Backend && pool.spec.replicas.is_none() {
        let written = replicas::write(&shared.ctx.client, pool, wanted).await;
        written.map_err(|source| ReconcileError::Write { what: "spec.replicas", source: Box::new(source) })?;
    }
    let object = ensured.object.or(live);
    Ok(object.and_then(|object| serde_json::to_value(object).ok()).unwrap_or_default())
}

/// Ranks the Pods by load, so that the idlest go first. Until a relay has reported, the cluster decides. The last
/// report may be up to 5 s old, so a new one is requested.
pub(super) async fn rank(pool: &WorkerPool, shared: &PoolContext, there: &[Arc<Pod>]) {
    let namespace = pool.namespace().unwrap_or_default();
    if let Some(snapshot) = shared.ctx.relays.fresh(&namespace, &pool.spec.provider, RANK_TIMEOUT).await {
        pods::rank(&shared.ctx.client, pool, there, &snapshot).await;
    }
}

/// Returns a token that cannot be guessed, so that only the kubelet can drain the pool's workers.
#[allow(clippy::expect_used, reason = "there is no safe fallback for random bytes")]
fn random_token() -> String {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
