//! What the models are called. Only here is a name more than an id: slots, grants and metrics know ids alone.

use std::collections::{BTreeMap, BTreeSet};

use modelrelay_protocol::message::SlotModel;

use super::Inner;
use crate::multiplexer::Model;
use crate::multiplexer::event::Demand;

impl Inner {
    /// The id of the model that a name stands for: an id itself, before anything else.
    pub(super) fn id(&self, name: &str) -> Option<Model> {
        let has_alias = |model: &&SlotModel| model.aliases.iter().any(|alias| alias == name);
        let model = self.models().find(|model| model.id == name).or_else(|| self.models().find(has_alias));
        model.map(|model| Model::from(model.id.as_str()))
    }

    /// The ids, sorted, then all other names: a relay that takes only so many shall take those.
    pub(super) fn names(&self) -> Vec<Model> {
        let ids: BTreeSet<Model> = self.models().map(|model| model.id.as_str().into()).collect();
        let aliases: BTreeSet<Model> =
            self.models().flat_map(|model| &model.aliases).map(|alias| alias.as_str().into()).collect();
        ids.iter().chain(aliases.difference(&ids)).cloned().collect()
    }

    /// What waits for a model by all of its names is one demand. What nobody here serves is left out.
    pub(super) fn by_id(&self, demand: &[Demand]) -> Vec<Demand> {
        let mut by_id: BTreeMap<Model, Demand> = BTreeMap::new();
        for stated in demand {
            let Some(id) = self.id(&stated.model) else { continue };
            match by_id.get_mut(&id) {
                Some(sum) => {
                    sum.waiting = sum.waiting.saturating_add(stated.waiting);
                    sum.oldest = sum.oldest.max(stated.oldest);
                    sum.sum = sum.sum.saturating_add(stated.sum);
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
