//! The states of a slot. Each holds only the data it needs, and most have one successor.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use modelrelay_protocol::message::SlotState;

use crate::Model;
use crate::effect::Reason;
use crate::error::SlotError;
use crate::estimate::LoadKind;
use crate::event::{Generation, OpId, RequestClass};

/// The state of a slot.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Nothing is resident, and the memory is assumed to be free.
    Empty,
    /// The resident serves; its gate is open.
    Ready(Resident),
    /// The gate is closed, running requests may end. The last state from which a swap can be aborted.
    Draining(Draining),
    /// The drain timeout is over; the remaining requests were cancelled.
    Severing(Severing),
    /// Past the commit point: the memory is being freed.
    Evicting(Evicting),
    /// A model is being loaded.
    Loading(Loading),
    /// The former resident is being loaded again.
    RollingBack(Loading),
    /// Nothing is resident after a recent failure.
    Backoff {
        /// The end of the back-off.
        until: Instant,
    },
    /// The memory is not provably free. Only an operator can end this state.
    Quarantined {
        /// The model whose memory is not freed.
        model: Model,
    },
    /// The worker is stopping.
    Stopping {
        /// The time at which running requests are ended.
        deadline: Instant,
        /// True if `Stopped` was emitted.
        stopped: bool,
    },
}

/// The model that serves.
#[derive(Clone, Debug)]
pub(super) struct Resident {
    pub(super) model: Model,
    pub(super) generation: Generation,
    /// The time since which it serves.
    pub(super) since: Instant,
    /// The time since which it is idle.
    pub(super) idle_since: Option<Instant>,
    /// True if a request has completed: a model that dies before that is treated as a failed load.
    pub(super) answered: bool,
    /// True if it is idle and kept while requests for others wait.
    pub(super) lingering: bool,
    /// The number of consecutive probes that found silence.
    pub(super) silent: u8,
    /// True if a request could not reach it, and no probe has found it since.
    pub(super) suspected: bool,
    /// The models whose keys had attained less service than its own when it was loaded.
    pub(super) owes: BTreeSet<Model>,
}

/// The goal of a swap, and the reason.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// The model to load; `None` to unload only.
    pub(super) model: Option<Model>,
    pub(super) reason: Reason,
}

#[derive(Clone, Debug)]
pub(super) struct Draining {
    pub(super) resident: Resident,
    pub(super) target: Target,
    /// The class of the resident's work when its turn ended.
    pub(super) class: RequestClass,
    pub(super) since: Instant,
    pub(super) deadline: Instant,
}

#[derive(Clone, Debug)]
pub(super) struct Severing {
    pub(super) resident: Resident,
    pub(super) target: Target,
    /// The time at which the gate was closed.
    pub(super) draining_since: Instant,
    pub(super) severed: u32,
    pub(super) until: Instant,
}

#[derive(Clone, Debug)]
pub(super) struct Evicting {
    /// The model that is being unloaded.
    pub(super) model: Model,
    pub(super) step: Step,
    /// True if it was killed: then nothing is left to try.
    pub(super) forced: bool,
    pub(super) op: OpId,
    pub(super) deadline: Instant,
    pub(super) since: Instant,
    pub(super) then: Then,
}

/// The progress of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Evict,
    Force,
    Memory,
}

/// The next step once the memory is free.
#[derive(Clone, Debug)]
pub(super) enum Then {
    /// The swap continues.
    Load { model: Model, prior: Option<Model> },
    /// The load failed; the former resident is loaded again.
    RollBack { prior: Model },
    /// Nothing.
    Rest,
}

#[derive(Clone, Debug)]
pub(super) struct Loading {
    pub(super) model: Model,
    /// The former resident, which could be loaded again. `None` while rolling back.
    pub(super) prior: Option<Model>,
    pub(super) kind: LoadKind,
    pub(super) since: Instant,
    pub(super) op: OpId,
    pub(super) deadline: Instant,
}

/// A preflight in progress. Nothing is changed before its result.
#[derive(Clone, Debug)]
pub(super) struct Preflight {
    pub(super) op: OpId,
    pub(super) model: Model,
    pub(super) reason: Reason,
    pub(super) deadline: Instant,
}

/// The data of a swap, for the report at its end.
#[derive(Clone, Debug)]
pub(super) struct SwapRecord {
    pub(super) from: Option<Model>,
    pub(super) to: Option<Model>,
    pub(super) reason: Reason,
    pub(super) drain: Duration,
    pub(super) evict: Duration,
    pub(super) severed: u32,
}

/// A model's last failed load.
#[derive(Clone, Debug)]
pub(super) struct LastFailure {
    pub(super) error: SlotError,
    pub(super) until: Instant,
}

impl State {
    /// The model that serves, or served until its gate was closed.
    pub(super) fn resident(&self) -> Option<&Resident> {
        match self {
            Self::Ready(resident)
            | Self::Draining(Draining { resident, .. })
            | Self::Severing(Severing { resident, .. }) => Some(resident),
            Self::Empty
            | Self::Evicting(_)
            | Self::Loading(_)
            | Self::RollingBack(_)
            | Self::Backoff { .. }
            | Self::Quarantined { .. }
            | Self::Stopping { .. } => None,
        }
    }

    /// True if the slot holds the model, or is about to. A worker that is stopping has all of its models to stop.
    pub(super) fn needs(&self, model: &Model) -> bool {
        self.resident().is_some_and(|resident| resident.model == *model)
            || self.target() == Some(model)
            || match self {
                Self::Evicting(evicting) => evicting.model == *model,
                Self::Quarantined { model: stuck } => stuck == model,
                Self::Stopping { .. } => true,
                Self::Empty
                | Self::Ready(_)
                | Self::Draining(_)
                | Self::Severing(_)
                | Self::Loading(_)
                | Self::RollingBack(_)
                | Self::Backoff { .. } => false,
            }
    }

    pub(super) fn resident_mut(&mut self) -> Option<&mut Resident> {
        match self {
            Self::Ready(resident)
            | Self::Draining(Draining { resident, .. })
            | Self::Severing(Severing { resident, .. }) => Some(resident),
            Self::Empty
            | Self::Evicting(_)
            | Self::Loading(_)
            | Self::RollingBack(_)
            | Self::Backoff { .. }
            | Self::Quarantined { .. }
            | Self::Stopping { .. } => None,
        }
    }

    /// The model to be resident next, as far as that is decided.
    pub(super) fn target(&self) -> Option<&Model> {
        match self {
            Self::Draining(Draining { target, .. }) | Self::Severing(Severing { target, .. }) => target.model.as_ref(),
            Self::Evicting(evicting) => match &evicting.then {
                Then::Load { model, .. } | Then::RollBack { prior: model } => Some(model),
                Then::Rest => None,
            },
            Self::Loading(loading) | Self::RollingBack(loading) => Some(&loading.model),
            Self::Empty | Self::Ready(_) | Self::Backoff { .. } | Self::Quarantined { .. } | Self::Stopping { .. } => {
                None
            }
        }
    }

    /// The state's name on the wire.
    pub(super) fn name(&self) -> SlotState {
        match self {
            Self::Empty => SlotState::Empty,
            Self::Ready(_) => SlotState::Ready,
            Self::Draining(_) => SlotState::Draining,
            Self::Severing(_) => SlotState::Severing,
            Self::Evicting(_) => SlotState::Evicting,
            Self::Loading(_) => SlotState::Loading,
            Self::RollingBack(_) => SlotState::RollingBack,
            Self::Backoff { .. } => SlotState::Backoff,
            Self::Quarantined { .. } => SlotState::Quarantined,
            Self::Stopping { .. } => SlotState::Stopping,
        }
    }

    /// The time at which the state changes by itself.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Draining(draining) => Some(draining.deadline),
            Self::Severing(severing) => Some(severing.until),
            Self::Evicting(evicting) => Some(evicting.deadline),
            Self::Loading(loading) | Self::RollingBack(loading) => Some(loading.deadline),
            Self::Backoff { until } => Some(*until),
            Self::Stopping { deadline, stopped: false } => Some(*deadline),
            Self::Stopping { stopped: true, .. } | Self::Empty | Self::Ready(_) | Self::Quarantined { .. } => None,
        }
    }
}
