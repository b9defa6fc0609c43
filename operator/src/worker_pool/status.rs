//! Builds the status of a pool from the known state: pure, with the time passed in.
//!
//! The conditions follow kstatus: Ready if the pool serves, or is at zero on purpose; Reconciling while it makes
//! progress; Stalled if a user has to change something. Missing information changes nothing: a new operator has no
//! report from a relay yet, which does not make a serving pool unready.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::census::{Census, LOADED};
use super::reasons::Reason;
use super::residency::Residency;
use super::rivals::Dispute;
use super::rollout::Rollout;
use super::writers::Standing;
use crate::conditions::{self, READY, RECONCILING, STALLED, Status, Wanted};
use crate::crd::WorkerPool;
use crate::crd::worker_pool::{Mode, WorkerPoolStatus};
use crate::manifests::backend::Workload;
use crate::names;
use crate::relay_state::RelaySnapshot;
use crate::words;

/// The maximum number of names in the status: models, and Pods without a worker.
const LISTED: usize = 32;
/// The maximum number of names in a message.
const NAMED: usize = 3;

/// The inputs of the status.
#[derive(Clone, Debug)]
pub struct Facts<'a> {
    /// The pool.
    pub pool: &'a WorkerPool,
    /// Its current status.
    pub previous: &'a WorkerPoolStatus,
    /// The reason that it cannot be applied, if any.
    pub stall: Option<(Reason, String)>,
    /// Its Provider.
    pub provider: ProviderState,
    /// Its Pods.
    pub census: &'a Census,
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
    pub standing: Standing,
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
pub fn status(facts: &Facts<'_>, now: &Time) -> WorkerPoolStatus {
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
        replicas: Some(facts.census.pods),
        injected: Some(facts.census.injected),
        not_injected: facts.census.not_injected.iter().take(LISTED).cloned().collect(),
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
fn models(facts: &Facts<'_>) -> (Vec<String>, Option<i32>) {
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
struct Verdict {
    status: Status,
    reason: Reason,
    message: String,
}

impl Verdict {
    fn new(status: impl Into<Status>, reason: Reason, message: impl Into<String>) -> Self {
        Self { status: status.into(), reason, message: message.into() }
    }

    fn wanted(self, type_: &'static str) -> Wanted {
        Wanted::new(type_, self.status, self.reason.as_str(), self.message)
    }
}

fn wanted(facts: &Facts<'_>) -> [Wanted; 3] {
    if let Some((reason, message)) = &facts.stall {
        return [
            Verdict::new(false, *reason, message).wanted(READY),
            Verdict::new(false, *reason, "").wanted(RECONCILING),
            Verdict::new(true, *reason, message).wanted(STALLED),
        ];
    }
    if at_zero(facts) && !facts.wakeable {
        return asleep_for_ever(facts);
    }
    let mut ready = ready(facts);
    let reconciling = reconciling(facts, &ready);
    let mut stalled = Verdict::new(false, ready.reason, "");
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
fn conflict(facts: &Facts<'_>) -> Option<Verdict> {
    let of = |stalls: bool, message: String| Some(Verdict::new(stalls, Reason::ScalingConflict, message));
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
            Dispute::Settled(rival) => {
                let rival = rival.describe();
                of(false, format!("{rival} scaled {whose}; the operator reverted it: scale WorkerPool {name} instead"))
            }
        }
    });
    by_dispute.or_else(|| match facts.standing {
        Standing::Alone => None,
        Standing::Shared => of(
            false,
            "spec.replicas was changed externally although spec.scaling is set; the number is not lowered for one \
             scaleDownDelay"
                .to_owned(),
        ),
        Standing::Yielding => of(
            true,
            "spec.replicas keeps being changed externally, so spec.scaling is suspended: use only one of the two"
                .to_owned(),
        ),
    })
}

fn asleep_for_ever(facts: &Facts<'_>) -> [Wanted; 3] {
    const MESSAGE: &str = "the pool is scaled to zero and has never advertised a model, so no request can wake it: list its \
        models in spec.models, or set spec.replicas to 1 once";
    let rolling = facts.rollout.as_ref().is_some_and(|rollout| !rollout.done);
    [
        Verdict::new(false, Reason::ModelsUnknown, MESSAGE).wanted(READY),
        Verdict::new(rolling, Reason::ModelsUnknown, "").wanted(RECONCILING),
        Verdict::new(true, Reason::ModelsUnknown, MESSAGE).wanted(STALLED),
    ]
}

fn ready(facts: &Facts<'_>) -> Verdict {
    let provider = &facts.pool.spec.provider;
    match facts.provider {
        ProviderState::Missing => {
            let message = format!("Provider {provider} does not exist in this namespace");
            return Verdict::new(false, Reason::ProviderNotFound, message);
        }
        ProviderState::Disabled => {
            let message = format!("Provider {provider} has enabled: false, so its relays reject workers");
            return Verdict::new(false, Reason::ProviderDisabled, message);
        }
        ProviderState::Present => {}
    }
    if at_zero(facts) {
        let message = match facts.pool.spec.scaling {
            Some(_) => "scaled to zero; a request for one of its models wakes the pool",
            None => "spec.replicas is 0",
        };
        return Verdict::new(true, Reason::ScaledToZero, message);
    }
    match &facts.workers {
        Workers::Unknown => as_before(facts).unwrap_or_else(|| {
            let message = format!("no relay of Provider {provider} has been polled yet");
            Verdict::new(Status::Unknown, Reason::RelaysUnknown, message)
        }),
        Workers::Silent => {
            let message = format!("no relay of Provider {provider} responds");
            Verdict::new(Status::Unknown, Reason::RelaysUnreachable, message)
        }
        Workers::Known { serving, .. } if *serving > 0 => match quarantined(facts, *serving) {
            Some(Quarantine::Whole(message)) => Verdict::new(false, Reason::SlotsQuarantined, message),
            Some(Quarantine::Part(message)) => Verdict::new(true, Reason::SlotsQuarantined, message),
            None => serving_verdict(facts, *serving),
        },
        Workers::Known { idle, .. } => not_serving(facts, *idle),
    }
}

/// Returns the verdict for a pool whose workers accept requests.
fn serving_verdict(facts: &Facts<'_>, serving: i32) -> Verdict {
    match not_injected(facts) {
        Some(message) => Verdict::new(true, Reason::PodsNotInjected, message),
        None => {
            let workers = words::counted(serving, "worker is", "workers are");
            let message = format!("{workers} connected to Provider {}", facts.pool.spec.provider);
            Verdict::new(true, Reason::Serving, message)
        }
    }
}

/// Slots that accept nothing until a user has acted.
enum Quarantine {
    Whole(String),
    Part(String),
}

fn quarantined(facts: &Facts<'_>, serving: i32) -> Option<Quarantine> {
    let residency = facts.residency.as_ref()?;
    let first = residency.quarantined().next()?;
    let (number, all) = (residency.quarantined().count(), residency.slots.len());
    let where_ = format!("slot {} of worker {}", first.slot, first.worker);
    let more = if number > 1 { " first" } else { "" };
    let slots = words::counted(number, "slot is", "slots are");
    let message = format!("{slots} quarantined out of {all}, {where_}{more}: its memory could not be freed");
    // Workers without slots, such as those of Pods from before the multiplexer, are unaffected.
    let workers: BTreeSet<&str> = residency.slots.iter().map(|held| held.worker.as_str()).collect();
    let others = usize::try_from(serving).is_ok_and(|serving| serving > workers.len());
    Some(if number == all && !others { Quarantine::Whole(message) } else { Quarantine::Part(message) })
}

/// Returns the verdict for a pool without a serving worker. `idle` workers are connected and have nothing to serve.
fn not_serving(facts: &Facts<'_>, idle: i32) -> Verdict {
    let census = facts.census;
    if let Some(failure) = facts.rollout.as_ref().and_then(|rollout| rollout.failure.clone())
        && census.pods == 0
    {
        return Verdict::new(false, Reason::PodsNotCreated, failure);
    }
    if census.pods == 0 && facts.pool.spec.mode() == Mode::Inject {
        if let Some(why) = &facts.not_created {
            return Verdict::new(false, Reason::PodsNotCreated, why);
        }
        let name = facts.pool.metadata.name.as_deref().unwrap_or_default();
        let message = format!("no Pod in this namespace has the label {}={name}", names::POOL_LABEL);
        return Verdict::new(false, Reason::NoPods, message);
    }
    if let Some(message) = not_injected(facts).filter(|_| census.injected == 0) {
        return Verdict::new(false, Reason::PodsNotInjected, message);
    }
    let provider = &facts.pool.spec.provider;
    let ready = format!("{} of {} Pods {} ready", census.ready, census.pods, words::one_or(census.ready, "is", "are"));
    if idle > 0 {
        let workers = words::counted(idle, "worker is", "workers are");
        let silent = if idle == 1 { "its backend does not respond" } else { "their backends do not respond" };
        let message = format!("{ready}; {workers} connected to Provider {provider}, but {silent}");
        // A Pod may become ready only when its backend has loaded its model. A backend that never does is then
        // recognized by the elapsed time.
        return match (census.settled, census.silent) {
            (0, 0) => Verdict::new(false, Reason::WaitingForWorkers, format!("{message} yet")),
            (0, silent) => {
                let (pods, minutes) = (words::counted(silent, "Pod has", "Pods have"), LOADED.as_secs() / 60);
                let message = format!("{message}; {pods} been unready for over {minutes} minutes");
                Verdict::new(false, Reason::BackendsNotAnswering, message)
            }
            _ => Verdict::new(false, Reason::BackendsNotAnswering, message),
        };
    }
    if census.settled > 0 {
        let message = format!(
            "{ready}, and no worker is connected to Provider {provider}: see the log of container {}",
            names::WORKER_CONTAINER
        );
        return Verdict::new(false, Reason::NotConnected, message);
    }
    Verdict::new(false, Reason::WaitingForWorkers, format!("{ready}, and no worker has registered yet"))
}

fn reconciling(facts: &Facts<'_>, ready: &Verdict) -> Verdict {
    if matches!(ready.reason, Reason::ProviderNotFound | Reason::WaitingForWorkers) {
        return Verdict::new(true, ready.reason, ready.message.clone());
    }
    match &facts.rollout {
        Some(rollout) if !rollout.done => Verdict::new(true, Reason::RollingOut, rollout.message.clone()),
        Some(_) | None => Verdict::new(false, ready.reason, ""),
    }
}

/// True if no Pod is requested, and the number is configurable.
fn at_zero(facts: &Facts<'_>) -> bool {
    facts.rollout.as_ref().is_some_and(|rollout| rollout.scaled && rollout.desired == 0)
}

fn not_injected(facts: &Facts<'_>) -> Option<String> {
    let missing = &facts.census.not_injected;
    let first = missing.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if missing.len() > NAMED { ", …" } else { "" };
    let (have, them) = if missing.len() == 1 { ("has", "it") } else { ("have", "them") };
    let all = facts.census.pods;
    (!missing.is_empty())
        .then(|| format!("{} of {all} Pods {have} no worker: {first}{more}; delete {them}", missing.len()))
}

/// Returns the previous verdict, which stands while nothing new is known.
fn as_before(facts: &Facts<'_>) -> Option<Verdict> {
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
    lasting.then(|| Verdict::new(before.status == "True", reason, before.message.clone()))
}

#[cfg(test)]
mod tests;
