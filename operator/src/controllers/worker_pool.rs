//! The WorkerPool controller: fetch, validate, render, apply, report, each in its own file.
//!
//! Two loops share the same memory. The reconciler writes a pool's objects and its status when something changed. The
//! [`ticker`] reads the relays' reports once a second, decides how many Pods scaling pools need, and requests
//! reconciliations. Both write only differences, so an idle cluster causes no requests, except that targets of other
//! owners are read every ten seconds.
//!
//! There are no finalizers: a deleted pool's objects are removed through their owner references, and a pool that is
//! being deleted is not rebuilt.

mod access;
mod advance;
mod claims;
pub mod fetch;
pub mod memory;
pub mod objects;
pub mod pod_counts;
pub mod pods;
pub mod render;
pub mod replicas;
pub mod report;
pub mod residency;
pub mod rivals;
pub mod rollout;
pub mod scaling;
pub mod status;
pub mod target;
pub mod ticker;
pub mod writers;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt, future, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::runtime::controller::{Action, Config, Controller, Error as ControllerError};
use kube::runtime::events::EventType;
use kube::runtime::reflector::ObjectRef;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::cluster::apply::ApplyError;
use crate::cluster::cache::Caches;
use crate::context::Context;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::Mode;
use crate::manifests::sidecar::{self, SidecarInputs};
use crate::plural;
use crate::spec::worker_pool::reasons::Reason;
use crate::spec::worker_pool::validate;
use crate::telemetry::metrics::ControllerName;
use advance::PoolOutcome;
use fetch::PoolFetchError;
use memory::PoolMemories;
use pod_counts::{Measure, PodCounts, SETTLED};
use residency::Residency;
use status::{PoolFacts, ProviderState, Workers};
use ticker::Ticker;
use writers::ReplicaOwner;

/// The number of pools that are reconciled at once.
const CONCURRENCY: u16 = 4;
/// Changes of Pods come in bursts: those within this time of the first cause one reconciliation.
const GATHER: Duration = Duration::from_millis(100);
/// The interval of reconciliations without a trigger, in case a change was missed.
const RESYNC: Duration = Duration::from_secs(3600);

/// The interval for a pool without Pods: no change of another owner's Deployment triggers a reconciliation. Deployments
/// are read only if one changed.
const WITHOUT_PODS: Duration = Duration::from_secs(60);

/// The state that both loops share.
pub struct PoolContext {
    /// The operator's shared context.
    pub ctx: Arc<Context>,
    /// The caches of the watches.
    pub caches: Caches,
    /// The memory of each pool.
    pub memory: PoolMemories,
}

/// The reason that a reconciliation ended early; it is retried after a growing delay.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// An object could not be read.
    #[error(transparent)]
    Fetch(#[from] PoolFetchError),
    /// An object could not be applied.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// The pool itself, or one of its Pods, could not be written.
    #[error("{what}: {source}")]
    Write {
        /// The object.
        what: &'static str,
        /// The underlying error.
        source: Box<kube::Error>,
    },
    /// The status describes the problem, which may pass with time.
    #[error("{}: {message}", .reason.as_str())]
    Stalled {
        /// The reason in the conditions.
        reason: Reason,
        /// The problem.
        message: String,
    },
}

impl ReconcileError {
    /// Returns the label value for metrics.
    fn kind(&self) -> &'static str {
        match self {
            Self::Fetch(_) | Self::Write { .. } => "api",
            Self::Apply(error) => error.kind(),
            Self::Stalled { reason: Reason::NameTaken, .. } => "name_taken",
            Self::Stalled { reason: Reason::InvalidSpec, .. } => "invalid_spec",
            Self::Stalled { .. } => "forbidden",
        }
    }
}

/// Reconciles pools until it is dropped.
pub async fn run(ctx: Arc<Context>, caches: Caches, requests: UnboundedReceiver<ObjectRef<WorkerPool>>) {
    // Before the caches are filled, an absent Provider or Pod means nothing.
    caches.ready().await;
    let shared = Arc::new(PoolContext { ctx, caches, memory: PoolMemories::default() });
    let controller = Controller::for_stream(stream::pending(), shared.caches.pools.clone())
        .with_config(Config::default().concurrency(CONCURRENCY))
        .reconcile_on(gathered(requests))
        .run(reconcile, retry, shared.clone())
        .for_each(|outcome| {
            match outcome {
                Ok(_) => {}
                // A pool that is gone needs no work, but Pods may wait for it.
                Err(ControllerError::ObjectNotFound(gone)) => {
                    let shared = shared.clone();
                    tokio::spawn(async move {
                        let mut pool = ObjectRef::new(&gone.name);
                        pool.namespace = gone.namespace;
                        pods::release_orphans(&shared.ctx.client, &shared.caches, &pool).await;
                    });
                }
                Err(ControllerError::ReconcilerFailed(error, pool)) => {
                    tracing::warn!(namespace = pool.namespace, workerpool = pool.name, %error, "failed to reconcile WorkerPool; retrying");
                }
                Err(error @ (ControllerError::QueueError(_) | ControllerError::RunnerError(_))) => {
                    tracing::error!(%error, "WorkerPool controller failed");
                }
            }
            future::ready(())
        });
    future::join(controller, Ticker::new(shared.clone()).run()).await;
}

/// Yields each pool once for all requests within [`GATHER`] of the first. The controller's own debouncing is not used,
/// because it waits for silence: of a thousand Pods one always changes, and the pool would never be reconciled.
fn gathered(requests: UnboundedReceiver<ObjectRef<WorkerPool>>) -> impl Stream<Item = ObjectRef<WorkerPool>> {
    let batches = stream::unfold(requests, |mut requests| async move {
        let mut batch = HashSet::from([requests.recv().await?]);
        tokio::time::sleep(GATHER).await;
        while let Ok(another) = requests.try_recv() {
            batch.insert(another);
        }
        Some((stream::iter(batch), requests))
    });
    batches.flatten()
}

/// Reconciles a pool once.
pub async fn reconcile(pool: Arc<WorkerPool>, shared: Arc<PoolContext>) -> Result<Action, ReconcileError> {
    let started = Instant::now();
    let result = reconcile_pool(&pool, &shared).await;
    let error = result.as_ref().err().map(ReconcileError::kind);
    shared.ctx.metrics.reconciled(ControllerName::WorkerPool, started.elapsed(), error);
    if result.is_ok() {
        shared.memory.with(&pool, memory::PoolMemory::reconciled);
    }
    result
}

/// Returns when to retry. By value, as the controller requires.
#[allow(clippy::needless_pass_by_value, reason = "the controller's signature")]
pub fn retry(pool: Arc<WorkerPool>, _error: &ReconcileError, shared: Arc<PoolContext>) -> Action {
    Action::requeue(shared.memory.with(&pool, memory::PoolMemory::reconciliation_failed))
}

/// The state that was read at the beginning.
struct FetchedPool {
    provider: ProviderState,
    pods: Vec<Arc<Pod>>,
    counts: PodCounts,
    /// The reason that another owner's Deployment has none of the pool's Pods.
    not_created: Option<String>,
}

async fn reconcile_pool(pool: &WorkerPool, shared: &PoolContext) -> Result<Action, ReconcileError> {
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    shared.ctx.namespaces.assigns_ids(pool.metadata.namespace.as_deref().unwrap_or_default()).await;
    let pods = fetch::pods(&shared.caches, pool);
    let (image, hash) = worker_now(shared, pool);
    let (namespace, name) = memory::key(pool);
    let idle = Workers::idle(&name, shared.ctx.relays.of(&namespace, &pool.spec.provider).as_deref());
    let measure = Measure {
        hash: &hash,
        image: &image,
        usable: pod_counts::usable_since(pool, &report::previous(shared, pool).conditions),
        idle: &idle,
        now: Timestamp::now(),
    };
    let counts = pod_counts::take(pods.iter().map(AsRef::as_ref), measure);
    let provider = fetch::provider(&shared.caches, pool);
    let not_created = match is_without_pods(pool, &counts) {
        true => fetch::not_created(shared, pool).await,
        false => None,
    };
    let fetched = FetchedPool { provider, pods, counts, not_created };
    let outcome = advance::advance(pool, shared, &fetched).await?;
    let numbers_later = report(pool, shared, &fetched, &outcome).await?;
    publish_waiting_event(pool, shared, &fetched.counts, outcome.stall.as_ref()).await;
    publish_taken_event(pool, shared).await;
    // The webhook reads from the status whether the pool can be used, so the status is written before Pods are
    // released.
    if outcome.stall.is_none() {
        release(pool, shared, &fetched.counts).await?;
    }
    match outcome.stall {
        Some((reason, message)) if outcome.heals => Err(ReconcileError::Stalled { reason, message }),
        Some(_) | None => Ok(Action::requeue(next_reconcile(pool, &fetched.counts, numbers_later))),
    }
}

/// True if another owner creates the Pods, and there are none.
fn is_without_pods(pool: &WorkerPool, counts: &PodCounts) -> bool {
    pool.spec.mode() == Mode::Inject && counts.pods == 0 && counts.gated.is_empty()
}

/// Publishes an Event about waiting Pods: neither a gated Pod nor its creator shows what it waits for.
async fn publish_waiting_event(
    pool: &WorkerPool,
    shared: &PoolContext,
    counts: &PodCounts,
    stall: Option<&(Reason, String)>,
) {
    let waiting = stall.filter(|_| !counts.gated.is_empty());
    let published =
        shared.memory.with(pool, |entry| std::mem::replace(&mut entry.published_waiting, waiting.is_some()));
    let Some((_, why)) = waiting.filter(|_| !published) else { return };
    let note = format!("{} for this pool: {why}", plural::counted(counts.gated.len(), "Pod waits", "Pods wait"));
    shared.ctx.publish(&pool.object_ref(&()), EventType::Warning, "PodsWaiting", "Gate", note).await;
}

/// Publishes an Event about Pods that the pool selects and another one has.
async fn publish_taken_event(pool: &WorkerPool, shared: &PoolContext) {
    let taken = claims::taken_pods(&shared.caches, pool);
    let published = shared.memory.with(pool, |entry| std::mem::replace(&mut entry.published_taken, taken.is_some()));
    let Some((other, number)) = taken.filter(|_| !published) else { return };
    let pods =
        plural::counted(number, "Pod that spec.selector matches belongs", "Pods that spec.selector matches belong");
    let note = format!(
        "{pods} to WorkerPool {other}: a Pod belongs to the pool in its label, or to the oldest that selects it"
    );
    shared.ctx.publish(&pool.object_ref(&()), EventType::Warning, "PodsOfAnotherPool", "Select", note).await;
}

async fn release(pool: &WorkerPool, shared: &PoolContext, counts: &PodCounts) -> Result<(), ReconcileError> {
    let released = pods::release(&shared.ctx.client, &memory::key(pool).0, &counts.gated)
        .await
        .map_err(|source| ReconcileError::Write { what: "a Pod that waits for the pool", source: Box::new(source) })?;
    if released > 0 {
        let pods =
            plural::counted(released, "Pod that waited for this pool was", "Pods that waited for this pool were");
        let note = format!("{pods} recreated with a worker");
        shared.ctx.publish(&pool.object_ref(&()), EventType::Normal, "PodsReleased", "Release", note).await;
    }
    Ok(())
}

async fn report(
    pool: &WorkerPool,
    shared: &PoolContext,
    fetched: &FetchedPool,
    outcome: &PoolOutcome,
) -> Result<Option<Duration>, ReconcileError> {
    let (namespace, name) = memory::key(pool);
    let previous = report::previous(shared, pool);
    let snapshot = shared.ctx.relays.of(&namespace, &pool.spec.provider);
    let workers = Workers::of(&name, snapshot.as_deref());
    let residency = Residency::of(&name, snapshot.as_deref());
    let counts = &fetched.counts;
    let outdated = match &outcome.rollout {
        Some(_) if outcome.outdated => counts.injected,
        // The operator did not render the template of a target.
        Some(_) if pool.spec.target().is_some() => counts.outdated,
        // From the template's revision, because another webhook may have rewritten the image of every Pod.
        Some(rollout) => rollout.old,
        None => counts.outdated,
    };
    let facts = PoolFacts {
        pool,
        previous: &previous,
        stall: outcome.stall.clone(),
        provider: fetched.provider,
        provider_problem: fetch::provider_problem(&shared.caches, pool),
        counts,
        not_created: fetched.not_created.clone(),
        workers,
        residency: residency.clone(),
        rollout: outcome.rollout.clone(),
        wakeable: pool.spec.scaling.is_none() || ticker::is_wakeable(pool),
        standing: shared.replica_owner(pool, Instant::now()),
        dispute: outcome.dispute.clone(),
        outdated,
    };
    let status = status::status(&facts, &Time(Timestamp::now()));
    let desired = outcome.rollout.as_ref().map_or(counts.pods, |rollout| rollout.desired);
    for (state, number) in [("desired", desired), ("ready", counts.ready), ("connected", status.connected.unwrap_or(0))]
    {
        shared.ctx.metrics.pool_replicas.with_label_values(&[&*namespace, &*name, state]).set(number.into());
    }
    let later = report::write(shared, pool, &previous, status)
        .await
        .map_err(|source| ReconcileError::Write { what: "status", source: Box::new(source) })?;
    publish_slot_events(pool, shared, residency.as_ref()).await;
    Ok(later)
}

/// Publishes Events about failed loads and quarantined slots, because the status may have changed again before a user
/// sees it.
async fn publish_slot_events(pool: &WorkerPool, shared: &PoolContext, residency: Option<&Residency>) {
    let Some(residency) = residency else { return };
    let events =
        shared.memory.with(pool, |entry| entry.published_slots.new_events(residency, Instant::now(), Timestamp::now()));
    for (reason, note) in events {
        shared.ctx.publish(&pool.object_ref(&()), EventType::Warning, reason, "Load", note).await;
    }
}

fn next_reconcile(pool: &WorkerPool, counts: &PodCounts, numbers_later: Option<Duration>) -> Duration {
    // A ready Pod without a connection is reported only once it has settled.
    let settling = (counts.settled < counts.ready).then_some(SETTLED);
    let without = is_without_pods(pool, counts).then_some(WITHOUT_PODS);
    // Slightly later than the deadline itself, so that it has passed.
    let silent = counts.silent_in.map(|left| left + Duration::from_secs(1));
    let target = pool.spec.target().map(|_| target::INTERVAL);
    [numbers_later, settling, without, silent, target].into_iter().flatten().fold(RESYNC, Duration::min)
}

/// Returns image and hash of the worker that a Pod would get now.
fn worker_now(shared: &PoolContext, pool: &WorkerPool) -> (String, String) {
    let defaults = shared.ctx.worker_defaults(pool.metadata.namespace.as_deref().unwrap_or_default());
    let inputs = SidecarInputs { pool, defaults: &defaults, drain_token: "" };
    let container = sidecar::container(&inputs, false);
    let image = container.get("image").and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
    (image, sidecar::hash(&inputs))
}

impl PoolContext {
    /// Returns who writes the replicas of a pool that scales.
    fn replica_owner(&self, pool: &WorkerPool, now: Instant) -> ReplicaOwner {
        let Some(scaling) = validate(pool).ok().and_then(|validated| validated.scaling) else {
            return ReplicaOwner::Alone;
        };
        self.memory.with(pool, |entry| entry.writers.replica_owner(now, scaling.delay))
    }
}

#[cfg(test)]
mod tests;
