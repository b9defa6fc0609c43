//! Selects the worker for a request: the lowest load wins, ties are broken by rotation, without a scan of the other
//! workers. Of workers at different [distances](Distance), the nearest wins, unless it has more load or backlog than
//! the others by more than the [spill](Spill).

use std::collections::BTreeSet;

use super::distance::{Distance, Spill};
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
    pub(crate) distance: Distance,
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

/// The workers that have room for one model, by their distance.
#[derive(Clone, Debug, Default)]
pub(crate) struct Available {
    by_distance: [Sides; Distance::ALL.len()],
    /// The number of workers beyond the first distance; without any, the others are not searched.
    far: usize,
}

/// Workers at one distance, separated by what they can carry.
#[derive(Clone, Debug, Default)]
struct Sides {
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

impl Sides {
    fn best(&self, needs_core1: bool, suits: impl Fn(WorkerKey) -> bool) -> Option<Rank> {
        let first = |side: &Ranked| side.ranks.iter().find(|rank| suits(rank.worker)).copied();
        self.able(needs_core1).filter_map(first).min()
    }

    fn least_backlog(&self, needs_core1: bool, suits: impl Fn(WorkerKey) -> bool) -> Option<Rank> {
        let first = |side: &Ranked| side.backlogs.iter().find(|(.., rank)| suits(rank.worker)).copied();
        self.able(needs_core1).filter_map(first).min().map(|(.., rank)| rank)
    }

    fn able(&self, needs_core1: bool) -> impl Iterator<Item = &Ranked> {
        std::iter::once(&self.core1).chain((!needs_core1).then_some(&self.seeds))
    }

    fn side(&mut self, core1: bool) -> &mut Ranked {
        if core1 { &mut self.core1 } else { &mut self.seeds }
    }
}

impl Available {
    pub(crate) fn insert(&mut self, rank: Rank, core1: bool) {
        self.far += usize::from(rank.distance != Distance::Zone);
        self.by_distance[rank.distance as usize].side(core1).insert(rank);
    }

    pub(crate) fn remove(&mut self, rank: &Rank, core1: bool) {
        self.far -= usize::from(rank.distance != Distance::Zone);
        self.by_distance[rank.distance as usize].side(core1).remove(rank);
    }

    /// Returns the best worker that `suits`. Few do not: those that failed this request.
    pub(crate) fn best(&self, needs_core1: bool, spill: Spill, suits: impl Fn(WorkerKey) -> bool) -> Option<Rank> {
        self.nearest(|sides| sides.best(needs_core1, &suits), |_| 0, spill)
    }

    /// The same by backlog.
    pub(crate) fn least_backlog(
        &self,
        needs_core1: bool,
        spill: Spill,
        suits: impl Fn(WorkerKey) -> bool,
    ) -> Option<Rank> {
        let backlog = |rank: &Rank| rank.backlog.unwrap_or(0);
        self.nearest(|sides| sides.least_backlog(needs_core1, &suits), backlog, spill)
    }

    /// Returns the nearest of the best workers of each distance that exceeds the least load and the least backlog of
    /// them by at most `spill`; if each exceeds one of the two, the one with the least backlog.
    fn nearest(
        &self,
        best: impl Fn(&Sides) -> Option<Rank>,
        backlog: impl Fn(&Rank) -> u64,
        spill: Spill,
    ) -> Option<Rank> {
        let [near, farther @ ..] = &self.by_distance;
        let near = best(near);
        if self.far == 0 {
            return near;
        }
        let [cluster, elsewhere] = farther;
        let bests = [near, best(cluster), best(elsewhere)];
        let is_failing = bests.iter().flatten().map(|rank| rank.is_failing).min()?;
        let sound = || bests.iter().flatten().filter(|rank| rank.is_failing == is_failing).copied();
        let load = sound().map(|rank| rank.load).min()?.saturating_add(spill.requests);
        let bytes = sound().map(|rank| backlog(&rank)).min()?.saturating_add(spill.bytes);
        let is_near_enough = |rank: &Rank| rank.load <= load && backlog(rank) <= bytes;
        sound().find(is_near_enough).or_else(|| sound().min_by_key(|rank| (backlog(rank), *rank)))
    }
}
