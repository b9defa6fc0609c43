//! The events that the shell passes to the core. Every type here is plain data; the time is passed with the event.

use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{self, Slot};

use super::distance::{Distance, Spill};
use super::fairness::{Fairness, TokenUsage};
use super::owner::Owner;

/// The instant at which an event happened, read by the shell.
pub type Now = std::time::Instant;

/// A model's exact name, as advertised by a worker or requested by a client.
pub type Model = Arc<str>;

/// Ids of models.
pub type Allowed = Arc<BTreeSet<Model>>;

/// Identifies one client request within this relay. Keys increase in arrival order: the key *is* the place in the
/// queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestKey(pub u64);

/// Identifies one worker connection. A worker that reconnects gets a new key; keys are never reused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerKey(pub u64);

/// Identifies a conversation: a keyed hash of the part of the prompt with which each of its turns begins, and of the
/// model's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Conversation(pub u64);

/// How a worker is chosen among those with room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Placement {
    /// The least loaded one; among equals a conversation's home, or else round-robin.
    #[default]
    LeastLoad,
    /// A conversation's home, unless waiting there would cost more than three times its prompt's computation elsewhere.
    Cache,
}

/// A provider's limits. A request captures its timeouts when it arrives; they never change for it afterwards.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A disabled provider rejects new requests and fails queued ones; running ones finish.
    pub enabled: bool,
    /// The number of requests that may wait. Requeues are admitted beyond it, as beyond any [`QueueShare`].
    pub max_queue_len: usize,
    /// The number of body bytes that may wait. Requeues are admitted beyond it.
    pub max_queue_bytes: u64,
    /// How long a request may wait while a worker serves its model.
    pub queue_timeout: Duration,
    /// How long a request may wait while no worker serves its model, where neither `cold_timeout` nor a declaration
    /// applies. `None`: the queue timeout, on one waiting clock, warm or cold.
    pub absent_timeout: Option<Duration>,
    /// How long a request may wait while no worker serves its model. `None`: determined by `cold_models` and the slots
    /// of multiplexers.
    pub cold_timeout: Option<Duration>,
    /// Models that may have no worker; without an explicit cold timeout they get that of other models, but at least
    /// [`DEFAULT_COLD_TIMEOUT`].
    pub cold_models: HashSet<Model>,
    /// How long a request may take in total, without cold waiting.
    pub request_timeout: Duration,
    /// How a worker is chosen.
    pub placement: Placement,
    /// How much more load a nearer worker may have than a farther one and still be chosen.
    pub spill: Spill,
    /// The largest number of conversations whose home is remembered.
    pub max_homes: usize,
    /// How waiting requests share the workers.
    pub fairness: Fairness,
}

impl Settings {
    /// Returns how long a request waits while no worker serves its model, unless a cold timeout or a declaration
    /// applies.
    pub(crate) fn absent(&self) -> Duration {
        self.absent_timeout.unwrap_or(self.queue_timeout)
    }
}

/// The least cold timeout of a model that is declared to have no worker at times.
pub const DEFAULT_COLD_TIMEOUT: Duration = Duration::from_secs(600);

/// An event outside the core.
#[derive(Clone, Debug)]
pub enum Event {
    /// A client's request was read completely.
    Submit(NewRequest),
    /// A request was cancelled.
    Cancel {
        /// The request.
        request: RequestKey,
        /// The reason.
        reason: CancelReason,
    },
    /// A worker registered and was acknowledged.
    WorkerJoined(NewWorker),
    /// A worker's connection was lost.
    WorkerLost {
        /// The worker.
        worker: WorkerKey,
        /// The requests whose response head was sent to the client: they are never sent again.
        started: HashSet<RequestKey>,
        /// The cause.
        cause: LossCause,
    },
    /// A worker replaced its list of models, which also means that their backend is usable.
    ModelsUpdated {
        /// The worker.
        worker: WorkerKey,
        /// The whole list, as acknowledged.
        models: Vec<Model>,
        /// The models of the list whose requests the backend fails; other names are ignored.
        failing: Vec<Model>,
        /// The worker's load, if it reported one.
        load: Option<u32>,
    },
    /// A worker reported its total load. Ignored for `core1` workers, whose grants are exact.
    LoadReported {
        /// The worker.
        worker: WorkerKey,
        /// The number of all requests that it runs, for any relay.
        load: u32,
    },
    /// A `core1` worker granted a number of this relay's requests.
    Granted {
        /// The worker.
        worker: WorkerKey,
        /// The grant, absolute.
        grant: Grant,
    },
    /// A multiplexer reported the models that it serves now, and the number of this relay's requests for each.
    GatesSet {
        /// The worker.
        worker: WorkerKey,
        /// The sums over all its models, for display; they limit nothing.
        sums: Grant,
        /// One entry per model that it serves now; no requests are sent for any other.
        gates: Vec<(Model, Gate)>,
    },
    /// A multiplexer reported the state of its slots.
    SlotsReported {
        /// The worker.
        worker: WorkerKey,
        /// All slots.
        slots: Vec<Slot>,
    },
    /// A worker's response ended, or the worker failed it after its head was sent.
    Completed {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// The attempt.
        attempt: u32,
        /// The share of the prompt that the backend took from its cache, in permille; `None` if it was not reported.
        cached: Option<u16>,
        /// The tokens that it has used, which replace what its key was charged for it; `None` if that stays.
        usage: Option<TokenUsage>,
    },
    /// The first byte of a response came, so its prompt is computed. Reported once per attempt.
    Begun {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// The attempt.
        attempt: u32,
    },
    /// The tokens that a running request has used so far. They replace what its key was charged for it. Reported before
    /// an event that ends the request without its worker's completion.
    Used {
        /// The request.
        request: RequestKey,
        /// The tokens.
        usage: TokenUsage,
    },
    /// A worker reported the conversations that other relays have sent it. A known home at another worker is replaced
    /// only if the reported body is longer.
    HomesReported {
        /// The worker.
        worker: WorkerKey,
        /// Conversations, with the size of each one's last body in bytes.
        homes: Vec<(Conversation, u64)>,
        /// The bytes of other relays' requests there whose first byte has not come.
        backlog: u64,
    },
    /// A worker failed a request of which nothing has been sent to the client yet.
    AttemptFailed {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// The attempt.
        attempt: u32,
        /// The failure.
        failure: AttemptFailure,
    },
    /// A request's worker has sent nothing of its response for too long. Has no effect unless [another
    /// worker](crate::dispatch::Dispatch::can_move) can serve it now.
    Silent {
        /// The request.
        request: RequestKey,
    },
    /// A worker gets no new requests from now on, at its own or an admin's request.
    WorkerDraining {
        /// The worker.
        worker: WorkerKey,
    },
    /// A worker process has joined again, and its older connection only finishes its requests: requests that wait for
    /// that process wait for the newer connection. Has no effect unless the newer one speaks `core1` and accepts
    /// requests.
    WorkerSucceeded {
        /// The older connection.
        older: WorkerKey,
        /// The newer one.
        newer: WorkerKey,
    },
    /// The provider's settings were replaced.
    SettingsChanged(Settings),
    /// The provider was deleted: queued requests fail, running ones continue, workers drain.
    Deleted,
    /// The relay shuts down: no new requests are admitted; the queue and requeues continue.
    DrainBegun,
    /// The relay's drain deadline has passed: all remaining requests end.
    DrainDeadline,
    /// Time has passed, at least to [`next_timeout`](crate::dispatch::Dispatch::next_timeout).
    Tick,
}

/// A client's request, reduced to the fields that the core needs.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Its identifier and place.
    pub key: RequestKey,
    /// The requested model.
    pub model: Model,
    /// The size of its body while it waits.
    pub bytes: u64,
    /// Affinity: the only worker that may serve it.
    pub pin: Option<WorkerKey>,
    /// True if a worker that supports only the seed messages cannot carry it.
    pub needs_core1: bool,
    /// The ids of the models that may serve it, whatever a worker means by its name; `None`: any.
    pub allowed: Option<Allowed>,
    /// The share of the queue that it uses while it waits; `None`: unlimited.
    pub share: Option<QueueShare>,
    /// Its conversation; `None`: it follows the contract.
    pub conversation: Option<Conversation>,
    /// The API key that it came with; `None`: it shares with all others that have none.
    pub owner: Option<Owner>,
}

impl NewRequest {
    /// A request of no owner, which any worker with the model may serve.
    pub fn new(key: RequestKey, model: Model, bytes: u64) -> Self {
        Self {
            key,
            model,
            bytes,
            pin: None,
            needs_core1: false,
            allowed: None,
            share: None,
            conversation: None,
            owner: None,
        }
    }
}

/// How much of the queue the waiting requests of one key may fill, by number and by bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueShare {
    /// The key.
    pub key: Arc<str>,
    /// 1 to 100.
    pub percent: u8,
}

/// A worker that was just acknowledged.
#[derive(Clone, Debug)]
pub struct NewWorker {
    /// Its connection.
    pub key: WorkerKey,
    /// The acknowledged models.
    pub models: Vec<Model>,
    /// The models of the list whose requests the backend fails; other names are ignored.
    pub failing: Vec<Model>,
    /// The acknowledged number of requests at a time. The limit for workers without `core1`.
    pub max_concurrent: u32,
    /// The number of requests that it reported as running already.
    pub load: u32,
    /// True if it supports frames, credits, grants and drain.
    pub core1: bool,
    /// Its multiplexer, if it has one. Such a worker also speaks `core1`.
    pub multiplexer: Option<NewMultiplexer>,
    /// The worker process, the same after it reconnects; `None`: unknown.
    pub instance: Option<Arc<str>>,
    /// How far it is from the relay.
    pub distance: Distance,
}

/// A multiplexer as its worker registered it.
#[derive(Clone, Debug)]
pub struct NewMultiplexer {
    /// The same at every relay that the worker is linked to, so that relays choose alike.
    pub instance: Arc<str>,
    /// The state of its slots.
    pub slots: Vec<Slot>,
}

/// A multiplexer's report on one model that it serves now, as seen from this link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// The number of this relay's requests for the model that may run there.
    pub slots: u32,
    /// The number of requests that run there for other links.
    pub others: u32,
    /// The number that it can run for all links; 0 if it did not report one.
    pub capacity: u32,
}

/// A `core1` worker's report on its capacity, as seen from this link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// The number of this relay's requests that may run there.
    pub slots: u32,
    /// The number of requests that run there for other links.
    pub others: u32,
    /// The number that it can run for all links.
    pub capacity: u32,
    /// The number of relays that it is linked to.
    pub links: u32,
}

impl From<&message::Grant> for Grant {
    fn from(grant: &message::Grant) -> Self {
        Self { slots: grant.slots, others: grant.others, capacity: grant.capacity, links: grant.links }
    }
}

/// The reason why a request ended before its response was complete.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CancelReason {
    /// The client disconnected.
    ClientDisconnect,
    /// The client left more unread bytes than allowed.
    SlowClient,
    /// The response grew past the stream limit.
    StreamLimit,
    /// The relay had no memory for the response.
    NoMemory,
    /// An admin cancelled it; the client is notified.
    Admin,
    /// The worker broke the protocol for this request (wrong length, overrun); the shell notifies the client.
    WorkerFault,
    /// The request timeout expired.
    Timeout,
    /// The relay's drain deadline passed.
    DrainDeadline,
}

/// The cause of a worker's loss.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LossCause {
    /// Its connection ended, for any reason.
    Disconnected,
    /// It went silent, or stopped reading.
    HeartbeatTimeout,
}

/// The reason why a worker could not serve a request, by consequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AttemptFailure {
    /// It has no free slot. No attempt is spent.
    AtCapacity,
    /// It accepts no new requests. No attempt is spent.
    Draining,
    /// Its model was swapped out during the request. No attempt is spent, three times at most.
    SeveredBySwap,
    /// Its backend refused the connection.
    BackendUnreachable,
    /// Its backend broke the connection before it responded.
    BackendReset,
    /// It cannot load the model.
    LoadFailed {
        /// The kind of failure.
        code: LoadFailure,
        /// When the worker will try again, if it reported that.
        retry_after: Option<Duration>,
        /// The worker's report.
        report: Arc<FailureReport>,
    },
    /// Anything else: the request is over.
    Fatal(Arc<FailureReport>),
}

/// A worker's report of a failure, for the client. The core returns it in a
/// [`Failure`](crate::dispatch::Failure) and never reads it.
#[derive(PartialEq, Eq, Default)]
pub struct FailureReport {
    /// The worker's code for the failure; empty if it stated none.
    pub code: String,
    /// The human-readable message; empty if it stated none.
    pub message: String,
}

/// Neither field is shown: both are text of a worker.
impl fmt::Debug for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The reason why a model could not be loaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LoadFailure {
    /// It does not fit.
    InsufficientMemory,
    /// Its backend does not start.
    BackendUnavailable,
    /// Its slot needs an operator.
    SlotQuarantined,
}
