//! What the core tells the shell to do. Effects are plain data, executed in order while the provider's lock is held.

use std::time::Duration;

use super::event::{CancelReason, LoadFailure, Model, RequestKey, WorkerKey};

/// Something for the shell to do.
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
        /// 1 for the first sending; names this one in the worker's answer.
        attempt: u32,
        /// How long it waited since it arrived or was requeued.
        waited: Duration,
    },
    /// Tell the worker that the request is wanted no more. Its slot is free already.
    CancelSent {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// Which sending of it.
        attempt: u32,
        /// Why.
        reason: CancelReason,
    },
    /// The request is over; tell the client. After the response head went out this comes only with
    /// [`RequestTimeout`](Failure::RequestTimeout), [`Draining`](Failure::Draining) and
    /// [`CancelledByAdmin`](Failure::CancelledByAdmin), and means an error frame.
    Fail {
        /// The request.
        request: RequestKey,
        /// What to say.
        failure: Failure,
        /// How often it had been sent.
        attempts: u32,
        /// How long ago it arrived.
        age: Duration,
    },
    /// The request is over, and there is nothing that the core could tell the client.
    Cancelled {
        /// The request.
        request: RequestKey,
        /// Why.
        reason: CancelReason,
        /// Where it was.
        stage: Stage,
    },
    /// The request's worker is gone after the response head went out: end the client's answer with an error frame.
    Severed {
        /// The request.
        request: RequestKey,
        /// The lost worker.
        worker: WorkerKey,
    },
    /// The answer is complete; the request is over.
    Finished {
        /// The request.
        request: RequestKey,
        /// The worker that answered.
        worker: WorkerKey,
        /// Which sending.
        attempt: u32,
    },
    /// The request waits again, at its original place. A [`Send`](Effect::Send) may follow at once.
    Requeued {
        /// The request.
        request: RequestKey,
        /// Why.
        reason: RequeueReason,
        /// The sending that came to nothing.
        attempt: u32,
    },
    /// Tell a worker with several links, or with a multiplexer, what waits here for it. Complete: a model not listed has nothing waiting.
    Demand {
        /// The worker.
        worker: WorkerKey,
        /// Sorted by model.
        demand: Vec<ModelDemand>,
    },
    /// A draining worker has nothing left in flight. Said once.
    DrainedIdle {
        /// The worker.
        worker: WorkerKey,
    },
}

/// What waits here for one model of one worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelDemand {
    /// The model.
    pub model: Model,
    /// How many requests.
    pub waiting: u32,
    /// The age of the oldest.
    pub oldest: Duration,
    /// The sum of their ages.
    pub sum: Duration,
}

/// Where a request was when it was cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Stage {
    /// It waited.
    Queued,
    /// A worker had it.
    InFlight,
}

/// Why a request waits again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RequeueReason {
    /// Its worker's connection ended.
    WorkerLost,
    /// Its worker went silent.
    HeartbeatTimeout,
    /// Its worker takes no new requests.
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

/// Why a request failed: the rows of the error table that the core decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// No place to wait.
    QueueFull {
        /// When to come back, in whole seconds, 1 to 60.
        retry_after_secs: u32,
    },
    /// What its key may have in the queue waits there already.
    QueueShareFull {
        /// How much that is.
        percent: u8,
    },
    /// Waited too long, warm or cold.
    QueueTimeout {
        /// When to come back, in whole seconds, 1 to 60.
        retry_after_secs: u32,
    },
    /// Took too long altogether.
    RequestTimeout,
    /// Its workers were lost too often.
    RequeueExhausted,
    /// The provider is disabled.
    Disabled,
    /// The provider was deleted.
    Deleted,
    /// The relay is shutting down.
    Draining,
    /// Backends could not be reached until attempts or the waiting clock ran out.
    BackendUnreachable,
    /// Swapped out too often.
    SeveredBySwap,
    /// No worker can load the model.
    LoadFailed {
        /// What kind of failure.
        code: LoadFailure,
        /// When the worker will try again, if it said.
        retry_after: Option<Duration>,
    },
    /// A multiplexer was to load the model and has not done so in time.
    ModelLoading {
        /// How long it will take yet, if it said.
        retry_after: Option<Duration>,
    },
    /// Every multiplexer that has the model said that it cannot load it now.
    ModelFailed {
        /// The one that tries again first.
        worker: WorkerKey,
        /// What kind of failure.
        code: LoadFailure,
        /// When it will try again, if it said.
        retry_after: Option<Duration>,
    },
    /// Only workers without `core1` serve the model.
    WorkerTooOld {
        /// One of them.
        worker: WorkerKey,
    },
    /// The one worker that may serve it is gone.
    AffinityLost,
    /// An admin cancelled it.
    CancelledByAdmin,
    /// The worker failed it for a reason of its own, which the shell knows.
    Fatal,
}
