//! The effects that the core returns. They are plain data, executed in order while the provider's lock is held.

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::queue_position::QueuePosition;

use super::event::{CancelReason, FailureReport, LoadFailure, Model, RequestKey, WorkerKey};
use super::owner::Class;

/// An action for the shell to execute.
///
/// Each request ends with exactly one of [`Fail`](Effect::Fail), [`Cancelled`](Effect::Cancelled),
/// [`Severed`](Effect::Severed) or [`Finished`](Effect::Finished).
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// Send the request to the worker, under a fresh wire id.
    Send {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// 1 for the first attempt; identifies this attempt in the worker's reply.
        attempt: u32,
        /// The time since the request arrived or was requeued.
        waited: Duration,
        /// Why the request goes to this worker.
        decision: Decision,
        /// Its class.
        class: Class,
    },
    /// Notify the worker that the request is cancelled. Its slot is already free.
    CancelSent {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// The attempt.
        attempt: u32,
        /// The reason.
        reason: CancelReason,
    },
    /// The request is over; send the failure to the client. After the response head was sent, this happens only with
    /// [`RequestTimeout`](Failure::RequestTimeout), [`Draining`](Failure::Draining) and
    /// [`CancelledByAdmin`](Failure::CancelledByAdmin), and means an error frame.
    Fail {
        /// The request.
        request: RequestKey,
        /// The failure to report.
        failure: Failure,
        /// The number of attempts.
        attempts: u32,
        /// The time since the request arrived.
        age: Duration,
        /// Its position in the queue, if it waited until now or may not wait.
        position: Option<QueuePosition>,
    },
    /// The request is over, and the core has nothing to report to the client.
    Cancelled {
        /// The request.
        request: RequestKey,
        /// The reason.
        reason: CancelReason,
        /// The stage at which it was cancelled.
        stage: Stage,
    },
    /// The request's worker was lost after the response head was sent: end the client's response with an error frame.
    Severed {
        /// The request.
        request: RequestKey,
        /// The lost worker.
        worker: WorkerKey,
    },
    /// The response is complete; the request is over.
    Finished {
        /// The request.
        request: RequestKey,
        /// The worker that served it.
        worker: WorkerKey,
        /// The attempt.
        attempt: u32,
    },
    /// The request waits again, at its original place. A [`Send`](Effect::Send) may follow at once.
    Requeued {
        /// The request.
        request: RequestKey,
        /// The reason.
        reason: RequeueReason,
        /// The attempt that failed.
        attempt: u32,
    },
    /// Report the demand to a worker with several links, or with a multiplexer. Complete: a model not listed has none.
    Demand {
        /// The worker.
        worker: WorkerKey,
        /// Sorted by model.
        demand: Vec<ModelDemand>,
    },
    /// A draining worker has nothing left in flight. Emitted once.
    DrainedIdle {
        /// The worker.
        worker: WorkerKey,
    },
}

/// Why a request went to its worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// It has no conversation, or is pinned.
    LeastLoad,
    /// Its conversation had no home.
    New,
    /// To its conversation's home.
    Home,
    /// To another worker than its conversation's home.
    Moved(MoveReason),
}

/// Why a request did not go to its conversation's home.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MoveReason {
    /// The home has no room.
    Busy,
    /// Waiting there would cost more than three times the prompt's computation elsewhere.
    Backlog,
    /// The home's cache often does not hold what was expected.
    Distrust,
    /// Other workers are less loaded.
    Load,
    /// The home is farther from the relay.
    Nearer,
    /// The home left, drains, failed this request or others for the model, or cannot serve it any more.
    Gone,
}

impl Decision {
    /// The decision's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LeastLoad => "least_load",
            Self::New => "new",
            Self::Home => "home",
            Self::Moved(_) => "moved",
        }
    }

    /// The reason of a move; empty otherwise.
    pub fn reason(self) -> &'static str {
        let Self::Moved(reason) = self else { return "" };
        match reason {
            MoveReason::Busy => "busy",
            MoveReason::Backlog => "backlog",
            MoveReason::Distrust => "distrust",
            MoveReason::Load => "load",
            MoveReason::Nearer => "nearer",
            MoveReason::Gone => "gone",
        }
    }
}

/// The waiting requests for one model of one worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelDemand {
    /// The model.
    pub model: Model,
    /// The number of requests.
    pub waiting: u32,
    /// The age of the oldest request.
    pub oldest: Duration,
    /// The sum of their ages.
    pub sum: Duration,
    /// Their highest class, for a multiplexer.
    pub class: Class,
    /// The model's place in the fair order among those of the report, for a multiplexer. Models may share a place.
    pub rank: u32,
}

/// The stage of a request when it was cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// It was queued.
    Queued,
    /// A worker was serving it.
    InFlight,
}

/// The reason why a request waits again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequeueReason {
    /// Its worker's connection ended.
    WorkerLost,
    /// Its worker went silent.
    HeartbeatTimeout,
    /// Its worker accepts no new requests.
    Draining,
    /// Its worker had no slot.
    AtCapacity,
    /// Its model was swapped out.
    SeveredBySwap,
    /// The backend refused the connection.
    BackendUnreachable,
    /// The backend broke the connection.
    BackendReset,
    /// The worker could not load the model.
    LoadFailed,
    /// The worker sent nothing of a response in time.
    FirstByteTimeout,
}

/// The reason why a request failed: the rows of the error table that the core decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The queue is full.
    QueueFull {
        /// When to retry, in whole seconds, 1 to 60.
        retry_after_secs: u32,
    },
    /// The key's share of the queue is full.
    QueueShareFull {
        /// The size of the share.
        percent: u8,
    },
    /// The queue was full, or the key's share of it, and a request of a higher class took the place.
    Displaced {
        /// When to retry, in whole seconds, 1 to 60.
        retry_after_secs: u32,
    },
    /// The request waited too long, warm or cold.
    QueueTimeout {
        /// When to retry, in whole seconds, 1 to 60.
        retry_after_secs: u32,
    },
    /// The request exceeded its request timeout.
    RequestTimeout,
    /// Its workers were lost too often.
    RequeueExhausted,
    /// The provider is disabled.
    Disabled,
    /// The provider was deleted.
    Deleted,
    /// The relay is shutting down.
    Draining,
    /// Backends could not be reached until the attempts or the waiting time were used up.
    BackendUnreachable,
    /// The request was swapped out too often.
    SeveredBySwap,
    /// No worker can load the model.
    LoadFailed {
        /// The kind of failure.
        code: LoadFailure,
        /// When the worker will try again, if it reported that.
        retry_after: Option<Duration>,
        /// The worker's report.
        report: Arc<FailureReport>,
    },
    /// A multiplexer was assigned to load the model and has not done so in time.
    ModelLoading {
        /// The remaining load time, if the worker reported one.
        retry_after: Option<Duration>,
    },
    /// Every multiplexer that has the model reported that it cannot load it now.
    ModelFailed {
        /// The worker that tries again first.
        worker: WorkerKey,
        /// The kind of failure.
        code: LoadFailure,
        /// When it will try again, if it reported that.
        retry_after: Option<Duration>,
        /// Its report on the slot that tries again first.
        report: Arc<FailureReport>,
    },
    /// Only workers without `core1` serve the model.
    WorkerTooOld {
        /// One of them.
        worker: WorkerKey,
    },
    /// The only worker that may serve the request is gone.
    AffinityLost,
    /// An admin cancelled it.
    CancelledByAdmin,
    /// The worker failed the request for a reason of its own.
    Fatal(Arc<FailureReport>),
}
