//! Checks every pool once a second, without requests to the API server: which pools have to be reconciled because their
//! relays or their Provider changed, how many Pods the scaling pools need, and which pools are gone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use kube::runtime::events::EventType;
use kube::{Resource, ResourceExt};

use super::memory::key;
use super::scaling::share::{self, ModelCapacity, Sharer};
use super::scaling::{Load, ScalingDecision, ScalingInputs, Why};
use super::status::Workers;
use super::writers::{ReplicaObservation, ReplicaOwner, ReplicaWrite};
use super::{PoolContext, advance, fetch, replicas, residency, target};
use crate::crd::WorkerPool;
use crate::crd::provider::MovingStep;
use crate::crd::worker_pool::TargetKind;
use crate::plural::one_or;
use crate::relays::state::{RelaySnapshot, WorkerReport};
use crate::resources::conditions::{self, READY};
use crate::resources::names::{self, ObjectKey};
use crate::spec::worker_pool::reasons::Reason;
use crate::spec::worker_pool::{ScalingConfig, validate, wakeable_models};

const EVERY: Duration = Duration::from_secs(1);
/// The number of pools whose replicas are written at once.
const CONCURRENCY: usize = 4;

/// Ticks until it is dropped, and then removes its share of the metrics.
pub struct Ticker {
    shared: Arc<PoolContext>,
    /// The last counts of pools that are not ready and ready.
    counted: [i64; 2],
}

/// A number of replicas to write.
#[derive(Debug)]
pub(super) struct Change {
    pool: Arc<WorkerPool>,
    from: i32,
    decision: ScalingDecision,
    load: Option<Load>,
}

impl Ticker {
    /// Creates the ticker.
    pub fn new(shared: Arc<PoolContext>) -> Self {
        Self { shared, counted: [0, 0] }
    }

    /// Runs indefinitely.
    pub async fn run(mut self) {
        let mut interval = tokio::time::interval(EVERY);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let pools = self.shared.caches.pools.state();
            self.count(&pools);
            self.forget(&pools);
            self.notice(&pools);
            let changes = plan(&self.shared, &pools, Instant::now());
            stream::iter(changes).for_each_concurrent(CONCURRENCY, |change| carry_out(&self.shared, change)).await;
        }
    }

    fn count(&mut self, pools: &[Arc<WorkerPool>]) {
        let is_ready = |pool: &&Arc<WorkerPool>| {
            pool.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, READY))
        };
        let ready = i64::try_from(pools.iter().filter(is_ready).count()).unwrap_or(i64::MAX);
        let all = i64::try_from(pools.len()).unwrap_or(i64::MAX);
        self.show([all - ready, ready]);
    }

    /// Updates the gauge by differences, because several sets of controllers, one for each watched namespace, share it.
    fn show(&mut self, counts: [i64; 2]) {
        let gauge = &self.shared.ctx.metrics.resources;
        for (index, ready) in ["false", "true"].into_iter().enumerate() {
            gauge.with_label_values(&["WorkerPool", ready]).add(counts[index] - self.counted[index]);
        }
        self.counted = counts;
    }

    fn forget(&self, pools: &[Arc<WorkerPool>]) {
        let there: BTreeSet<ObjectKey> = pools.iter().map(|pool| key(pool)).collect();
        for (namespace, name) in self.shared.memory.retain(|key| there.contains(key)) {
            for state in ["desired", "ready", "connected"] {
                let _ = self.shared.ctx.metrics.pool_replicas.remove_label_values(&[&*namespace, &*name, state]);
            }
        }
    }

    /// Requests a reconciliation of every pool whose Provider or workers changed.
    fn notice(&self, pools: &[Arc<WorkerPool>]) {
        for pool in pools {
            let (namespace, name) = key(pool);
            let snapshot = self.shared.ctx.relays.of(&namespace, &pool.spec.provider);
            let now = fingerprint(&self.shared, pool, snapshot.as_deref());
            if self.shared.memory.with(pool, |entry| entry.seen.replace(now) != Some(now)) {
                self.shared.caches.triggers.pool(&namespace, &name);
            }
        }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.show([0, 0]);
        self.forget(&[]);
    }
}

fn fingerprint(shared: &PoolContext, pool: &WorkerPool, snapshot: Option<&RelaySnapshot>) -> u64 {
    let mut hasher = DefaultHasher::new();
    let provider = fetch::provider(&shared.caches, pool);
    format!("{provider:?}").hash(&mut hasher);
    fetch::tls_secret(&shared.caches, pool).hash(&mut hasher);
    fetch::relay_name(&shared.caches, pool).hash(&mut hasher);
    match Workers::of(&pool.name_any(), snapshot) {
        // Only then does the pool show the Provider's problem.
        Workers::Unknown => (0_u8, fetch::provider_problem(&shared.caches, pool)).hash(&mut hasher),
        Workers::Silent => (1_u8, fetch::provider_problem(&shared.caches, pool)).hash(&mut hasher),
        Workers::Known { connected, serving, idle, models } => {
            (2_u8, connected, serving, idle, models).hash(&mut hasher);
        }
    }
    residency::fingerprint(&pool.name_any(), snapshot).hash(&mut hasher);
    // The conditions show other writers of the replicas.
    let standing = shared.replica_owner(pool, Instant::now());
    format!("{standing:?}").hash(&mut hasher);
    hasher.finish()
}

/// Returns the scaling pools that need another number.
pub(super) fn plan(shared: &PoolContext, pools: &[Arc<WorkerPool>], now: Instant) -> Vec<Change> {
    let mut by_provider: HashMap<(String, &str), Vec<&Arc<WorkerPool>>> = HashMap::new();
    for pool in pools.iter().filter(|pool| pool.metadata.deletion_timestamp.is_none()) {
        by_provider.entry((pool.namespace().unwrap_or_default(), &pool.spec.provider)).or_default().push(pool);
    }
    let mut changes = Vec::new();
    for ((namespace, provider), pools) in by_provider {
        let scaled: Vec<_> = pools.iter().filter_map(|pool| Some((*pool, config(pool)?))).collect();
        if scaled.is_empty() {
            continue;
        }
        let snapshot = shared.ctx.relays.of(&namespace, provider);
        let shares = snapshot.as_deref().map(|snapshot| share_out(shared, snapshot, &pools)).unwrap_or_default();
        for (pool, config) in scaled {
            let load = snapshot.as_deref().map(|snapshot| load(snapshot, &pool.name_any(), &shares));
            changes.extend(evaluate(shared, pool, &config, load, now));
        }
    }
    changes
}

fn config(pool: &WorkerPool) -> Option<ScalingConfig> {
    validate(pool).ok()?.scaling
}

/// Assigns the waiting requests to pools.
fn share_out(shared: &PoolContext, snapshot: &RelaySnapshot, pools: &[&Arc<WorkerPool>]) -> BTreeMap<String, u64> {
    // A pool that cannot be applied must not keep another asleep.
    let able = |pool: &&&Arc<WorkerPool>| !is_stuck(pool);
    share::share(&snapshot.models, pools.iter().filter(able).map(|pool| sharer(shared, snapshot, pool)).collect())
}

fn is_stuck(pool: &WorkerPool) -> bool {
    let conditions = pool.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.iter().any(|one| {
        one.type_ == conditions::STALLED && one.status == "True" && one.reason != Reason::ScalingConflict.as_str()
    })
}

fn sharer(shared: &PoolContext, snapshot: &RelaySnapshot, pool: &WorkerPool) -> Sharer {
    let name = pool.name_any();
    // A target that cannot be scaled has the room of its workers, and keeps no other pool asleep.
    let current = current(shared, pool);
    let grows = pool.spec.target().is_none() || current.is_some();
    let places = match config(pool).filter(|_| grows) {
        Some(config) => vec![growing(snapshot, pool, &config)],
        None => snapshot.workers_of(&name).filter(|worker| !worker.draining).map(free).collect(),
    };
    let asleep = current.is_some_and(|current| current.replicas == 0);
    Sharer { asleep, name, places }
}

/// The present number of a pool's Pods.
struct CurrentReplicas {
    replicas: i32,
    /// The generation of the object that has the number; 0 if it is unknown.
    generation: i64,
    /// The number that the operator last wrote, as far as it is recorded.
    noted: Option<i32>,
}

/// Returns the number, or `None` while it is unknown: the reconciliation that creates the Deployment writes the first
/// one, and that which reads a target remembers its number.
fn current(shared: &PoolContext, pool: &WorkerPool) -> Option<CurrentReplicas> {
    if let Some(target) = pool.spec.target() {
        let (replicas, noted) = shared.memory.with(pool, |entry| entry.target.replicas(target))?;
        return Some(CurrentReplicas { replicas, generation: 0, noted });
    }
    Some(CurrentReplicas {
        replicas: pool.spec.replicas?,
        generation: pool.metadata.generation.unwrap_or_default(),
        noted: pool.annotations().get(names::SCALED_ANNOTATION).and_then(|number| number.parse().ok()),
    })
}

/// Returns the room that a scaling pool has at its greatest size.
fn growing(snapshot: &RelaySnapshot, pool: &WorkerPool, config: &ScalingConfig) -> ModelCapacity {
    let mut models: BTreeSet<String> = wakeable_models(pool).cloned().collect();
    let mut running = 0_u64;
    for worker in snapshot.workers_of(&pool.name_any()) {
        models.extend(worker.models.iter().cloned());
        if !worker.draining {
            running += worker.in_flight;
        }
    }
    let most = u64::try_from(config.max).unwrap_or_default().saturating_mul(u64::from(config.target));
    ModelCapacity { models, room: most.saturating_sub(running) }
}

/// Returns the room that a worker has now.
fn free(worker: &WorkerReport) -> ModelCapacity {
    ModelCapacity { models: worker.models.clone(), room: worker.max_concurrent.saturating_sub(worker.in_flight) }
}

/// True if a request could wake the pool from zero.
pub fn is_wakeable(pool: &WorkerPool) -> bool {
    wakeable_models(pool).next().is_some()
}

fn load(snapshot: &RelaySnapshot, pool: &str, shares: &BTreeMap<String, u64>) -> Load {
    let mut load = Load {
        waiting: shares.get(pool).copied().unwrap_or_default(),
        complete: snapshot.is_complete(),
        ..Load::default()
    };
    for worker in snapshot.workers_of(pool) {
        let of = if worker.draining { &mut load.ending } else { &mut load.running };
        *of += worker.in_flight;
    }
    load
}

/// Decides on one scaling pool.
fn evaluate(
    shared: &PoolContext,
    pool: &Arc<WorkerPool>,
    config: &ScalingConfig,
    load: Option<Load>,
    now: Instant,
) -> Option<Change> {
    if pool.spec.target().is_some() && load.is_none() {
        // Without relays, Pods of another owner would serve no request.
        return None;
    }
    let CurrentReplicas { replicas: current, generation, noted } = current(shared, pool)?;
    let inputs = ScalingInputs { current, load, wakeable: is_wakeable(pool) };
    let is_moving = is_moving(shared, pool);
    let decision = shared.memory.with(pool, |entry| {
        if is_moving {
            entry.history.begin_again(now);
        }
        match entry.writers.observe(now, generation, current, noted) {
            ReplicaObservation::Stale => return None,
            ReplicaObservation::Foreign => entry.history.begin_again(now),
            ReplicaObservation::Same => {}
        }
        let decision = entry.history.decide(now, config, &inputs);
        if decision.replicas == current {
            entry.target.agree();
        }
        let may_write = entry.writers.replica_owner(now, config.delay) != ReplicaOwner::Yielding
            && entry.scale_after.is_none_or(|after| after <= now);
        may_write.then_some(decision)
    })?;
    if decision.replicas < current && (is_moving || has_other_pods(shared, pool)) {
        return None;
    }
    (decision.replicas != current).then(|| Change { pool: pool.clone(), from: current, decision, load })
}

/// True if the Provider is moving to another relay, and its clients still use its own: the requests there are in no
/// report once the workers connect to the other.
fn is_moving(shared: &PoolContext, pool: &WorkerPool) -> bool {
    let step = fetch::provider_of(&shared.caches, pool).and_then(|provider| provider.status.as_ref()?.moving);
    matches!(step, Some(MovingStep::WaitingForRelay | MovingStep::ConnectingWorkers))
}

/// True if the pool's target has Pods that are not the pool's: they may serve requests that no relay reports.
fn has_other_pods(shared: &PoolContext, pool: &WorkerPool) -> bool {
    let Some(target) = pool.spec.target() else { return false };
    let own = fetch::pods(&shared.caches, pool).iter().filter(|pod| target::has_pod(target, pod)).count();
    let running = shared.memory.with(pool, |entry| entry.target.running(target));
    usize::try_from(running).is_ok_and(|running| own < running)
}

/// Writes the number.
async fn write(shared: &PoolContext, pool: &WorkerPool, from: i32, to: i32) -> Result<ReplicaWrite, kube::Error> {
    let Some(target) = pool.spec.target() else {
        let written = replicas::write(&shared.ctx.client, pool, to).await?;
        let generation = |pool: WorkerPool| pool.metadata.generation.unwrap_or_default();
        return Ok(written.map_or(ReplicaWrite::Outdated, |pool| ReplicaWrite::Done(generation(pool))));
    };
    if to < from && target.kind == TargetKind::Deployment {
        advance::rank(pool, shared, &fetch::pods(&shared.caches, pool)).await;
    }
    target::write(pool, shared, target, from, to).await
}

pub(super) async fn carry_out(shared: &PoolContext, change: Change) {
    let Change { pool, from, decision, load } = change;
    let to = decision.replicas;
    match write(shared, &pool, from, to).await {
        Ok(ReplicaWrite::Done(generation)) => {
            shared.memory.with(&pool, |entry| {
                entry.writers.wrote(generation, from, to);
                entry.scaled();
            });
            let note = format!("from {from} to {to}: {}", why(decision.why, load));
            tracing::info!(namespace = pool.namespace(), workerpool = pool.name_any(), "scaled {note}");
            let reason = if to > from { "ScaledUp" } else { "ScaledDown" };
            shared.ctx.publish(&pool.object_ref(&()), EventType::Normal, reason, "Scale", note).await;
        }
        Ok(ReplicaWrite::Outdated) => {}
        Ok(ReplicaWrite::Overruled(stored)) => {
            shared.memory.with(&pool, |entry| {
                entry.writers.wrote(0, from, stored);
                entry.scaling_failed(Instant::now());
            });
            tracing::warn!(
                namespace = pool.namespace(),
                workerpool = pool.name_any(),
                wanted = to,
                stored,
                "the API server stored another number of replicas than the one written, as an admission webhook makes it; retrying"
            );
        }
        Err(error) => {
            shared.memory.with(&pool, |entry| entry.scaling_failed(Instant::now()));
            tracing::warn!(
                namespace = pool.namespace(), workerpool = pool.name_any(), %error,
                "failed to scale"
            );
        }
    }
}

fn why(why: Why, load: Option<Load>) -> String {
    let load = load.unwrap_or_default();
    match why {
        Why::Load => {
            let requests_wait = one_or(load.waiting, "request waits", "requests wait");
            format!("{} {requests_wait} and {} {}", load.waiting, load.running, one_or(load.running, "runs", "run"))
        }
        Why::Idle => "fewer Pods were enough for the whole scaleDownDelay".to_owned(),
        Why::Bounds => "minReplicas and maxReplicas".to_owned(),
        Why::Delay | Why::Unknown | Why::ModelsUnknown => "no change".to_owned(),
    }
}

#[cfg(test)]
mod tests;
