//! Rejects a `multiplexer` that a worker would reject: in the pool's status, with the name of the pool's field, before
//! any worker restarts with an invalid file.
//!
//! The worker's own parser accepts everything that passes here; a test over generated pools keeps the two consistent.
//! The reverse does not hold: some settings that a worker would accept have no meaning in a pool.

use std::collections::{BTreeMap, BTreeSet};

use modelrelay_protocol::limits::{MAX_MODEL_CHARS, MAX_MODELS_PER_SLOT, MAX_MODELS_PER_WORKER, MAX_SLOTS_PER_WORKER};
use modelrelay_protocol::units::{self, UnitError};
use url::Url;

use super::ValidateError;
use crate::crd::WorkerPoolSpec;
use crate::crd::common::SizeText;
use crate::crd::multiplexer::{Driver, Multiplexer, Slot, SlotModel};
use crate::crd::worker_pool::Mode;

const MAX_SLOT_ID_CHARS: usize = 64;

/// The placeholder in a command or its environment for the port on which the backend must listen.
const PORT: &str = "${PORT}";

type Judged = Result<(), ValidateError>;

/// Checks the block and the fields that conflict with it. An empty block is treated as absent.
pub(super) fn validate(spec: &WorkerPoolSpec) -> Judged {
    let Some(block) = spec.multiplexer.as_ref().filter(|block| **block != Multiplexer::default()) else {
        return Ok(());
    };
    conflicting_fields(spec)?;
    place(spec, block)?;
    knobs(block)?;
    if block.slots.is_empty() || block.slots.len() > MAX_SLOTS_PER_WORKER {
        let found = block.slots.len();
        return refuse(
            "slots",
            format!("must have 1 to {MAX_SLOTS_PER_WORKER} slots, not {found}; for one backend use spec.backend"),
        );
    }
    let mut ids = BTreeSet::new();
    for one in &block.slots {
        if !ids.insert(&one.id) {
            return refuse("slots", format!("duplicate id {}: rename one of the slots", one.id));
        }
        slot(one)?;
    }
    names(block)?;
    deployments(block)
}

fn refuse<T>(field: &str, problem: impl Into<String>) -> Result<T, ValidateError> {
    let field = format!("spec.multiplexer.{field}");
    Err(ValidateError::Multiplexer { field, problem: problem.into() })
}

/// Rejects fields of a worker with a single backend.
fn conflicting_fields(spec: &WorkerPoolSpec) -> Judged {
    let given = [
        ("spec.backend", spec.backend.is_some(), "each slot has its own backends"),
        ("spec.models", spec.models != ["*"], "the models are those of the slots"),
        ("spec.maxConcurrency", spec.max_concurrency.is_some(), "each model of a slot has its own limit"),
    ];
    match given.into_iter().find(|(_, given, _)| *given) {
        Some((field, _, why)) => Err(ValidateError::Multiplexer {
            field: field.to_owned(),
            problem: format!("cannot be combined with spec.multiplexer, because {why}: remove it"),
        }),
        None => Ok(()),
    }
}

/// Checks drivers that have requirements on the Pod.
fn place(spec: &WorkerPoolSpec, block: &Multiplexer) -> Judged {
    let has_programs = spec.mode() == Mode::Template || !spec.sidecar.image.trim().is_empty();
    if let Some(slot) = block.slots.iter().find(|slot| slot.runs_commands())
        && !has_programs
    {
        let what = format!(
            "driver {} runs programs in the worker's container: use spec.template, or set spec.sidecar.image to an image with \
             the programs and the worker",
            slot.driver.as_str()
        );
        return refuse(&format!("slots.{}.driver", slot.id), what);
    }
    if let Some(slot) = block.slots.iter().find(|slot| slot.driver == Driver::Kubernetes) {
        let field = format!("slots.{}.driver", slot.id);
        if spec.mode() != Mode::Standalone {
            return refuse(
                &field,
                "driver kubernetes requires spec.standalone: only standalone workers may scale Deployments",
            );
        }
        let standalone = spec.standalone.as_ref().and_then(|standalone| standalone.replicas);
        if spec.replicas.or(standalone).is_some_and(|replicas| replicas > 1) {
            return refuse(&field, "only one worker may scale the Deployments: set spec.replicas to 1");
        }
    }
    Ok(())
}

fn knobs(block: &Multiplexer) -> Judged {
    let duration = |field: &str, text: Option<&str>| match text.map(units::parse_duration) {
        Some(Err(error)) => refuse(field, error.to_string()),
        Some(Ok(_)) | None => Ok(()),
    };
    let or_zero = |field: &str, text: Option<&str>| match text.map(units::parse_duration_or_zero) {
        Some(Err(error)) => refuse(field, error.to_string()),
        Some(Ok(_)) | None => Ok(()),
    };
    if let Some(Err(error)) = block.drain_timeout.as_ref().map(|text| text.parse()) {
        return refuse("drainTimeout", error.to_string());
    }
    duration("loadTimeout", block.load_timeout.as_ref().map(|text| text.0.as_str()))?;
    duration("holdBudget", block.hold_budget.as_ref().map(|text| text.0.as_str()))?;
    or_zero("minResidency", block.min_residency.as_ref().map(|text| text.0.as_str()))?;
    duration("maxWait", block.max_wait.as_deref().filter(|text| *text != "auto"))?;
    or_zero("linger", block.linger.as_deref().filter(|text| !["auto", "off"].contains(text)))
}

fn slot(slot: &Slot) -> Judged {
    name("slots.id", &slot.id, MAX_SLOT_ID_CHARS)?;
    let at = format!("slots.{}", slot.id);
    if slot.models.is_empty() || slot.models.len() > MAX_MODELS_PER_SLOT {
        let found = slot.models.len();
        return refuse(&format!("{at}.models"), format!("must have 1 to {MAX_MODELS_PER_SLOT} models, not {found}"));
    }
    size(&format!("{at}.memory"), slot.memory.as_ref())?;
    let shares_url = matches!(slot.driver, Driver::LlamaServer | Driver::Ollama);
    match &slot.url {
        Some(given) if shares_url => url(&format!("{at}.url"), given)?,
        Some(_) => {
            let why =
                format!("driver {} needs a url per model, not per slot: move it to the models", slot.driver.as_str());
            return refuse(&format!("{at}.url"), why);
        }
        None if shares_url => {
            return refuse(&format!("{at}.url"), "missing: set the address of the server of all models of the slot");
        }
        None => {}
    }
    let mut ids = BTreeSet::new();
    for one in &slot.models {
        if !ids.insert(&one.id) {
            return refuse(&format!("{at}.models"), format!("duplicate id {}: remove one of the models", one.id));
        }
        model(&at, slot.driver, one)?;
    }
    levels(&at, slot)?;
    default(&at, slot)
}

fn default(at: &str, slot: &Slot) -> Judged {
    let after = slot.return_to_default_after.as_ref();
    match &slot.default {
        Some(default) if !slot.models.iter().any(|model| model.id == *default) => refuse(
            &format!("{at}.default"),
            format!("{default} is not a model of the slot: use the id of one of its models"),
        ),
        None if after.is_some() => {
            refuse(&format!("{at}.returnToDefaultAfter"), "requires default: set it to the id of a model")
        }
        Some(_) | None => duration(&format!("{at}.returnToDefaultAfter"), after.map(|after| after.parse())),
    }
}

/// A slot accounts for the memory that its sleepers keep, so all its models must sleep at the same level.
fn levels(at: &str, slot: &Slot) -> Judged {
    let levels: BTreeSet<i32> = slot.models.iter().map(|model| model.level.unwrap_or(1)).collect();
    match levels.iter().copied().collect::<Vec<_>>().as_slice() {
        [1 | 2] => Ok(()),
        _ => refuse(&format!("{at}.models.level"), "must be 1 or 2, the same for all models of a slot"),
    }
}

fn model(slot: &str, driver: Driver, model: &SlotModel) -> Judged {
    name(&format!("{slot}.models.id"), &model.id, MAX_MODEL_CHARS)?;
    let at = format!("{slot}.models.{}", model.id);
    if let Some(key) = foreign(driver, model) {
        let why = format!("not supported by driver {}: remove it, or use another driver", driver.as_str());
        return refuse(&format!("{at}.{key}"), why);
    }
    for alias in &model.aliases {
        name(&format!("{at}.aliases"), alias, MAX_MODEL_CHARS)?;
    }
    if model.max_concurrency.is_some_and(|number| !(1..=65535).contains(&number)) {
        return refuse(&format!("{at}.maxConcurrency"), "must be 1 to 65535");
    }
    size(&format!("{at}.memory"), model.memory.as_ref())?;
    duration(&format!("{at}.idleTtl"), model.idle_ttl.as_ref().map(|text| text.parse()))?;
    if model.health_path.as_ref().is_some_and(|path| !path.starts_with('/')) {
        return refuse(&format!("{at}.healthPath"), "must be a path such as /health");
    }
    if model.expect_model.as_ref().is_some_and(|expected| expected.trim().is_empty()) {
        return refuse(&format!("{at}.expectModel"), "must be a model that the backend lists in /v1/models, or absent");
    }
    backend(&at, driver, model)
}

/// Returns the first key that only other drivers read.
fn foreign(driver: Driver, model: &SlotModel) -> Option<&'static str> {
    let read: &[&str] = match driver {
        Driver::Static => &["url", "healthPath", "expectModel"],
        Driver::Process | Driver::Sglang => &["command", "env", "url", "healthPath", "expectModel"],
        Driver::LlamaServer | Driver::Ollama => &[],
        Driver::VllmSleep => &["command", "env", "url", "healthPath", "expectModel", "level"],
        Driver::Kubernetes => &["deployment", "url", "healthPath", "expectModel"],
        Driver::Hooks => &["url", "healthPath", "expectModel", "load", "evict", "alive"],
    };
    let given = [
        ("command", !model.command.is_empty()),
        ("env", !model.env.is_empty()),
        ("url", model.url.is_some()),
        ("healthPath", model.health_path.is_some()),
        ("expectModel", model.expect_model.is_some()),
        ("level", model.level.is_some()),
        ("deployment", model.deployment.is_some()),
        ("load", !model.load.is_empty()),
        ("evict", !model.evict.is_empty()),
        ("alive", !model.alive.is_empty()),
    ];
    given.into_iter().find(|(key, given)| *given && !read.contains(key)).map(|(key, _)| key)
}

/// Checks the settings that the driver requires of a model.
fn backend(at: &str, driver: Driver, model: &SlotModel) -> Judged {
    if let Some(given) = &model.url {
        url(&format!("{at}.url"), given)?;
    }
    match driver {
        Driver::LlamaServer | Driver::Ollama => Ok(()),
        Driver::Process => {
            command(at, "command", &model.command)?;
            let uses_port = model.command.iter().chain(model.env.values()).any(|text| text.contains(PORT));
            if model.url.is_none() && !uses_port {
                let why = format!("the command has no port to listen on: add {PORT} to it, or set url");
                return refuse(&format!("{at}.command"), why);
            }
            Ok(())
        }
        Driver::Static => needs_url(at, model),
        Driver::VllmSleep | Driver::Sglang => {
            needs_url(at, model)?;
            match (model.command.is_empty(), model.env.is_empty()) {
                (true, false) => refuse(&format!("{at}.env"), "requires command: set command, or remove env"),
                (true, true) => Ok(()),
                (false, _) => command(at, "command", &model.command),
            }
        }
        Driver::Kubernetes => match model.deployment.as_deref() {
            Some(deployment) if is_object_name(deployment) => Ok(()),
            Some(_) => refuse(&format!("{at}.deployment"), "must be a valid name of a Deployment"),
            None => refuse(
                &format!("{at}.deployment"),
                "missing: set the Deployment in this namespace that serves the model",
            ),
        },
        Driver::Hooks => {
            needs_url(at, model)?;
            command(at, "load", &model.load)?;
            command(at, "evict", &model.evict)?;
            if model.alive.is_empty() { Ok(()) } else { command(at, "alive", &model.alive) }
        }
    }
}

fn needs_url(at: &str, model: &SlotModel) -> Judged {
    match model.url {
        Some(_) => Ok(()),
        None => refuse(
            &format!("{at}.url"),
            "missing: set the address of the model's backend, such as http://127.0.0.1:8001",
        ),
    }
}

fn command(at: &str, key: &str, words: &[String]) -> Judged {
    match words.first() {
        Some(program) if !program.is_empty() => Ok(()),
        Some(_) | None => {
            refuse(&format!("{at}.{key}"), "missing: set a program and its arguments, such as [vllm, serve, NAME]")
        }
    }
}

/// Checks a URL by the worker's rules.
fn url(field: &str, text: &str) -> Judged {
    let Ok(url) = Url::parse(text.trim()) else {
        return refuse(field, "must be http://HOST:PORT or https://HOST:PORT, with a path if the backend has one");
    };
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
        return refuse(field, "must be http://HOST:PORT or https://HOST:PORT, with a path if the backend has one");
    }
    // The URL may contain a password, so it is not repeated.
    let is_plain =
        url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
    if is_plain { Ok(()) } else { refuse(field, "must not contain credentials, a query or a fragment") }
}

fn name(field: &str, text: &str, longest: usize) -> Judged {
    let is_clean = text.trim() == text && !text.is_empty() && !text.chars().any(char::is_control);
    if is_clean && text != "*" && text.chars().count() <= longest {
        return Ok(());
    }
    refuse(
        field,
        format!("must be a name of 1 to {longest} printable characters, not *, without leading or trailing spaces"),
    )
}

fn is_object_name(text: &str) -> bool {
    let is_part = |part: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        ends(part.chars().next())
            && ends(part.chars().last())
            && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    text.len() <= 253 && text.split('.').all(is_part)
}

fn duration<T>(field: &str, parsed: Option<Result<T, UnitError>>) -> Judged {
    match parsed {
        Some(Err(error)) => refuse(field, error.to_string()),
        Some(Ok(_)) | None => Ok(()),
    }
}

fn size(field: &str, text: Option<&SizeText>) -> Judged {
    match text.map(SizeText::parse) {
        Some(Err(error)) => refuse(field, error.to_string()),
        Some(Ok(_)) | None => Ok(()),
    }
}

/// Checks that each model name has one meaning, in whichever slot.
fn names(block: &Multiplexer) -> Judged {
    let models = || block.slots.iter().flat_map(|slot| slot.models.iter().map(move |model| (slot, model)));
    let ids: BTreeSet<&str> = models().map(|(_, model)| model.id.as_str()).collect();
    let mut aliases: BTreeMap<&str, &str> = BTreeMap::new();
    for (slot, model) in models() {
        let field = format!("slots.{}.models.{}.aliases", slot.id, model.id);
        let mut own = BTreeSet::new();
        for alias in &model.aliases {
            if ids.contains(alias.as_str()) {
                return refuse(&field, format!("{alias} is the id of a model: remove the alias"));
            }
            if !own.insert(alias) {
                return refuse(&field, format!("duplicate alias {alias}: remove one"));
            }
            match aliases.insert(alias, &model.id) {
                Some(other) if other != model.id => {
                    return refuse(&field, format!("{alias} is already an alias of {other}: remove one of the two"));
                }
                Some(_) | None => {}
            }
        }
    }
    let all = ids.len() + aliases.len();
    if all > MAX_MODELS_PER_WORKER {
        return refuse("slots", format!("too many model names: {all}, at most {MAX_MODELS_PER_WORKER} per worker"));
    }
    Ok(())
}

/// Checks that each Deployment serves one model: with two, neither could be recognized as loaded.
fn deployments(block: &Multiplexer) -> Judged {
    let mut seen = BTreeSet::new();
    for slot in &block.slots {
        for model in &slot.models {
            if let Some(deployment) = model.deployment.as_deref().filter(|deployment| !seen.insert(*deployment)) {
                let field = format!("slots.{}.models.{}.deployment", slot.id, model.id);
                return refuse(
                    &field,
                    format!("{deployment} already serves another model: each model needs its own Deployment"),
                );
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
