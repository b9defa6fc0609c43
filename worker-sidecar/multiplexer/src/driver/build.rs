//! Builds drivers from settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Driver;
use super::hooks::Hooks;
use super::key::Key;
use super::kubernetes::{Access, KubernetesScale};
use super::llama_router::LlamaRouter;
use super::memory::SlotMemory;
use super::nvidia::Nvidia;
use super::ollama::Ollama;
use super::process::Process;
use super::roster::Roster;
use super::settings::{DriverSettings, SlotSettings};
use super::sglang::Sglang;
use super::slot::SlotDriver;
use super::static_url::StaticUrl;
use super::vllm_sleep::VllmSleep;
use crate::setting_error::SettingError;

/// A slot's driver, and the part of it that accepts new settings.
#[derive(Clone, Debug)]
pub struct Driven {
    /// Executes the machine's calls.
    pub driver: Arc<SlotDriver>,
    /// Assigns a driver to each model.
    pub roster: Arc<Roster>,
}

/// Returns the driver of each slot, in their order, with its memory meter. `supervisor`: the path of this program,
/// which runs between the worker and each process that a driver starts. Fails if a driver cannot work at all, for
/// example outside a cluster.
pub fn slot_drivers(slots: &[SlotSettings], supervisor: &Path) -> Result<Vec<Driven>, SettingError> {
    let loading = slots.iter().filter(|slot| loads(slot)).count();
    let with_driver = |slot: &SlotSettings| {
        let (key, supervisor) = (Key::new(slot.api_key.clone()), supervisor.to_path_buf());
        let shared = key.clone();
        let build = move |slot: &SlotSettings| driver(slot, supervisor.clone(), &shared);
        let roster = Arc::new(Roster::new(slot, Box::new(build))?);
        let memory = SlotMemory::new(Arc::new(meter(slot, loading)));
        let driver = Arc::new(SlotDriver::new(Arc::<Roster>::clone(&roster), memory).with_key(key));
        Ok(Driven { driver, roster })
    };
    slots.iter().map(with_driver).collect()
}

/// A slot that does not name its GPUs has all of them only if it is the only one: among several, each slot would treat
/// memory that another one uses as memory that was not freed.
fn meter(slot: &SlotSettings, loading: usize) -> Nvidia {
    if !loads(slot) {
        return Nvidia::without_devices();
    }
    if loading == 1 || !slot.devices.is_empty() {
        return Nvidia::new(slot.devices.clone());
    }
    tracing::info!(
        slot = slot.config.id,
        "GPU memory is not measured for this slot: {loading} slots load models; list the slot's GPUs in `devices`"
    );
    Nvidia::without_devices()
}

/// The backends of a `static` driver are always loaded.
fn loads(slot: &SlotSettings) -> bool {
    !matches!(slot.driver, DriverSettings::Static(_))
}

fn driver(slot: &SlotSettings, supervisor: PathBuf, key: &Key) -> Result<Arc<dyn Driver>, SettingError> {
    let mut settings = slot.driver.clone();
    settings.served_mut().into_iter().for_each(|served| served.key = key.clone());
    Ok(match settings {
        DriverSettings::Static(models) => Arc::new(StaticUrl::new(models)),
        DriverSettings::Process(models) => Arc::new(Process::new(models, supervisor)),
        DriverSettings::LlamaServer(url, models) => Arc::new(LlamaRouter::new(url, models).with_key(key.clone())),
        DriverSettings::Ollama(url, models) => Arc::new(Ollama::new(url, models).with_key(key.clone())),
        DriverSettings::VllmSleep(level, models) => Arc::new(VllmSleep::new(models, level, supervisor)),
        DriverSettings::Sglang(models) => Arc::new(Sglang::new(models, supervisor)),
        DriverSettings::Hooks(models) => Arc::new(Hooks::new(models, supervisor)),
        DriverSettings::Kubernetes(models) => {
            Arc::new(KubernetesScale::new(Access::of_this_pod()?, models, slot.config.knobs.load_timeout))
        }
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::http::{HeaderMap, HeaderValue, StatusCode};
    use modelrelay_protocol::secret::Secret;
    use url::Url;

    use super::super::hooks::HookedModel;
    use super::super::process::ProcessModel;
    use super::super::served::Served;
    use super::super::sglang::SaverModel;
    use super::super::vllm_sleep::{Level, SleeperModel};
    use super::*;
    use crate::Model;
    use crate::config::{ModelConfig, SlotConfig};
    use crate::driver::tests::serve;
    use crate::event::Left;

    #[test]
    fn only_slots_with_devices_measure_memory_among_several() {
        let url: Url = "http://127.0.0.1:1".parse().unwrap();
        let on = |devices: &[&str]| SlotSettings {
            devices: devices.iter().map(|device| (*device).to_owned()).collect(),
            ..slot(DriverSettings::Ollama(url.clone(), vec!["m".into()]))
        };
        assert!(meter(&on(&[]), 1).measures() && meter(&on(&["1"]), 2).measures());
        assert!(!meter(&on(&[]), 2).measures());
        let is_there = slot(DriverSettings::Static(vec![(Served::new("m"), url.clone())]));
        assert!(!meter(&is_there, 1).measures() && !loads(&is_there) && loads(&on(&[])));
    }

    fn slot(driver: DriverSettings) -> SlotSettings {
        let config = SlotConfig::new("gpu0", vec![ModelConfig::new("m", 1)]);
        SlotSettings { config, driver, devices: Vec::new(), backend_names: Default::default(), api_key: None }
    }

    /// Each kind with a model `m` at `url`, the remains after an eviction, and whether its backend is the driver's own.
    fn kinds(url: &Url) -> [(DriverSettings, Left, bool); 9] {
        let served = Served::new("m");
        let reload_from = Some("/weights".to_owned());
        let saver = SaverModel { served: served.clone(), url: url.clone(), launch: None, reload_from };
        let (load, evict) = (vec!["true".to_owned()], vec!["true".to_owned()]);
        let hooked = HookedModel { served: served.clone(), url: url.clone(), load, evict, alive: None };
        let process = ProcessModel { served: served.clone(), launch: Default::default(), url: None };
        let sleeper = SleeperModel { served: served.clone(), url: url.clone(), launch: None };
        let started = SleeperModel { launch: Some(Default::default()), ..sleeper.clone() };
        let started_saver = SaverModel { launch: Some(Default::default()), ..saver.clone() };
        [
            (DriverSettings::Static(vec![(served, url.clone())]), Left::Nothing, false),
            (DriverSettings::Process(vec![process]), Left::Nothing, true),
            (DriverSettings::LlamaServer(url.clone(), vec!["m".into()]), Left::Nothing, false),
            (DriverSettings::Ollama(url.clone(), vec!["m".into()]), Left::Nothing, false),
            (DriverSettings::VllmSleep(Level::One, vec![sleeper]), Left::Asleep, false),
            (DriverSettings::Sglang(vec![saver]), Left::Emptied, false),
            (DriverSettings::Hooks(vec![hooked]), Left::Nothing, false),
            (DriverSettings::VllmSleep(Level::Two, vec![started]), Left::Emptied, true),
            (DriverSettings::Sglang(vec![started_saver]), Left::Emptied, true),
        ]
    }

    #[test]
    fn every_slot_driver_knows_its_models() {
        let kinds = kinds(&"http://127.0.0.1:1".parse().unwrap());
        let slots: Vec<_> = kinds.iter().map(|(settings, ..)| slot(settings.clone())).collect();
        let drivers = slot_drivers(&slots, Path::new("worker")).unwrap();
        assert_eq!(drivers.len(), kinds.len());
        for (driver, (_, leaves, owns)) in drivers.iter().map(|slot| slot.driver.driver()).zip(kinds) {
            assert_eq!(driver.models(), [Model::from("m")], "{driver:?}");
            let capabilities = driver.capabilities();
            assert_eq!((capabilities.leaves, capabilities.owns_backends), (leaves, owns), "{driver:?}");
            assert_eq!(driver.owns(&"m".into()), owns, "{driver:?}");
            assert!(driver.detects_absence(), "{driver:?}");
            // A sleeping engine's CUDA context, in bytes.
            let kept = if leaves == Left::Nothing { 0..=0 } else { 1400 << 20..=2 << 30 };
            assert!(kept.contains(&capabilities.returns.residual), "{driver:?}");
        }
    }

    #[tokio::test]
    async fn every_driver_sends_current_key_of_slot() {
        let shown = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&shown);
        let note = move |headers: HeaderMap| {
            noted.lock().unwrap().push(headers.get("authorization").cloned());
            async { StatusCode::NOT_FOUND }
        };
        let url = serve(axum::Router::new().fallback(note)).await;
        for (settings, _, _) in kinds(&url).into_iter().filter(|(_, _, owns)| !owns) {
            let key = Key::default();
            let driver = driver(&slot(settings), "worker".into(), &key).unwrap();
            for secret in ["first", "second"] {
                key.set(Some(Secret::new(secret)));
                // It returns no response that a driver could use.
                let _ = driver.probe(&"m".into()).await;
                let keys = std::mem::take(&mut *shown.lock().unwrap());
                assert!(!keys.is_empty(), "{driver:?}");
                let wanted = format!("Bearer {secret}");
                let is_shown = |sent: &Option<HeaderValue>| sent.as_ref().is_some_and(|sent| *sent == *wanted);
                assert!(keys.iter().all(is_shown), "{driver:?}: {keys:?}");
            }
        }
    }
}
