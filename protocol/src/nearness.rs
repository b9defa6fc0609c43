//! How near a slot is to a model that it does not serve yet: whom to ask for it.
//!
//! Relays choose a worker by this, and a worker with several slots one of them. Both must agree, or one request makes two
//! slots load the same model: so both call the same function, which sees nothing but what the slot said of itself and how
//! long ago that was.

use std::cmp::Reverse;
use std::time::Duration;

use crate::message::{Slot, SlotModel, SlotModelStatus, SlotState};

/// How often its own swap cost a slot must have been idle before a model that sleeps there goes before an empty slot.
const IDLE_SWAPS: u32 = 3;

/// What stands between a slot and a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The slot is on its way to the model, or there.
    Coming,
    /// It holds nothing.
    Empty,
    /// It holds another model, which has nothing to do.
    Idle,
    /// It holds another model, or is on its way to one.
    Busy,
    /// It holds a model that it must keep.
    Pinned,
    /// It takes nothing: its worker is ending, or a person must look at it.
    Closed,
}

/// How near a slot is to a model, nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Nearness {
    /// It drains, or loads, or is ready for it.
    Coming,
    /// The model sleeps there, and the slot has long had nothing to do.
    Asleep,
    /// It holds nothing.
    Empty,
    /// It has had nothing to do for so many seconds. Whole ones: those who hear of the same slots some milliseconds apart
    /// shall agree, and leave the rest to the tie-break that is the same for all.
    Idle(Reverse<u64>),
    /// It is busy; so many models are wanted there beside this one.
    Busy {
        /// Models.
        wanted: u32,
    },
    /// Nothing is known, or what it holds is pinned there.
    Far,
}

impl Nearness {
    /// Whether the slot has nothing to do.
    pub fn is_free(self) -> bool {
        matches!(self, Self::Asleep | Self::Empty | Self::Idle(_))
    }
}

impl Way {
    /// Between this slot and this model.
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
            // Its gate will open, or is closing and the slot's next state will say so.
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

/// What a slot has said of itself and of one of its models, as far as it says how near the two are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offer {
    /// What stands between them.
    pub way: Way,
    /// The model sleeps there.
    is_asleep: bool,
    /// How long the slot had been idle.
    idle: Duration,
    swap_cost: Duration,
    /// How many other models are wanted there.
    wanted: u32,
    /// Whether this one is.
    is_wanted: bool,
    /// For how long the model will not be tried again; zero where it has not failed.
    fails_for: Duration,
}

impl Offer {
    /// What `slot` says of `model`, which is one of its own.
    pub fn new(slot: &Slot, model: &SlotModel) -> Self {
        let fails_for = match model.status {
            // Without a time, until it says something else.
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

    /// Whether somebody has asked the slot for the model, or it is on its way for another reason.
    pub fn is_asked(&self) -> bool {
        self.is_wanted || self.way == Way::Coming
    }

    /// How near they are, `ago` after that was said. `None`: the slot takes nothing for the model.
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

    /// How near they are once the slot has begun with another model that it was asked for.
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
    fn what_a_slot_does_says_how_near_it_is() {
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
    fn a_slot_is_no_farther_from_a_model_for_being_asked_for_it() {
        let busy = Slot { wanted: 2, ..slot(SlotState::Ready, Some("a")) };
        let wanted = SlotModel { wanted: true, ..m() };
        assert_eq!(near(&busy, &wanted), Some(Nearness::Busy { wanted: 1 }));
        assert_eq!((Offer::new(&busy, &wanted).is_asked(), Offer::new(&busy, &m()).is_asked()), (true, false));
    }

    #[test]
    fn a_sleeper_goes_before_an_empty_slot_once_its_slot_has_been_idle_for_three_swaps() {
        let asleep = SlotModel { status: SlotModelStatus::Sleeping, ..m() };
        let idle = |millis| Slot { idle_ms: millis, ..slot(SlotState::Ready, Some("a")) };
        assert_eq!(near(&idle(4_999), &asleep), Some(Nearness::Idle(Reverse(5))));
        assert_eq!(near(&idle(5_000), &asleep), Some(Nearness::Asleep), "a second has passed since");
        assert_eq!(near(&slot(SlotState::Empty, None), &asleep), Some(Nearness::Asleep));
    }

    #[test]
    fn a_failure_counts_until_its_time_is_over() {
        let empty = slot(SlotState::Backoff, None);
        let failed = |retry_ms| SlotModel { status: SlotModelStatus::Failed, retry_ms, ..m() };
        assert_eq!(near(&empty, &failed(None)), None);
        assert_eq!(near(&empty, &failed(Some(1_001))), None);
        assert_eq!(near(&empty, &failed(Some(1_000))), Some(Nearness::Empty));
    }

    #[test]
    fn the_nearest_is_the_least() {
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
