//! A slot's driver with its memory: carries out the effects that name a call of the driver, and says each in the outcome
//! that the machine expects. What is measured around a call is measured here, so that no driver can forget it.

use std::sync::Arc;

use super::memory::SlotMemory;
use super::{Driver, DriverError, Probed};
use crate::multiplexer::Model;
use crate::multiplexer::estimate::LoadKind;
use crate::multiplexer::event::{Found, Left, Outcome};

/// Carries out a machine's calls. Every method may be dropped; what that leaves is the driver's rule.
#[derive(Debug)]
pub struct SlotDriver {
    driver: Arc<dyn Driver>,
    memory: SlotMemory,
}

impl SlotDriver {
    /// The driver and what measures for it.
    pub fn new(driver: Arc<dyn Driver>, memory: SlotMemory) -> Self {
        Self { driver, memory }
    }

    /// The driver itself.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// For [`Effect::Preflight`](crate::multiplexer::effect::Effect::Preflight): whether the driver could load it, and what
    /// is free beside what the resident would give back.
    pub async fn preflight(&self, model: &Model, resident: Option<&Model>) -> Outcome {
        if let Err(error) = self.driver.check(model).await {
            return Outcome::Preflight(Err(error.to_string()));
        }
        Outcome::Preflight(Ok(self.memory.reading(resident, self.driver.capabilities().returns).await))
    }

    /// For [`Effect::Load`](crate::multiplexer::effect::Effect::Load).
    pub async fn load(&self, model: &Model, kind: LoadKind) -> Outcome {
        self.memory.note_load(model).await;
        Outcome::Loaded(self.driver.load(model, kind).await)
    }

    /// For [`Effect::Evict`](crate::multiplexer::effect::Effect::Evict).
    pub async fn evict(&self, model: &Model) -> Outcome {
        self.memory.note_evict(model).await;
        let evicted = self.driver.evict(model).await;
        if let Ok(left) = evicted {
            self.memory.note_evicted(model, left).await;
        }
        Outcome::Evicted(evicted.map_err(|error| error.to_string()))
    }

    /// For [`Effect::ForceEvict`](crate::multiplexer::effect::Effect::ForceEvict) and
    /// [`Effect::Discard`](crate::multiplexer::effect::Effect::Discard).
    pub async fn force_evict(&self, model: &Model) -> Outcome {
        self.memory.note_evict(model).await;
        Outcome::ForceEvicted(self.driver.force_evict(model).await.map_err(|error| error.to_string()))
    }

    /// For [`Effect::CheckMemory`](crate::multiplexer::effect::Effect::CheckMemory).
    pub async fn check_memory(&self, model: &Model) -> Outcome {
        let returns = self.driver.capabilities().returns;
        // What is never unloaded gives nothing back.
        let freed = self.driver.capabilities().can_coexist || self.memory.is_freed(model, returns).await;
        Outcome::MemoryChecked { freed }
    }

    /// For [`Effect::Probe`](crate::multiplexer::effect::Effect::Probe): the resident first, then whatever else the slot
    /// knows, because somebody else may have changed it.
    pub async fn probe(&self, resident: Option<&Model>) -> Outcome {
        let mut silent = false;
        let others = self.driver.models().into_iter().filter(|model| Some(model) != resident);
        for model in resident.cloned().into_iter().chain(others) {
            match self.driver.probe(&model).await {
                Ok(Probed { ready: true, .. }) => return Outcome::Probed(Found::Serving(model)),
                Ok(Probed { .. }) | Err(DriverError::Unreachable { .. }) => {}
                // A stranger's silence says nothing about the resident.
                Err(error) => {
                    tracing::debug!(model = &*model, %error, "the backend cannot be looked at");
                    silent |= resident.is_none_or(|resident| *resident == model);
                }
            }
        }
        Outcome::Probed(if silent { Found::Silence } else { Found::Nothing })
    }

    /// What is left of an unloaded model of this slot.
    pub fn leaves(&self) -> Left {
        self.driver.capabilities().leaves
    }
}
