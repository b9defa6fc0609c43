//! Chooses among several slots with the same model, in the order in which relays choose among workers, by the same
//! function.

use std::collections::BTreeSet;
use std::time::Instant;

use modelrelay_protocol::nearness::{Nearness, Offer};

use super::{Inner, Peer, SlotView};
use crate::Model;
use crate::event::{Demand, Event, RelayKey};

/// The suitability of a slot for a model, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LoadEligibility {
    /// Its gate is open, and this relay may send one more request.
    Free,
    /// Its gate is open.
    Open,
    /// Its gate is closed; the nearness as relays see it.
    Near(Nearness),
    /// It has failed, or accepts no requests.
    Out,
}

impl Inner {
    pub(super) fn choose(&self, relay: RelayKey, model: &Model, now: Instant) -> Option<usize> {
        self.slots_of(model).min_by_key(|slot| {
            let taken = self.taken(*slot, model);
            let eligibility = self.eligibility(relay, *slot, model, taken, now);
            let is_elsewhere = !self.is_chosen(*slot, model);
            (eligibility, is_elsewhere, taken, *slot)
        })
    }

    /// A relay reported its waiting requests: sends every slot its part.
    pub(super) fn handle_demand(&mut self, relay: RelayKey, demand: Vec<Demand>, now: Instant) {
        let divided = self.divide(relay, &demand, now);
        let Some(view) = self.relays.get_mut(&relay) else { return };
        (view.demand, view.stated) = (demand, now);
        for (slot, models) in divided.into_iter().enumerate() {
            self.send_demand(relay, slot, models);
        }
    }

    /// A slot's state has changed: waiting requests go to the slot that is nearer now, because relays would not report
    /// them again for that.
    ///
    /// A slot whose part names the same models is not notified again: it already knows of the requests that were sent
    /// to it since.
    pub(super) fn divide_again(&mut self, now: Instant) {
        let waiting: Vec<_> =
            self.relays.iter().filter(|(_, view)| !view.demand.is_empty()).map(|(relay, _)| *relay).collect();
        for relay in waiting {
            let Some(view) = self.relays.get(&relay) else { continue };
            let passed = now.saturating_duration_since(view.stated);
            let demand: Vec<_> = view.demand.iter().map(|stated| stated.aged(passed)).collect();
            for (slot, models) in self.divide(relay, &demand, now).into_iter().enumerate() {
                let part: BTreeSet<_> = models.iter().map(|stated| Model::clone(&stated.model)).collect();
                if self.relays.get(&relay).is_some_and(|view| view.parts.get(slot) != Some(&part)) {
                    self.send_demand(relay, slot, models);
                }
            }
        }
    }

    fn send_demand(&mut self, relay: RelayKey, slot: usize, models: Vec<Demand>) {
        if let Some(view) = self.relays.get_mut(&relay) {
            view.parts.resize(self.slots.len(), BTreeSet::new());
            view.parts[slot] = models.iter().map(|stated| Model::clone(&stated.model)).collect();
        }
        if let Some(mailbox) = self.mailboxes.get(slot) {
            mailbox.send_event(Event::Demand { relay, models });
        }
    }

    /// Sends the whole demand to every slot with an open gate, otherwise only to the chosen slot: one request must not
    /// make every slot load its model.
    ///
    /// The choice is kept while no other slot is nearer, and shared by all relays: the snapshot of a slot includes the
    /// demand that was sent there, which would make every other slot seem less wanted.
    fn divide(&mut self, relay: RelayKey, demand: &[Demand], now: Instant) -> Vec<Vec<Demand>> {
        self.chosen.retain(|(of, model), _| *of != relay || demand.iter().any(|stated| stated.model == *model));
        let mut divided = vec![Vec::new(); self.slots.len()];
        for stated in demand {
            let open: Vec<_> =
                self.slots_of(&stated.model).filter(|slot| self.slots[*slot].open.contains(&stated.model)).collect();
            let key = (relay, Model::clone(&stated.model));
            let chosen = if open.is_empty() {
                let chosen = self.choose(relay, &stated.model, now);
                chosen.map(|chosen| self.chosen.insert(key, chosen));
                chosen.into_iter().collect()
            } else {
                self.chosen.remove(&key);
                open
            };
            chosen.into_iter().for_each(|slot| divided[slot].push(stated.clone()));
        }
        divided
    }

    fn eligibility(&self, relay: RelayKey, slot: usize, model: &Model, taken: u32, now: Instant) -> LoadEligibility {
        let SlotView { snapshot, open, at } = &self.slots[slot];
        let Some(described) = snapshot.models.iter().find(|known| *known.id == **model) else {
            return LoadEligibility::Out;
        };
        if open.contains(model) {
            let key = (slot, Model::clone(model));
            let free = match self.relays.get(&relay) {
                Some(view) if view.peer == Peer::Slots1 => {
                    let granted = view.grants.get(&key).map_or(0, |values| values.slots);
                    view.own.get(&key).copied().unwrap_or(0) < granted
                }
                Some(_) | None => taken < described.capacity,
            };
            return if free { LoadEligibility::Free } else { LoadEligibility::Open };
        }
        let Some(nearness) = Offer::new(snapshot, described).nearness(now.saturating_duration_since(*at)) else {
            return LoadEligibility::Out;
        };
        let is_chosen = self.is_chosen(slot, model);
        let others = self.others(slot, model, now);
        LoadEligibility::Near(match nearness {
            // The slot's snapshot does not yet include what was sent there a moment ago.
            _ if taken > 0 => Nearness::Coming,
            // It begins in a moment; a busy slot may take long, and is left for one that is nearer.
            Nearness::Asleep | Nearness::Empty | Nearness::Idle(_) if is_chosen => Nearness::Coming,
            // It is about to begin with another model. The number that its snapshot reports as wanted may already
            // include that.
            Nearness::Asleep | Nearness::Empty | Nearness::Idle(_) if others > 0 => {
                Nearness::Busy { wanted: snapshot.wanted.max(others) }
            }
            Nearness::Busy { wanted } => Nearness::Busy { wanted: wanted.max(others) },
            Nearness::Coming | Nearness::Asleep | Nearness::Empty | Nearness::Idle(_) | Nearness::Far => nearness,
        })
    }

    /// Returns the number of other models that were requested from this slot and that it has not begun to load: its
    /// snapshot may not include them yet.
    fn others(&self, slot: usize, model: &Model, now: Instant) -> u32 {
        let SlotView { snapshot, at, .. } = &self.slots[slot];
        let is_ahead = |other: &&Model| {
            let described = snapshot.models.iter().find(|known| *known.id == ***other);
            let nearness = |described| Offer::new(snapshot, described).nearness(now.saturating_duration_since(*at));
            *other != model
                && snapshot.resident.as_deref() != Some(&***other)
                && described.and_then(nearness).is_some_and(|nearness| nearness != Nearness::Coming)
        };
        let assigned = self.chosen.iter().filter(|(_, chosen)| **chosen == slot).map(|((_, of), _)| of);
        let came = self.relays.values().flat_map(|view| view.own.keys());
        let came = came.filter(|(at, _)| *at == slot).map(|(_, of)| of);
        let others: BTreeSet<&Model> = assigned.chain(came).filter(is_ahead).collect();
        u32::try_from(others.len()).unwrap_or(u32::MAX)
    }

    /// True if demand for the model was sent to this slot, whose gate is not open yet.
    fn is_chosen(&self, slot: usize, model: &Model) -> bool {
        self.chosen.iter().any(|((_, of), chosen)| *chosen == slot && of == model)
    }

    /// Returns the number of requests for the model at this slot, of all relays.
    fn taken(&self, slot: usize, model: &Model) -> u32 {
        let key = (slot, Model::clone(model));
        self.relays.values().filter_map(|view| view.own.get(&key)).fold(0, |sum, own| sum.saturating_add(*own))
    }
}
