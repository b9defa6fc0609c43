//! Which worker gets a request: lowest load wins, ties by rotation, found without a look at the others.

use std::collections::BTreeSet;

use super::event::WorkerKey;

/// A worker's place among those with room. Ordered: least loaded, then longest not served; those that fail the model last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Rank {
    pub(super) is_failing: bool,
    pub(super) load: u32,
    /// The number of the last sending to it.
    pub(super) turn: u64,
    pub(super) worker: WorkerKey,
}

impl Rank {
    /// The rank of the same worker among those of a model that it does not fail.
    pub(super) fn as_sound(self) -> Self {
        Self { is_failing: false, ..self }
    }
}

/// The workers that have room for one model, kept apart by what they can carry.
#[derive(Debug, Default)]
pub(super) struct Available {
    core1: BTreeSet<Rank>,
    seeds: BTreeSet<Rank>,
}

impl Available {
    pub(super) fn insert(&mut self, rank: Rank, core1: bool) {
        self.side(core1).insert(rank);
    }

    pub(super) fn remove(&mut self, rank: &Rank, core1: bool) {
        self.side(core1).remove(rank);
    }

    /// The best worker that `suits`. Those that do not are few: workers that failed the very request.
    pub(super) fn best(&self, needs_core1: bool, suits: impl Fn(WorkerKey) -> bool) -> Option<WorkerKey> {
        let first = |side: &BTreeSet<Rank>| side.iter().find(|rank| suits(rank.worker)).copied();
        let core1 = first(&self.core1);
        let seeds = if needs_core1 { None } else { first(&self.seeds) };
        core1.into_iter().chain(seeds).min().map(|rank| rank.worker)
    }

    fn side(&mut self, core1: bool) -> &mut BTreeSet<Rank> {
        if core1 { &mut self.core1 } else { &mut self.seeds }
    }
}
