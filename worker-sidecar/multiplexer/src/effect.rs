//! The effects of a slot's machine. The actor executes them in order.
//!
//! Driver calls run one at a time: a new `Preflight`, `Evict`, `ForceEvict`, `CheckMemory` or `Load` supersedes the
//! previous one, whose future is dropped. A `Probe` runs in parallel with them.

use std::fmt;
use std::time::Duration;

use modelrelay_protocol::grants::GrantValues;

use super::Model;
use super::error::{LoadFailure, SlotError};
use super::estimate::LoadKind;
use super::event::{DownCause, Generation, OpId, OrderId, RelayKey, RequestKey};

/// One effect.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// The request may go to the backend now. The lease's holder sends `Released` when the request ends, or at once if
    /// the lease is no longer wanted.
    Lease {
        /// The request.
        request: RequestKey,
        /// The requested model.
        model: Model,
        /// The generation that the lease belongs to.
        generation: Generation,
    },
    /// The request is rejected. It never had a lease.
    Fail {
        /// The request.
        request: RequestKey,
        /// The reason.
        error: SlotError,
    },
    /// The lease's holder must end its request now and close its connection to the backend.
    CancelLease {
        /// The request.
        request: RequestKey,
        /// The reason.
        why: LeaseEnd,
    },
    /// The model accepts requests: add its entry to each relay's `grant`, with the values of [`Effect::Grant`].
    OpenGate {
        /// The model.
        model: Model,
    },
    /// The model accepts no more requests: remove its entry.
    CloseGate {
        /// The model.
        model: Model,
    },
    /// The values of a relay's entry changed, for a model whose gate is open.
    Grant {
        /// The link.
        relay: RelayKey,
        /// The model.
        model: Model,
        /// The new values.
        values: GrantValues,
    },
    /// Measure whether the model can be loaded.
    Preflight {
        /// Identifies the call.
        op: OpId,
        /// The model.
        model: Model,
    },
    /// Unload the model, or put it to sleep. None of its requests is running.
    Evict {
        /// Identifies the call.
        op: OpId,
        /// The model.
        model: Model,
    },
    /// Kill the model's backend, whatever its state. If it is already gone, the call succeeds.
    ForceEvict {
        /// Identifies the call.
        op: OpId,
        /// The model.
        model: Model,
    },
    /// Check whether the model's memory is free; wait for that up to
    /// [`MEMORY_FREE_TIMEOUT`](super::config::MEMORY_FREE_TIMEOUT).
    CheckMemory {
        /// Identifies the call.
        op: OpId,
        /// The unloaded model.
        model: Model,
    },
    /// Load the model, wait until it is ready, and check that the backend serves the right one.
    Load {
        /// Identifies the call.
        op: OpId,
        /// The model.
        model: Model,
        /// Cold or from sleep.
        kind: LoadKind,
    },
    /// Check what the backend serves.
    Probe {
        /// Identifies the call.
        op: OpId,
        /// The resident, if there is one.
        model: Option<Model>,
    },
    /// A request could not reach the model's backend, but a probe has found it alive. Relays hold the failure against
    /// the worker until it announces its models again, and the gate has not changed in the meantime.
    StillServes {
        /// The model.
        model: Model,
    },
    /// Kill what is left of this model, in parallel with everything else. Nothing waits for the result.
    Discard {
        /// The model.
        model: Model,
    },
    /// The configuration no longer has this model, and the slot holds nothing of it.
    Forget {
        /// The model.
        model: Model,
    },
    /// An order has ended.
    OrderDone {
        /// The order.
        id: OrderId,
        /// Its result.
        result: Result<(), OrderError>,
    },
    /// Notify relays: [`snapshot`](super::machine::Machine::snapshot) differs by more than the passing of time.
    Changed,
    /// For logs and metrics only.
    SlotEvent(SlotEvent),
    /// After `Stop`: nothing runs any more. Only errors for requests that arrive later follow.
    Stopped,
}

/// The reason why the slot ends a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseEnd {
    /// The request ran longer than a swap waits.
    Swap,
    /// The backend is gone.
    BackendLost,
    /// The relay is gone.
    RelayLost,
    /// The worker is stopping.
    Shutdown,
}

impl LeaseEnd {
    /// The error for the client, if a client is left to receive it.
    pub fn error(self) -> Option<SlotError> {
        match self {
            Self::Swap => Some(SlotError::Severed),
            Self::BackendLost => Some(SlotError::BackendLost),
            Self::RelayLost => None,
            Self::Shutdown => Some(SlotError::Draining),
        }
    }
}

/// The reason why an order was not executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrderError {
    /// The slot has no such model.
    UnknownModel,
    /// The model is not loaded.
    NotResident,
    /// The model in question is pinned.
    Pinned(Model),
    /// Requests for this other model wait.
    OthersWait(Model),
    /// The slot is in the middle of a swap.
    Busy,
    /// Another model was loaded meanwhile.
    Superseded,
    /// The slot's memory could not be freed.
    Quarantined,
    /// The worker is stopping.
    Stopping,
    /// The order was tried and failed.
    Failed(SlotError),
}

impl fmt::Display for OrderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownModel => f.write_str("the slot has no such model"),
            Self::NotResident => f.write_str("the model is not loaded"),
            Self::Pinned(model) => write!(f, "model {model} is pinned; unpin it first"),
            Self::OthersWait(model) => write!(f, "requests for model {model} are waiting"),
            Self::Busy => f.write_str("the slot is in the middle of a swap"),
            Self::Superseded => f.write_str("another model was loaded in the meantime"),
            Self::Quarantined => {
                f.write_str("the slot's memory could not be freed; unload with mode now kills the backend")
            }
            Self::Stopping => f.write_str("the worker is shutting down"),
            // This leaves the worker: a user who may order loads is not necessarily allowed to read the worker's log.
            Self::Failed(error) => f.write_str(&error.for_clients()),
        }
    }
}

/// The reason why a slot unloads its resident, or loads into an empty slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Requests for other models waited, and the resident was idle.
    Idle,
    /// Requests for other models waited, and the resident's quantum was over.
    Quantum,
    /// Requests waited, and the slot was empty.
    Wanted,
    /// An operator ordered it.
    Order,
    /// The slot has just started, or was idle long enough to return to its default model.
    Default,
    /// The resident was idle longer than its `idle_ttl`.
    Ttl,
    /// The model is no longer in the configuration.
    Removed,
}

/// The result of a swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SwapResult {
    /// The swap succeeded.
    Done,
    /// The load failed.
    LoadFailed,
    /// Memory was not freed, so the slot loaded nothing.
    Quarantined,
}

/// A swap that passed its commit point.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The former resident.
    pub from: Option<Model>,
    /// The model to load.
    pub to: Option<Model>,
    /// The reason.
    pub reason: Reason,
    /// From closing the gate to the end of the last request.
    pub drain: Duration,
    /// From there until the memory was free.
    pub evict: Duration,
    /// From there until the model was ready.
    pub load: Duration,
    /// Requests that did not finish in time.
    pub severed: u32,
    /// The result.
    pub result: SwapResult,
}

/// Facts for logs and metrics. Nothing depends on them.
#[derive(Clone, Debug, PartialEq)]
pub enum SlotEvent {
    /// The gate was closed for a swap that can still be aborted.
    SwapBegun {
        /// The resident.
        from: Option<Model>,
        /// The next model.
        to: Option<Model>,
        /// The reason.
        reason: Reason,
    },
    /// The swap is no longer wanted, and the gate is open again.
    SwapAborted {
        /// The resident, which stays.
        from: Model,
    },
    /// The swap has ended.
    SwapEnded(Swap),
    /// A model has stopped serving.
    ResidencyEnded {
        /// The model.
        model: Model,
        /// How long it served, its drain included.
        lasted: Duration,
    },
    /// A held request received its lease.
    Held {
        /// Its model.
        model: Model,
        /// How long it waited.
        waited: Duration,
    },
    /// A request waits for a load that other requests caused.
    Coalesced {
        /// Its model.
        model: Model,
    },
    /// An idle resident was kept for its next request, and the request arrived.
    LingerHit {
        /// The resident.
        model: Model,
    },
    /// An idle resident was kept, and no request arrived.
    LingerMiss {
        /// The resident.
        model: Model,
    },
    /// A model could not be loaded.
    LoadFailed {
        /// The model.
        model: Model,
        /// The error.
        error: SlotError,
    },
    /// A sleeping model did not wake; its backend is started cold.
    WakeFailed {
        /// The model.
        model: Model,
        /// The failure.
        failure: LoadFailure,
    },
    /// Unloading failed, and the backend is killed.
    EvictFailed {
        /// The model.
        model: Model,
        /// The reason.
        detail: String,
    },
    /// An unloaded model's memory was not freed.
    MemoryNotFreed {
        /// The model.
        model: Model,
    },
    /// The slot is out of use until an operator intervenes.
    Quarantined {
        /// The model whose memory is not freed.
        model: Model,
    },
    /// A backend is gone.
    BackendDown {
        /// Its model.
        model: Model,
        /// How its end was detected.
        cause: DownCause,
        /// The number of requests that ended with it.
        leases: u32,
    },
    /// A probe found a model that this worker did not load; it is the resident now.
    Adopted {
        /// The model.
        model: Model,
    },
    /// `max_wait` is shorter than four swaps to this model: the quantum's floor takes precedence.
    MaxWaitInfeasible {
        /// The model.
        model: Model,
        /// The cost of a swap to it.
        cost: Duration,
    },
}
