//! What the shell tells the core. Every type here is plain data; times come in beside the event.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::Slot;

/// The instant at which an event happened, read by the shell.
pub type Now = std::time::Instant;

/// A model's exact name, as advertised by a worker or asked for by a client.
pub type Model = Arc<str>;

/// Ids of models.
pub type Allowed = Arc<BTreeSet<Model>>;

/// Names one client request within this relay. Keys increase in arrival order: the key *is* the place in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestKey(pub u64);

/// Names one worker connection. A worker that dials again gets a new key; keys are never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerKey(pub u64);

/// A provider's limits. Timeouts are taken by a request when it arrives and never change for it afterwards.
#[derive(Clone, Debug)]
pub struct Settings {
    /// A disabled provider refuses new requests and fails queued ones; running ones finish.
    pub enabled: bool,
    /// How many requests may wait. Requeues are admitted beyond it, as beyond any [`QueueShare`].
    pub max_queue_len: usize,
    /// How many body bytes may wait. Requeues are admitted beyond it.
    pub max_queue_bytes: u64,
    /// How long a request may wait while a worker serves its model.
    pub queue_timeout: Duration,
    /// How long a request may wait while no worker serves its model, where neither `cold_timeout` nor a declaration applies.
    /// `None`: the queue timeout, on one waiting clock, warm or cold.
    pub absent_timeout: Option<Duration>,
    /// How long a request may wait while no worker serves its model. `None`: as `cold_models` and the slots of multiplexers
    /// say.
    pub cold_timeout: Option<Duration>,
    /// Models that may be at zero workers; without an explicit cold timeout they get what other models get, but at least
    /// [`DEFAULT_COLD_TIMEOUT`].
    pub cold_models: HashSet<Model>,
    /// How long a request may take altogether, cold waiting excepted.
    pub request_timeout: Duration,
}

impl Settings {
    /// The time that a request waits while no worker serves its model, unless a cold timeout or a declaration applies.
    pub(super) fn absent(&self) -> Duration {
        self.absent_timeout.unwrap_or(self.queue_timeout)
    }
}

/// The least cold timeout of a model that is declared to be at zero workers at times.
pub const DEFAULT_COLD_TIMEOUT: Duration = Duration::from_secs(600);

/// Something that happened outside the core.
#[derive(Clone, Debug)]
pub enum Event {
    /// A client's request was read to its end.
    Submit(NewRequest),
    /// A request is wanted no more. `reason` says by whom.
    Cancel {
        /// The request.
        request: RequestKey,
        /// Why it ends.
        reason: CancelReason,
    },
    /// A worker registered and was acknowledged.
    WorkerJoined(NewWorker),
    /// A worker's connection is gone.
    WorkerLost {
        /// The worker.
        worker: WorkerKey,
        /// Those of its requests whose response head was handed to the client: they are never sent again.
        started: HashSet<RequestKey>,
        /// How it was lost.
        cause: LossCause,
    },
    /// A worker replaced its list of models, and with it says that their backend is usable.
    ModelsUpdated {
        /// The worker.
        worker: WorkerKey,
        /// The whole list, as acknowledged.
        models: Vec<Model>,
        /// Those of them whose requests its backend fails; other names mean nothing.
        failing: Vec<Model>,
        /// What the worker said about its load, if it did.
        load: Option<u32>,
    },
    /// A worker told how much it runs altogether. Ignored for `core1` workers, whose grants are exact.
    LoadReported {
        /// The worker.
        worker: WorkerKey,
        /// Everything it runs, for anyone.
        load: u32,
    },
    /// A `core1` worker said how many of this relay's requests it will run.
    Granted {
        /// The worker.
        worker: WorkerKey,
        /// Its word, absolute.
        grant: Grant,
    },
    /// A multiplexer said which of its models it serves now, and how many of this relay's requests for each.
    GatesSet {
        /// The worker.
        worker: WorkerKey,
        /// The sums over all its models, for people; they limit nothing.
        sums: Grant,
        /// One entry per model that it serves now; nothing is sent for any other.
        gates: Vec<(Model, Gate)>,
    },
    /// A multiplexer said what its slots are doing.
    SlotsReported {
        /// The worker.
        worker: WorkerKey,
        /// All of them.
        slots: Vec<Slot>,
    },
    /// A worker's answer ended, or the worker failed it after its head went out.
    Completed {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// Which sending of the request.
        attempt: u32,
    },
    /// A worker failed a request of which nothing has been sent to the client yet.
    AttemptFailed {
        /// The worker.
        worker: WorkerKey,
        /// The request.
        request: RequestKey,
        /// Which sending of the request.
        attempt: u32,
        /// What went wrong.
        failure: AttemptFailure,
    },
    /// The worker of a request has sent nothing of its response for too long. Nothing happens unless
    /// [another worker](super::Dispatch::can_move) can take it now.
    Silent {
        /// The request.
        request: RequestKey,
    },
    /// A worker gets no new requests from now on, by its own wish or an admin's.
    WorkerDraining {
        /// The worker.
        worker: WorkerKey,
    },
    /// A worker process has joined anew, and its older connection only finishes what it has: who waits for that process
    /// waits for the newer one. Nothing happens unless the newer one speaks `core1` and takes requests.
    WorkerSucceeded {
        /// The older connection.
        older: WorkerKey,
        /// The newer one.
        newer: WorkerKey,
    },
    /// The provider's settings were replaced.
    SettingsChanged(Settings),
    /// The provider is gone: queued requests fail, running ones go on, workers drain.
    Deleted,
    /// The relay shuts down: nothing new is admitted; queue and requeues go on.
    DrainBegun,
    /// The relay's time to shut down is over: whatever is left ends.
    DrainDeadline,
    /// Time has passed, to at least what [`next_timeout`](super::Dispatch::next_timeout) said.
    Tick,
}

/// A client's request, as far as the core needs to know it.
#[derive(Clone, Debug)]
pub struct NewRequest {
    /// Its name and place.
    pub key: RequestKey,
    /// The model it asks for.
    pub model: Model,
    /// What its body costs while it waits.
    pub bytes: u64,
    /// Affinity: only this worker may serve it.
    pub pin: Option<WorkerKey>,
    /// A worker that speaks only the seeds' messages cannot carry it.
    pub needs_core1: bool,
    /// The models that may answer it, by their ids, whatever a worker means by its name; `None`: any.
    pub allowed: Option<Allowed>,
    /// Whose share of the queue it counts in while it waits; `None`: nobody's.
    pub share: Option<QueueShare>,
}

/// How much of the queue the waiting requests of one key may fill, by number and by bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueShare {
    /// Whose they are.
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
    /// Those of them whose requests its backend fails; other names mean nothing.
    pub failing: Vec<Model>,
    /// The acknowledged number of requests at a time. The gate for workers without `core1`.
    pub max_concurrent: u32,
    /// What it said that it runs already.
    pub load: u32,
    /// Whether it speaks frames, credits, grants and drain.
    pub core1: bool,
    /// What there is to know of its multiplexer, if it has one. Such a worker speaks `core1` too.
    pub multiplexer: Option<NewMultiplexer>,
}

/// A multiplexer as its worker registered it.
#[derive(Clone, Debug)]
pub struct NewMultiplexer {
    /// The same at every relay that the worker is linked to, so that relays choose alike.
    pub instance: Arc<str>,
    /// What its slots are doing.
    pub slots: Vec<Slot>,
}

/// A multiplexer's word on one model that it serves now, as seen from this link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// How many of this relay's requests for the model may run there.
    pub slots: u32,
    /// How many run there for other links.
    pub others: u32,
    /// How many it can run for everybody; 0 where it did not say.
    pub capacity: u32,
}

/// A `core1` worker's word on its capacity, as seen from this link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grant {
    /// How many of this relay's requests may run there.
    pub slots: u32,
    /// How many run there for other links.
    pub others: u32,
    /// How many it can run for everybody.
    pub capacity: u32,
    /// How many relays it is linked to.
    pub links: u32,
}

/// Who or what ended a request before its answer was complete.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CancelReason {
    /// The client went away.
    ClientDisconnect,
    /// The client left more unread than it may.
    SlowClient,
    /// The answer grew past the stream ceiling.
    StreamLimit,
    /// The relay had no memory for the answer.
    NoMemory,
    /// An admin said so; the client is told.
    Admin,
    /// The worker broke the rules of this one request (wrong length, overrun); the shell tells the client.
    WorkerFault,
    /// The request timeout.
    Timeout,
    /// The relay's drain deadline.
    DrainDeadline,
}

/// How a worker was lost.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LossCause {
    /// Its connection ended, for whatever reason.
    Disconnected,
    /// It went silent, or stopped reading.
    HeartbeatTimeout,
}

/// Why a worker could not serve a request, sorted by what follows from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AttemptFailure {
    /// It has no slot for it. No attempt is spent.
    AtCapacity,
    /// It takes no new requests. No attempt is spent.
    Draining,
    /// Its model was swapped out under it. No attempt is spent, three times at most.
    SeveredBySwap,
    /// Its backend refused the connection.
    BackendUnreachable,
    /// Its backend broke the connection before answering.
    BackendReset,
    /// It cannot load the model.
    LoadFailed {
        /// What kind of failure.
        code: LoadFailure,
        /// When the worker will try again, if it said.
        retry_after: Option<Duration>,
    },
    /// Anything else: the request is over.
    Fatal,
}

/// Why a model could not be loaded.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LoadFailure {
    /// It does not fit.
    InsufficientMemory,
    /// Its backend does not start.
    BackendUnavailable,
    /// Its slot waits for a person.
    SlotQuarantined,
}
