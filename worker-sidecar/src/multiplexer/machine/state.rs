//! What a slot is doing. Each state holds only what it needs, and most have one way out.

use std::time::{Duration, Instant};

use modelrelay_protocol::message::SlotState;

use crate::multiplexer::Model;
use crate::multiplexer::effect::Reason;
use crate::multiplexer::error::SlotError;
use crate::multiplexer::estimate::LoadKind;
use crate::multiplexer::event::{Generation, OpId};

/// What a slot is doing.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// Nothing resident, memory believed free.
    Empty,
    /// The resident serves, its gate is open.
    Ready(Resident),
    /// The gate is closed, running requests may end. The last state from which there is a way back.
    Draining(Draining),
    /// The time for that is over; the rest was told to hang up.
    Severing(Severing),
    /// Beyond the commit point: the memory is being freed.
    Evicting(Evicting),
    /// A model is being loaded.
    Loading(Loading),
    /// The former resident is being loaded again.
    RollingBack(Loading),
    /// Nothing resident, recent failure.
    Backoff {
        /// Its end.
        until: Instant,
    },
    /// The memory is not provably free. Only an operator leads out.
    Quarantined {
        /// What does not go.
        model: Model,
    },
    /// The worker ends.
    Stopping {
        /// When running requests are ended.
        deadline: Instant,
        /// Whether `Stopped` was said.
        stopped: bool,
    },
}

/// The model that serves.
#[derive(Clone, Debug)]
pub(super) struct Resident {
    pub(super) model: Model,
    pub(super) generation: Generation,
    /// Since when.
    pub(super) since: Instant,
    /// Since when it has nothing to do.
    pub(super) idle_since: Option<Instant>,
    /// Whether it has ever answered a request: one that dies before has not really been loaded.
    pub(super) answered: bool,
    /// Whether it is idle and kept while others wait.
    pub(super) lingering: bool,
    /// Looks at the backend in a row that found nobody.
    pub(super) silent: u8,
    /// Whether a request could not reach it, and no look has found it since.
    pub(super) suspected: bool,
}

/// Where a slot goes, and why.
#[derive(Clone, Debug)]
pub(super) struct Target {
    /// What is to be resident; nothing, if it is only to be unloaded.
    pub(super) model: Option<Model>,
    pub(super) reason: Reason,
}

#[derive(Clone, Debug)]
pub(super) struct Draining {
    pub(super) resident: Resident,
    pub(super) target: Target,
    pub(super) since: Instant,
    pub(super) deadline: Instant,
}

#[derive(Clone, Debug)]
pub(super) struct Severing {
    pub(super) resident: Resident,
    pub(super) target: Target,
    /// Since when the gate is closed.
    pub(super) draining_since: Instant,
    pub(super) severed: u32,
    pub(super) until: Instant,
}

#[derive(Clone, Debug)]
pub(super) struct Evicting {
    /// What is being unloaded.
    pub(super) model: Model,
    pub(super) step: Step,
    /// Whether it was killed: then there is nothing left to try.
    pub(super) forced: bool,
    pub(super) op: OpId,
    pub(super) deadline: Instant,
    pub(super) since: Instant,
    pub(super) then: Then,
}

/// How far an eviction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Evict,
    Force,
    Memory,
}

/// What follows once the memory is free.
#[derive(Clone, Debug)]
pub(super) enum Then {
    /// The swap goes on.
    Load { model: Model, prior: Option<Model> },
    /// The load failed; the former resident comes back.
    RollBack { prior: Model },
    /// Nothing.
    Rest,
}

#[derive(Clone, Debug)]
pub(super) struct Loading {
    pub(super) model: Model,
    /// What was resident before and could come back. None while rolling back.
    pub(super) prior: Option<Model>,
    pub(super) kind: LoadKind,
    pub(super) since: Instant,
    pub(super) op: OpId,
    pub(super) deadline: Instant,
}

/// A question whether a model could be loaded. Nothing is touched before its answer.
#[derive(Clone, Debug)]
pub(super) struct Preflight {
    pub(super) op: OpId,
    pub(super) model: Model,
    pub(super) reason: Reason,
    pub(super) deadline: Instant,
}

/// What is told of a swap at its end.
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
pub(super) struct Failure {
    pub(super) error: SlotError,
    pub(super) until: Instant,
}

impl State {
    /// The model that serves, or did until its gate was closed.
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

    /// True if the slot may hold the model, or is about to. A worker that ends has all of its models to end.
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

    /// The model that is to be resident next, as far as that is decided.
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

    /// The wire's word for it.
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

    /// When it changes by itself.
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
