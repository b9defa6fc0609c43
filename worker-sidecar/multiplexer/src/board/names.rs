//! The names of the models. Only this module knows aliases: slots, grants and metrics use ids alone.

use std::collections::{BTreeMap, BTreeSet};

use modelrelay_protocol::message::SlotModel;

use super::Inner;
use crate::Model;
use crate::event::Demand;

impl Inner {
    /// Returns the id of the model with this name. An id takes precedence over an alias.
    pub(super) fn id(&self, name: &str) -> Option<Model> {
        let has_alias = |model: &&SlotModel| model.aliases.iter().any(|alias| alias == name);
        let model = self.models().find(|model| model.id == name).or_else(|| self.models().find(has_alias));
        model.map(|model| Model::from(model.id.as_str()))
    }

    /// Returns the ids, sorted, then all aliases: a relay that accepts only a limited number should accept the ids.
    pub(super) fn names(&self) -> Vec<Model> {
        let ids: BTreeSet<Model> = self.models().map(|model| model.id.as_str().into()).collect();
        let aliases: BTreeSet<Model> =
            self.models().flat_map(|model| &model.aliases).map(|alias| alias.as_str().into()).collect();
        ids.iter().chain(aliases.difference(&ids)).cloned().collect()
    }

    /// Merges the demand for all names of a model into one. Demand for unknown models is dropped.
    pub(super) fn by_id(&self, demand: &[Demand]) -> Vec<Demand> {
        let mut by_id: BTreeMap<Model, Demand> = BTreeMap::new();
        for stated in demand {
            let Some(id) = self.id(&stated.model) else { continue };
            match by_id.get_mut(&id) {
                Some(sum) => {
                    sum.waiting = sum.waiting.saturating_add(stated.waiting);
                    sum.oldest = sum.oldest.max(stated.oldest);
                    sum.sum = sum.sum.saturating_add(stated.sum);
                    (sum.class, sum.rank) = (sum.class.min(stated.class), sum.rank.min(stated.rank));
                }
                None => {
                    by_id.insert(Model::clone(&id), Demand { model: id, ..stated.clone() });
                }
            }
        }
        by_id.into_values().collect()
    }

    fn models(&self) -> impl Iterator<Item = &SlotModel> {
        self.slots.iter().flat_map(|slot| &slot.snapshot.models)
    }
}
