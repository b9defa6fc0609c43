//! Which of several slots with the same model is asked: the same order in which relays choose among workers.

use modelrelay_protocol::message::{SlotModelStatus, SlotState};

use super::{Inner, Peer, SlotView};
use crate::multiplexer::Model;
use crate::multiplexer::event::{Demand, RelayKey};

/// How near a slot is to serving a model, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Nearness {
    /// Its gate is open, and this relay may send one more.
    Free,
    /// Its gate is open.
    Open,
    /// It goes there already.
    UnderWay,
    Asleep,
    Empty,
    Idle,
    Busy,
    /// It has failed, or takes nothing.
    Out,
}

impl Inner {
    /// The slot for one request.
    pub(super) fn choose(&self, relay: RelayKey, model: &Model) -> Option<usize> {
        self.slots_of(model).min_by_key(|slot| {
            let taken = self.taken(*slot, model);
            (self.nearness(relay, *slot, model, taken), taken, self.slots[*slot].snapshot.wanted, *slot)
        })
    }

    /// Every slot with an open gate is told of all that waits, else only the one that is chosen: or one request would make
    /// every slot load its model.
    pub(super) fn divide(&self, relay: RelayKey, demand: &[Demand]) -> Vec<Vec<Demand>> {
        let mut divided = vec![Vec::new(); self.slots.len()];
        for stated in demand {
            let open: Vec<_> =
                self.slots_of(&stated.model).filter(|slot| self.slots[*slot].open.contains(&stated.model)).collect();
            let chosen = if open.is_empty() { self.choose(relay, &stated.model).into_iter().collect() } else { open };
            chosen.into_iter().for_each(|slot| divided[slot].push(stated.clone()));
        }
        divided
    }

    fn nearness(&self, relay: RelayKey, slot: usize, model: &Model, taken: u32) -> Nearness {
        let SlotView { snapshot, open, .. } = &self.slots[slot];
        let described = snapshot.models.iter().find(|known| *known.id == **model);
        if open.contains(model) {
            let key = (slot, Model::clone(model));
            let free = match self.relays.get(&relay) {
                Some(view) if view.peer == Peer::Slots1 => {
                    let granted = view.grants.get(&key).map_or(0, |values| values.slots);
                    view.own.get(&key).copied().unwrap_or(0) < granted
                }
                Some(_) | None => described.is_some_and(|described| taken < described.capacity),
            };
            return if free { Nearness::Free } else { Nearness::Open };
        }
        let status = described.map_or(SlotModelStatus::Unloaded, |described| described.status);
        let refuses = matches!(snapshot.state, SlotState::Quarantined | SlotState::Stopping);
        if refuses || status == SlotModelStatus::Failed {
            return Nearness::Out;
        }
        // What was sent there a moment ago is not in its snapshot yet.
        if snapshot.target.as_deref() == Some(&**model) || taken > 0 {
            return Nearness::UnderWay;
        }
        match (snapshot.state, status, snapshot.idle_ms > 0) {
            (SlotState::Ready, SlotModelStatus::Sleeping, true) | (SlotState::Empty, SlotModelStatus::Sleeping, _) => {
                Nearness::Asleep
            }
            (SlotState::Empty, ..) => Nearness::Empty,
            (SlotState::Ready, _, true) => Nearness::Idle,
            _ => Nearness::Busy,
        }
    }

    /// Requests for the model that are there, of all relays.
    fn taken(&self, slot: usize, model: &Model) -> u32 {
        let key = (slot, Model::clone(model));
        self.relays.values().filter_map(|view| view.own.get(&key)).fold(0, |sum, own| sum.saturating_add(*own))
    }
}
