//! Builds the status of a pool from the known state: pure, with the time passed in.
//!
//! The conditions follow kstatus: Ready if the pool serves, or is at zero on purpose; Reconciling while it makes
//! progress; Stalled if a user has to change something. Missing information changes nothing: a new operator has no
//! report from a relay yet, which does not make a serving pool unready.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::pod_counts::{LOADED, PodCounts};
use super::residency::Residency;
use super::rivals::Dispute;
use super::rollout::Rollout;
use super::writers::ReplicaOwner;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::{Mode, WorkerPoolStatus};
use crate::manifests::sidecar;
use crate::plural;
use crate::relays::state::RelaySnapshot;
use crate::resources::conditions::{self, READY, RECONCILING, STALLED, Status, Wanted};
use crate::resources::names;
use crate::spec::worker_pool::reasons::Reason;
use crate::spec::workload::Workload;

/// The maximum number of names in the status: models, and Pods without a worker.
const LISTED: usize = 32;
/// The maximum number of names in a message.
const NAMED: usize = 3;

/// The inputs of the status.
#[derive(Clone, Debug)]
pub struct PoolFacts<'a> {
    /// The pool.
    pub pool: &'a WorkerPool,
    /// Its current status.
    pub previous: &'a WorkerPoolStatus,
    /// The reason that it cannot be applied, if any.
    pub stall: Option<(Reason, String)>,
    /// Its Provider.
    pub provider: ProviderState,
    /// The reason that its Provider is not ready.
    pub provider_problem: Option<String>,
    /// Its Pods.
    pub counts: &'a PodCounts,
    /// The reason that another owner's Deployment cannot create its Pods.
    pub not_created: Option<String>,
    /// Its workers.
    pub workers: Workers,
    /// The slots of their multiplexers; `None` while unknown.
    pub residency: Option<Residency>,
    /// Its Deployment or DaemonSet.
    pub rollout: Option<Rollout>,
    /// True if a request could wake it from zero.
    pub wakeable: bool,
    /// The writers of its number of replicas.
    pub standing: ReplicaOwner,
    /// The conflict over the Deployment's number of replicas.
    pub dispute: Option<Dispute>,
    /// The number of Pods whose worker differs from the one that would be rendered now.
    pub outdated: i32,
}

/// The state of a pool's Provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProviderState {
    /// It does not exist.
    Missing,
    /// It rejects workers.
    Disabled,
    /// It exists and is enabled.
    Present,
}

/// The relays' reports of the pool's workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workers {
    /// No relay was polled yet.
    Unknown,
    /// No relay responds.
    Silent,
    /// The workers are known.
    Known {
        /// The number of workers that some relay knows.
        connected: i32,
        /// Those of them that accept requests: they are not draining, and advertise a model.
        serving: i32,
        /// Those that are not draining and advertise none: workers link before their backends are healthy.
        idle: i32,
        /// All models that they advertise.
        models: BTreeSet<String>,
    },
}

impl Workers {
    /// Returns the names of a pool's workers that are connected and have nothing to serve; on Kubernetes, the names of
    /// their Pods.
    pub fn idle(pool: &str, snapshot: Option<&RelaySnapshot>) -> BTreeSet<String> {
        let workers = snapshot.into_iter().flat_map(|snapshot| snapshot.workers_of(pool));
        let idle = workers.filter(|worker| !worker.draining && worker.models.is_empty());
        idle.map(|worker| worker.name.clone()).collect()
    }

    /// Returns the workers of a pool.
    pub fn of(pool: &str, snapshot: Option<&RelaySnapshot>) -> Self {
        let Some(snapshot) = snapshot else { return Self::Unknown };
        if !snapshot.relays.is_empty() && snapshot.relays.values().all(Result::is_err) {
            return Self::Silent;
        }
        let (mut connected, mut serving, mut idle, mut models) = (0, 0, 0, BTreeSet::new());
        for worker in snapshot.workers_of(pool) {
            connected += 1;
            serving += i32::from(!worker.draining && !worker.models.is_empty());
            idle += i32::from(!worker.draining && worker.models.is_empty());
            models.extend(worker.models.iter().cloned());
        }
        Self::Known { connected, serving, idle, models }
    }
}

/// Returns the complete status.
pub fn status(facts: &PoolFacts<'_>, now: &Time) -> WorkerPoolStatus {
    let previous = facts.previous;
    let (models, model_count) = models(facts);
    let connected = match &facts.workers {
        Workers::Known { connected, .. } => Some(*connected),
        Workers::Unknown | Workers::Silent => previous.connected.or(Some(0)),
    };
    let generation = facts.pool.metadata.generation;
    let name = facts.pool.metadata.name.as_deref().unwrap_or_default();
    let slots = Residency::status(facts.residency.as_ref(), facts.pool, previous);
    WorkerPoolStatus {
        observed_generation: generation,
        conditions: conditions::merge(&previous.conditions, &wanted(facts), generation, now),
        mode: Some(facts.pool.spec.mode()),
        selector: Some(format!("{}={name}", names::POOL_LABEL)),
        replicas: Some(facts.counts.pods),
        injected: Some(facts.counts.injected),
        not_injected: facts.counts.not_injected.iter().take(LISTED).cloned().collect(),
        outdated: Some(facts.outdated),
        connected,
        models,
        model_count,
        slots: slots.listed,
        slot_count: slots.count,
        quarantined: slots.quarantined,
    }
}

/// Returns the models that the workers advertise; while none does, the last advertised ones, because a request for them
/// may wake the pool.
fn models(facts: &PoolFacts<'_>) -> (Vec<String>, Option<i32>) {
    match &facts.workers {
        Workers::Known { models, .. } if !models.is_empty() => {
            (models.iter().take(LISTED).cloned().collect(), i32::try_from(models.len()).ok())
        }
        Workers::Known { .. } | Workers::Unknown | Workers::Silent => {
            (facts.previous.models.clone(), facts.previous.model_count.or(Some(0)))
        }
    }
}

/// The content of one condition.
struct ConditionState {
    status: Status,
    reason: Reason,
    message: String,
}

impl ConditionState {
    fn new(status: impl Into<Status>, reason: Reason, message: impl Into<String>) -> Self {
        Self { status: status.into(), reason, message: message.into() }
    }

    fn wanted(self, type_: &'static str) -> Wanted {
        Wanted::new(type_, self.status, self.reason.as_str(), self.message)
    }
}

fn wanted(facts: &PoolFacts<'_>) -> [Wanted; 3] {
    if let Some((reason, message)) = &facts.stall {
        return [
            ConditionState::new(false, *reason, message).wanted(READY),
            ConditionState::new(false, *reason, "").wanted(RECONCILING),
            ConditionState::new(true, *reason, message).wanted(STALLED),
        ];
    }
    if at_zero(facts) && !facts.wakeable {
        return cannot_wake(facts);
    }
    let mut ready = ready(facts);
    let reconciling = reconciling(facts, &ready);
    let mut stalled = ConditionState::new(false, ready.reason, "");
    if let Some(conflict) = conflict(facts) {
        if conflict.status == Status::False && ready.status == Status::True {
            ready.reason = conflict.reason;
            ready.message = format!("{}; {}", ready.message, conflict.message);
        }
        stalled = conflict;
    }
    [ready.wanted(READY), reconciling.wanted(RECONCILING), stalled.wanted(STALLED)]
}

/// Returns the Stalled condition for other writers of the number of replicas: true if the operator yields to them.
fn conflict(facts: &PoolFacts<'_>) -> Option<ConditionState> {
    let of = |stalls: bool, message: String| Some(ConditionState::new(stalls, Reason::ScalingConflict, message));
    if let (Some(target), Some(dispute)) = (facts.pool.spec.target(), &facts.dispute) {
        return of(true, target_conflict(&target.display(), dispute));
    }
    let by_dispute = facts.dispute.as_ref().and_then(|dispute| {
        let name = facts.pool.metadata.name.as_deref().unwrap_or_default();
        let deployment = Workload::of(facts.pool)?.name(name);
        let whose = format!("Deployment {deployment}, which belongs to this pool");
        match dispute {
            Dispute::Left(rival) if rival.autoscaler => {
                let rival = rival.describe();
                of(true, format!(
                    "{rival} scales {whose}, and the operator does not override it: set its scaleTargetRef to WorkerPool {name}, or \
                     remove it and set spec.replicas"
                ))
            }
            Dispute::Left(rival) => {
                let rival = rival.describe();
                of(true, format!("{rival} keeps scaling {whose}; the operator does not override it for now: scale WorkerPool {name} instead"))
            }
            Dispute::Overruled { .. } => None,
            Dispute::Settled(rival) => {
                let rival = rival.describe();
                of(false, format!("{rival} scaled {whose}; the operator reverted it: scale WorkerPool {name} instead"))
            }
        }
    });
    by_dispute.or_else(|| match facts.standing {
        ReplicaOwner::Alone => None,
        ReplicaOwner::Shared => of(
            false,
            format!(
                "{number} changed externally although spec.scaling is set; the number is not lowered for one scaleDownDelay",
                number = scaled_number(facts, "was", "were"),
            ),
        ),
        ReplicaOwner::Yielding => of(
            true,
            format!(
                "{number} being changed externally, so spec.scaling is suspended: use only one of the two",
                number = scaled_number(facts, "keeps", "keep"),
            ),
        ),
    })
}

fn target_conflict(target: &str, dispute: &Dispute) -> String {
    match dispute {
        Dispute::Left(rival) | Dispute::Settled(rival) => format!(
            "{} scales {target}, and the operator does not override it: remove it or spec.scaling; if it is removed, scale \
             {target} once to another number",
            rival.describe(),
        ),
        Dispute::Overruled { wanted, stored } => format!(
            "the operator scaled {target} to {wanted}, and the API server stored {stored}: an admission webhook changes the number; \
             exempt {target} from it, or remove spec.scaling. The operator retries"
        ),
    }
}

/// Returns the number that the operator writes, with a verb.
fn scaled_number(facts: &PoolFacts<'_>, singular: &str, plural: &str) -> String {
    match facts.pool.spec.target() {
        Some(target) => format!("the replicas of {} {plural}", target.display()),
        None => format!("spec.replicas {singular}"),
    }
}

fn cannot_wake(facts: &PoolFacts<'_>) -> [Wanted; 3] {
    let remedy = match facts.pool.spec.target() {
        Some(target) => format!("scale {} to 1 once", target.display()),
        None => "set spec.replicas to 1 once".to_owned(),
    };
    let message = &format!(
        "the pool is scaled to zero and has never advertised a model, so no request can wake it: list its models in \
         spec.models, or {remedy}"
    );
    let rolling = facts.rollout.as_ref().is_some_and(|rollout| !rollout.done);
    [
        ConditionState::new(false, Reason::ModelsUnknown, message.as_str()).wanted(READY),
        ConditionState::new(rolling, Reason::ModelsUnknown, "").wanted(RECONCILING),
        ConditionState::new(true, Reason::ModelsUnknown, message.as_str()).wanted(STALLED),
    ]
}

fn ready(facts: &PoolFacts<'_>) -> ConditionState {
    let provider = &facts.pool.spec.provider;
    match facts.provider {
        ProviderState::Missing => {
            let message = format!("Provider {provider} does not exist in this namespace");
            return ConditionState::new(false, Reason::ProviderNotFound, message);
        }
        ProviderState::Disabled => {
            let message = format!("Provider {provider} has enabled: false, so its relays reject workers");
            return ConditionState::new(false, Reason::ProviderDisabled, message);
        }
        ProviderState::Present => {}
    }
    if at_zero(facts) {
        let message = match facts.pool.spec.scaling {
            Some(_) => "scaled to zero; a request for one of its models wakes the pool",
            None => "spec.replicas is 0",
        };
        return ConditionState::new(true, Reason::ScaledToZero, message);
    }
    let problem = facts.provider_problem.as_ref();
    let problem = problem.map(|problem| format!("; the Provider is not ready: {problem}")).unwrap_or_default();
    match &facts.workers {
        Workers::Unknown => as_before(facts).unwrap_or_else(|| {
            let message = format!("no relay of Provider {provider} has been polled yet{problem}");
            ConditionState::new(Status::Unknown, Reason::RelaysUnknown, message)
        }),
        Workers::Silent => {
            let message = format!("no relay of Provider {provider} responds{problem}");
            ConditionState::new(Status::Unknown, Reason::RelaysUnreachable, message)
        }
        Workers::Known { serving, .. } if *serving > 0 => match quarantined(facts, *serving) {
            Some(Quarantine::Whole(message)) => ConditionState::new(false, Reason::SlotsQuarantined, message),
            Some(Quarantine::Part(message)) => ConditionState::new(true, Reason::SlotsQuarantined, message),
            None => serving_condition(facts, *serving),
        },
        Workers::Known { idle, .. } => not_serving(facts, *idle),
    }
}

/// Returns the verdict for a pool whose workers accept requests.
fn serving_condition(facts: &PoolFacts<'_>, serving: i32) -> ConditionState {
    match not_injected(facts) {
        Some(message) => ConditionState::new(true, Reason::PodsNotInjected, message),
        None => {
            let workers = plural::counted(serving, "worker is", "workers are");
            let message = format!("{workers} connected to Provider {}", facts.pool.spec.provider);
            ConditionState::new(true, Reason::Serving, message)
        }
    }
}

/// Slots that accept nothing until a user has acted.
enum Quarantine {
    Whole(String),
    Part(String),
}

fn quarantined(facts: &PoolFacts<'_>, serving: i32) -> Option<Quarantine> {
    let residency = facts.residency.as_ref()?;
    let first = residency.quarantined().next()?;
    let (number, all) = (residency.quarantined().count(), residency.slots.len());
    let where_ = format!("slot {} of worker {}", first.slot, first.worker);
    let more = if number > 1 { " first" } else { "" };
    let slots = plural::counted(number, "slot is", "slots are");
    let message = format!("{slots} quarantined out of {all}, {where_}{more}: its memory could not be freed");
    // Workers without slots, such as those of Pods from before the multiplexer, are unaffected.
    let workers: BTreeSet<&str> = residency.slots.iter().map(|held| held.worker.as_str()).collect();
    let others = usize::try_from(serving).is_ok_and(|serving| serving > workers.len());
    Some(if number == all && !others { Quarantine::Whole(message) } else { Quarantine::Part(message) })
}

/// Returns the verdict for a pool without a serving worker. `idle` workers are connected and have nothing to serve.
fn not_serving(facts: &PoolFacts<'_>, idle: i32) -> ConditionState {
    let counts = facts.counts;
    if let Some(failure) = facts.rollout.as_ref().and_then(|rollout| rollout.failure.clone())
        && counts.pods == 0
    {
        return ConditionState::new(false, Reason::PodsNotCreated, failure);
    }
    // Pods of a target that is being scaled up may not exist yet.
    let is_growing = facts.rollout.as_ref().is_some_and(|rollout| !rollout.done);
    if counts.pods == 0 && facts.pool.spec.mode() == Mode::Inject {
        if let Some(why) = &facts.not_created {
            return ConditionState::new(false, Reason::PodsNotCreated, why);
        }
        if is_growing {
            let message = "the target's Pods do not exist yet";
            return ConditionState::new(false, Reason::WaitingForWorkers, message);
        }
        let name = facts.pool.metadata.name.as_deref().unwrap_or_default();
        let message = match facts.pool.spec.selector {
            None => format!("no Pod in this namespace has the label {}={name}", names::POOL_LABEL),
            Some(_) => format!(
                "no Pod that spec.selector matches was created since the pool; the namespace needs the label {}={}",
                names::SELECT_LABEL,
                names::SELECT_ENABLED
            ),
        };
        return ConditionState::new(false, Reason::NoPods, message);
    }
    if let Some(message) = not_injected(facts).filter(|_| counts.injected == 0) {
        return ConditionState::new(false, Reason::PodsNotInjected, message);
    }
    let provider = &facts.pool.spec.provider;
    let ready = format!("{} of {} Pods {} ready", counts.ready, counts.pods, plural::one_or(counts.ready, "is", "are"));
    if idle > 0 {
        let workers = plural::counted(idle, "worker is", "workers are");
        let silent = if idle == 1 { "its backend does not respond" } else { "their backends do not respond" };
        let message = format!("{ready}; {workers} connected to Provider {provider}, but {silent}");
        // A Pod may become ready only when its backend has loaded its model. A backend that never does is then
        // recognized by the elapsed time.
        return match (counts.settled, counts.silent) {
            (0, 0) => ConditionState::new(false, Reason::WaitingForWorkers, format!("{message} yet")),
            (0, silent) => {
                let (pods, minutes) = (plural::counted(silent, "Pod has", "Pods have"), LOADED.as_secs() / 60);
                let message = format!("{message}; {pods} been unready for over {minutes} minutes");
                ConditionState::new(false, Reason::BackendsNotAnswering, message)
            }
            _ => ConditionState::new(false, Reason::BackendsNotAnswering, message),
        };
    }
    // Unlike most reasons, this one is known without the worker's log.
    let cause = (counts.node_names > 0).then_some(sidecar::NODE_NAMES);
    if counts.settled > 0 {
        let log = format!("see the log of container {}", names::WORKER_CONTAINER);
        let cause = cause.unwrap_or(&log);
        let message = format!("{ready}, and no worker is connected to Provider {provider}: {cause}");
        return ConditionState::new(false, Reason::NotConnected, message);
    }
    let cause = cause.map(|cause| format!(": {cause}")).unwrap_or_default();
    ConditionState::new(false, Reason::WaitingForWorkers, format!("{ready}, and no worker has registered yet{cause}"))
}

fn reconciling(facts: &PoolFacts<'_>, ready: &ConditionState) -> ConditionState {
    if matches!(ready.reason, Reason::ProviderNotFound | Reason::WaitingForWorkers) {
        return ConditionState::new(true, ready.reason, ready.message.clone());
    }
    match &facts.rollout {
        Some(rollout) if !rollout.done => ConditionState::new(true, Reason::RollingOut, rollout.message.clone()),
        Some(_) | None => ConditionState::new(false, ready.reason, ""),
    }
}

/// True if no Pod is requested, and the number is configurable.
fn at_zero(facts: &PoolFacts<'_>) -> bool {
    facts.rollout.as_ref().is_some_and(|rollout| rollout.scaled && rollout.desired == 0)
}

fn not_injected(facts: &PoolFacts<'_>) -> Option<String> {
    let missing = &facts.counts.not_injected;
    let first = missing.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if missing.len() > NAMED { ", …" } else { "" };
    let (have, them) = if missing.len() == 1 { ("has", "it") } else { ("have", "them") };
    let all = facts.counts.pods;
    (!missing.is_empty())
        .then(|| format!("{} of {all} Pods {have} no worker: {first}{more}; delete {them}", missing.len()))
}

/// Returns the previous verdict, which stands while nothing new is known.
fn as_before(facts: &PoolFacts<'_>) -> Option<ConditionState> {
    let before: &Condition = facts.previous.conditions.iter().find(|condition| condition.type_ == READY)?;
    let reason = *Reason::ALL.iter().find(|reason| reason.as_str() == before.reason)?;
    // A pool that was at zero, or waited for something that now exists, must be evaluated again.
    let lasting = matches!(
        reason,
        Reason::Serving
            | Reason::NotConnected
            | Reason::BackendsNotAnswering
            | Reason::PodsNotInjected
            | Reason::SlotsQuarantined
            | Reason::NoPods
            | Reason::WaitingForWorkers
    );
    lasting.then(|| ConditionState::new(before.status == "True", reason, before.message.clone()))
}

#[cfg(test)]
mod tests;
