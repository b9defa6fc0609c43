//! Bugs as a core could have them: it does not understand an event. The explorer must find each.

#![cfg_attr(not(unix), allow(dead_code, reason = "the explorer runs only on Unix"))]

use std::collections::HashSet;

use crate::dispatch::AttemptFailure::{AtCapacity, BackendReset};
use crate::dispatch::Event;

/// A bug of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bug {
    /// It forgets that a response has begun when its worker is lost.
    ForgetsResponse,
    /// It ignores that a worker drains.
    IgnoresDrain,
    /// It ignores a grant of fewer requests.
    KeepsGrant,
    /// It ignores that a request is cancelled.
    IgnoresCancel,
    /// It counts a lost backend as a refusal, which spends no attempt.
    ForgivesLoss,
}

/// Returns an event as a core with the bug understands it.
pub(super) fn understood(bug: Option<Bug>, event: &Event) -> Event {
    match (bug, event) {
        (Some(Bug::ForgetsResponse), Event::WorkerLost { worker, cause, .. }) => {
            Event::WorkerLost { worker: *worker, started: HashSet::new(), cause: *cause }
        }
        (Some(Bug::IgnoresDrain), Event::WorkerDraining { .. }) | (Some(Bug::IgnoresCancel), Event::Cancel { .. }) => {
            Event::Tick
        }
        (Some(Bug::KeepsGrant), Event::Granted { grant, .. }) if grant.slots == 0 => Event::Tick,
        (Some(Bug::ForgivesLoss), Event::AttemptFailed { worker, request, attempt, failure: BackendReset }) => {
            let (worker, request, attempt) = (*worker, *request, *attempt);
            Event::AttemptFailed { worker, request, attempt, failure: AtCapacity }
        }
        (_, event) => event.clone(),
    }
}
