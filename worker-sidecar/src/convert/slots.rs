//! llama-swap's groups as slots.
//!
//! A group there may push out every other model, or run beside them. A slot here holds one model and knows nothing of other slots.
//! So whatever pushes others out shares one slot with them, and only what runs beside others has a slot of its own: a GPU
//! that is shared by mistake fails with "out of memory", one that is not shared by mistake merely waits.

use super::llama_swap::Group;
use super::{Model, Notes, Slot};

/// The slot of all models that push each other out.
const SHARED: &str = "gpu0";

/// Every model in one slot. `groups` in their order; a model in several belongs to the first.
pub(super) fn divide(mut models: Vec<Model>, groups: &[(String, Group)], notes: &mut Notes) -> Vec<Slot> {
    let mut own = Vec::new();
    for (name, group) in groups {
        let place = format!("groups.{name}");
        let mut members = Vec::new();
        for member in &group.members {
            match models.iter().position(|model| model.id == *member) {
                Some(index) => members.push(models.remove(index)),
                None => notes.add(&place, &format!("{member} is no model, or in another group already")),
            }
        }
        let is_apart = !group.exclusive || group.persistent;
        match (is_apart, group.swap) {
            (true, true) => own.extend(slot(name, members)),
            (true, false) => own.extend(members.into_iter().filter_map(|model| {
                let id = format!("{name}-{}", model.id);
                slot(&id, vec![model])
            })),
            (false, swap) => {
                if !swap {
                    notes.add(&place, &format!("its models ran together and nothing beside them; in slot {SHARED} they take turns. Where they fit together, give each a slot"));
                }
                models.extend(members);
            }
        }
        if is_apart {
            notes.add(
                &place,
                "it has slots of its own, which are loaded beside the others: their memory has to suffice for all",
            );
        }
    }
    slot(SHARED, models).into_iter().chain(own).collect()
}

fn slot(id: &str, models: Vec<Model>) -> Option<Slot> {
    let id = id.chars().filter(|letter| !letter.is_control()).take(64).collect();
    (!models.is_empty()).then_some(Slot { id, driver: "process", default: None, models })
}

/// Models that are to be there from the start: the first of each slot.
pub(super) fn preload(slots: &mut [Slot], wanted: &[String], notes: &mut Notes) {
    for id in wanted {
        match slots.iter_mut().find(|slot| slot.models.iter().any(|model| model.id == *id)) {
            Some(slot) if slot.default.is_none() => slot.default = Some(id.clone()),
            Some(slot) => notes.add(
                "hooks.on_startup.preload",
                &format!("{id} is not loaded at the start: slot {} holds one model", slot.id),
            ),
            None => notes.add("hooks.on_startup.preload", &format!("{id} is no model")),
        }
    }
}
