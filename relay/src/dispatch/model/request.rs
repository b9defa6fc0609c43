//! One request: its needs, its history and its state.

use super::clock::{Moment, Span, span};
use super::effect::Failure;
use super::event::{
    Allowed, Conversation, DEFAULT_COLD_TIMEOUT, FailureReport, LoadFailure, Model, NewRequest, Settings, WorkerKey,
};
use super::flows::{Charge, FlowId};
use super::models::ModelId;
use super::owner::Class;
use super::queue::{LaneId, LaneKey, QueuePlace};
use super::registry::Worker;
use super::wait_list::{Deadlines, QueueEntry};
use std::sync::Arc;
use std::time::Duration;

/// The number of lost workers and broken backends that a request survives.
pub(crate) const MAX_REQUEUES: u32 = 3;

/// The number of swaps that a request survives.
pub(crate) const MAX_SEVERED: u32 = 3;

#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The request as it was submitted; only its pin changes, with its worker's link.
    pub(crate) new: NewRequest,
    pub(crate) model: ModelId,
    pub(crate) arrived: Moment,
    pub(crate) limits: Limits,
    /// The cold time of earlier waits.
    pub(crate) cold_waited: Span,
    /// The number of requeues that spent an attempt.
    pub(crate) requeues: u32,
    /// The number of requeues by a swap.
    pub(crate) severed: u32,
    /// The number of attempts.
    pub(crate) attempts: u32,
    /// The number of its last dispatch.
    pub(crate) sent: u64,
    /// Workers that failed it, sorted.
    pub(crate) failed_on: Vec<FailedOn>,
    /// Workers that it was revoked from because they had sent nothing for too long.
    pub(crate) silent: Vec<WorkerKey>,
    /// The last failure that explains why it waits.
    pub(crate) last_failure: Option<LastFailure>,
    pub(crate) state: RequestState,
    /// While it runs: the bytes of its prompt that are believed to be in its worker's cache.
    pub(crate) believed: u64,
    /// The bytes by which it adds to its worker's backlog, until the first byte of its response.
    pub(crate) cost: u64,
    /// The number of requests that arrived later and were sent first, because they were at home.
    pub(crate) overtaken: u8,
    /// The key that it shares the workers by.
    pub(crate) flow: FlowId,
    pub(crate) class: Class,
    /// What its flow was charged for the current attempt.
    pub(crate) charge: Charge,
}

/// The models that a request's name may mean, if not any model that a worker means by it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Scope {
    pub(crate) name: Model,
    pub(crate) allowed: Allowed,
}

impl Scope {
    pub(crate) fn admits(&self, worker: &Worker) -> bool {
        is_allowed(&self.allowed, &self.name, worker)
    }
}

/// True if the model that a worker means by a name is among those that a request may use.
fn is_allowed(allowed: &Allowed, name: &Model, worker: &Worker) -> bool {
    allowed.contains(worker.id(name))
}

/// The state of a request. At its end it is removed.
#[derive(Clone, Debug)]
pub(crate) enum RequestState {
    Queued {
        /// Its place in its model's queue; `None` before it has one.
        place: Option<QueuePlace>,
        /// The time of its arrival or last requeue.
        since: Moment,
        /// The position of its lane's cold axis at which its own cold clock was zero.
        cold_start: Span,
    },
    Running {
        worker: WorkerKey,
        /// The end of the request timeout.
        due: Moment,
    },
}

/// A worker that failed a request, with its last announcement of the model: after the next one it may try again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct FailedOn {
    pub(crate) worker: WorkerKey,
    pub(crate) announcement: u64,
}

#[derive(Clone, Debug)]
pub(crate) enum LastFailure {
    Unreachable,
    Load { code: LoadFailure, retry_after: Option<Duration>, report: Arc<FailureReport> },
}

impl LastFailure {
    /// True if the request ends once all workers have failed it. An unreachable backend is waited for instead.
    pub(crate) fn ends_without_candidate(&self) -> bool {
        matches!(self, Self::Load { .. })
    }

    pub(crate) fn failure(&self) -> Failure {
        match self {
            Self::Unreachable => Failure::BackendUnreachable,
            Self::Load { code, retry_after, report } => {
                Failure::LoadFailed { code: *code, retry_after: *retry_after, report: Arc::clone(report) }
            }
        }
    }
}

/// The timeouts of one request, captured from the settings at its arrival.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    queue: Span,
    /// `None`: one waiting clock, warm or cold.
    cold: Option<Span>,
    request: Span,
}

impl Limits {
    /// A model that is declared, by the settings or by a multiplexer's slot, gets time to be loaded.
    pub(crate) fn new(settings: &Settings, model: &Model, in_slot: bool) -> Self {
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
    /// Its conversation. A pinned request goes to its worker and has none.
    pub(crate) fn conversation(&self) -> Option<Conversation> {
        self.new.conversation.filter(|_| self.new.pin.is_none())
    }

    /// Returns the queue entry of a request that waits from now on.
    pub(crate) fn entry(&self, cold_start: Span) -> QueueEntry {
        QueueEntry { key: self.new.key, arrived: self.arrived, deadlines: self.deadlines(cold_start) }
    }

    /// Returns the deadlines of a wait whose cold clock was zero at `cold_start`.
    ///
    /// Warm time since arrival is all time less cold waiting: `(now - arrived) - (cold(now) - cold_start)`, which is
    /// `warm(now) - (arrived - cold_start)` on the lane's warm axis. It includes running time, as it must.
    fn deadlines(&self, cold_start: Span) -> Deadlines {
        let Limits { queue, cold, request } = self.limits;
        let warm_zero = i64::try_from(self.arrived.nanos()).unwrap_or(0) - cold_start;
        match cold {
            Some(cold) => Deadlines::new(Some(warm_zero + queue.min(request)), Some(cold_start + cold), None),
            // The wall deadline ends it first unless the request timeout is shorter.
            None => Deadlines::new(Some(warm_zero + request), None, Some(self.arrived.plus(queue))),
        }
    }

    /// Returns the properties that determine its lane, besides its pin.
    pub(crate) fn lane(&self) -> LaneKey {
        let allowed = self.new.allowed.as_ref();
        LaneKey {
            model: self.model,
            flow: self.flow,
            class: self.class,
            needs_core1: self.new.needs_core1,
            failed_on: self.failed_on.clone(),
            scope: allowed.cloned().map(|allowed| Scope { name: Model::clone(&self.new.model), allowed }),
        }
    }

    /// True if both belong to one key and class, so that the older one goes first.
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        (self.flow, self.class) == (other.flow, other.class)
    }

    /// Returns its lane in its model's queue.
    pub(crate) fn lane_id(&self) -> LaneId {
        LaneId { pin: self.new.pin, key: self.lane() }
    }

    /// Returns which timeout ends the request at its warm deadline.
    pub(crate) fn warm_failure(&self) -> Expiry {
        if self.limits.request < self.limits.queue { Expiry::Request } else { Expiry::Waiting }
    }

    /// Returns the time at which it must end if it runs from now on.
    pub(crate) fn running_due(&self) -> Moment {
        self.arrived.plus(self.cold_waited + self.limits.request)
    }

    /// True if this worker failed it and has not announced its model since, or means a model that the request may not
    /// use.
    pub(crate) fn refuses(&self, worker: &Worker) -> bool {
        let allowed = self.new.allowed.as_ref();
        refuses(&self.failed_on, self.model, worker)
            || allowed.is_some_and(|allowed| !is_allowed(allowed, &self.new.model, worker))
    }

    pub(crate) fn note_failed_on(&mut self, entry: FailedOn) {
        self.failed_on.retain(|old| old.worker != entry.worker);
        self.failed_on.push(entry);
        self.failed_on.sort_unstable();
    }
}

/// The timeout that ended a waiting request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Expiry {
    Waiting,
    Request,
}

/// True if a list of failures with a model excludes a worker.
pub(crate) fn refuses(failed_on: &[FailedOn], model: ModelId, worker: &Worker) -> bool {
    let entry = || FailedOn { worker: worker.key, announcement: worker.announcement(model) };
    !failed_on.is_empty() && failed_on.binary_search(&entry()).is_ok()
}
