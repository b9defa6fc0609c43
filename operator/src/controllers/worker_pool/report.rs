//! Writes changes of a pool's status, and publishes Events about transitions: conditions at once, numbers every ten
//! seconds.

use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource;
use kube::runtime::events::EventType;

use super::PoolContext;
use crate::cluster::apply;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::WorkerPoolStatus;
use crate::resources::conditions::{READY, STALLED};
use crate::spec::worker_pool::reasons::Reason;

/// The minimum interval between writes of numbers: with a thousand changing Pods, each change would be a write.
const NUMBERS_EVERY: Duration = Duration::from_secs(10);

/// Returns the current status, even if the cache does not show a recent write yet.
pub fn previous(shared: &PoolContext, pool: &WorkerPool) -> WorkerPoolStatus {
    let recent = shared.memory.with(pool, |entry| {
        let (at, status) = entry.written.as_ref()?;
        (at.elapsed() < NUMBERS_EVERY).then(|| status.clone())
    });
    recent.or_else(|| pool.status.clone()).unwrap_or_default()
}

/// Writes the status if it is due; otherwise returns the time until it is.
pub async fn write(
    shared: &PoolContext,
    pool: &WorkerPool,
    previous: &WorkerPoolStatus,
    status: WorkerPoolStatus,
) -> Result<Option<Duration>, kube::Error> {
    let since = shared.memory.with(pool, |entry| entry.written.as_ref().map(|(at, _)| at.elapsed()));
    match pace(previous, &status, since) {
        Pace::Unchanged => return Ok(None),
        Pace::Later(delay) => return Ok(Some(delay)),
        Pace::Now => {}
    }
    apply::write_status(&shared.ctx.client, pool, &status).await?;
    for (type_, reason, message) in transitions(&previous.conditions, &status.conditions) {
        shared.ctx.publish(&pool.object_ref(&()), type_, reason.as_str(), "Reconcile", message).await;
    }
    shared.memory.with(pool, |entry| entry.written = Some((Instant::now(), status)));
    Ok(None)
}

#[derive(Debug, PartialEq, Eq)]
enum Pace {
    Unchanged,
    Now,
    Later(Duration),
}

fn pace(previous: &WorkerPoolStatus, status: &WorkerPoolStatus, since: Option<Duration>) -> Pace {
    if previous == status {
        return Pace::Unchanged;
    }
    let urgent = |status: &WorkerPoolStatus| {
        let conditions: Vec<_> = status
            .conditions
            .iter()
            .map(|one| (one.type_.clone(), one.status.clone(), one.reason.clone(), one.observed_generation))
            .collect();
        (conditions, status.observed_generation, status.mode, status.selector.clone())
    };
    match since {
        Some(since) if since < NUMBERS_EVERY && urgent(previous) == urgent(status) => {
            Pace::Later(NUMBERS_EVERY.saturating_sub(since))
        }
        Some(_) | None => Pace::Now,
    }
}

/// Returns the transitions that deserve an Event: a new reason of Ready that a user would care about, and a conflict
/// that stops the scaling.
fn transitions(before: &[Condition], after: &[Condition]) -> Vec<(EventType, Reason, String)> {
    let find = |list: &[Condition], type_: &str| list.iter().find(|condition| condition.type_ == type_).cloned();
    let mut events: Vec<(EventType, Reason, String)> = Vec::new();
    for type_ in [READY, STALLED] {
        let Some(now) = find(after, type_) else { continue };
        let was = find(before, type_);
        let same = was.is_some_and(|was| was.status == now.status && was.reason == now.reason);
        let Some(reason) = Reason::ALL.iter().copied().find(|reason| reason.as_str() == now.reason) else { continue };
        let matters = if type_ == READY { event_type(reason) } else { conflict(reason) };
        if let (false, Some(event_type)) = (same, matters)
            && events.iter().all(|(_, other, _)| *other != reason)
        {
            events.push((event_type, reason, now.message));
        }
    }
    events
}

/// The one reason that Ready does not always show.
fn conflict(reason: Reason) -> Option<EventType> {
    (reason == Reason::ScalingConflict).then_some(EventType::Warning)
}

fn event_type(reason: Reason) -> Option<EventType> {
    match reason {
        Reason::Serving | Reason::ScaledToZero => Some(EventType::Normal),
        // States that pass by themselves, and those that the Provider's own Events cover.
        Reason::WaitingForWorkers | Reason::RollingOut | Reason::RelaysUnknown | Reason::RelaysUnreachable => None,
        Reason::NotConnected
        | Reason::BackendsNotAnswering
        | Reason::NoPods
        | Reason::PodsNotCreated
        | Reason::PodsNotInjected
        | Reason::ProviderNotFound
        | Reason::ProviderDisabled
        | Reason::NameTaken
        | Reason::TargetNotFound
        | Reason::TemplateInvalid
        | Reason::InvalidSpec
        | Reason::SlotsQuarantined
        | Reason::ModelsUnknown
        | Reason::ScalingConflict
        | Reason::Forbidden => Some(EventType::Warning),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn condition(type_: &str, status: &str, reason: Reason) -> Condition {
        Condition {
            type_: type_.into(),
            status: status.into(),
            reason: reason.as_str().into(),
            message: "why".into(),
            last_transition_time: Time(Timestamp::from_second(1).unwrap()),
            observed_generation: Some(1),
        }
    }

    fn ready(status: &str, reason: Reason) -> WorkerPoolStatus {
        WorkerPoolStatus { conditions: vec![condition(READY, status, reason)], ..WorkerPoolStatus::default() }
    }

    #[test]
    fn conditions_are_written_immediately_and_numbers_throttled() {
        let before = ready("True", Reason::Serving);
        let counted = WorkerPoolStatus { connected: Some(3), ..before.clone() };
        let second = Some(Duration::from_secs(1));
        assert_eq!(pace(&before, &before, second), Pace::Unchanged);
        assert_eq!(pace(&before, &counted, second), Pace::Later(Duration::from_secs(9)));
        assert_eq!(pace(&before, &counted, Some(Duration::from_secs(10))), Pace::Now);
        assert_eq!(pace(&before, &counted, None), Pace::Now);
        assert_eq!(pace(&before, &ready("False", Reason::NotConnected), second), Pace::Now);
        let next = WorkerPoolStatus { observed_generation: Some(2), ..before.clone() };
        assert_eq!(pace(&before, &next, second), Pace::Now);
    }

    #[test]
    fn events_report_transitions() {
        let events = |before: &WorkerPoolStatus, after: &WorkerPoolStatus| -> Vec<&str> {
            transitions(&before.conditions, &after.conditions).iter().map(|(_, reason, _)| reason.as_str()).collect()
        };
        let none = WorkerPoolStatus::default();
        let (serving, missing) = (ready("True", Reason::Serving), ready("False", Reason::ProviderNotFound));
        assert_eq!(events(&none, &missing), ["ProviderNotFound"]);
        assert_eq!(events(&missing, &missing), [""; 0]);
        assert_eq!(events(&missing, &ready("False", Reason::WaitingForWorkers)), [""; 0]);
        assert_eq!(events(&missing, &serving), ["Serving"]);
        let mut conflict = serving.clone();
        conflict.conditions.push(condition(STALLED, "True", Reason::ScalingConflict));
        assert_eq!(events(&serving, &conflict), ["ScalingConflict"]);
        assert_eq!(events(&conflict, &conflict), [""; 0]);
        let mut invalid = ready("False", Reason::TemplateInvalid);
        invalid.conditions.push(condition(STALLED, "True", Reason::TemplateInvalid));
        assert_eq!(events(&serving, &invalid), ["TemplateInvalid"]);
    }
}
