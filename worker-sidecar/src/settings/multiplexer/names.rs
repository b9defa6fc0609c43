//! The names of a worker's models: each refers to one model.

use std::collections::{BTreeMap, BTreeSet};

use modelrelay_protocol::limits::{MAX_ALIASES_PER_MODEL, MAX_MODEL_CHARS, MAX_MODELS_PER_WORKER};

use super::file::FileSlot;
use super::{SettingError, check_id};

/// Rejects names that could refer to two models, and more names than a relay accepts. One model may be in several
/// slots, with the same aliases or others.
pub(super) fn check(slots: &[FileSlot]) -> Result<(), SettingError> {
    let models = || slots.iter().flat_map(|slot| slot.models.iter().map(move |model| (slot, model)));
    let ids: BTreeSet<&str> = models().map(|(_, model)| model.id.as_str()).collect();
    let mut meant: BTreeMap<&str, &str> = BTreeMap::new();
    for (slot, model) in models() {
        let at = format!("multiplexer.slots.{}.models.{}.aliases", slot.id, model.id);
        if model.aliases.len() > MAX_ALIASES_PER_MODEL {
            let number = format!("{} aliases", model.aliases.len());
            return Err(SettingError::new(at, number, format!("at most {MAX_ALIASES_PER_MODEL} aliases")));
        }
        let mut seen = BTreeSet::new();
        for alias in &model.aliases {
            check_id(&at, alias, MAX_MODEL_CHARS)?;
            if ids.contains(alias.as_str()) {
                return Err(SettingError::new(
                    at,
                    alias,
                    "an alias must not be the id of a model; remove it, or rename one",
                ));
            }
            if !seen.insert(alias) {
                return Err(SettingError::new(at, alias, "each alias must be listed once; remove one of the two"));
            }
            let other = meant.insert(alias, &model.id).filter(|other| *other != model.id);
            if let Some(other) = other {
                let why =
                    format!("an alias must belong to one model, but {other} has it too; remove it from one of the two");
                return Err(SettingError::new(at, alias, why));
            }
        }
    }
    let number = ids.len() + meant.len();
    if number > MAX_MODELS_PER_WORKER {
        let allowed = format!("at most {MAX_MODELS_PER_WORKER} models and aliases");
        return Err(SettingError::new("multiplexer.slots", format!("{number} models and aliases"), allowed));
    }
    Ok(())
}
