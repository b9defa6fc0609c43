//! Decides when to unload a resident model, and for which other model.
//!
//! - A resident with work of its own stays for a *quantum* that grows with the cost of the swap, its gate open all the
//!   time: neither the least residency nor the quantum ever idles the GPU.
//! - An idle resident is unloaded at once, or after a short *linger* if its history predicts that its next request is
//!   about to arrive and that waiting saves two swaps.
//! - Among the models with waiting requests, the first one in the relays' fair order comes first: of the highest class,
//!   then of keys with the least service. Of those that share its place, it is the one with the most waiting time per
//!   second of swapping. A model that has waited longer than its bound comes before all of them. A backlog waits from
//!   the end of its model's last turn, so it is not late again at once.
//! - A resident all of whose work is of a lower class than a waiting request stays only for the floor of the quantum.
//!   So does one whose keys had attained more service than those of another model already when it was loaded.
//! - Age acts only through the quantum, and never cuts it below three times the cost: a limit that could cut it would
//!   turn every backlog into arrival order, which does nothing but swap.
//!
//! Pure arithmetic over plain values; the slot machine collects them and carries out the decision. A simulator that
//! runs this same code measures the rules' worth in `docs/multiplexer/policy.md`.

#![warn(clippy::disallowed_types, clippy::iter_over_hash_type)]

use std::time::{Duration, Instant};

use super::config::{Knobs, Linger};
use super::estimate::Gaps;
use super::event::RequestClass;

/// A resident with work stays at least this many times the swap cost: then at most a quarter of the time is swapping.
const FLOOR_COSTS: u32 = 3;

/// It stays this many times the swap cost if no other model would wait too long: then at most a ninth of the time is
/// swapping.
const TENURE_COSTS: u32 = 8;

/// Without a setting, a model may wait the longer of this ...
const MAX_WAIT: Duration = Duration::from_secs(120);

/// ... and this many times the swap cost.
const MAX_WAIT_COSTS: u32 = 10;

/// The longest usual drain: how long running requests normally take to end once their model has to go.
const LONGEST_USUAL_DRAIN: Duration = Duration::from_secs(30);

/// The longest linger. A linger is also at most half the cost of a swap.
const LONGEST_LINGER: Duration = Duration::from_secs(5);

/// With fewer gaps than this, the policy does not linger.
const FEWEST_GAPS: usize = 3;

/// The least cost that the policy reckons with: a driver that swaps in no time must not cause a division by zero.
const LEAST_COST: Duration = Duration::from_millis(1);

/// A model that has waiting requests and may be loaded: not in back-off, not kept out by a pin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The number of waiting requests, here and at relays.
    pub waiting: u32,
    /// How long the model has waited for its turn: the age of the oldest request, but at most the time since the model
    /// was last resident.
    pub age: Duration,
    /// The sum of their ages.
    pub total_wait: Duration,
    /// The cost of the swap to it.
    pub cost: Duration,
    /// The highest class of the waiting requests.
    pub class: RequestClass,
    /// Its place in the fair order of the relays, from 0. Candidates may share a place.
    pub rank: u32,
    /// True if its keys had attained less service than those of the resident when the resident was loaded, and are of
    /// the same class: the resident's turn increases the difference.
    pub is_owed: bool,
}

/// The resident, as the policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct ResidentView<'a> {
    /// The time since which it serves.
    pub since: Instant,
    /// The time since which it has neither running nor waiting requests; `None` while it has some.
    pub idle_since: Option<Instant>,
    /// Its history of gaps between requests.
    pub gaps: &'a Gaps,
    /// The usual number of its requests that run or wait at once.
    pub concurrency: f64,
    /// The highest class of its running and waiting requests, or that of its last one while it has none.
    pub class: RequestClass,
}

/// A decision of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Keep the resident, and decide again at this time if nothing happens before.
    Stay {
        /// The time at which waiting alone may change the decision.
        recheck: Option<Instant>,
        /// True if the resident is idle and kept only for its next request.
        lingering: bool,
    },
    /// Unload the resident.
    Leave {
        /// The index of the candidate to load.
        to: usize,
        /// The reason.
        why: Why,
    },
}

/// The reason why a resident is unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// It was idle.
    Idle,
    /// Its quantum was over.
    Quantum,
}

/// Decides whether to leave the resident for one of the candidates.
pub fn decide(knobs: &Knobs, resident: &ResidentView<'_>, candidates: &[Candidate], now: Instant) -> Decision {
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
    if now >= turn_end(knobs, resident, candidates, to) {
        return Decision::Leave { to, why: Why::Quantum };
    }
    // Another candidate may overtake the pick in the meantime, and may have the shorter quantum.
    let dues = (0..candidates.len()).map(|other| turn_end(knobs, resident, candidates, other));
    Decision::Stay { recheck: dues.filter(|due| *due > now).min(), lingering: false }
}

/// Returns when a resident with work is unloaded for one of the candidates.
pub fn turn_end(knobs: &Knobs, resident: &ResidentView<'_>, candidates: &[Candidate], to: usize) -> Instant {
    let precedes = |candidate: &Candidate| {
        candidate.class < resident.class || candidate.class == resident.class && candidate.is_owed
    };
    // Whichever model comes next: one that is late comes before the one that ends the turn early.
    let cost = candidates[to].cost;
    let turn = if candidates.iter().any(precedes) { floor(knobs, cost) } else { quantum(knobs, cost) };
    resident.since + turn
}

/// Returns the index of the next candidate. `busy`: the resident has work, so its turn also comes before a waiter's.
pub fn pick(knobs: &Knobs, busy: bool, candidates: &[Candidate]) -> Option<usize> {
    let late = |index: &usize| candidates[*index].age > bound(knobs, busy, candidates, *index);
    let oldest = (0..candidates.len()).filter(late).max_by_key(|index| candidates[*index].age);
    oldest.or_else(|| {
        let place = |index: usize| (candidates[index].class, candidates[index].rank);
        let first = (0..candidates.len()).map(place).min()?;
        let worth = |index: &usize| {
            let Candidate { total_wait, cost, .. } = candidates[*index];
            total_wait.as_secs_f64() / cost.max(LEAST_COST).as_secs_f64()
        };
        // Ties go to the oldest, then to the first.
        (0..candidates.len()).rev().filter(|index| place(*index) == first).max_by(|a, b| {
            let by_age = || candidates[*a].age.cmp(&candidates[*b].age);
            worth(a).total_cmp(&worth(b)).then_with(by_age)
        })
    })
}

/// Returns how long a resident with work stays before a swap that costs `cost`.
pub fn quantum(knobs: &Knobs, cost: Duration) -> Duration {
    let tenure = (cost * TENURE_COSTS).min(max_wait(knobs, cost).saturating_sub(cost));
    floor(knobs, cost).max(tenure)
}

/// Returns how long a resident with work stays at least before a swap that costs `cost`.
pub fn floor(knobs: &Knobs, cost: Duration) -> Duration {
    knobs.min_residency.max(cost * FLOOR_COSTS)
}

/// Returns how long a model should wait at most.
pub fn max_wait(knobs: &Knobs, cost: Duration) -> Duration {
    knobs.max_wait.unwrap_or_else(|| MAX_WAIT.max(cost * MAX_WAIT_COSTS))
}

/// True if the operator's `max_wait` is shorter than the floor of the quantum allows.
pub fn is_infeasible(knobs: &Knobs, cost: Duration) -> bool {
    knobs.max_wait.is_some_and(|max_wait| max_wait < cost * (FLOOR_COSTS + 1))
}

/// Returns the wait after which a candidate precedes all others, except those that have waited longer: the turns of all
/// others, and its own swap.
///
/// The swap to the resident is included: a waiter may have arrived when that swap had just begun.
pub fn bound(knobs: &Knobs, busy: bool, candidates: &[Candidate], index: usize) -> Duration {
    other_turns(knobs, busy, candidates, index).sum::<Duration>() + own_swap(knobs, candidates, index)
}

/// Returns how long a candidate waits at most, if all loads succeed, no drain lasts longer than usual and no other has
/// waited longer: its bound, the turn of another that had just begun by then, and its own swap. A lookahead that begins
/// no turn that would end beyond another model's bound was tried: it costs 7 to 10 % of the responses of a slot whose
/// models are all wanted, for a bound that is one turn shorter.
pub fn longest_wait(knobs: &Knobs, busy: bool, candidates: &[Candidate], index: usize) -> Duration {
    let others = || other_turns(knobs, busy, candidates, index);
    let bound = bound(knobs, busy, candidates, index);
    match others().max() {
        Some(longest) if others().count() > 1 => bound + longest + own_swap(knobs, candidates, index),
        // A single other candidate does not follow itself.
        Some(_) | None => bound,
    }
}

/// Returns the assumed duration of a drain: a timeout long enough for the longest responses is no estimate of the usual
/// ones.
pub fn usual_drain(knobs: &Knobs) -> Duration {
    knobs.drain_timeout.min(LONGEST_USUAL_DRAIN)
}

/// The turns of all other candidates, and of the resident.
fn other_turns(knobs: &Knobs, busy: bool, candidates: &[Candidate], index: usize) -> impl Iterator<Item = Duration> {
    let turn = |cost: Duration| quantum(knobs, cost) + cost + usual_drain(knobs);
    let others = candidates.iter().enumerate().filter(move |(other, _)| *other != index);
    others.map(move |(_, other)| turn(other.cost)).chain(busy.then(|| turn(candidates[index].cost)))
}

fn own_swap(knobs: &Knobs, candidates: &[Candidate], index: usize) -> Duration {
    candidates[index].cost + usual_drain(knobs)
}

/// Returns how long an idle resident is kept for its next request while requests for others wait.
///
/// Waiting for `t` saves two swaps for each past gap of at most `t`, less the gap itself, and costs `t` for each longer
/// gap. The `t` with the best balance wins, if any is better than not waiting. If more requests wait for another model
/// than the resident usually serves at once, they come first whatever the history. So does a request of a higher class
/// than the resident's last one, even before a fixed linger.
pub fn linger(knobs: &Knobs, resident: &ResidentView<'_>, candidates: &[Candidate], cost: Duration) -> Duration {
    if candidates.iter().any(|candidate| candidate.class < resident.class) {
        return Duration::ZERO;
    }
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
