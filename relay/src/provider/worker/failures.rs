//! The last failed load in each slot of a worker, for humans and for programs that poll every few seconds.
//!
//! A slot reports a model as failed only during its back-off, which is two seconds at first. So the failure is kept
//! until that model is resident again, or for [`KEPT`]: one failure per slot, however many models it has. No decision
//! depends on it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use modelrelay_protocol::message::{Slot, SlotModel, SlotModelStatus};

/// Within this time the operator reports a failure only once.
const KEPT: Duration = Duration::from_secs(600);

/// A failed load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotFailure {
    /// The model.
    pub model: String,
    /// The kind of failure, as the worker reported it.
    pub code: Option<String>,
    /// The human-readable reason.
    pub message: Option<String>,
    /// When the relay received the report.
    pub at: Instant,
    /// True if the model was also failed in the slot's last report.
    lasts: bool,
}

/// The failures by slot.
#[derive(Debug, Default)]
pub struct Failures {
    by_slot: HashMap<String, SlotFailure>,
}

impl Failures {
    /// Records a slot report; `before` is the previous one.
    pub fn note(&mut self, before: &[Slot], slots: &[Slot], now: Instant) {
        self.by_slot.retain(|id, _| slots.iter().any(|slot| slot.id == *id));
        for slot in slots {
            let was_failed = |model: &SlotModel| {
                before.iter().filter(|old| old.id == slot.id).flat_map(|old| &old.models).any(|old| same(old, model))
            };
            let failed = || slot.models.iter().filter(|model| model.status == SlotModelStatus::Failed);
            if let Some(new) = failed().find(|model| !was_failed(model)) {
                self.by_slot.insert(slot.id.clone(), SlotFailure::of(new, now));
            } else if let Some(known) = self.by_slot.get_mut(&slot.id) {
                known.lasts = failed().any(|model| model.id == known.model);
            }
            if self.by_slot.get(&slot.id).is_some_and(|known| slot.resident.as_ref() == Some(&known.model)) {
                self.by_slot.remove(&slot.id);
            }
        }
    }

    /// Returns the failure of this slot.
    pub fn of(&self, slot: &str, now: Instant) -> Option<&SlotFailure> {
        let known = self.by_slot.get(slot)?;
        (known.lasts || now.saturating_duration_since(known.at) < KEPT).then_some(known)
    }

    /// Merges the failures from an older link of the same worker; `slots` is the current report.
    pub fn inherit(&mut self, older: Self, slots: &[Slot]) {
        for (id, old) in older.by_slot {
            let Some(slot) = slots.iter().find(|slot| slot.id == id) else { continue };
            match self.by_slot.get_mut(&id) {
                // The worker still reported the failure when it registered again.
                Some(new) if (&new.model, &new.code) == (&old.model, &old.code) => new.at = old.at,
                Some(_) => {}
                None if slot.resident.as_ref() == Some(&old.model) => {}
                None => {
                    self.by_slot.insert(id, SlotFailure { lasts: false, ..old });
                }
            }
        }
    }
}

impl SlotFailure {
    fn of(model: &SlotModel, at: Instant) -> Self {
        let SlotModel { id, code, message, .. } = model;
        Self { model: id.clone(), code: code.clone(), message: message.clone(), at, lasts: true }
    }
}

/// True if the model failed before as it does now.
fn same(old: &SlotModel, new: &SlotModel) -> bool {
    let is_same = (&old.id, &old.code, &old.message) == (&new.id, &new.code, &new.message);
    old.status == SlotModelStatus::Failed && is_same
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(resident: Option<&str>, failed: &[(&str, &str)]) -> Vec<Slot> {
        let model = |(id, code): &(&str, &str)| SlotModel {
            id: (*id).to_owned(),
            status: SlotModelStatus::Failed,
            code: Some((*code).to_owned()),
            ..SlotModel::default()
        };
        let models = failed.iter().map(model).collect();
        vec![Slot { id: "gpu0".into(), resident: resident.map(str::to_owned), models, ..Slot::default() }]
    }

    /// Returns the failures after these reports, one per second.
    fn failures_after(start: Instant, words: &[Vec<Slot>]) -> Failures {
        let (mut failures, mut before) = (Failures::default(), Vec::new());
        for (second, slots) in (0..).zip(words) {
            failures.note(&before, slots, start + Duration::from_secs(second));
            before.clone_from(slots);
        }
        failures
    }

    fn known(failures: &Failures, now: Instant) -> Option<(&str, &str)> {
        let failure = failures.of("gpu0", now)?;
        Some((&failure.model, failure.code.as_deref().unwrap_or_default()))
    }

    #[test]
    fn failure_is_kept_until_resident_or_ten_minutes() {
        let start = Instant::now();
        let (failing, fine) = (slot(None, &[("a", "x")]), slot(Some("b"), &[]));
        let passed = failures_after(start, &[failing.clone(), fine.clone()]);
        assert_eq!(known(&passed, start + Duration::from_secs(599)), Some(("a", "x")));
        assert_eq!(known(&passed, start + KEPT), None);
        let lasting = failures_after(start, &[failing.clone(), failing.clone()]);
        assert_eq!(known(&lasting, start + 2 * KEPT), Some(("a", "x")), "it is not over");
        assert_eq!(lasting.of("gpu0", start).map(|failure| failure.at), Some(start), "and is as old as it is");
        assert_eq!(known(&failures_after(start, &[failing.clone(), slot(Some("a"), &[])]), start), None);
        assert_eq!(known(&failures_after(start, &[failing, vec![]]), start), None, "the slot is gone");
        assert_eq!(known(&failures_after(start, &[fine]), start), None);
    }

    #[test]
    fn last_of_several_failures_is_kept() {
        let start = Instant::now();
        let rolled_back = failures_after(start, &[slot(None, &[("b", "x")]), slot(None, &[("a", "y"), ("b", "x")])]);
        assert_eq!(known(&rolled_back, start), Some(("a", "y")));
        let again = failures_after(start, &[slot(None, &[("a", "x")]), slot(None, &[]), slot(None, &[("a", "x")])]);
        assert_eq!(again.of("gpu0", start).map(|failure| failure.at), Some(start + Duration::from_secs(2)));
        let otherwise = failures_after(start, &[slot(None, &[("a", "x")]), slot(None, &[("a", "y")])]);
        assert_eq!(known(&otherwise, start), Some(("a", "y")));
    }

    #[test]
    fn newer_link_inherits_earlier_failure() {
        let (start, later) = (Instant::now(), Instant::now() + Duration::from_secs(60));
        let inherited = |slots: Vec<Slot>| {
            let mut newer = failures_after(later, std::slice::from_ref(&slots));
            newer.inherit(failures_after(start, &[slot(None, &[("a", "x")])]), &slots);
            newer.of("gpu0", later).map(|failure| (failure.model.clone(), failure.at))
        };
        assert_eq!(inherited(slot(Some("b"), &[])), Some(("a".to_owned(), start)));
        assert_eq!(inherited(slot(None, &[("a", "x")])), Some(("a".to_owned(), start)));
        assert_eq!(inherited(slot(None, &[("b", "x")])), Some(("b".to_owned(), later)));
        assert_eq!(inherited(slot(Some("a"), &[])), None);
        assert_eq!(inherited(vec![]), None);
    }
}
