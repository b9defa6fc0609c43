//! When a resident model is left, and for which.
//!
//! - A resident with work of its own stays for a *quantum* that grows with what the swap costs, its gate open all the time:
//!   neither the least residency nor the quantum ever idles the GPU.
//! - An idle resident goes at once, or after a short *linger* where its own history says that its next request is about to
//!   come and two swaps are saved.
//! - Among those that wait, the one that waits most per second of swapping comes first, but for one that waits longer than
//!   its bound.
//! - Age acts only through the quantum, and never cuts it below three times the cost: a limit that may cut it turns every
//!   backlog into arrival order, which does nothing but swap.
//!
//! Pure arithmetic over plain values; the slot machine collects them and carries out the decision. What the rules are worth
//! is measured in `docs/multiplexer/policy.md` by a simulator that runs this very code.

#![warn(clippy::disallowed_types, clippy::iter_over_hash_type)]

use std::time::{Duration, Instant};

use super::config::{Knobs, Linger};
use super::estimate::Gaps;

/// A resident with work stays at least so many times what leaving it costs: then at most a quarter of the time is swapping.
const FLOOR_COSTS: u32 = 3;

/// It stays so long if nobody would wait too long: then at most a ninth of the time is swapping.
const TENURE_COSTS: u32 = 8;

/// Without a setting, a model may wait this long ...
const MAX_WAIT: Duration = Duration::from_secs(120);

/// ... or so many times what a swap costs, whatever is longer.
const MAX_WAIT_COSTS: u32 = 10;

/// How long running requests take at most, as a rule, once their model has to go.
const LONGEST_USUAL_DRAIN: Duration = Duration::from_secs(30);

/// No linger beyond this, and none beyond half the cost of a swap.
const LONGEST_LINGER: Duration = Duration::from_secs(5);

/// With fewer gaps nothing is known.
const FEWEST_GAPS: usize = 3;

/// The least cost that counts: a driver that swaps in no time must not divide by zero.
const LEAST_COST: Duration = Duration::from_millis(1);

/// A model that others wait for, and that may be loaded: not in back-off, not kept out by a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Requests that wait, here or at relays.
    pub waiting: u32,
    /// How long the oldest of them has waited.
    pub age: Duration,
    /// How long all of them have waited together.
    pub total_wait: Duration,
    /// What the swap to it costs.
    pub cost: Duration,
}

/// The resident, as the policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct Resident<'a> {
    /// Since when it serves.
    pub since: Instant,
    /// Since when it has neither running nor waiting requests; `None` while it has some.
    pub idle_since: Option<Instant>,
    /// Its history of gaps between requests.
    pub gaps: &'a Gaps,
    /// How many of its requests usually run or wait at once.
    pub concurrency: f64,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing, and to look again at this time if nothing happens before.
    Stay {
        /// When waiting alone may have changed the answer.
        recheck: Option<Instant>,
        /// Whether the resident is idle and kept for its next request only.
        lingering: bool,
    },
    /// Leave the resident.
    Leave {
        /// For this one of the candidates.
        to: usize,
        /// Because of this.
        why: Why,
    },
}

/// Why a resident is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// It had nothing to do.
    Idle,
    /// Its quantum was over.
    Quantum,
}

/// Whether to leave the resident for one of the candidates.
pub fn decide(knobs: &Knobs, resident: &Resident<'_>, candidates: &[Candidate], now: Instant) -> Decision {
    let busy = resident.idle_since.is_none();
    let Some(to) = pick(knobs, busy, candidates) else {
        return Decision::Stay { recheck: None, lingering: false };
    };
    let cost = candidates[to].cost;
    if let Some(idle_since) = resident.idle_since {
        let until = idle_since + linger(knobs, resident, candidates, cost);
        return if now >= until {
            Decision::Leave { to, why: Why::Idle }
        } else {
            Decision::Stay { recheck: Some(until), lingering: true }
        };
    }
    if now >= resident.since + quantum(knobs, cost) {
        return Decision::Leave { to, why: Why::Quantum };
    }
    // Another candidate may overtake the pick meanwhile, and its quantum may be the shorter one.
    let dues = candidates.iter().map(|candidate| resident.since + quantum(knobs, candidate.cost));
    Decision::Stay { recheck: dues.filter(|due| *due > now).min(), lingering: false }
}

/// Which candidate comes next. `busy`: the resident has work, and so is one more whose turn comes before a waiter's.
pub fn pick(knobs: &Knobs, busy: bool, candidates: &[Candidate]) -> Option<usize> {
    let late = |index: &usize| candidates[*index].age > bound(knobs, busy, candidates, *index);
    let oldest = (0..candidates.len()).filter(late).max_by_key(|index| candidates[*index].age);
    oldest.or_else(|| {
        let worth = |index: &usize| {
            let Candidate { total_wait, cost, .. } = candidates[*index];
            total_wait.as_secs_f64() / cost.max(LEAST_COST).as_secs_f64()
        };
        // Of equals the oldest, and of those the first.
        (0..candidates.len()).rev().max_by(|a, b| {
            let by_age = || candidates[*a].age.cmp(&candidates[*b].age);
            worth(a).total_cmp(&worth(b)).then_with(by_age)
        })
    })
}

/// How long a resident with work stays before it is left for a model to which the swap costs `cost`.
pub fn quantum(knobs: &Knobs, cost: Duration) -> Duration {
    let floor = knobs.min_residency.max(cost * FLOOR_COSTS);
    let tenure = (cost * TENURE_COSTS).min(max_wait(knobs, cost).saturating_sub(cost));
    floor.max(tenure)
}

/// How long a model should wait at most.
pub fn max_wait(knobs: &Knobs, cost: Duration) -> Duration {
    knobs.max_wait.unwrap_or_else(|| MAX_WAIT.max(cost * MAX_WAIT_COSTS))
}

/// Whether the operator's `max_wait` asks for more than the floor of the quantum allows.
pub fn is_infeasible(knobs: &Knobs, cost: Duration) -> bool {
    knobs.max_wait.is_some_and(|max_wait| max_wait < cost * (FLOOR_COSTS + 1))
}

/// After how long a candidate comes before all others, but for those that have waited longer: everybody else's turn, and its
/// own swap.
///
/// The swap to the resident is counted too: a waiter may have come when that had just begun.
pub fn bound(knobs: &Knobs, busy: bool, candidates: &[Candidate], index: usize) -> Duration {
    other_turns(knobs, busy, candidates, index).sum::<Duration>() + own_swap(knobs, candidates, index)
}

/// How long a candidate waits at most, if all loads go well, no drain lasts longer than usual and no other has waited longer:
/// its bound, the turn of another that had just begun by then, and its own swap. To look ahead, so that no turn is begun that
/// ends beyond somebody's bound, was tried: it costs 7 to 10 % of the answers of a slot whose models are all wanted, for a
/// promise that is a turn shorter.
pub fn longest_wait(knobs: &Knobs, busy: bool, candidates: &[Candidate], index: usize) -> Duration {
    let others = || other_turns(knobs, busy, candidates, index);
    let bound = bound(knobs, busy, candidates, index);
    match others().max() {
        Some(longest) if others().count() > 1 => bound + longest + own_swap(knobs, candidates, index),
        // A single other one does not follow itself.
        Some(_) | None => bound,
    }
}

/// How long a drain is taken to last: a timeout that waits for the longest answers says nothing about the usual ones.
pub fn usual_drain(knobs: &Knobs) -> Duration {
    knobs.drain_timeout.min(LONGEST_USUAL_DRAIN)
}

/// The turns of all but one candidate, and of the resident.
fn other_turns(knobs: &Knobs, busy: bool, candidates: &[Candidate], index: usize) -> impl Iterator<Item = Duration> {
    let turn = |cost: Duration| quantum(knobs, cost) + cost + usual_drain(knobs);
    let others = candidates.iter().enumerate().filter(move |(other, _)| *other != index);
    others.map(move |(_, other)| turn(other.cost)).chain(busy.then(|| turn(candidates[index].cost)))
}

fn own_swap(knobs: &Knobs, candidates: &[Candidate], index: usize) -> Duration {
    candidates[index].cost + usual_drain(knobs)
}

/// How long an idle resident is kept for its next request while others wait.
///
/// Waiting for `t` saves two swaps for each past gap that was no longer, less the gap itself, and costs `t` for each that
/// was. The `t` with the best balance wins, if any is better than not to wait. Where more wait for another model than the
/// resident usually serves at once, they come first whatever the history says.
pub fn linger(knobs: &Knobs, resident: &Resident<'_>, candidates: &[Candidate], cost: Duration) -> Duration {
    match knobs.linger {
        Linger::Off => return Duration::ZERO,
        Linger::Fixed(fixed) => return fixed,
        Linger::Auto => {}
    }
    let most_waiting = candidates.iter().map(|candidate| candidate.waiting).max().unwrap_or(0);
    if resident.gaps.len() < FEWEST_GAPS || f64::from(most_waiting) > resident.concurrency + 0.25 {
        return Duration::ZERO;
    }
    let cap = (cost / 2).min(LONGEST_LINGER);
    let balance = |t: Duration| {
        let each = |gap: Duration| {
            if gap <= t { 2.0 * cost.as_secs_f64() - gap.as_secs_f64() } else { -t.as_secs_f64() }
        };
        resident.gaps.iter().map(each).sum::<f64>()
    };
    let choices = resident.gaps.iter().filter(|gap| *gap <= cap).map(|gap| (gap, balance(gap)));
    let best = choices.max_by(|a, b| a.1.total_cmp(&b.1));
    best.filter(|(_, balance)| *balance > 0.0).map_or(Duration::ZERO, |(gap, _)| gap.mul_f64(1.25))
}

#[cfg(test)]
mod tests;
