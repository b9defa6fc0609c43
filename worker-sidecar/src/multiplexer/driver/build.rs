//! From settings to the driver that they mean.

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
use super::sglang::Sglang;
use super::slot::SlotDriver;
use super::static_url::StaticUrl;
use super::vllm_sleep::VllmSleep;
use crate::config::{DriverSettings, SettingError, SlotSettings};

/// The driver of each slot, in their order, and what measures its memory. `supervisor`: this very program, which stands
/// between the worker and each process that a driver starts. Fails where a driver cannot work at all: outside a cluster, say.
pub fn slot_drivers(slots: &[SlotSettings], supervisor: &Path) -> Result<Vec<Arc<SlotDriver>>, SettingError> {
    let loading = slots.iter().filter(|slot| loads(slot)).count();
    let with_driver = |slot: &SlotSettings| {
        let key = Key::new(slot.api_key.clone());
        let driver = driver(slot, supervisor.to_path_buf(), &key)?;
        Ok(Arc::new(SlotDriver::new(driver, SlotMemory::new(Arc::new(meter(slot, loading)))).with_key(key)))
    };
    slots.iter().map(with_driver).collect()
}

/// A slot that does not say which of the GPUs are its own has all of them only if it is alone: of several, each would take
/// what another loads for memory that does not come back.
fn meter(slot: &SlotSettings, loading: usize) -> Nvidia {
    if !loads(slot) {
        return Nvidia::without_devices();
    }
    if loading == 1 || !slot.devices.is_empty() {
        return Nvidia::new(slot.devices.clone());
    }
    tracing::info!(
        slot = slot.config.id,
        "GPU memory is not measured for this slot: name its GPUs in `devices`, {loading} slots load models"
    );
    Nvidia::without_devices()
}

/// What a driver of the kind `static` leads to is always there.
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
    use url::Url;

    use super::super::hooks::HookedModel;
    use super::super::process::ProcessModel;
    use super::super::served::Served;
    use super::super::sglang::SaverModel;
    use super::super::vllm_sleep::{Level, SleeperModel};
    use super::*;
    use crate::multiplexer::Model;
    use crate::multiplexer::config::{ModelConfig, SlotConfig};
    use crate::multiplexer::event::Left;

    #[test]
    fn of_several_slots_only_those_measure_memory_that_name_their_devices() {
        let url: Url = "http://127.0.0.1:1".parse().unwrap();
        let slot = |devices: &[&str]| SlotSettings {
            config: SlotConfig::new("gpu0", vec![ModelConfig::new("m", 1)]),
            driver: DriverSettings::Ollama(url.clone(), vec!["m".into()]),
            devices: devices.iter().map(|device| (*device).to_owned()).collect(),
            backend_names: Default::default(),
            api_key: None,
        };
        assert!(meter(&slot(&[]), 1).measures() && meter(&slot(&["1"]), 2).measures());
        assert!(!meter(&slot(&[]), 2).measures());
        let is_there = DriverSettings::Static(vec![(Served::new("m"), url.clone())]);
        let is_there = SlotSettings { driver: is_there, ..slot(&[]) };
        assert!(!meter(&is_there, 1).measures() && !loads(&is_there) && loads(&slot(&[])));
    }

    #[test]
    fn every_driver_knows_the_models_of_its_slot() {
        let url: Url = "http://127.0.0.1:1".parse().unwrap();
        let served = Served::new("m");
        let reload_from = Some("/weights".to_owned());
        let saver = SaverModel { served: served.clone(), url: url.clone(), launch: None, reload_from };
        let (load, evict) = (vec!["true".to_owned()], vec!["true".to_owned()]);
        let hooked = HookedModel { served: served.clone(), url: url.clone(), load, evict, alive: None };
        let process = ProcessModel { served: served.clone(), launch: Default::default(), url: None };
        let sleeper = SleeperModel { served: served.clone(), url: url.clone(), launch: None };
        let started = SleeperModel { launch: Some(Default::default()), ..sleeper.clone() };
        for (settings, leaves, owns) in [
            (DriverSettings::Static(vec![(served, url.clone())]), Left::Nothing, false),
            (DriverSettings::Process(vec![process]), Left::Nothing, true),
            (DriverSettings::LlamaServer(url.clone(), vec!["m".into()]), Left::Nothing, false),
            (DriverSettings::Ollama(url, vec!["m".into()]), Left::Nothing, false),
            (DriverSettings::VllmSleep(Level::One, vec![sleeper]), Left::Asleep, false),
            (DriverSettings::Sglang(vec![saver]), Left::Emptied, false),
            (DriverSettings::Hooks(vec![hooked]), Left::Nothing, false),
            (DriverSettings::VllmSleep(Level::Two, vec![started]), Left::Emptied, true),
        ] {
            let config = SlotConfig::new("gpu0", vec![ModelConfig::new("m", 1)]);
            let slot = SlotSettings {
                config,
                driver: settings,
                devices: Vec::new(),
                backend_names: Default::default(),
                api_key: None,
            };
            let driver = driver(&slot, "worker".into(), &Key::default()).unwrap();
            assert_eq!(driver.models(), [Model::from("m")], "{driver:?}");
            let capabilities = driver.capabilities();
            assert_eq!((capabilities.leaves, capabilities.owns_backends), (leaves, owns), "{driver:?}");
            assert_eq!(driver.owns(&"m".into()), owns, "{driver:?}");
        }
    }
}
