//! The validated settings of a slot and of its driver.

use std::collections::BTreeMap;

use modelrelay_protocol::secret::Secret;
use url::Url;

use super::hooks::HookedModel;
use super::kubernetes::ScaledModel;
use super::process::ProcessModel;
use super::served::Served;
use super::sglang::SaverModel;
use super::vllm_sleep::{Level, SleeperModel};
use crate::Model;
use crate::config::SlotConfig;
use crate::estimate::Priors;

/// One slot, and the settings of its driver.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotSettings {
    /// The settings that the slot's state machine needs.
    pub config: SlotConfig,
    /// The driver.
    pub driver: DriverSettings,
    /// Its GPUs, by index or UUID; empty means all that the worker sees or, if several slots load models, unknown.
    pub devices: Vec<String>,
    /// The backends' names of the models, if they differ from the id.
    pub backend_names: BTreeMap<Model, String>,
    /// The API key of its backends, which replaces a client's own.
    pub api_key: Option<Secret>,
}

/// A driver and its settings.
#[derive(Clone, Debug, PartialEq)]
pub enum DriverSettings {
    /// Backends that are always loaded.
    Static(Vec<(Served, Url)>),
    /// A command per model.
    Process(Vec<ProcessModel>),
    /// llama-server as a router.
    LlamaServer(Url, Vec<Model>),
    /// Ollama.
    Ollama(Url, Vec<Model>),
    /// vLLM's sleep mode.
    VllmSleep(Level, Vec<SleeperModel>),
    /// SGLang's memory saver.
    Sglang(Vec<SaverModel>),
    /// The operator's own commands.
    Hooks(Vec<HookedModel>),
    /// A Deployment per model.
    Kubernetes(Vec<ScaledModel>),
}

impl SlotSettings {
    /// The ids of its models.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.config.models.iter().map(|model| &model.id)
    }

    /// Returns the setting that differs from those of a running slot and takes effect only at the next start.
    pub fn fixed_difference(&self, running: &Self) -> Option<&'static str> {
        if self.devices != running.devices {
            return Some("devices");
        }
        match (&self.driver, &running.driver) {
            (DriverSettings::LlamaServer(url, _), DriverSettings::LlamaServer(running, _))
            | (DriverSettings::Ollama(url, _), DriverSettings::Ollama(running, _)) => (url != running).then_some("url"),
            (DriverSettings::VllmSleep(level, _), DriverSettings::VllmSleep(running, _)) => {
                (level != running).then_some("models.level")
            }
            (driver, running) => {
                (std::mem::discriminant(driver) != std::mem::discriminant(running)).then_some("driver")
            }
        }
    }
}

impl DriverSettings {
    /// Returns the assumed cost of its loads before any was measured.
    pub fn priors(&self) -> Priors {
        match self {
            Self::Static(_) => Priors::NONE,
            Self::VllmSleep(Level::Two, _) => Priors::EMPTIED,
            Self::VllmSleep(Level::One, _)
            | Self::Process(_)
            | Self::LlamaServer(..)
            | Self::Ollama(..)
            | Self::Sglang(_)
            | Self::Kubernetes(_)
            | Self::Hooks(_) => Priors::USUAL,
        }
    }

    /// Returns the servers that it probes itself, each with its model.
    pub fn served_mut(&mut self) -> Vec<&mut Served> {
        match self {
            Self::Static(models) => models.iter_mut().map(|(served, _)| served).collect(),
            Self::Process(models) => models.iter_mut().map(|model| &mut model.served).collect(),
            Self::VllmSleep(_, models) => models.iter_mut().map(|model| &mut model.served).collect(),
            Self::Sglang(models) => models.iter_mut().map(|model| &mut model.served).collect(),
            Self::Hooks(models) => models.iter_mut().map(|model| &mut model.served).collect(),
            Self::Kubernetes(models) => models.iter_mut().map(|model| &mut model.served).collect(),
            Self::LlamaServer(..) | Self::Ollama(..) => Vec::new(),
        }
    }

    /// Returns the part that concerns these models, sorted, so that their order does not matter.
    pub fn only(mut self, ids: &[&Model]) -> Self {
        fn keep<T>(models: &mut Vec<T>, ids: &[&Model], id: impl Fn(&T) -> &Model) {
            models.retain(|model| ids.contains(&id(model)));
            models.sort_by(|one, other| id(one).cmp(id(other)));
        }
        match &mut self {
            Self::Static(models) => keep(models, ids, |(served, _)| &served.id),
            Self::Process(models) => keep(models, ids, |model| &model.served.id),
            Self::VllmSleep(_, models) => keep(models, ids, |model| &model.served.id),
            Self::Sglang(models) => keep(models, ids, |model| &model.served.id),
            Self::Hooks(models) => keep(models, ids, |model| &model.served.id),
            Self::Kubernetes(models) => keep(models, ids, |model| &model.served.id),
            Self::LlamaServer(_, models) | Self::Ollama(_, models) => keep(models, ids, |model| model),
        }
        self
    }
}
