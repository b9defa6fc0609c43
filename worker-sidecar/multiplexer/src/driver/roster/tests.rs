use std::sync::atomic::{AtomicU32, Ordering};

use super::super::Returns;
use super::super::served::Served;
use super::*;
use crate::config::{ModelConfig, SlotConfig};

type Log = Arc<Mutex<Vec<String>>>;

/// Logs its calls with its number.
#[derive(Debug)]
struct Numbered {
    number: u32,
    log: Log,
    can_coexist: bool,
}

impl Numbered {
    fn note(&self, verb: &str, model: &Model) {
        self.log.lock().unwrap().push(format!("{} {verb} {model}", self.number));
    }
}

impl Driver for Numbered {
    fn capabilities(&self) -> Capabilities {
        let can_coexist = self.can_coexist;
        Capabilities { leaves: Left::Asleep, can_coexist, owns_backends: true, returns: Returns::ALL }
    }

    fn models(&self) -> Vec<Model> {
        Vec::new()
    }

    fn url(&self, _: &Model) -> Option<Url> {
        Some(format!("http://127.0.0.1:{}", self.number).parse().unwrap())
    }

    fn check<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        self.note("check", model);
        Box::pin(std::future::ready(Ok(())))
    }

    fn probe<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Probed, DriverError>> {
        self.note("probe", model);
        Box::pin(std::future::ready(Ok(Probed::default())))
    }

    fn load<'a>(&'a self, model: &'a Model, _: LoadKind) -> Call<'a, Result<(), LoadFailure>> {
        self.note("load", model);
        Box::pin(std::future::ready(Ok(())))
    }

    fn evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<Left, DriverError>> {
        self.note("evict", model);
        Box::pin(std::future::ready(Ok(Left::Asleep)))
    }

    fn force_evict<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        self.note("force", model);
        Box::pin(std::future::ready(Ok(())))
    }

    fn stop<'a>(&'a self, model: &'a Model) -> Call<'a, Result<(), DriverError>> {
        self.note("stop", model);
        Box::pin(std::future::ready(Ok(())))
    }

    fn forget(&self, model: &Model) {
        self.note("forget", model);
    }
}

/// A roster whose drivers are numbered from 1, in the order in which they are built.
struct Rig {
    roster: Roster,
    log: Log,
}

impl Rig {
    fn new(models: &[(&str, u16)]) -> Self {
        Self::with(models, false)
    }

    fn with(models: &[(&str, u16)], can_coexist: bool) -> Self {
        let (log, built) = (Log::default(), AtomicU32::new(0));
        let shared = Arc::clone(&log);
        let build = move |slot: &SlotSettings| {
            if slot.models().any(|model| **model == *"unbuildable") {
                return Err(SettingError::hidden("models", "it cannot be built"));
            }
            let number = built.fetch_add(1, Ordering::Relaxed) + 1;
            Ok(Arc::new(Numbered { number, log: Arc::clone(&shared), can_coexist }) as Arc<dyn Driver>)
        };
        Self { roster: Roster::new(&settings(models), Box::new(build)).unwrap(), log }
    }

    /// Returns the added, removed and changed models.
    fn reconfigure(&self, models: &[(&str, u16)]) -> [String; 3] {
        let Changes { added, removed, changed } = self.roster.reconfigure(&settings(models)).unwrap();
        [added, removed, changed].map(|models| models.join(" "))
    }

    fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    /// The number of the driver that the model's requests go to.
    fn driver_of(&self, model: &str) -> Option<u16> {
        self.roster.url(&model.into())?.port()
    }
}

/// A slot with these models; the port represents all of a model's driver settings.
fn settings(models: &[(&str, u16)]) -> SlotSettings {
    let served = |(id, port): &(&str, u16)| (Served::new(*id), format!("http://backend:{port}").parse().unwrap());
    SlotSettings {
        config: SlotConfig::new("gpu0", models.iter().map(|(id, _)| ModelConfig::new(*id, 1)).collect()),
        driver: DriverSettings::Static(models.iter().map(served).collect()),
        devices: Vec::new(),
        backend_names: models.iter().map(|(id, port)| ((*id).into(), format!("{id}-{port}"))).collect(),
        api_key: None,
    }
}

#[test]
fn added_model_gets_its_own_driver() {
    let rig = Rig::new(&[("a", 7)]);
    assert_eq!(rig.reconfigure(&[("b", 7), ("a", 7)]), ["b", "", ""]);
    assert_eq!(rig.roster.models(), [Model::from("b"), "a".into()]);
    assert_eq!((rig.driver_of("a"), rig.driver_of("b")), (Some(1), Some(2)));
    assert_eq!(rig.reconfigure(&[("a", 7), ("b", 7)]), ["", "", ""]);
}

#[tokio::test]
async fn changed_model_keeps_driver_until_next_load() {
    let (rig, model) = (Rig::new(&[("a", 7), ("b", 7)]), Model::from("a"));
    assert_eq!(rig.reconfigure(&[("a", 8), ("b", 7)]), ["", "", "a"]);
    assert_eq!((rig.driver_of("a"), rig.roster.backend_name(&model).as_deref()), (Some(1), Some("a-7")));
    rig.roster.probe(&model).await.unwrap();
    rig.roster.check(&model).await.unwrap();
    rig.roster.load(&model, LoadKind::Cold).await.unwrap();
    assert_eq!(rig.log(), ["1 probe a", "2 check a", "1 force a", "1 forget a", "2 load a"]);
    assert_eq!((rig.driver_of("a"), rig.roster.backend_name(&model).as_deref()), (Some(2), Some("a-8")));
    rig.roster.load(&model, LoadKind::Cold).await.unwrap();
    rig.roster.load(&"b".into(), LoadKind::Cold).await.unwrap();
    assert_eq!(rig.log(), ["2 load a", "1 load b"]);
}

#[tokio::test]
async fn latest_of_several_changes_is_loaded() {
    let (rig, model) = (Rig::new(&[("a", 7)]), Model::from("a"));
    rig.reconfigure(&[("a", 8)]);
    assert_eq!(rig.reconfigure(&[("a", 9)]), ["", "", "a"]);
    rig.roster.load(&model, LoadKind::Cold).await.unwrap();
    assert_eq!(rig.driver_of("a"), Some(3));
    rig.reconfigure(&[("a", 8)]);
    assert_eq!(rig.reconfigure(&[("a", 9)]), ["", "", "a"], "back to what is loaded");
    rig.log();
    rig.roster.load(&model, LoadKind::Cold).await.unwrap();
    assert_eq!(rig.log(), ["3 load a"]);
}

#[tokio::test]
async fn changed_models_backend_stops_instead_of_sleeping() {
    let (rig, model) = (Rig::new(&[("a", 7), ("b", 7)]), Model::from("a"));
    assert_eq!(rig.roster.evict(&model).await, Ok(Left::Asleep));
    rig.reconfigure(&[("a", 8), ("b", 7)]);
    assert_eq!(rig.roster.evict(&model).await, Ok(Left::Nothing));
    rig.reconfigure(&[("a", 8)]);
    assert_eq!(rig.roster.evict(&"b".into()).await, Ok(Left::Nothing));
    assert_eq!(rig.log(), ["1 evict a", "1 stop a", "1 stop b"]);
}

#[test]
fn removed_model_keeps_driver_until_forgotten() {
    let rig = Rig::new(&[("a", 7), ("b", 7)]);
    rig.roster.forget(&"b".into());
    assert_eq!(rig.reconfigure(&[("a", 7)]), ["", "b", ""]);
    assert_eq!(rig.driver_of("b"), Some(1));
    assert_eq!(rig.reconfigure(&[("a", 7)]), ["", "", ""], "reported once");
    assert_eq!(rig.reconfigure(&[("a", 7), ("b", 7)]), ["b", "", ""]);
    rig.roster.forget(&"b".into());
    assert_eq!((rig.driver_of("b"), rig.log()), (Some(1), vec![]), "the configuration has it again");
    rig.reconfigure(&[("a", 7)]);
    rig.roster.forget(&"b".into());
    assert_eq!((rig.driver_of("b"), rig.log()), (None, vec!["1 forget b".to_owned()]));
}

#[test]
fn changed_address_of_unloaded_model_applies_at_once() {
    let rig = Rig::with(&[("a", 7)], true);
    assert_eq!(rig.reconfigure(&[("a", 8)]), ["", "", "a"]);
    assert_eq!(rig.driver_of("a"), Some(2));
}

#[test]
fn settings_rejected_by_driver_change_nothing() {
    let rig = Rig::new(&[("a", 7), ("b", 7)]);
    assert!(rig.roster.reconfigure(&settings(&[("a", 8), ("unbuildable", 7)])).is_err());
    assert_eq!(rig.roster.models(), [Model::from("a"), "b".into()]);
    assert_eq!(rig.reconfigure(&[("a", 7), ("b", 7)]), ["", "", ""]);
}
