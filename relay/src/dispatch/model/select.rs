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
    /// The bytes that it has yet to compute, if workers are placed by it.
    pub(crate) backlog: Option<u64>,
}

impl Rank {
    /// Returns the rank of the same worker for a model that it does not fail.
    pub(crate) fn as_sound(self) -> Self {
        Self { is_failing: false, ..self }
    }

    fn by_backlog(self) -> Option<(bool, u64, Self)> {
        self.backlog.map(|backlog| (self.is_failing, backlog, self))
    }
}

/// The workers that have room for one model, separated by what they can carry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Available {
    core1: Ranked,
    seeds: Ranked,
}

/// Workers by their rank, and by their backlog: failing ones last, then the smallest first, equals by rank.
#[derive(Clone, Debug, Default)]
struct Ranked {
    ranks: BTreeSet<Rank>,
    backlogs: BTreeSet<(bool, u64, Rank)>,
}

impl Ranked {
    fn insert(&mut self, rank: Rank) {
        self.ranks.insert(rank);
        self.backlogs.extend(rank.by_backlog());
    }

    fn remove(&mut self, rank: &Rank) {
        self.ranks.remove(rank);
        if let Some(entry) = rank.by_backlog() {
            self.backlogs.remove(&entry);
        }
    }
}

impl Available {
    pub(crate) fn insert(&mut self, rank: Rank, core1: bool) {
        self.side(core1).insert(rank);
    }

    pub(crate) fn remove(&mut self, rank: &Rank, core1: bool) {
        self.side(core1).remove(rank);
    }

    /// Returns the best worker that `suits`. Few do not: those that failed this request.
    pub(crate) fn best(&self, needs_core1: bool, suits: impl Fn(WorkerKey) -> bool) -> Option<Rank> {
        let first = |side: &Ranked| side.ranks.iter().find(|rank| suits(rank.worker)).copied();
        self.sides(needs_core1).filter_map(first).min()
    }

    /// The same by backlog.
    pub(crate) fn least_backlog(&self, needs_core1: bool, suits: impl Fn(WorkerKey) -> bool) -> Option<Rank> {
        let first = |side: &Ranked| side.backlogs.iter().find(|(.., rank)| suits(rank.worker)).copied();
        self.sides(needs_core1).filter_map(first).min().map(|(.., rank)| rank)
    }

    fn sides(&self, needs_core1: bool) -> impl Iterator<Item = &Ranked> {
        std::iter::once(&self.core1).chain((!needs_core1).then_some(&self.seeds))
    }

    fn side(&mut self, core1: bool) -> &mut Ranked {
        if core1 { &mut self.core1 } else { &mut self.seeds }
    }
}
