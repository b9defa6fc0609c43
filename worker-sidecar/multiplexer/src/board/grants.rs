//! One link's `grant`, merged from all slots.

use std::collections::BTreeMap;

use modelrelay_protocol::message::{Grant, ModelGrant};

use super::{Inner, Peer, RelayView};
use crate::Model;
use crate::event::RelayKey;

impl Inner {
    /// Sends its grant to each of these relays, if it differs from the last one.
    pub(super) fn send_grants(&mut self, which: impl Fn(Peer) -> bool) {
        let relays = self.relays.iter().filter(|(_, view)| which(view.peer));
        let grants: Vec<_> = relays.filter_map(|(key, view)| Some((*key, self.grant(*key, view)?))).collect();
        for (key, grant) in grants {
            if let Some(view) = self.relays.get_mut(&key)
                && view.sent.as_ref() != Some(&grant)
            {
                view.sent = Some(grant.clone());
                view.sink.grant(grant);
            }
        }
    }

    fn grant(&self, key: RelayKey, view: &RelayView) -> Option<Grant> {
        let links = u32::try_from(self.relays.len()).unwrap_or(u32::MAX);
        match view.peer {
            Peer::Old => None,
            Peer::Core1 => {
                let capacity = self.capacity();
                let others =
                    self.relays.iter().filter(|(other, _)| **other != key).flat_map(|(_, view)| view.own.values());
                let others = others.fold(0, |sum: u32, own| sum.saturating_add(*own));
                // It may send as many requests as can run, whatever is resident: a request that cannot run yet waits
                // here.
                Some(Grant { slots: capacity, others, capacity, links, models: None })
            }
            Peer::Slots1 => {
                let mut models: BTreeMap<&Model, ModelGrant> = BTreeMap::new();
                let open = |(slot, model): &(usize, Model)| self.slots[*slot].open.contains(model);
                for ((_, model), values) in view.grants.iter().filter(|(key, _)| open(key)) {
                    let none = ModelGrant { id: model.to_string(), slots: 0, others: 0, capacity: 0 };
                    let entry = models.entry(model).or_insert(none);
                    entry.slots = entry.slots.saturating_add(values.slots);
                    entry.others = entry.others.saturating_add(values.others);
                    entry.capacity = entry.capacity.saturating_add(values.capacity);
                }
                let sum = |of: fn(&ModelGrant) -> u32| models.values().map(of).fold(0, u32::saturating_add);
                let (slots, others, capacity) = (sum(|m| m.slots), sum(|m| m.others), sum(|m| m.capacity));
                Some(Grant { slots, others, capacity, links, models: Some(models.into_values().collect()) })
            }
        }
    }

    /// Returns the most requests that run at once: the sum of each slot's largest capacity.
    pub(super) fn capacity(&self) -> u32 {
        let largest = |slot: &super::SlotView| slot.snapshot.models.iter().map(|model| model.capacity).max();
        self.slots.iter().filter_map(largest).fold(0, u32::saturating_add)
    }
}
