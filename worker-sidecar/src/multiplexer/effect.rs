//! What a slot's machine wants done. Effects are carried out in order.
//!
//! Calls of the driver are carried out one at a time: a new `Preflight`, `Evict`, `ForceEvict`, `CheckMemory` or `Load`
//! supersedes the one before, whose future is dropped. A `Probe` runs beside them.

use std::fmt;
use std::time::Duration;

use modelrelay_protocol::grants::GrantValues;

use super::Model;
use super::error::{LoadFailure, SlotError};
use super::estimate::LoadKind;
use super::event::{DownCause, Generation, OpId, OrderId, RelayKey, RequestKey};

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// The request may go to the backend now. Its holder answers with `Released`, however it ends; if nobody wants the
    /// lease any more, at once.
    Lease {
        /// The request.
        request: RequestKey,
        /// The model that it asked for, and gets.
        model: Model,
        /// Whose lease it is.
        generation: Generation,
    },
    /// The request is not served. It never had a lease.
    Fail {
        /// The request.
        request: RequestKey,
        /// Why.
        error: SlotError,
    },
    /// The holder of this lease is to end its request now, and close its connection to the backend.
    CancelLease {
        /// The request.
        request: RequestKey,
        /// Why.
        why: LeaseEnd,
    },
    /// The model takes requests: its entry belongs into each relay's `grant`, with the numbers of [`Effect::Grant`].
    OpenGate {
        /// The model.
        model: Model,
    },
    /// The model takes no more requests: its entry goes.
    CloseGate {
        /// The model.
        model: Model,
    },
    /// A relay's entry for the model whose gate is open has new numbers.
    Grant {
        /// The link.
        relay: RelayKey,
        /// The model.
        model: Model,
        /// The numbers.
        values: GrantValues,
    },
    /// Measure whether the model could be loaded.
    Preflight {
        /// Names the call.
        op: OpId,
        /// The model.
        model: Model,
    },
    /// Unload it, or put it to sleep. Nothing of it runs.
    Evict {
        /// Names the call.
        op: OpId,
        /// The model.
        model: Model,
    },
    /// Kill its backend, whatever state it is in. One that is gone already is no failure.
    ForceEvict {
        /// Names the call.
        op: OpId,
        /// The model.
        model: Model,
    },
    /// See whether the memory of this model is back; wait for it as long as
    /// [`MEMORY_FREE_TIMEOUT`](super::config::MEMORY_FREE_TIMEOUT).
    CheckMemory {
        /// Names the call.
        op: OpId,
        /// The model that was unloaded.
        model: Model,
    },
    /// Load it, wait until it is ready, and check that it is the right one.
    Load {
        /// Names the call.
        op: OpId,
        /// The model.
        model: Model,
        /// From nothing or from sleep.
        kind: LoadKind,
    },
    /// See what the backend serves. `model`: the resident, if there is one.
    Probe {
        /// Names the call.
        op: OpId,
        /// The model that should be there.
        model: Option<Model>,
    },
    /// A request could not reach the model's backend, but a look has found it. Relays hold what failed against the worker until
    /// it announces its models anew, and its gate has not turned.
    StillServes {
        /// The model.
        model: Model,
    },
    /// Kill what is left of this model, beside whatever else is going on; nobody waits for an answer.
    Discard {
        /// The model.
        model: Model,
    },
    /// The configuration does not have this model any more, and the slot holds nothing of it.
    Forget {
        /// The model.
        model: Model,
    },
    /// An order was carried out, or not.
    OrderDone {
        /// Which.
        id: OrderId,
        /// How it ended.
        result: Result<(), OrderError>,
    },
    /// Relays are to be told: [`snapshot`](super::machine::Machine::snapshot) differs by more than the passing of time.
    Changed,
    /// For logs and metrics.
    News(News),
    /// After `Stop`: nothing runs any more. The last effect but for errors of requests that come still.
    Stopped,
}

/// Why a lease is ended by the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseEnd {
    /// It took longer than a swap waits.
    Swap,
    /// Its backend is gone.
    BackendLost,
    /// Its relay is gone.
    RelayLost,
    /// The worker ends.
    Shutdown,
}

impl LeaseEnd {
    /// What the client is told, if anybody is left to be told.
    pub fn error(self) -> Option<SlotError> {
        match self {
            Self::Swap => Some(SlotError::Severed),
            Self::BackendLost => Some(SlotError::BackendLost),
            Self::RelayLost => None,
            Self::Shutdown => Some(SlotError::Draining),
        }
    }
}

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrderError {
    /// The slot has no such model.
    UnknownModel,
    /// It is not in the slot.
    NotResident,
    /// The model in question is pinned.
    Pinned(Model),
    /// Requests for this other model wait.
    OthersWait(Model),
    /// The slot is doing something else.
    Busy,
    /// Something else was loaded meanwhile.
    Superseded,
    /// The slot's memory could not be freed.
    Quarantined,
    /// The worker is ending.
    Stopping,
    /// It was tried.
    Failed(SlotError),
}

impl fmt::Display for OrderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownModel => f.write_str("the slot has no such model"),
            Self::NotResident => f.write_str("the model is not loaded"),
            Self::Pinned(model) => write!(f, "model {model} is pinned; unpin it first"),
            Self::OthersWait(model) => write!(f, "requests for model {model} wait"),
            Self::Busy => f.write_str("the slot is in the middle of a swap"),
            Self::Superseded => f.write_str("another model was loaded meanwhile"),
            Self::Quarantined => {
                f.write_str("the slot's memory could not be freed; unload with mode now kills the backend")
            }
            Self::Stopping => f.write_str("the worker is ending"),
            // This leaves the worker: whoever may order loads need not be whoever may read its log.
            Self::Failed(error) => f.write_str(&error.for_clients()),
        }
    }
}

/// Why a slot leaves its resident, or loads into an empty slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Others waited, and it had nothing to do.
    Idle,
    /// Others waited, and its quantum was over.
    Quantum,
    /// Somebody waited, and the slot was empty.
    Wanted,
    /// An operator said so.
    Order,
    /// The slot was idle long enough to go back to its default, or has just started.
    Default,
    /// It was idle longer than its `idle_ttl`.
    Ttl,
    /// It is not in the configuration any more.
    Removed,
}

/// How a swap ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SwapResult {
    /// As intended.
    Done,
    /// The load failed.
    LoadFailed,
    /// Memory was not freed, so nothing was loaded.
    Quarantined,
}

/// A swap that went beyond its commit point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swap {
    /// What was resident.
    pub from: Option<Model>,
    /// What was to be.
    pub to: Option<Model>,
    /// Why.
    pub reason: Reason,
    /// From closing the gate to the last request's end.
    pub drain: Duration,
    /// From there until the memory was back.
    pub evict: Duration,
    /// From there until it was ready.
    pub load: Duration,
    /// Requests that did not finish in time.
    pub severed: u32,
    /// How it ended.
    pub result: SwapResult,
}

/// What logs and metrics may want to know. Nothing depends on it.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// The gate was closed for a swap that may still be called off.
    SwapBegun {
        /// The resident.
        from: Option<Model>,
        /// What comes.
        to: Option<Model>,
        /// Why.
        reason: Reason,
    },
    /// Nobody wants it any more, and the gate is open again.
    SwapAborted {
        /// The resident, which stays.
        from: Model,
    },
    /// It has ended.
    SwapEnded(Swap),
    /// A model serves no more.
    ResidencyEnded {
        /// The model.
        model: Model,
        /// How long it did, its drain included.
        lasted: Duration,
    },
    /// A request was held, and has its lease now.
    Held {
        /// Its model.
        model: Model,
        /// How long it waited.
        waited: Duration,
    },
    /// A request waits for a load that others had caused.
    Coalesced {
        /// Its model.
        model: Model,
    },
    /// An idle resident was kept for its next request, and that came.
    LingerHit {
        /// The resident.
        model: Model,
    },
    /// It did not come.
    LingerMiss {
        /// The resident.
        model: Model,
    },
    /// A model could not be loaded.
    LoadFailed {
        /// The model.
        model: Model,
        /// Why.
        error: SlotError,
    },
    /// A sleeping model did not wake, and is started cold.
    WakeFailed {
        /// The model.
        model: Model,
        /// Why.
        failure: LoadFailure,
    },
    /// Unloading failed, and the backend is killed.
    EvictFailed {
        /// The model.
        model: Model,
        /// Why.
        detail: String,
    },
    /// An unloaded model's memory did not come back.
    MemoryNotFreed {
        /// The model.
        model: Model,
    },
    /// The slot is out of use until an operator looks at it.
    Quarantined {
        /// The model that does not go.
        model: Model,
    },
    /// A backend is gone.
    BackendDown {
        /// Its model.
        model: Model,
        /// How that was seen.
        cause: DownCause,
        /// Requests that ended with it.
        leases: u32,
    },
    /// A model was found that nobody here had loaded, and is resident now.
    Adopted {
        /// The model.
        model: Model,
    },
    /// `max_wait` is shorter than four swaps to this model: the quantum's floor comes first.
    MaxWaitInfeasible {
        /// The model.
        model: Model,
        /// What a swap to it costs.
        cost: Duration,
    },
}
