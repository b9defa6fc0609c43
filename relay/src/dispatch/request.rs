//! One request: what it needs, what it has been through, and where it is now.

use super::clock::{Moment, Span, span};
use super::effect::Failure;
use super::event::{Allowed, DEFAULT_COLD_TIMEOUT, LoadFailure, Model, QueueShare, RequestKey, Settings, WorkerKey};
use super::line::{Deadlines, Waiter};
use super::models::ModelId;
use super::queue::{LaneId, LaneKey, Place};
use super::registry::Worker;
use std::time::Duration;

/// Losses and broken backends that a request survives.
pub(super) const MAX_REQUEUES: u32 = 3;

/// Swaps that a request survives.
pub(super) const MAX_SEVERED: u32 = 3;

#[derive(Debug)]
pub(super) struct Request {
    pub(super) key: RequestKey,
    pub(super) model: ModelId,
    pub(super) bytes: u64,
    pub(super) pin: Option<WorkerKey>,
    pub(super) needs_core1: bool,
    pub(super) scope: Option<Scope>,
    pub(super) share: Option<QueueShare>,
    pub(super) arrived: Moment,
    pub(super) limits: Limits,
    /// Cold time of the waits that are over.
    pub(super) cold_waited: Span,
    /// Requeues that spent an attempt.
    pub(super) requeues: u32,
    /// Requeues by a swap.
    pub(super) severed: u32,
    /// How often it was sent.
    pub(super) attempts: u32,
    /// The number of its last sending.
    pub(super) sent: u64,
    /// Workers that failed it, sorted.
    pub(super) failed_on: Vec<FailedOn>,
    /// Workers that it was taken from because they had sent nothing for too long.
    pub(super) silent: Vec<WorkerKey>,
    /// The last failure that its waiting must be blamed on.
    pub(super) trouble: Option<Trouble>,
    pub(super) state: State,
}

/// What a request's name may mean, where not whatever a worker means by it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Scope {
    pub(super) name: Model,
    pub(super) allowed: Allowed,
}

impl Scope {
    pub(super) fn admits(&self, worker: &Worker) -> bool {
        self.allowed.contains(worker.id(&self.name))
    }
}

/// Where a request is. Its end is its removal.
#[derive(Debug)]
pub(super) enum State {
    Queued {
        /// Its place in its model's queue; `None` for the moment before it has one.
        place: Option<Place>,
        /// Since this arrival or requeue.
        since: Moment,
        /// Where its cold clock stood at zero, on its lane's cold axis.
        cold_start: Span,
    },
    Running {
        worker: WorkerKey,
        /// The end of the request timeout.
        due: Moment,
    },
}

/// A worker that failed a request, and which announcement of the model it had made last: after the next it may try again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct FailedOn {
    pub(super) worker: WorkerKey,
    pub(super) announcement: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    Unreachable,
    Load { code: LoadFailure, retry_after: Option<Duration> },
}

impl Trouble {
    /// Whether it is over once everybody has tried. A backend that was unreachable is waited for instead.
    pub(super) fn ends_without_candidate(self) -> bool {
        matches!(self, Self::Load { .. })
    }

    pub(super) fn failure(self) -> Failure {
        match self {
            Self::Unreachable => Failure::BackendUnreachable,
            Self::Load { code, retry_after } => Failure::LoadFailed { code, retry_after },
        }
    }
}

/// The timeouts of one request, taken from the settings at its arrival.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    queue: Span,
    /// `None`: one waiting clock, warm or cold.
    cold: Option<Span>,
    request: Span,
}

impl Limits {
    /// A model that is declared, by the settings or by a multiplexer's slot, gets time to be loaded.
    pub(super) fn new(settings: &Settings, model: &Model, in_slot: bool) -> Self {
        let declared = || {
            let declared = in_slot || settings.cold_models.contains(model);
            declared.then(|| settings.absent().max(DEFAULT_COLD_TIMEOUT))
        };
        Self {
            queue: span(settings.queue_timeout),
            cold: settings.cold_timeout.or_else(declared).or(settings.absent_timeout).map(span),
            request: span(settings.request_timeout),
        }
    }
}

impl Request {
    /// It waits from now on.
    pub(super) fn waiter(&self, cold_start: Span) -> Waiter {
        Waiter { key: self.key, arrived: self.arrived, deadlines: self.deadlines(cold_start) }
    }

    /// The deadlines of a wait whose cold clock stood at zero at `cold_start`.
    ///
    /// Warm time since arrival is all time less cold waiting: `(now - arrived) - (cold(now) - cold_start)`, which is
    /// `warm(now) - (arrived - cold_start)` on the lane's warm axis. Running time is in it, as it must be.
    fn deadlines(&self, cold_start: Span) -> Deadlines {
        let Limits { queue, cold, request } = self.limits;
        let warm_zero = i64::try_from(self.arrived.nanos()).unwrap_or(0) - cold_start;
        match cold {
            Some(cold) => Deadlines::new(Some(warm_zero + queue.min(request)), Some(cold_start + cold), None),
            // The wall ends it first unless the request timeout is the shorter one.
            None => Deadlines::new(Some(warm_zero + request), None, Some(self.arrived.plus(queue))),
        }
    }

    /// Which workers can serve it, besides its pin.
    pub(super) fn lane(&self) -> LaneKey {
        LaneKey {
            model: self.model,
            needs_core1: self.needs_core1,
            failed_on: self.failed_on.clone(),
            scope: self.scope.clone(),
        }
    }

    /// Where in its model's queue it stands.
    pub(super) fn lane_id(&self) -> LaneId {
        LaneId { pin: self.pin, key: self.lane() }
    }

    /// What ends a request on its warm deadline.
    pub(super) fn warm_failure(&self) -> Expiry {
        if self.limits.request < self.limits.queue { Expiry::Request } else { Expiry::Waiting }
    }

    /// When it must end if it runs from now on.
    pub(super) fn running_due(&self) -> Moment {
        self.arrived.plus(self.cold_waited + self.limits.request)
    }

    /// Whether this worker failed it and has not announced its model since, or means what it may not have.
    pub(super) fn refuses(&self, worker: &Worker) -> bool {
        refuses(&self.failed_on, self.model, worker) || self.scope.as_ref().is_some_and(|scope| !scope.admits(worker))
    }

    pub(super) fn note_failed_on(&mut self, entry: FailedOn) {
        self.failed_on.retain(|old| old.worker != entry.worker);
        self.failed_on.push(entry);
        self.failed_on.sort_unstable();
    }
}

/// Which clock ran out on a waiting request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Expiry {
    Waiting,
    Request,
}

/// Whether a list of failures with a model rules a worker out.
pub(super) fn refuses(failed_on: &[FailedOn], model: ModelId, worker: &Worker) -> bool {
    let entry = || FailedOn { worker: worker.key, announcement: worker.announcement(model) };
    !failed_on.is_empty() && failed_on.binary_search(&entry()).is_ok()
}
