//! The driver of a slot whose models change while it works.
//!
//! Each model belongs to the driver that was built for its settings. A model that is added, or whose settings change,
//! gets a new driver. The previous driver keeps the model until its next load, because only the driver that started a
//! backend can end it. A removed model keeps its driver until the slot has unloaded it.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use url::Url;

use super::settings::{DriverSettings, SlotSettings};
use super::{Call, Capabilities, Driver, DriverError, Probed};
use crate::Model;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::Left;
use crate::setting_error::SettingError;

/// Builds the driver of a slot with these settings.
pub type Build = Box<dyn Fn(&SlotSettings) -> Result<Arc<dyn Driver>, SettingError> + Send + Sync>;

/// The models of a slot, each with its driver.
pub struct Roster {
    build: Build,
    capabilities: Capabilities,
    detects_absence: bool,
    /// In the order of the configuration, removed models last. Never held over an await.
    entries: Mutex<Vec<RosterEntry>>,
}

#[derive(Clone, Debug)]
struct RosterEntry {
    model: Model,
    current: Assigned,
    /// Takes over at the next load.
    next: Option<Assigned>,
    is_removed: bool,
}

/// A driver and the settings of the model that it was built for.
#[derive(Clone, Debug)]
struct Assigned {
    driver: Arc<dyn Driver>,
    settings: DriverSettings,
    backend_name: Option<Model>,
}

/// The models that a new configuration adds, removes, or gives other settings.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// New models.
    pub added: Vec<Model>,
    /// Models that are drained and unloaded.
    pub removed: Vec<Model>,
    /// Models whose next load uses other settings.
    pub changed: Vec<Model>,
}

impl Assigned {
    fn new(slot: &SlotSettings, model: &Model, driver: Arc<dyn Driver>) -> Self {
        let backend_name = slot.backend_names.get(model).map(|name| Model::from(name.as_str()));
        Self { driver, settings: slot.driver.clone().only(&[model]), backend_name }
    }
}

impl RosterEntry {
    fn latest(&self) -> &Assigned {
        self.next.as_ref().unwrap_or(&self.current)
    }
}

impl Roster {
    /// The models of a slot, all with one driver.
    pub fn new(slot: &SlotSettings, build: Build) -> Result<Self, SettingError> {
        let driver = build(slot)?;
        let (capabilities, detects_absence) = (driver.capabilities(), driver.detects_absence());
        let entry = |model: &Model| RosterEntry {
            current: Assigned::new(slot, model, Arc::clone(&driver)),
            model: Model::clone(model),
            next: None,
            is_removed: false,
        };
        let entries = Mutex::new(slot.models().map(entry).collect());
        Ok(Self { build, capabilities, detects_absence, entries })
    }

    /// Applies new settings, whose driver is of the same kind. On an error, nothing is changed.
    pub fn reconfigure(&self, slot: &SlotSettings) -> Result<Changes, SettingError> {
        let mut changes = Changes::default();
        let mut entries = self.lock();
        let mut renewed = Vec::new();
        for model in slot.models() {
            let known = entries.iter().find(|entry| entry.model == *model);
            renewed.push(self.entry(slot, model, known, &mut changes)?);
        }
        for entry in entries.iter().filter(|entry| slot.models().all(|model| entry.model != *model)) {
            if !entry.is_removed {
                changes.removed.push(Model::clone(&entry.model));
            }
            renewed.push(RosterEntry { is_removed: true, ..entry.clone() });
        }
        *entries = renewed;
        Ok(changes)
    }

    fn entry(
        &self,
        slot: &SlotSettings,
        model: &Model,
        known: Option<&RosterEntry>,
        changes: &mut Changes,
    ) -> Result<RosterEntry, SettingError> {
        let settings = slot.driver.clone().only(&[model]);
        let assigned = || {
            let alone = SlotSettings { driver: settings.clone(), ..slot.clone() };
            Ok(Assigned::new(slot, model, (self.build)(&alone)?))
        };
        let Some(known) = known else {
            changes.added.push(Model::clone(model));
            return Ok(RosterEntry { model: Model::clone(model), current: assigned()?, next: None, is_removed: false });
        };
        if known.is_removed {
            changes.added.push(Model::clone(model));
        }
        let mut entry = RosterEntry { is_removed: false, ..known.clone() };
        if entry.latest().settings == settings {
            return Ok(entry);
        }
        changes.changed.push(Model::clone(model));
        entry.next = (entry.current.settings != settings).then(assigned).transpose()?;
        // Loading such a model starts nothing, and it is never unloaded.
        if self.capabilities.can_coexist
            && let Some(next) = entry.next.take()
        {
            entry.current = next;
        }
        Ok(entry)
    }

    fn find<T>(&self, model: &Model, read: impl FnOnce(&RosterEntry) -> T) -> Result<T, DriverError> {
        let entries = self.lock();
        let found = entries.iter().find(|entry| entry.model == *model);
        found.map(read).ok_or_else(|| DriverError::UnknownModel(model.to_string()))
    }

    fn current(&self, model: &Model) -> Result<Arc<dyn Driver>, DriverError> {
        self.find(model, |entry| Arc::clone(&entry.current.driver))
    }

    /// True if the model's backend cannot be used for its next load.
    fn is_outdated(&self, model: &Model) -> bool {
        self.find(model, |entry| entry.next.is_some() || entry.is_removed).unwrap_or(true)
    }

    /// The driver for the model's next load, once the previous driver has ended its backend.
    async fn renewed(&self, model: &Model) -> Result<Arc<dyn Driver>, DriverError> {
        let (previous, next) = self.find(model, |entry| (Arc::clone(&entry.current.driver), entry.next.clone()))?;
        let Some(next) = next else { return Ok(previous) };
        if previous.owns(model) {
            previous.force_evict(model).await?;
        }
        previous.forget(model);
        let mut entries = self.lock();
        if let Some(entry) = entries.iter_mut().find(|entry| entry.model == *model) {
            // The file may have changed again in the meantime.
            entry.next.take_if(|latest| Arc::ptr_eq(&latest.driver, &next.driver));
            entry.current = next.clone();
        }
        Ok(next.driver)
    }

    fn drivers(&self) -> Vec<Arc<dyn Driver>> {
        let of_entry = |entry: &RosterEntry| {
            [Some(&entry.current), entry.next.as_ref()].map(|of| of.map(|of| Arc::clone(&of.driver)))
        };
        self.lock().iter().flat_map(of_entry).flatten().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RosterEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Roster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Roster").field(&*self.lock()).finish()
    }
}

impl Driver for Roster {
    fn capabilities(&self) -> Capabilities {
        let owns_backends = self.drivers().iter().any(|driver| driver.capabilities().owns_backends);
        Capabilities { owns_backends, ..self.capabilities }
    }

    fn models(&self) -> Vec<Model> {
        self.lock().iter().map(|entry| Model::clone(&entry.model)).collect()
    }

    fn url(&self, model: &Model) -> Option<Url> {
        self.current(model).ok()?.url(model)
    }

    fn backend_name(&self, model: &Model) -> Option<Model> {
        self.find(model, |entry| entry.current.backend_name.clone()).ok().flatten()
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async {
            let driver = self.find(model, |entry| Arc::clone(&entry.latest().driver))?;
            driver.check(model).await
        })
    }

    fn detects_absence(&self) -> bool {
        self.detects_absence
    }

    fn set_load_timeout(&self, load_timeout: Duration) {
        self.drivers().iter().for_each(|driver| driver.set_load_timeout(load_timeout));
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        Box::pin(async { self.current(model)?.probe(model).await })
    }

    fn load<'a>(&'a self, model: &'a Model, kind: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        Box::pin(async move { self.renewed(model).await?.load(model, kind).await })
    }

    /// Ends a backend whose settings have changed instead of putting it to sleep.
    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        Box::pin(async {
            let driver = self.current(model)?;
            if self.is_outdated(model) && driver.owns(model) {
                return driver.stop(model).await.map(|()| Left::Nothing);
            }
            driver.evict(model).await
        })
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async { self.current(model)?.force_evict(model).await })
    }

    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        Box::pin(async { self.current(model)?.stop(model).await })
    }

    fn owns(&self, model: &Model) -> bool {
        self.current(model).is_ok_and(|driver| driver.owns(model))
    }

    fn ended<'a>(&'a self, model: &'a Model) -> Call<'a, ()> {
        Box::pin(async {
            match self.current(model) {
                Ok(driver) => driver.ended(model).await,
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn forget(&self, model: &Model) {
        let gone = self.lock().extract_if(.., |entry| entry.is_removed && entry.model == *model).next();
        if let Some(entry) = gone {
            entry.current.driver.forget(model);
        }
    }
}

#[cfg(test)]
mod tests;
