//! How near a slot is to a model that it does not serve yet, which decides where the model is loaded.
//!
//! Relays choose a worker by this, and a worker with several slots chooses one of them. Both must agree, or one request
//! makes two slots load the same model. Both therefore call the same function, whose only input is the slot's own
//! report and its age.

use std::cmp::Reverse;
use std::time::Duration;

use crate::message::{Slot, SlotModel, SlotModelStatus, SlotState};

/// A sleeping model goes before an empty slot once its slot has been idle for this many times the swap cost.
const IDLE_SWAPS: u32 = 3;

/// The obstacle between a slot and a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The slot is loading the model, or holds it.
    Coming,
    /// The slot is empty.
    Empty,
    /// The slot holds another model, which is idle.
    Idle,
    /// The slot holds another model, or is loading one.
    Busy,
    /// The slot holds a pinned model.
    Pinned,
    /// The slot loads nothing: its worker is ending, or it needs an operator.
    Closed,
}

/// How near a slot is to a model, nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Nearness {
    /// The slot drains or loads for the model, or is ready.
    Coming,
    /// The model sleeps there, and the slot has long been idle.
    Asleep,
    /// The slot is empty.
    Empty,
    /// The slot has been idle for this number of whole seconds. Relays that read the same slots some milliseconds apart
    /// must agree, and leave the rest to the tie-break that is the same for all.
    Idle(Reverse<u64>),
    /// The slot is busy, and other models are wanted there.
    Busy {
        /// The number of other wanted models.
        wanted: u32,
    },
    /// Nothing is known, or the slot's resident is pinned.
    Far,
}

impl Nearness {
    /// True if the slot is idle.
    pub fn is_free(self) -> bool {
        matches!(self, Self::Asleep | Self::Empty | Self::Idle(_))
    }
}

impl Way {
    /// Returns the obstacle between this slot and this model.
    pub fn of(slot: &Slot, model: &str) -> Self {
        let is_target = slot.target.as_deref() == Some(model);
        match slot.state {
            SlotState::Stopping | SlotState::Quarantined => Self::Closed,
            SlotState::Draining
            | SlotState::Severing
            | SlotState::Evicting
            | SlotState::Loading
            | SlotState::RollingBack
                if is_target =>
            {
                Self::Coming
            }
            SlotState::Empty | SlotState::Backoff => Self::Empty,
            // The gate will open, or it is closing and the slot's next state will show that.
            SlotState::Ready if slot.resident.as_deref() == Some(model) => Self::Coming,
            SlotState::Ready if holds_pinned(slot) => Self::Pinned,
            SlotState::Ready if slot.idle_ms > 0 => Self::Idle,
            SlotState::Ready
            | SlotState::Draining
            | SlotState::Severing
            | SlotState::Evicting
            | SlotState::Loading
            | SlotState::RollingBack => Self::Busy,
        }
    }
}

/// The part of a slot's report that determines how near it is to one of its models.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// The obstacle between them.
    pub way: Way,
    /// True if the model sleeps there.
    is_asleep: bool,
    /// How long the slot had been idle.
    idle: Duration,
    swap_cost: Duration,
    /// The number of other models that are wanted there.
    wanted: u32,
    /// True if this model is wanted there.
    is_wanted: bool,
    /// The time for which the model will not be tried again; zero if it has not failed.
    fails_for: Duration,
}

impl Offer {
    /// Reads the report of `slot` on `model`, which is one of its own.
    pub fn new(slot: &Slot, model: &SlotModel) -> Self {
        let fails_for = match model.status {
            // Without a time, until the next report.
            SlotModelStatus::Failed => model.retry_ms.map_or(Duration::MAX, Duration::from_millis),
            SlotModelStatus::Resident | SlotModelStatus::Sleeping | SlotModelStatus::Unloaded => Duration::ZERO,
        };
        Self {
            way: Way::of(slot, &model.id),
            is_asleep: model.status == SlotModelStatus::Sleeping,
            idle: Duration::from_millis(slot.idle_ms),
            swap_cost: Duration::from_millis(model.swap_cost_ms),
            wanted: slot.wanted.saturating_sub(u32::from(model.wanted)),
            is_wanted: model.wanted,
            fails_for,
        }
    }

    /// True if the model was requested from the slot, or is being loaded for another reason.
    pub fn is_requested(&self) -> bool {
        self.is_wanted || self.way == Way::Coming
    }

    /// How near they are, `ago` after the report. `None`: the slot does not load the model.
    pub fn nearness(&self, ago: Duration) -> Option<Nearness> {
        if ago < self.fails_for {
            return None;
        }
        let idle = self.idle.saturating_add(ago);
        match self.way {
            Way::Coming => Some(Nearness::Coming),
            Way::Empty if self.is_asleep => Some(Nearness::Asleep),
            Way::Empty => Some(Nearness::Empty),
            Way::Idle if self.is_asleep && idle >= self.swap_cost.saturating_mul(IDLE_SWAPS) => Some(Nearness::Asleep),
            Way::Idle => Some(Nearness::Idle(Reverse(idle.as_secs()))),
            Way::Busy => Some(Nearness::Busy { wanted: self.wanted }),
            Way::Pinned => Some(Nearness::Far),
            Way::Closed => None,
        }
    }

    /// How near they are once the slot has started to load another requested model.
    pub fn nearness_behind_another(&self) -> Nearness {
        Nearness::Busy { wanted: self.wanted.saturating_add(1) }
    }
}

fn holds_pinned(slot: &Slot) -> bool {
    slot.models.iter().any(|model| model.pinned && slot.resident.as_ref() == Some(&model.id))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(state: SlotState, resident: Option<&str>) -> Slot {
        let resident = resident.map(str::to_owned);
        let a = SlotModel { id: "a".to_owned(), ..SlotModel::default() };
        Slot { state, resident, models: vec![a], ..Slot::default() }
    }

    fn m() -> SlotModel {
        SlotModel { id: "m".to_owned(), swap_cost_ms: 2_000, ..SlotModel::default() }
    }

    fn near(slot: &Slot, model: &SlotModel) -> Option<Nearness> {
        Offer::new(slot, model).nearness(Duration::from_secs(1))
    }

    #[test]
    fn nearness_follows_state_of_slot() {
        let idle = |millis| Slot { idle_ms: millis, wanted: 2, ..slot(SlotState::Ready, Some("a")) };
        let loading = |target: &str| Slot { target: Some(target.to_owned()), ..slot(SlotState::Loading, None) };
        let mut pinned = idle(60_000);
        pinned.models[0].pinned = true;
        for (slot, nearness) in [
            (loading("m"), Some(Nearness::Coming)),
            (slot(SlotState::Ready, Some("m")), Some(Nearness::Coming)),
            (slot(SlotState::Empty, None), Some(Nearness::Empty)),
            (slot(SlotState::Backoff, None), Some(Nearness::Empty)),
            (idle(1_500), Some(Nearness::Idle(Reverse(2)))),
            (idle(0), Some(Nearness::Busy { wanted: 2 })),
            (loading("a"), Some(Nearness::Busy { wanted: 0 })),
            (pinned, Some(Nearness::Far)),
            (slot(SlotState::Stopping, None), None),
            (slot(SlotState::Quarantined, None), None),
        ] {
            assert_eq!(near(&slot, &m()), nearness, "{slot:?}");
        }
    }

    #[test]
    fn own_demand_does_not_make_slot_farther() {
        let busy = Slot { wanted: 2, ..slot(SlotState::Ready, Some("a")) };
        let wanted = SlotModel { wanted: true, ..m() };
        assert_eq!(near(&busy, &wanted), Some(Nearness::Busy { wanted: 1 }));
        assert_eq!((Offer::new(&busy, &wanted).is_requested(), Offer::new(&busy, &m()).is_requested()), (true, false));
    }

    #[test]
    fn sleeper_is_nearer_after_three_idle_swap_times() {
        let asleep = SlotModel { status: SlotModelStatus::Sleeping, ..m() };
        let idle = |millis| Slot { idle_ms: millis, ..slot(SlotState::Ready, Some("a")) };
        assert_eq!(near(&idle(4_999), &asleep), Some(Nearness::Idle(Reverse(5))));
        assert_eq!(near(&idle(5_000), &asleep), Some(Nearness::Asleep), "a second has passed since");
        assert_eq!(near(&slot(SlotState::Empty, None), &asleep), Some(Nearness::Asleep));
    }

    #[test]
    fn failed_model_has_no_nearness_until_retry() {
        let empty = slot(SlotState::Backoff, None);
        let failed = |retry_ms| SlotModel { status: SlotModelStatus::Failed, retry_ms, ..m() };
        assert_eq!(near(&empty, &failed(None)), None);
        assert_eq!(near(&empty, &failed(Some(1_001))), None);
        assert_eq!(near(&empty, &failed(Some(1_000))), Some(Nearness::Empty));
    }

    #[test]
    fn nearness_is_ordered_nearest_first() {
        let ordered = [
            Nearness::Coming,
            Nearness::Asleep,
            Nearness::Empty,
            Nearness::Idle(Reverse(9)),
            Nearness::Idle(Reverse(1)),
            Nearness::Busy { wanted: 0 },
            Nearness::Busy { wanted: 1 },
            Nearness::Far,
        ];
        assert!(ordered.is_sorted());
        let free = ordered.map(|nearness| nearness.is_free());
        assert_eq!(free, [false, true, true, true, true, false, false, false]);
    }
}
