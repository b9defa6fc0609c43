//! Validation of a registration: names are trimmed, lists are cleaned and cut, and every change is reported in a
//! warning.
//!
//! A worker never gains anything beyond the acknowledged registration.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use modelrelay_protocol::limits::{MAX_ID_BYTES, MAX_MODEL_CHARS, MAX_WORKER_NAME_CHARS};
use modelrelay_protocol::location::{ALLOWED_LABEL, Location};
use modelrelay_protocol::message::{Register, Slot};
use modelrelay_protocol::names::{self, Naming};
use modelrelay_protocol::version::{Capabilities, Capability, is_known_version};

use super::slots::{aliases, clean_slots, most_models};
use crate::settings::config::ProviderConfig;

/// The model name that the published worker registers if it could not read its backend's list. It is no model.
pub const WILDCARD: &str = "*";

/// The parts of a registration that were accepted.
#[derive(Clone, Debug, PartialEq)]
pub struct Accepted {
    /// The human-readable name.
    pub name: String,
    /// The models for which requests may be sent.
    pub models: Vec<Arc<str>>,
    /// The number of requests at once.
    pub max_concurrent: u32,
    /// Its zone and cluster.
    pub location: Location,
    /// The state of its slots, if it has a multiplexer.
    pub slots: Vec<Slot>,
    /// Names that only left-out slots define.
    pub meaningless: BTreeSet<String>,
    /// How the worker's backend matches model names.
    pub naming: Naming,
    /// Notes on the changes.
    pub warnings: Vec<String>,
}

/// True if this protocol version may register.
pub fn version_is_accepted(version: Option<&str>, required: bool) -> bool {
    match version {
        Some(version) => is_known_version(version),
        None => !required,
    }
}

/// Validates a registration.
pub fn sanitize(register: &Register, provider: &ProviderConfig) -> Accepted {
    let mut warnings = Vec::new();
    let trimmed = register.worker_name.trim();
    let mut name = names::printable(trimmed, MAX_WORKER_NAME_CHARS);
    if name != trimmed {
        warnings.push(format!("worker_name truncated to {MAX_WORKER_NAME_CHARS} printable characters"));
    } else if trimmed != register.worker_name {
        warnings.push("worker_name trimmed".to_owned());
    }
    if name.is_empty() {
        "worker".clone_into(&mut name);
    }
    let mut max_concurrent = register.max_concurrent;
    if max_concurrent == 0 {
        max_concurrent = 1;
        warnings.push("max_concurrent raised from 0 to 1".to_owned());
    }
    let (slots, meaningless) = sanitize_slots(register, provider, &mut warnings);
    let mut models = sanitize_models(&register.models, provider, &mut warnings);
    models.retain(|model| !meaningless.contains(&**model));
    let location = sanitize_location(register, &mut warnings);
    Accepted { name, models, max_concurrent, location, slots, meaningless, naming: register.naming, warnings }
}

/// Returns the valid labels: they become labels of metrics.
fn sanitize_location(register: &Register, warnings: &mut Vec<String>) -> Location {
    let given = register.location.as_deref().cloned().unwrap_or_default();
    let valid = given.clone().valid();
    for (what, is_left_out) in [("zone", given.zone != valid.zone), ("cluster", given.cluster != valid.cluster)] {
        if is_left_out {
            warnings.push(format!("{what} left out: allowed are {ALLOWED_LABEL}"));
        }
    }
    valid
}

/// Returns the valid slots of a multiplexer; without the capability they are ignored. If the slots are invalid, also
/// returns the names that they defined: a request by one could never be sent, and would wait for a load.
fn sanitize_slots(
    register: &Register,
    provider: &ProviderConfig,
    warnings: &mut Vec<String>,
) -> (Vec<Slot>, BTreeSet<String>) {
    let slots =
        register.slots.clone().filter(|_| Capabilities::from_names(&register.capabilities).has(Capability::Slots1));
    let slots = slots.unwrap_or_default();
    let names = aliases(&slots);
    match clean_slots(slots, most_models(provider.max_models_per_worker)) {
        Ok(slots) => (slots, BTreeSet::new()),
        Err(why) => {
            warnings.push(format!("slots left out: {why}"));
            if let Some(first) = names.first() {
                let number = names.len();
                warnings.push(format!(
                    "{number} model name(s) of these slots dropped, the first is {}",
                    first.escape_debug()
                ));
            }
            (Vec::new(), names)
        }
    }
}

/// Cleans a list of models: trims names, drops empty ones and duplicates in first-seen order, limits number and length,
/// and keeps only those of the catalogue if there is one.
pub fn sanitize_models(models: &[String], provider: &ProviderConfig, warnings: &mut Vec<String>) -> Vec<Arc<str>> {
    let mut seen = HashSet::new();
    let mut kept: Vec<Arc<str>> = Vec::new();
    let (mut empty, mut twice, mut long, mut unprintable, mut trimmed, mut foreign) = (0, 0, 0, 0, 0, Vec::new());
    let mut wildcards = 0;
    for raw in models {
        let model = raw.trim();
        trimmed += usize::from(model.len() != raw.len() && !model.is_empty());
        if model.is_empty() {
            empty += 1;
        } else if model == WILDCARD {
            wildcards += 1;
        } else if model.chars().count() > MAX_MODEL_CHARS {
            long += 1;
        } else if model.contains(names::is_unprintable) {
            unprintable += 1;
        } else if !seen.insert(model) {
            twice += 1;
        } else if !in_catalogue(model, provider) {
            foreign.push(model);
        } else {
            kept.push(model.into());
        }
    }
    let mut warn = |count: usize, what: &str| {
        if count > 0 {
            warnings.push(format!("{count} model name(s) {what}"));
        }
    };
    warn(trimmed, "trimmed");
    warn(empty, "dropped: empty");
    warn(wildcards, "dropped: `*` is not a model name, and the worker has not listed its backend's models yet");
    warn(twice, "dropped: duplicate");
    warn(long, &format!("dropped: longer than {MAX_MODEL_CHARS} characters"));
    warn(unprintable, "dropped: with control or invisible characters");
    if let Some(first) = kept.get(provider.max_models_per_worker) {
        let (most, first) = (provider.max_models_per_worker, first.escape_debug());
        let excess = kept.len() - most;
        warn(excess, &format!("dropped: more than {most} models (MAX_MODELS_PER_WORKER), the first is {first}"));
    }
    kept.truncate(provider.max_models_per_worker);
    for model in foreign.iter().take(8) {
        warnings.push(format!(
            "model {} dropped: not in the catalogue of provider {}",
            model.escape_debug(),
            provider.name
        ));
    }
    if foreign.len() > 8 {
        warnings.push(format!("{} more models dropped: not in the catalogue", foreign.len() - 8));
    }
    kept
}

/// Returns an id from the wire, if it is valid.
pub fn accepted_id(id: Option<&str>) -> Option<Arc<str>> {
    id.filter(|id| !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(|b| b.is_ascii_graphic()))
        .map(Arc::from)
}

fn in_catalogue(model: &str, provider: &ProviderConfig) -> bool {
    provider.models.as_ref().is_none_or(|catalogue| catalogue.iter().any(|entry| entry.id == model))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::config::CatalogueModel;
    use modelrelay_protocol::message::SlotModel;

    fn register(models: &[&str]) -> Register {
        Register {
            worker_name: "box".into(),
            max_concurrent: 2,
            models: models.iter().map(ToString::to_string).collect(),
            ..Register::default()
        }
    }

    fn names(accepted: &Accepted) -> Vec<&str> {
        accepted.models.iter().map(AsRef::as_ref).collect()
    }

    #[test]
    fn models_are_trimmed_deduplicated_in_order_and_capped() {
        let mut provider = ProviderConfig::new("p");
        provider.max_models_per_worker = 2;
        let accepted = sanitize(&register(&[" b ", "", "a", "b", "c"]), &provider);
        assert_eq!(names(&accepted), ["b", "a"]);
        assert_eq!(accepted.warnings.len(), 4, "{:?}", accepted.warnings);
    }

    #[test]
    fn invalid_zone_is_left_out_with_warning() {
        let mut message = register(&["a"]);
        let location = Location { zone: Some("a\u{1b}[31m".into()), cluster: Some("home".into()) };
        message.location = Some(Box::new(location));
        let accepted = sanitize(&message, &ProviderConfig::new("p"));
        assert_eq!(accepted.location, Location { zone: None, cluster: Some("home".into()) });
        assert_eq!(accepted.warnings.len(), 1, "{:?}", accepted.warnings);
        assert!(accepted.warnings[0].starts_with("zone left out"), "{:?}", accepted.warnings);
    }

    #[test]
    fn wildcard_is_rejected_as_model() {
        let accepted = sanitize(&register(&[" * ", "a*"]), &ProviderConfig::new("p"));
        assert_eq!(names(&accepted), ["a*"]);
        assert!(accepted.warnings.iter().any(|warning| warning.contains("`*`")), "{:?}", accepted.warnings);
    }

    #[test]
    fn clean_registration_has_no_warnings() {
        assert_eq!(sanitize(&register(&["a", "b"]), &ProviderConfig::new("p")).warnings, Vec::<String>::new());
    }

    #[test]
    fn models_outside_catalogue_are_dropped_with_warning() {
        let mut provider = ProviderConfig::new("p");
        provider.models = Some(vec![CatalogueModel { id: "a".into(), aliases: vec!["alias".into()] }]);
        let accepted = sanitize(&register(&["a", "z", "alias"]), &provider);
        assert_eq!(names(&accepted), ["a"]);
        assert!(accepted.warnings.iter().any(|w| w.contains("model z")), "{:?}", accepted.warnings);
    }

    #[test]
    fn aliases_are_dropped_without_slots_defining_them() {
        let mut message = register(&["a", "b", "fast"]);
        message.capabilities = vec!["core1".to_owned(), "slots1".to_owned()];
        let model = SlotModel { id: "a".into(), aliases: vec!["fast".into(), "b".into()], ..SlotModel::default() };
        let slot = |models: &[&SlotModel]| Slot {
            id: "gpu0".into(),
            models: models.iter().map(|model| (*model).clone()).collect(),
            ..Slot::default()
        };
        let b = SlotModel { id: "b".into(), ..SlotModel::default() };
        message.slots = Some(vec![slot(&[&model, &b])]);
        assert_eq!(names(&sanitize(&message, &ProviderConfig::new("p"))), ["a", "b", "fast"]);
        message.slots = Some(vec![slot(&[&model, &b]), slot(&[])]);
        let accepted = sanitize(&message, &ProviderConfig::new("p"));
        assert_eq!((names(&accepted), accepted.slots.len()), (vec!["a", "b"], 0));
        assert_eq!(accepted.warnings.len(), 2, "{:?}", accepted.warnings);
        assert!(accepted.warnings[1].contains("fast"), "{:?}", accepted.warnings);
    }

    #[test]
    fn zero_concurrency_and_long_worker_names_are_corrected() {
        let mut message = register(&["a"]);
        message.max_concurrent = 0;
        message.worker_name = format!(" {} ", "ä".repeat(200));
        let accepted = sanitize(&message, &ProviderConfig::new("p"));
        assert_eq!((accepted.max_concurrent, accepted.name.chars().count()), (1, MAX_WORKER_NAME_CHARS));
        assert_eq!(accepted.warnings.len(), 2);
    }
}
