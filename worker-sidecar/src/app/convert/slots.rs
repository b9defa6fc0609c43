//! llama-swap's groups as slots.
//!
//! A group may unload every other model, or run in parallel with them. A slot holds one model and is independent of
//! other slots. So models that unload others share one slot with them, and only models that run in parallel with others
//! get their own slot: a GPU that is shared by mistake fails with "out of memory", while one that is wrongly not shared
//! merely causes waiting.

use serde::Deserialize;

use super::{ConvertedModel, ConvertedSlot, Notes};

/// Models that swap with each other, or run together, in parallel with others or instead of them.
#[derive(Debug, Deserialize)]
pub(super) struct Group {
    #[serde(default = "yes")]
    pub(super) swap: bool,
    #[serde(default = "yes")]
    pub(super) exclusive: bool,
    #[serde(default)]
    pub(super) persistent: bool,
    #[serde(default)]
    pub(super) members: Vec<String>,
}

fn yes() -> bool {
    true
}

/// The slot of all models that unload each other.
const SHARED: &str = "gpu0";

/// The most characters of a slot's name.
const MAX_ID_CHARS: usize = 64;

/// Puts every model into one slot. `groups` in their order; a model in several groups belongs to the first.
pub(super) fn divide(
    mut models: Vec<ConvertedModel>,
    groups: &[(String, Group)],
    notes: &mut Notes,
) -> Vec<ConvertedSlot> {
    let mut own = Vec::new();
    for (name, group) in groups {
        let place = format!("groups.{name}");
        let mut members = Vec::new();
        for member in &group.members {
            match models.iter().position(|model| model.id == *member) {
                Some(index) => members.push(models.remove(index)),
                None => notes.add(&place, &format!("{member} is not a model, or is already in another group")),
            }
        }
        let is_apart = !group.exclusive || group.persistent;
        match (is_apart, group.swap) {
            (true, true) => own.push((name.clone(), members)),
            (true, false) => own.extend(members.into_iter().map(|model| (format!("{name}-{}", model.id), vec![model]))),
            (false, swap) => {
                if !swap {
                    notes.add(&place, &format!("its models ran together and without others; in slot {SHARED} only one is loaded at a time. If they fit into memory together, give each its own slot"));
                }
                models.extend(members);
            }
        }
        if is_apart {
            notes.add(
                &place,
                "it has its own slots, which are loaded in addition to the others: memory must suffice for all",
            );
        }
    }
    let mut slots = Vec::new();
    for (name, models) in std::iter::once((SHARED.to_owned(), models)).chain(own) {
        if !models.is_empty() {
            let id = unused(&name, &slots);
            slots.push(ConvertedSlot { id, driver: "process", default: None, models });
        }
    }
    slots
}

/// Returns the group's name as a slot name; with a number if a slot has that name already.
fn unused(name: &str, slots: &[ConvertedSlot]) -> String {
    let numbers = (2..).map(|number| format!("-{number}"));
    let mut ids = std::iter::once(String::new()).chain(numbers).map(|end| {
        let letters = name.chars().filter(|letter| !letter.is_control());
        letters.take(MAX_ID_CHARS - end.len()).chain(end.chars()).collect::<String>()
    });
    ids.find(|id| slots.iter().all(|slot| slot.id != *id)).unwrap_or_default()
}

/// Sets the models that are loaded at the start: the first of each slot.
pub(super) fn preload(slots: &mut [ConvertedSlot], wanted: &[String], notes: &mut Notes) {
    for name in wanted.iter().map(|name| name.trim()).filter(|name| !name.is_empty()) {
        let model = slots.iter().flat_map(|slot| &slot.models);
        let model = model.filter(|model| model.id == name || model.aliases.iter().any(|alias| alias == name));
        let id = model.map(|model| model.id.clone()).next().unwrap_or_else(|| name.to_owned());
        match slots.iter_mut().find(|slot| slot.models.iter().any(|model| model.id == id)) {
            Some(slot) if slot.default.is_none() => slot.default = Some(id),
            Some(slot) => notes.add(
                "hooks.on_startup.preload",
                &format!("{id} is not loaded at startup: slot {} holds only one model", slot.id),
            ),
            None => notes.add("hooks.on_startup.preload", &format!("{id} is not a model")),
        }
    }
}
