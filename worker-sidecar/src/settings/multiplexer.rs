//! The `multiplexer` of `worker.yaml`, validated: the slots, and the driver of each.
//!
//! Keys that a driver does not read are errors too: a `command` for a driver that starts nothing would seem to have an
//! effect.

mod file;
mod names;

pub(super) use file::FileMultiplexer;

use std::collections::BTreeSet;
use std::time::Duration;

use modelrelay_multiplexer::Model;
use modelrelay_multiplexer::config::{Knobs, Linger, ModelConfig, SlotConfig};
use modelrelay_multiplexer::driver::hooks::HookedModel;
use modelrelay_multiplexer::driver::kubernetes::ScaledModel;
use modelrelay_multiplexer::driver::launch::{Launch, PORT};
use modelrelay_multiplexer::driver::process::ProcessModel;
use modelrelay_multiplexer::driver::served::Served;
use modelrelay_multiplexer::driver::sglang::SaverModel;
use modelrelay_multiplexer::driver::vllm_sleep::{Level, SleeperModel};
use modelrelay_protocol::limits::{MAX_MODEL_CHARS, MAX_MODELS_PER_SLOT, MAX_SLOTS_PER_WORKER};
use modelrelay_protocol::names::is_unprintable;
use modelrelay_protocol::units::{HumanDurationOrZero, parse_duration, parse_duration_or_zero};
use url::Url;

use super::mistakes::{Mistakes, collect};
use super::parse::{self, Given};
use super::{Args, DriverSettings, File, SettingError, SlotSettings, read_secret};
use file::{DriverKind, FileModel, FileSlot};

const MAX_SLOT_ID_CHARS: usize = 64;

/// Validates the block, and the settings that conflict with it.
pub(super) fn slots(args: &Args, file: &File) -> Result<Option<Vec<SlotSettings>>, Vec<SettingError>> {
    let Some(block) = &file.multiplexer else {
        let without = |_| SettingError::hidden("DRAIN_TIMEOUT", "worker.yaml has no `multiplexer`; unset it");
        return args.drain_timeout.as_ref().map(without).map_or(Ok(None), |error| Err(vec![error]));
    };
    let mut mistakes = Mistakes::default();
    mistakes.all(reject_backend_settings(args, file));
    let knobs = mistakes.of(knobs(args, block)).unwrap_or_default();
    mistakes.of(check_number(block.slots.len()));
    mistakes.of(names::check(&block.slots));
    let mut ids = BTreeSet::new();
    let mut slots = Vec::new();
    for slot in &block.slots {
        if !ids.insert(slot.id.as_str()) {
            let again =
                SettingError::new("multiplexer.slots", &slot.id, "each slot needs its own id; rename one of the slots");
            mistakes.of::<()>(Err(again));
        }
        slots.extend(mistakes.all(judge(slot, &knobs)));
    }
    mistakes.of(refuse_shared_deployments(&slots));
    let held = max_held(&slots);
    for slot in &mut slots {
        slot.config.max_held_per_relay = held;
    }
    mistakes.or(Some(Some(slots)))
}

fn check_number(slots: usize) -> Result<(), SettingError> {
    if (1..=MAX_SLOTS_PER_WORKER).contains(&slots) {
        return Ok(());
    }
    let allowed = format!(
        "1 to {MAX_SLOTS_PER_WORKER} slots; for one backend without swaps use `backend` instead of `multiplexer`"
    );
    Err(SettingError::new("multiplexer.slots", format!("{slots} slots"), allowed))
}

/// Rejects two models of one Deployment, because they would be loaded and unloaded together.
fn refuse_shared_deployments(slots: &[SlotSettings]) -> Result<(), SettingError> {
    let mut known = BTreeSet::new();
    for slot in slots {
        let DriverSettings::Kubernetes(models) = &slot.driver else { continue };
        if let Some(again) = models.iter().find(|model| !known.insert(model.deployment.as_str())) {
            let setting = format!("multiplexer.slots.{}.models.{}.deployment", slot.config.id, again.served.id);
            return Err(SettingError::new(setting, &again.deployment, "each model needs its own Deployment"));
        }
    }
    Ok(())
}

/// Rejects settings for the one backend of a worker without a multiplexer, because they would be ignored.
fn reject_backend_settings(args: &Args, file: &File) -> Result<(), Vec<SettingError>> {
    const REMOVE: &str = "applies to a worker with one backend only; remove it, or remove `multiplexer`";
    const EACH: &str = "each model of a slot has its own `maxConcurrency`; remove this one";
    let given = [
        ("backend", file.backend.is_some(), REMOVE),
        ("models", file.models.is_some(), "the slots define the models; remove it"),
        ("maxConcurrency", file.max_concurrency.is_some(), EACH),
        ("BACKEND_URL", args.backend_url.is_some(), REMOVE),
        ("BACKEND_ENGINE", args.backend_engine.is_some(), REMOVE),
        ("BACKEND_API_KEY", args.backend_api_key.is_some(), REMOVE),
        ("BACKEND_API_KEY_FILE", args.backend_api_key_file.is_some(), REMOVE),
        ("MODELS", args.models.is_some(), "`multiplexer.slots` defines the models; unset it"),
        ("MAX_CONCURRENCY", args.max_concurrency.is_some(), "each model of a slot has its own limit; unset it"),
    ];
    let refuse = |setting, what| SettingError::hidden(setting, format!("conflicts with `multiplexer`: {what}"));
    let judged =
        given.into_iter().map(|(setting, given, what)| if given { Err(refuse(setting, what)) } else { Ok(()) });
    collect(judged).map(|_| ())
}

/// Parses a duration like any other; a bare number means seconds, as in the decision record that this flag comes from.
fn drain_timeout(text: &str) -> Result<Duration, SettingError> {
    match text.trim().parse() {
        Ok(seconds @ 0..=86_400) => Ok(Duration::from_secs(seconds)),
        Ok(_) | Err(_) => parse_duration_or_zero(text.trim())
            .map_err(|error| SettingError::new("DRAIN_TIMEOUT", text, format!("seconds, or {}", error.allowed()))),
    }
}

fn knobs(args: &Args, block: &FileMultiplexer) -> Result<Knobs, SettingError> {
    let default = Knobs::default();
    let duration = |setting: &str, text: &str, words: &str| {
        parse_duration(text)
            .map_err(|error| SettingError::new(setting, text, format!("{words}, or {}", error.allowed())))
    };
    Ok(Knobs {
        drain_timeout: match (&args.drain_timeout, block.drain_timeout) {
            (Some(text), _) => drain_timeout(text)?,
            (None, of_file) => of_file.map_or(default.drain_timeout, |duration| duration.0),
        },
        load_timeout: block.load_timeout.map_or(default.load_timeout, |duration| duration.0),
        hold_budget: block.hold_budget.map_or(default.hold_budget, |duration| duration.0),
        max_wait: match block.max_wait.as_deref() {
            None | Some("auto") => None,
            Some(text) => Some(duration("multiplexer.maxWait", text, "auto")?),
        },
        min_residency: block.min_residency.map_or(default.min_residency, |duration| duration.0),
        linger: match block.linger.as_deref() {
            None | Some("auto") => Linger::Auto,
            Some("off") => Linger::Off,
            Some(text) if parse_duration_or_zero(text).is_ok_and(|linger| linger.is_zero()) => Linger::Off,
            Some(text) => Linger::Fixed(duration("multiplexer.linger", text, "auto, off")?),
        },
        rollback: block.rollback.unwrap_or(default.rollback),
    })
}

/// The registered `max_concurrent`, the most requests that one relay may have here: the sum of each slot's largest
/// capacity.
fn max_held(slots: &[SlotSettings]) -> usize {
    let largest = |slot: &SlotSettings| slot.config.models.iter().map(|model| model.capacity).max().unwrap_or_default();
    slots.iter().map(|slot| usize::try_from(largest(slot)).unwrap_or(usize::MAX)).fold(0, usize::saturating_add)
}

fn judge(slot: &FileSlot, knobs: &Knobs) -> Result<SlotSettings, Vec<SettingError>> {
    let mut mistakes = Mistakes::default();
    mistakes.of(check_id("multiplexer.slots.id", &slot.id, MAX_SLOT_ID_CHARS));
    let at = format!("multiplexer.slots.{}", slot.id);
    let models = mistakes.all(models(&at, slot));
    mistakes.of(check_default(&at, slot));
    let driver = mistakes.all(driver(&at, slot));
    let api_key = slot.api_key_file.as_deref().filter(|path| !path.as_os_str().is_empty());
    let api_key = api_key.map(|path| read_secret(&format!("{at}.apiKeyFile"), path)).transpose();
    let api_key = mistakes.of(api_key);
    let other_name = |model: &FileModel| model.expect_model.clone().filter(|name| *name != model.id);
    let backend_names = slot.models.iter().filter_map(|model| Some((model.id.as_str().into(), other_name(model)?)));
    let settings = || {
        let driver = driver?;
        let mut config = SlotConfig::new(&slot.id, models?);
        config.knobs = knobs.clone();
        config.memory = slot.memory.map(|size| size.0);
        config.default = slot.default.as_deref().map(Model::from);
        config.return_to_default_after = slot.return_to_default_after.and_then(unless_off);
        config.priors = driver.priors();
        Some(SlotSettings {
            config: config.within_reason(),
            driver,
            devices: slot.devices.clone(),
            backend_names: backend_names.collect(),
            api_key: api_key?,
        })
    };
    mistakes.or(settings())
}

fn models(at: &str, slot: &FileSlot) -> Result<Vec<ModelConfig>, Vec<SettingError>> {
    if slot.models.is_empty() || slot.models.len() > MAX_MODELS_PER_SLOT {
        let number = format!("{} models", slot.models.len());
        let allowed = format!("1 to {MAX_MODELS_PER_SLOT} models");
        return Err(vec![SettingError::new(format!("{at}.models"), number, allowed)]);
    }
    let mut ids = BTreeSet::new();
    collect(slot.models.iter().map(|model| {
        check_id(&format!("{at}.models.id"), &model.id, MAX_MODEL_CHARS)?;
        if !ids.insert(model.id.as_str()) {
            return Err(SettingError::new(
                format!("{at}.models"),
                &model.id,
                "each id must be listed once; remove one of the two",
            ));
        }
        model_config(at, slot, model)
    }))
}

fn check_default(at: &str, slot: &FileSlot) -> Result<(), SettingError> {
    match &slot.default {
        Some(default) if !slot.models.iter().any(|model| model.id == *default) => {
            Err(SettingError::new(format!("{at}.default"), default, "the id of a model of the slot"))
        }
        None if slot.return_to_default_after.is_some() => {
            let setting = format!("{at}.returnToDefaultAfter");
            Err(SettingError::hidden(setting, "the slot has no `default` to return to; set one"))
        }
        Some(_) | None => Ok(()),
    }
}

fn model_config(slot: &str, of: &FileSlot, model: &FileModel) -> Result<ModelConfig, SettingError> {
    let at = format!("{slot}.models.{}", model.id);
    if let Some(key) = model.keys().find(|key| !of.driver.keys().contains(key)) {
        let why = format!("not supported by driver {}; remove it, or choose another driver", of.driver.as_str());
        return Err(SettingError::hidden(format!("{at}.{key}"), why));
    }
    if let Some(name) = &model.expect_model {
        check_id(&format!("{at}.expectModel"), name, MAX_MODEL_CHARS)?;
    }
    let capacity = match model.max_concurrency {
        Some(number) => parse::concurrency(&format!("{at}.maxConcurrency"), &number.to_string())?,
        None => 1,
    };
    Ok(ModelConfig {
        aliases: model.aliases.iter().map(|alias| Model::from(alias.as_str())).collect(),
        memory: model.memory.map(|size| size.0),
        pin: model.pin,
        idle_ttl: model.idle_ttl.and_then(unless_off),
        ..ModelConfig::new(model.id.as_str(), capacity)
    })
}

/// Returns the duration; `None` for zero, which means off.
fn unless_off(duration: HumanDurationOrZero) -> Option<Duration> {
    Some(duration.0).filter(|duration| !duration.is_zero())
}

fn check_id(setting: &str, id: &str, longest: usize) -> Result<(), SettingError> {
    let is_clean = id.trim() == id && !id.is_empty() && !id.contains(is_unprintable);
    if is_clean && id != "*" && id.chars().count() <= longest {
        return Ok(());
    }
    Err(SettingError::new(setting, id, format!("a name of 1 to {longest} printable characters, not *")))
}

fn driver(at: &str, slot: &FileSlot) -> Result<DriverSettings, Vec<SettingError>> {
    let shares_url = matches!(slot.driver, DriverKind::LlamaServer | DriverKind::Ollama);
    if slot.url.is_some() && !shares_url {
        let why = format!("driver {} has a `url` per model, not per slot; move it to the models", slot.driver.as_str());
        return Err(vec![SettingError::hidden(format!("{at}.url"), why)]);
    }
    let one = |error| vec![error];
    let ids = || slot.models.iter().map(|model| Model::from(model.id.as_str())).collect();
    let models = || slot.models.iter().map(|model| ModelAt { at: format!("{at}.models.{}", model.id), model });
    Ok(match slot.driver {
        DriverKind::Static => {
            DriverSettings::Static(collect(models().map(|model| Ok((model.served()?, model.url()?))))?)
        }
        DriverKind::Process => DriverSettings::Process(collect(models().map(|model| model.process()))?),
        DriverKind::LlamaServer => DriverSettings::LlamaServer(url(at, slot.url.as_deref()).map_err(one)?, ids()),
        DriverKind::Ollama => DriverSettings::Ollama(url(at, slot.url.as_deref()).map_err(one)?, ids()),
        DriverKind::VllmSleep => {
            DriverSettings::VllmSleep(level(at, slot).map_err(one)?, collect(models().map(|model| model.sleeper()))?)
        }
        DriverKind::Sglang => DriverSettings::Sglang(collect(models().map(|model| model.saver()))?),
        DriverKind::Hooks => DriverSettings::Hooks(collect(models().map(|model| model.hooked()))?),
        DriverKind::Kubernetes => DriverSettings::Kubernetes(collect(models().map(|model| model.scaled()))?),
    })
}

/// All sleepers of a slot use the same level, because the slot relies on what is left of them.
fn level(at: &str, slot: &FileSlot) -> Result<Level, SettingError> {
    let levels: BTreeSet<u8> = slot.models.iter().map(|model| model.level.unwrap_or(1)).collect();
    let levels: Vec<u8> = levels.into_iter().collect();
    match *levels.as_slice() {
        [1] => Ok(Level::One),
        [2] => Ok(Level::Two),
        _ => {
            let found = levels.iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
            Err(SettingError::new(format!("{at}.models.level"), found, "1 or 2, the same for all models of a slot"))
        }
    }
}

fn url(at: &str, given: Option<&str>) -> Result<Url, SettingError> {
    let setting = format!("{at}.url");
    match given.map(str::trim).filter(|url| !url.is_empty()) {
        Some(value) => Given { setting: &setting, value }.backend_url(),
        None => Err(SettingError::hidden(setting, "missing: set the backend's address, such as http://127.0.0.1:8001")),
    }
}

/// A model of the file, and its name in errors.
struct ModelAt<'a> {
    at: String,
    model: &'a FileModel,
}

impl ModelAt<'_> {
    fn served(&self) -> Result<Served, SettingError> {
        let mut served = Served::new(self.model.id.as_str());
        if let Some(expect) = &self.model.expect_model {
            served.expect.clone_from(expect);
        }
        if let Some(path) = &self.model.health_path {
            if !path.starts_with('/') {
                return Err(SettingError::new(format!("{}.healthPath", self.at), path, "a path such as /health"));
            }
            served.health_path.clone_from(path);
        }
        Ok(served)
    }

    fn url(&self) -> Result<Url, SettingError> {
        url(&self.at, self.model.url.as_deref())
    }

    fn argv(&self, key: &str, given: Option<&Vec<String>>) -> Result<Vec<String>, SettingError> {
        match given {
            Some(argv) if argv.first().is_some_and(|program| !program.is_empty()) => Ok(argv.clone()),
            Some(_) | None => {
                let setting = format!("{}.{key}", self.at);
                Err(SettingError::hidden(
                    setting,
                    "missing: set a program and its arguments, such as [vllm, serve, NAME]",
                ))
            }
        }
    }

    fn launch(&self) -> Result<Option<Launch>, SettingError> {
        let env = self.model.env.0.clone().unwrap_or_default();
        if self.model.command.is_none() {
            let setting = format!("{}.env", self.at);
            let unused = SettingError::hidden(setting, "needs a `command`; set one, or remove it");
            return if env.is_empty() { Ok(None) } else { Err(unused) };
        }
        let command = self.argv("command", self.model.command.as_ref())?;
        Ok(Some(Launch { command, env, ..Launch::default() }))
    }

    fn process(&self) -> Result<ProcessModel, SettingError> {
        let command = self.argv("command", self.model.command.as_ref())?;
        let launch = Launch { command, env: self.model.env.0.clone().unwrap_or_default(), ..Launch::default() };
        let url = self.model.url.is_some().then(|| self.url()).transpose()?;
        let told = launch.command.iter().chain(launch.env.values()).any(|text| text.contains(PORT));
        if url.is_none() && !told {
            let setting = format!("{}.command", self.at);
            let why = format!("the backend's port is unknown: put {PORT} into the command, or set `url`");
            return Err(SettingError::hidden(setting, why));
        }
        Ok(ProcessModel { served: self.served()?, launch, url })
    }

    fn sleeper(&self) -> Result<SleeperModel, SettingError> {
        Ok(SleeperModel { served: self.served()?, url: self.url()?, launch: self.launch()? })
    }

    fn saver(&self) -> Result<SaverModel, SettingError> {
        Ok(SaverModel { served: self.served()?, url: self.url()?, launch: self.launch()?, reload_from: None })
    }

    fn scaled(&self) -> Result<ScaledModel, SettingError> {
        const WANTED: &str = "the name of the Deployment that serves the model, in the worker's namespace";
        let setting = format!("{}.deployment", self.at);
        let deployment = match self.model.deployment.as_deref() {
            Some(name) if is_object_name(name) => name.to_owned(),
            Some(name) => return Err(SettingError::new(setting, name, WANTED)),
            None => return Err(SettingError::hidden(setting, format!("missing: {WANTED}"))),
        };
        let url = self.model.url.is_some().then(|| self.url()).transpose()?;
        Ok(ScaledModel { served: self.served()?, deployment, url })
    }

    fn hooked(&self) -> Result<HookedModel, SettingError> {
        let alive = self.model.alive.as_ref().map(|_| self.argv("alive", self.model.alive.as_ref())).transpose()?;
        Ok(HookedModel {
            served: self.served()?,
            url: self.url()?,
            load: self.argv("load", self.model.load.as_ref())?,
            evict: self.argv("evict", self.model.evict.as_ref())?,
            alive,
        })
    }
}

/// True for a name as in RFC 1123, which Kubernetes requires of most objects; it becomes part of a path.
fn is_object_name(name: &str) -> bool {
    let part = |part: &str| {
        part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
            && !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(part)
}

#[cfg(test)]
mod tests;
