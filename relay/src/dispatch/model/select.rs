//! Selects the worker for a request: the lowest load wins, ties are broken by rotation, without a scan of the other
//! workers.

use std::collections::BTreeSet;

use super::event::WorkerKey;

/// A worker's rank among those with room: least loaded first, then longest unused; workers that fail the model last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Rank {
    pub(crate) is_failing: bool,
    pub(crate) load: u32,
    /// The number of the last dispatch to it.
    pub(crate) turn: u64,
    pub(crate) worker: WorkerKey,
}

impl Rank {
    /// Returns the rank of the same worker for a model that it does not fail.
    pub(crate) fn as_sound(self) -> Self {
        Self { is_failing: false, ..self }
    }
}

/// The workers that have room for one model, separated by what they can carry.
#[derive(Debug, Default)]
pub(crate) struct Available {
    core1: BTreeSet<Rank>,
    seeds: BTreeSet<Rank>,
}

impl Available {
    pub(crate) fn insert(&mut self, rank: Rank, core1: bool) {
        self.side(core1).insert(rank);
    }

    pub(crate) fn remove(&mut self, rank: &Rank, core1: bool) {
        self.side(core1).remove(rank);
    }

    /// Returns the best worker that `suits`. Few do not: those that failed this request.
    pub(crate) fn best(&self, needs_core1: bool, suits: impl Fn(WorkerKey) -> bool) -> Option<WorkerKey> {
        let first = |side: &BTreeSet<Rank>| side.iter().find(|rank| suits(rank.worker)).copied();
        let core1 = first(&self.core1);
        let seeds = if needs_core1 { None } else { first(&self.seeds) };
        core1.into_iter().chain(seeds).min().map(|rank| rank.worker)
    }

    fn side(&mut self, core1: bool) -> &mut BTreeSet<Rank> {
        if core1 { &mut self.core1 } else { &mut self.seeds }
    }
}
