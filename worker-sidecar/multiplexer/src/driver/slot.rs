//! A slot's driver with its memory: executes the effects that name a driver call, and returns the outcome that the
//! machine expects. Measurements before and after a call are taken here, so that no driver can forget them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::key::Key;
use super::memory::SlotMemory;
use super::{Capabilities, Driver, DriverError, Probed};
use crate::Model;
use crate::config::EVICT_TIMEOUT;
use crate::error::LoadFailure;
use crate::estimate::LoadKind;
use crate::event::{Found, Outcome};
use crate::memory::Reading;

/// Executes a machine's calls. Every future may be dropped; the rules of [`Driver`] state what that leaves.
#[derive(Debug)]
pub struct SlotDriver {
    driver: Arc<dyn Driver>,
    memory: SlotMemory,
    key: Key,
    /// True if no other model is loaded from before this worker started.
    is_cleared: AtomicBool,
}

impl SlotDriver {
    /// Creates a slot driver with its memory record.
    pub fn new(driver: Arc<dyn Driver>, memory: SlotMemory) -> Self {
        Self { driver, memory, key: Key::default(), is_cleared: AtomicBool::new(false) }
    }

    /// Sets the API key of its backends.
    #[must_use]
    pub fn with_key(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// The API key of its backends.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The driver itself.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Measures memory once, so that a missing meter is logged at the start, and not at the first load.
    pub async fn measure(&self) {
        self.memory.measure_once().await;
    }

    /// For [`Effect::Forget`](crate::effect::Effect::Forget). A model that is in the configuration again is kept.
    pub fn forget(&self, model: &Model) {
        self.driver.forget(model);
        if !self.knows(model) {
            self.memory.forget(model);
        }
    }

    /// Before the next load, the backends of new models must be unloaded if another program has loaded them.
    pub fn expect_new_models(&self) {
        self.is_cleared.store(false, Ordering::Relaxed);
    }

    fn knows(&self, model: &Model) -> bool {
        self.driver.models().contains(model)
    }

    /// For [`Effect::Preflight`](crate::effect::Effect::Preflight): checks whether the driver could load
    /// the model, and measures the free memory and the memory that the resident would free.
    pub async fn preflight(&self, model: &Model, resident: Option<&Model>) -> Outcome {
        if !self.knows(model) {
            return Outcome::Preflight(Err(DriverError::UnknownModel(model.to_string()).to_string()));
        }
        if let Err(error) = self.driver.check(model).await {
            return Outcome::Preflight(Err(error.to_string()));
        }
        let Capabilities { can_coexist, returns, .. } = self.driver.capabilities();
        // A model that is never unloaded for another uses none of its memory.
        let reading = if can_coexist { Reading::default() } else { self.memory.reading(resident, returns).await };
        Outcome::Preflight(Ok(reading))
    }

    /// For [`Effect::Load`](crate::effect::Effect::Load).
    pub async fn load(&self, model: &Model, kind: LoadKind) -> Outcome {
        if let Err(failure) = self.clear_for(model).await {
            return Outcome::Loaded(Err(failure));
        }
        self.memory.note_load(model).await;
        let loaded = self.driver.load(model, kind).await;
        if loaded.is_ok() {
            self.memory.note_loaded(model).await;
        }
        Outcome::Loaded(loaded)
    }

    /// Unloads other models before the first load: a worker that has just started does not know which models its
    /// predecessor, or another program, has left loaded. A model that was found and adopted is unloaded by then.
    async fn clear_for(&self, target: &Model) -> Result<(), LoadFailure> {
        if self.driver.capabilities().can_coexist || self.is_cleared.load(Ordering::Relaxed) {
            return Ok(());
        }
        for model in self.driver.models().iter().filter(|model| *model != target) {
            match self.driver.probe(model).await {
                Ok(Probed { gone: true, .. }) | Err(DriverError::Unreachable { .. }) => continue,
                Ok(Probed { ready: true, .. }) => self.memory.note_found(model).await,
                Ok(Probed { .. }) | Err(_) => {}
            }
            tracing::info!(model = &**model, "unloading a model that was loaded before the worker started");
            self.clear_away(model).await?;
            // If the memory is not freed, the load will fail.
            self.memory.is_freed(model, self.driver.capabilities().returns).await;
        }
        self.is_cleared.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn clear_away(&self, model: &Model) -> Result<(), LoadFailure> {
        let stays = |detail: String| {
            LoadFailure::Driver(format!("model {model}, which shares the slot's memory, may still be loaded: {detail}"))
        };
        let evicted = tokio::time::timeout(EVICT_TIMEOUT, self.evict(model)).await;
        if matches!(evicted, Ok(Outcome::Evicted(Ok(_)))) {
            return Ok(());
        }
        match tokio::time::timeout(EVICT_TIMEOUT, self.force_evict(model)).await {
            Ok(Outcome::ForceEvicted(Err(detail))) => Err(stays(detail)),
            Ok(_) => Ok(()),
            Err(_) => Err(stays("stopping it timed out".to_owned())),
        }
    }

    /// For [`Effect::Evict`](crate::effect::Effect::Evict).
    pub async fn evict(&self, model: &Model) -> Outcome {
        self.memory.note_evict(model).await;
        let evicted = self.driver.evict(model).await;
        if let Ok(left) = evicted {
            self.memory.note_evicted(model, left).await;
        }
        Outcome::Evicted(evicted.map_err(|error| error.to_string()))
    }

    /// For [`Effect::ForceEvict`](crate::effect::Effect::ForceEvict) and
    /// [`Effect::Discard`](crate::effect::Effect::Discard).
    pub async fn force_evict(&self, model: &Model) -> Outcome {
        if !self.knows(model) {
            return Outcome::ForceEvicted(Ok(()));
        }
        self.memory.note_evict(model).await;
        if !self.driver.owns(model) {
            // The program that restarts it, or another of its backends, restarts it awake.
            self.is_cleared.store(false, Ordering::Relaxed);
        }
        Outcome::ForceEvicted(self.driver.force_evict(model).await.map_err(|error| error.to_string()))
    }

    /// For [`Effect::CheckMemory`](crate::effect::Effect::CheckMemory).
    pub async fn check_memory(&self, model: &Model) -> Outcome {
        let returns = self.driver.capabilities().returns;
        // A model that is never unloaded frees nothing.
        let freed = self.driver.capabilities().can_coexist || self.memory.is_freed(model, returns).await;
        Outcome::MemoryChecked { freed }
    }

    /// For [`Effect::Probe`](crate::effect::Effect::Probe): probes the resident first. Results for the
    /// slot's other models matter only if the resident is certainly gone, because another program may have swapped it:
    /// a server that is overloaded for a moment still holds its memory and has running requests.
    pub async fn probe(&self, resident: Option<&Model>) -> Outcome {
        let mut silent = false;
        let others = self.driver.models().into_iter().filter(|model| Some(model) != resident);
        for model in resident.cloned().into_iter().chain(others) {
            match self.driver.probe(&model).await {
                Ok(Probed { ready: true, .. }) => {
                    if resident != Some(&model) {
                        self.memory.note_found(&model).await;
                    }
                    return Outcome::Probed(Found::Serving(model));
                }
                Ok(Probed { gone: true, .. }) => {}
                look if resident == Some(&model) => {
                    tracing::debug!(model = &*model, ?look, "the resident model does not respond as expected");
                    return Outcome::Probed(Found::Silence);
                }
                Err(DriverError::Unreachable { .. }) => {}
                // The silence of another backend is no evidence about the resident.
                look @ (Ok(_) | Err(_)) => {
                    tracing::debug!(model = &*model, ?look, "cannot probe the backend");
                    silent |= resident.is_none();
                }
            }
        }
        Outcome::Probed(if silent { Found::Silence } else { Found::Nothing })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use url::Url;

    use super::super::memory::{Blind, Meter};
    use super::super::{Call, Returns};
    use super::*;
    use crate::event::Left;

    type Look = Result<Probed, DriverError>;

    /// Returns the probe results that the test sets for each model, and records the calls.
    #[derive(Debug, Default)]
    struct Shows {
        looks: Vec<(&'static str, Look)>,
        commands: Mutex<Vec<String>>,
        /// True if no backend can be ended.
        is_stuck: bool,
    }

    impl Shows {
        fn note(&self, verb: &str, model: &Model) {
            self.commands.lock().unwrap().push(format!("{verb} {model}"));
        }

        fn commands(&self) -> Vec<String> {
            std::mem::take(&mut *self.commands.lock().unwrap())
        }

        fn ended(&self) -> Result<(), DriverError> {
            if self.is_stuck { Err(DriverError::NotOurs("it stays".to_owned())) } else { Ok(()) }
        }
    }

    impl Driver for Shows {
        fn capabilities(&self) -> Capabilities {
            Capabilities { leaves: Left::Nothing, can_coexist: false, owns_backends: false, returns: Returns::ALL }
        }

        fn models(&self) -> Vec<Model> {
            self.looks.iter().map(|(model, _)| Model::from(*model)).collect()
        }

        fn url(&self, _: &Model) -> Option<Url> {
            None
        }

        fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Look> {
            let look = self.looks.iter().find(|(known, _)| **known == **model).map(|(_, look)| look.clone());
            Box::pin(std::future::ready(look.unwrap()))
        }

        fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
            self.note("load", model);
            Box::pin(std::future::ready(Ok(())))
        }

        fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
            self.note("evict", model);
            Box::pin(std::future::ready(self.ended().map(|()| Left::Nothing)))
        }

        fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
            self.note("force", model);
            Box::pin(std::future::ready(self.ended()))
        }
    }

    fn ready() -> Look {
        Ok(Probed { ready: true, ..Probed::default() })
    }

    fn refused() -> Look {
        Err(DriverError::Unreachable { url: "http://a".to_owned(), why: "refused".to_owned() })
    }

    fn slot(looks: Vec<(&'static str, Look)>) -> (Arc<Shows>, SlotDriver) {
        let shows = Arc::new(Shows { looks, ..Shows::default() });
        let driver = SlotDriver::new(Arc::<Shows>::clone(&shows), SlotMemory::new(Arc::new(Blind)));
        (shows, driver)
    }

    async fn found(resident: Option<&str>, looks: Vec<(&'static str, Look)>) -> Found {
        let resident = resident.map(Model::from);
        let outcome = slot(looks).1.probe(resident.as_ref()).await;
        let Outcome::Probed(found) = outcome else { panic!("{outcome:?}") };
        found
    }

    #[tokio::test]
    async fn unready_or_refusing_resident_is_silence_not_gone() {
        for look in [Ok(Probed::default()), refused()] {
            assert_eq!(found(Some("a"), vec![("a", look.clone()), ("b", Ok(Probed::gone()))]).await, Found::Silence);
            assert_eq!(
                found(Some("a"), vec![("a", look), ("b", ready())]).await,
                Found::Silence,
                "whatever else serves"
            );
        }
    }

    #[tokio::test]
    async fn gone_resident_leaves_slot_empty_or_replaced() {
        assert_eq!(found(Some("a"), vec![("a", Ok(Probed::gone())), ("b", refused())]).await, Found::Nothing);
        let replaced = found(Some("a"), vec![("a", Ok(Probed::gone())), ("b", ready())]).await;
        assert_eq!(replaced, Found::Serving("b".into()));
    }

    /// A meter that records the number of its measurements.
    #[derive(Debug, Default)]
    struct Counts(AtomicUsize);

    impl Meter for Counts {
        fn free(&self) -> Option<u64> {
            self.0.fetch_add(1, Ordering::Relaxed);
            None
        }

        fn host_free(&self) -> Option<u64> {
            None
        }
    }

    #[tokio::test]
    async fn starting_measurement_queries_meter_without_probing_models() {
        let meter = Arc::new(Counts::default());
        let shows = Arc::new(Shows::default());
        SlotDriver::new(Arc::<Shows>::clone(&shows), SlotMemory::new(Arc::<Counts>::clone(&meter))).measure().await;
        assert_eq!((meter.0.load(Ordering::Relaxed), shows.commands()), (1, vec![]));
    }

    #[tokio::test]
    async fn only_newly_found_model_is_measured() {
        let meter = Arc::new(Counts::default());
        let shows = Arc::new(Shows { looks: vec![("a", ready())], ..Shows::default() });
        let driver = SlotDriver::new(shows, SlotMemory::new(Arc::<Counts>::clone(&meter)));
        driver.probe(Some(&"a".into())).await;
        assert_eq!(meter.0.load(Ordering::Relaxed), 0);
        driver.probe(None).await;
        assert_eq!(meter.0.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn first_load_unloads_other_models_beforehand() {
        let looks = vec![
            ("a", Ok(Probed::default())),
            ("b", ready()),
            ("c", Ok(Probed::gone())),
            ("d", refused()),
            ("e", Ok(Probed::default())),
        ];
        let (shows, driver) = slot(looks.clone());
        assert!(matches!(driver.load(&"a".into(), LoadKind::Cold).await, Outcome::Loaded(Ok(()))));
        assert_eq!(shows.commands(), ["evict b", "evict e", "load a"]);
        driver.load(&"b".into(), LoadKind::Cold).await;
        assert_eq!(shows.commands(), ["load b"], "later loads follow evictions");

        let shows = Arc::new(Shows { looks, is_stuck: true, ..Shows::default() });
        let driver = SlotDriver::new(Arc::<Shows>::clone(&shows), SlotMemory::new(Arc::new(Blind)));
        let outcome = driver.load(&"a".into(), LoadKind::Cold).await;
        let Outcome::Loaded(Err(LoadFailure::Driver(why))) = outcome else { panic!("{outcome:?}") };
        assert!(why.contains("model b") && why.contains("it stays"), "{why}");
        assert_eq!(shows.commands(), ["evict b", "force b"], "and nothing is loaded next to it");
    }

    #[tokio::test]
    async fn unready_backend_at_start_is_silence() {
        let (not_yet, gone) = (|| Ok(Probed::default()), || Ok(Probed::gone()));
        for (a, b) in [(not_yet(), not_yet()), (not_yet(), gone()), (gone(), not_yet())] {
            assert_eq!(found(None, vec![("a", a), ("b", b)]).await, Found::Silence);
        }
        assert_eq!(found(None, vec![("a", gone()), ("b", gone())]).await, Found::Nothing);
    }

    #[tokio::test]
    async fn load_after_forced_eviction_probes_others_again() {
        let (shows, driver) = slot(vec![("a", Ok(Probed::default())), ("b", ready())]);
        driver.load(&"b".into(), LoadKind::Cold).await;
        driver.force_evict(&"a".into()).await;
        assert_eq!(shows.commands(), ["evict a", "load b", "force a"]);
        driver.load(&"b".into(), LoadKind::Cold).await;
        assert_eq!(shows.commands(), ["evict a", "load b"]);
    }

    #[tokio::test]
    async fn unknown_model_is_refused_and_needs_no_eviction() {
        let (shows, driver) = slot(vec![("a", ready())]);
        let stranger = Model::from("stranger");
        let outcome = driver.preflight(&stranger, Some(&"a".into())).await;
        assert!(matches!(&outcome, Outcome::Preflight(Err(why)) if why.contains("stranger")), "{outcome:?}");
        assert!(matches!(driver.preflight(&"a".into(), None).await, Outcome::Preflight(Ok(_))));
        assert!(matches!(driver.force_evict(&stranger).await, Outcome::ForceEvicted(Ok(()))));
        assert_eq!(shows.commands(), Vec::<String>::new());
    }
}
