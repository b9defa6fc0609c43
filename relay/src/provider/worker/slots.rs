//! Validation of a multiplexer's reports: bounded, or rejected as a whole.
//!
//! An invalid report is no reason to lose a worker's running requests. Rejected slots leave the last valid ones in
//! effect, because they only influence a choice; rejected gates leave none open, because gates let requests through.

use std::collections::{BTreeSet, HashSet};

use modelrelay_protocol::limits::{MAX_ID_BYTES, MAX_MODEL_CHARS, MAX_MODELS_PER_WORKER, MAX_SLOTS_PER_WORKER};
use modelrelay_protocol::message::{ModelGrant, Slot, SlotModel};
use modelrelay_protocol::names;

use crate::dispatch::{Gate, Model};

/// The maximum length of a failure's message.
const MAX_MESSAGE_CHARS: usize = 1_024;

/// The maximum length of a failure's code.
const MAX_CODE_CHARS: usize = 64;

/// The maximum number of models of a multiplexer, including those that a provider's own limit leaves out.
pub fn most_models(max_models_per_worker: usize) -> usize {
    max_models_per_worker.max(MAX_MODELS_PER_WORKER)
}

/// Returns the slots, or why they are invalid. `most` is the number of models that a worker may have.
pub fn clean_slots(mut slots: Vec<Slot>, most: usize) -> Result<Vec<Slot>, String> {
    if slots.len() > MAX_SLOTS_PER_WORKER {
        return Err(format!("{} slots exceed the limit of {MAX_SLOTS_PER_WORKER}", slots.len()));
    }
    let mut seen = HashSet::new();
    for slot in &slots {
        if slot.id.is_empty() || slot.id.len() > MAX_ID_BYTES || slot.id.contains(names::is_unprintable) {
            return Err(format!("a slot id is empty, longer than {MAX_ID_BYTES} bytes or not printable"));
        }
        if !seen.insert(&*slot.id) {
            return Err(format!("two slots are named {}", slot.id));
        }
        let named = slot.resident.iter().chain(&slot.target);
        check_models(named.map(String::as_str), usize::MAX, false)?;
        check_models(slot.models.iter().map(|model| &*model.id), most, true)
            .and_then(|()| check_models(names(slot), usize::MAX, false))
            .map_err(|why| format!("slot {}: {why}", slot.id))?;
        let number = names(slot).count();
        if number > most {
            return Err(format!("slot {}: {number} model names exceed the limit of {most}", slot.id));
        }
    }
    // The same rule as for a worker's own file: models that are in several slots are counted once.
    let number = slots.iter().flat_map(names).collect::<HashSet<_>>().len();
    if number > most {
        return Err(format!("{number} model names in all slots exceed the limit of {most}"));
    }
    slots.iter_mut().flat_map(|slot| &mut slot.models).for_each(clean_words);
    Ok(slots)
}

/// Ids and aliases, with repeats.
fn names(slot: &Slot) -> impl Iterator<Item = &str> {
    let aliases = slot.models.iter().flat_map(|model| &model.aliases);
    slot.models.iter().map(|model| &model.id).chain(aliases).map(String::as_str)
}

/// Returns the names that are no model's id. Without the slots their meaning is unknown.
pub fn aliases(slots: &[Slot]) -> BTreeSet<String> {
    let models = || slots.iter().flat_map(|slot| &slot.models);
    let ids: HashSet<&str> = models().map(|model| &*model.id).collect();
    models().flat_map(|model| &model.aliases).filter(|alias| !ids.contains(alias.as_str())).cloned().collect()
}

/// Returns the gates, or why they are invalid.
pub fn clean_gates(models: &[ModelGrant], most: usize) -> Result<Vec<(Model, Gate)>, String> {
    check_models(models.iter().map(|model| &*model.id), most, true)?;
    let gate = |model: &ModelGrant| Gate { slots: model.slots, others: model.others, capacity: model.capacity };
    Ok(models.iter().map(|model| (model.id.as_str().into(), gate(model))).collect())
}

fn check_models<'a>(models: impl Iterator<Item = &'a str>, most: usize, once: bool) -> Result<(), String> {
    let mut seen = HashSet::new();
    let mut count = 0;
    for model in models {
        count += 1;
        if !names::is_model_name(model) {
            return Err(format!("a model name does not have 1 to {MAX_MODEL_CHARS} printable characters"));
        }
        if !seen.insert(model) && once {
            return Err(format!("model {} is listed twice", model.escape_debug()));
        }
    }
    if count > most {
        return Err(format!("{count} models exceed the limit of {most}"));
    }
    Ok(())
}

/// Cuts human-readable text, which is never a reason to reject a report.
fn clean_words(model: &mut SlotModel) {
    let cut = |text: &mut String, most: usize| {
        *text = names::printable(text, most);
    };
    model.message.iter_mut().for_each(|message| cut(message, MAX_MESSAGE_CHARS));
    model.code.iter_mut().for_each(|code| cut(code, MAX_CODE_CHARS));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(id: &str, models: &[&str]) -> Slot {
        let models = models.iter().map(|id| SlotModel { id: (*id).to_owned(), ..SlotModel::default() });
        Slot { id: id.to_owned(), models: models.collect(), ..Slot::default() }
    }

    /// A slot with this number of models, each with this number of aliases.
    fn named(id: &str, models: usize, aliases: usize) -> Slot {
        let named = |model: usize| SlotModel {
            id: format!("model {model}"),
            aliases: (0..aliases).map(|alias| format!("name {alias} of model {model}")).collect(),
            ..SlotModel::default()
        };
        Slot { models: (0..models).map(named).collect(), ..slot(id, &[]) }
    }

    fn refusal(slots: Vec<Slot>) -> String {
        clean_slots(slots, 4).expect_err("refused")
    }

    #[test]
    fn valid_slots_are_unchanged() {
        let slots = vec![slot("gpu0", &["a", "b"]), slot("gpu1", &["a"])];
        assert_eq!(clean_slots(slots.clone(), 4), Ok(slots));
        assert_eq!(clean_slots(vec![], 4), Ok(vec![]));
    }

    #[test]
    fn invalid_slots_are_rejected_with_reason() {
        let many = (0..=MAX_SLOTS_PER_WORKER).map(|number| slot(&number.to_string(), &[])).collect();
        assert!(refusal(many).contains("17 slots"));
        assert!(refusal(vec![slot("x", &[]), slot("x", &[])]).contains("two slots are named x"));
        assert!(refusal(vec![slot("", &[])]).contains("a slot id"));
        assert!(refusal(vec![slot("x", &["a", "a"])]).contains("slot x: model a is listed twice"));
        assert!(refusal(vec![slot("x", &["1", "2", "3", "4", "5"])]).contains("5 models exceed the limit of 4"));
        assert!(refusal(vec![slot("x", &[&"n".repeat(257)])]).contains("1 to 256 printable"));
        let three = ["x", "y", "z"].map(|id| slot(id, &[&format!("{id}1"), &format!("{id}2")]));
        assert!(refusal(three.into()).contains("6 model names in all slots exceed the limit of 4"));
        assert!(refusal(vec![named("x", 2, 2)]).contains("slot x: 6 model names exceed the limit of 4"));
        let alias = |alias: String| vec![SlotModel { id: "a".into(), aliases: vec![alias], ..SlotModel::default() }];
        assert!(refusal(vec![Slot { models: alias(String::new()), ..slot("x", &[]) }]).contains("a model name"));
        assert!(
            refusal(vec![Slot { models: alias("n".repeat(257)), ..slot("x", &[]) }]).contains("1 to 256 printable")
        );
        let resident = Slot { resident: Some(String::new()), ..slot("x", &[]) };
        assert!(refusal(vec![resident]).contains("a model name"));
    }

    #[test]
    fn largest_configurable_slots_are_accepted() {
        for (slots, models, aliases) in [(8, 20, 3), (9, 64, 0), (16, 64, 3), (16, 15, 16)] {
            let slots: Vec<_> = (0..slots).map(|slot| named(&format!("gpu{slot}"), models, aliases)).collect();
            let clean = clean_slots(slots.clone(), MAX_MODELS_PER_WORKER);
            assert_eq!(clean.map(|clean| clean == slots), Ok(true), "{models} models with {aliases} aliases");
        }
    }

    #[test]
    fn slot_may_target_its_resident() {
        let slot = Slot { resident: Some("a".into()), target: Some("a".into()), ..slot("x", &["a"]) };
        assert!(clean_slots(vec![slot], 4).is_ok());
    }

    #[test]
    fn human_readable_texts_are_truncated() {
        let mut failed = slot("x", &["a"]);
        failed.models[0].message = Some(format!("one\ntwo{}", "x".repeat(2_000)));
        let cleaned = clean_slots(vec![failed], 4).expect("sense");
        let message = cleaned[0].models[0].message.as_deref().expect("a message");
        assert!(message.starts_with("onetwo") && message.chars().count() == MAX_MESSAGE_CHARS);
    }

    #[test]
    fn gates_are_unique_per_model() {
        let grant = |id: &str| ModelGrant { id: id.to_owned(), slots: 1, others: 2, capacity: 3 };
        let gate = Gate { slots: 1, others: 2, capacity: 3 };
        assert_eq!(clean_gates(&[grant("a")], 4), Ok(vec![("a".into(), gate)]));
        assert!(clean_gates(&[grant("a"), grant("a")], 4).is_err());
        assert!(clean_gates(&["1", "2", "3", "4", "5"].map(grant), 4).is_err());
    }
}
