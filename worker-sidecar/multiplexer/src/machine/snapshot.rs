//! The state of a slot as reported to relays, in wire types.

use std::time::{Duration, Instant};

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus, SlotState};

use super::Machine;
use super::entry::Entry;
use super::state::State;
use crate::Model;
use crate::error::SlotError;
use crate::event::Generation;

/// A drain in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainView {
    /// When the gate was closed.
    pub since: Instant,
    /// The time at which the requests that still run are severed.
    pub deadline: Instant,
    /// The number of running requests.
    pub leases: usize,
}

/// The part of a slot's state whose changes are reported to relays at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Face {
    state: SlotState,
    resident: Option<Model>,
    generation: Generation,
    target: Option<Model>,
    idle: bool,
    models: Vec<FaceOf>,
}

#[derive(Clone, Debug, PartialEq)]
struct FaceOf {
    id: Model,
    aliases: Vec<Model>,
    capacity: u32,
    pinned: bool,
    wanted: bool,
    asleep: bool,
    /// Each failure has its own end.
    failing: Option<Instant>,
}

/// A model's waiting and running requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Requests that wait in the worker.
    pub held: usize,
    /// Requests that wait here or at relays.
    pub waiting: u32,
    /// Requests that use the backend.
    pub leases: usize,
}

impl Machine {
    /// Returns the drain in progress, in human-readable form.
    pub fn drain(&self) -> Option<DrainView> {
        let (since, deadline) = match &self.state {
            State::Draining(draining) => (draining.since, draining.deadline),
            State::Severing(severing) => (severing.draining_since, severing.until),
            State::Stopping { deadline, stopped: false } => (self.since, *deadline),
            State::Stopping { stopped: true, .. }
            | State::Empty
            | State::Ready(_)
            | State::Evicting(_)
            | State::Loading(_)
            | State::RollingBack(_)
            | State::Backoff { .. }
            | State::Quarantined { .. } => return None,
        };
        Some(DrainView { since, deadline, leases: self.leases.len() })
    }

    /// Each model's requests, for metrics.
    pub fn requests(&self) -> impl Iterator<Item = (&Model, Requests)> {
        self.models.values().map(|entry| {
            let leases = self.leases.values().filter(|lease| lease.model == *entry.model()).count();
            let waiting = entry.waiting(self.now).count;
            (entry.model(), Requests { held: entry.held.len(), waiting, leases })
        })
    }

    /// Returns the slot's state as reported to relays at `now`.
    pub fn snapshot(&self, now: Instant) -> Slot {
        let resident = self.state.resident();
        let since = |moment| millis(now.saturating_duration_since(moment));
        let eta = self.state.target().and_then(|target| self.eta(target, now));
        let mut slot = self.timeless_snapshot();
        slot.eta_ms = eta.map(millis);
        slot.since_ms = since(self.since);
        // 0 means busy, and relays are notified at the very moment at which it becomes idle.
        slot.idle_ms = match resident {
            Some(resident) => resident.idle_since.map_or(0, |idle_since| since(idle_since).max(1)),
            None if matches!(self.state, State::Empty | State::Backoff { .. }) => since(self.since).max(1),
            None => 0,
        };
        for model in &mut slot.models {
            if let Some(entry) = self.models.get(model.id.as_str()) {
                model.swap_cost_ms = millis(self.swap_cost(entry.model()));
                let failure = entry.failing(now).and_then(|failure| failure.error_at(now).retry_after());
                model.retry_ms = failure.map(millis);
            }
        }
        slot
    }

    /// Returns the slot's state.
    pub fn state(&self) -> SlotState {
        self.state.name()
    }

    /// Returns the model that serves, or served until its gate was closed.
    pub fn resident(&self) -> Option<&Model> {
        self.state.resident().map(|resident| &resident.model)
    }

    /// Returns the number of the last load.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// True if a request uses the backend.
    pub fn is_serving(&self) -> bool {
        !self.leases.is_empty()
    }

    /// True if a message that concerns no slot may still change something: see [`SlotAllocator::is_listening`].
    ///
    /// [`SlotAllocator::is_listening`]: modelrelay_protocol::grants::SlotAllocator::is_listening
    pub fn is_listening(&self) -> bool {
        self.models.values().any(|entry| entry.allocator.is_listening())
    }

    /// Returns the part of the snapshot whose changes are reported at once. It is rebuilt on every event, so it has no
    /// text.
    pub(super) fn face(&self) -> Face {
        let models = self.models.values().filter(|entry| !entry.removed);
        let model = |entry: &Entry| FaceOf {
            id: entry.model().clone(),
            aliases: entry.config.aliases.clone(),
            capacity: entry.config.capacity,
            pinned: entry.pinned,
            wanted: self.is_wanted(entry),
            asleep: entry.asleep,
            failing: entry.failing(self.now).map(|failure| failure.until),
        };
        Face {
            state: self.state(),
            resident: self.resident().cloned(),
            generation: self.generation(),
            target: self.state.target().cloned(),
            // Relays route their demand by whether it is idle.
            idle: self.state.resident().is_some_and(|resident| resident.idle_since.is_some()),
            models: models.map(model).collect(),
        }
    }

    /// True if the model is not resident, and requests wait for it.
    fn is_wanted(&self, entry: &Entry) -> bool {
        Some(entry.model()) != self.resident() && entry.is_wanted()
    }

    /// The snapshot without the values that change with time and with every load.
    fn timeless_snapshot(&self) -> Slot {
        let wanted = self.models.values().filter(|entry| self.is_wanted(entry));
        let models = self.models.values().filter(|entry| !entry.removed);
        Slot {
            id: self.config.id.clone(),
            state: self.state(),
            resident: self.resident().map(ToString::to_string),
            generation: self.generation(),
            target: self.state.target().map(|model| model.to_string()),
            eta_ms: None,
            since_ms: 0,
            idle_ms: 0,
            wanted: u32::try_from(wanted.count()).unwrap_or(u32::MAX),
            models: models.map(|entry| self.describe(entry)).collect(),
        }
    }

    fn describe(&self, entry: &Entry) -> SlotModel {
        let resident = self.state.resident().is_some_and(|resident| resident.model == *entry.model());
        let quarantined = matches!(self.state, State::Quarantined { .. }).then_some(SlotError::Quarantined);
        let error = quarantined.or_else(|| entry.failing(self.now).map(|failure| failure.error.clone()));
        let status = match (&error, resident, entry.asleep) {
            (_, true, _) => SlotModelStatus::Resident,
            (Some(_), false, _) => SlotModelStatus::Failed,
            (None, false, true) => SlotModelStatus::Sleeping,
            (None, false, false) => SlotModelStatus::Unloaded,
        };
        SlotModel {
            id: entry.model().to_string(),
            aliases: entry.config.aliases.iter().map(ToString::to_string).collect(),
            status,
            capacity: entry.config.capacity,
            swap_cost_ms: 0,
            pinned: entry.pinned,
            wanted: self.is_wanted(entry),
            code: error.as_ref().map(|error| error.code().to_owned()),
            message: error.as_ref().map(SlotError::for_clients),
            retry_ms: None,
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
