//! Detects other writers of `spec.replicas` of a pool that the operator scales: pure, with the time passed in.
//!
//! A number that the operator did not write comes from a user, an autoscaler, or a manifest that is applied repeatedly.
//! One such write is respected like load: it is not lowered for one scale-down delay, while waiting requests may still
//! raise it. Two within a delay mean a program that disagrees, and two programs that correct each other would restart
//! backends indefinitely: the operator then yields, and writes nothing until a whole delay has passed without another
//! write.
//!
//! A program may also need longer than a delay to correct the operator, as a manifest that is applied every ten
//! minutes. Therefore, a write that undoes the operator's last one is remembered for a day: from the second one on the
//! operator yields, each time for twice as long.

use std::time::{Duration, Instant};

/// The time after which a write that undid the operator's is forgotten, unless there was another one.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);
/// The longest time for which the operator yields, unless one delay is longer.
const LONGEST_YIELD: Duration = Duration::from_secs(8 * 3600);

/// The history of the number's writers.
#[derive(Clone, Debug, Default)]
pub struct Writers {
    /// The number that was last seen or written.
    known: Option<i32>,
    /// Generation of the operator's last write: a cached object with an earlier one is outdated.
    wrote: i64,
    /// The last two writes by others, the newer first.
    foreign: [Option<Instant>; 2],
    /// The numbers before and after the operator's last write, unless another writer has changed it since.
    own: Option<(i32, i32)>,
    /// The number of writes that undid the operator's, and when the last one was seen.
    undone: Option<(u32, Instant)>,
}

/// The result of the operator's own write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaWrite {
    /// The number was written, and the pool has this generation; 0 for a target, whose generation is not followed.
    Done(i64),
    /// The number was another one, or another change came first.
    Outdated,
    /// The API server stored this number instead, as an admission webhook makes it.
    Overruled(i32),
}

/// The result of observing the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaObservation {
    /// The object is older than the operator's last write.
    Stale,
    /// There was no other write.
    Same,
    /// Another writer changed it.
    Foreign,
}

/// The owner of the number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReplicaOwner {
    /// The operator.
    #[default]
    Alone,
    /// Another writer changed it once, recently.
    Shared,
    /// Another writer keeps changing it: the operator does not write.
    Yielding,
}

impl Writers {
    /// Observes the pool. `noted` is the number that, according to the pool, the operator last wrote. It is part of the
    /// same write as the number, so if both are equal, the number is the operator's, even if the response to that write
    /// was lost or another leader wrote it.
    pub fn observe(&mut self, now: Instant, generation: i64, replicas: i32, noted: Option<i32>) -> ReplicaObservation {
        if generation < self.wrote {
            return ReplicaObservation::Stale;
        }
        let expected = self.known.or(noted);
        self.known = Some(replicas);
        let Some(expected) = expected.filter(|expected| *expected != replicas) else { return ReplicaObservation::Same };
        if noted == Some(replicas) {
            self.own = Some((expected, replicas));
            return ReplicaObservation::Same;
        }
        if self.own.take().is_some_and(|(before, after)| (before < after) == (replicas < after)) {
            let earlier = self.undone.filter(|(_, at)| now.saturating_duration_since(*at) < REMEMBERED);
            self.undone = Some((earlier.map_or(1, |(number, _)| number.saturating_add(1)), now));
        }
        self.foreign = [Some(now), self.foreign[0]];
        ReplicaObservation::Foreign
    }

    /// Records the operator's own write, which gave the pool this generation.
    pub fn wrote(&mut self, generation: i64, from: i32, to: i32) {
        self.known = Some(to);
        self.own = (from != to).then_some((from, to));
        self.wrote = generation;
    }

    /// Returns who owns the number now.
    pub fn replica_owner(&self, now: Instant, delay: Duration) -> ReplicaOwner {
        if self.yields_until(delay).is_some_and(|until| now < until) {
            return ReplicaOwner::Yielding;
        }
        let recent = self.foreign.iter().flatten().filter(|at| now.saturating_duration_since(**at) < delay).count();
        match recent {
            0 => ReplicaOwner::Alone,
            1 => ReplicaOwner::Shared,
            _ => ReplicaOwner::Yielding,
        }
    }

    /// Returns the end of the time for which the operator yields to a writer that undoes its writes.
    fn yields_until(&self, delay: Duration) -> Option<Instant> {
        let (number, at) = self.undone?;
        let doublings = number.checked_sub(2)?;
        let doubled = delay.saturating_mul(2_u32.saturating_pow(doublings));
        Some(at + doubled.min(LONGEST_YIELD.max(delay)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_secs(600);

    #[test]
    fn own_write_is_not_foreign() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        assert_eq!(writers.observe(now, 1, 2, None), ReplicaObservation::Same);
        writers.wrote(2, 2, 5);
        assert_eq!(writers.observe(now, 1, 2, None), ReplicaObservation::Stale);
        assert_eq!(writers.observe(now, 2, 5, None), ReplicaObservation::Same);
        assert_eq!(writers.replica_owner(now, DELAY), ReplicaOwner::Alone);
    }

    #[test]
    fn single_foreign_write_is_respected_until_delay_ends() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        writers.observe(now, 1, 2, None);
        assert_eq!(writers.observe(now, 2, 6, None), ReplicaObservation::Foreign);
        assert_eq!(writers.replica_owner(now, DELAY), ReplicaOwner::Shared);
        assert_eq!(writers.replica_owner(now + DELAY, DELAY), ReplicaOwner::Alone);
    }

    #[test]
    fn repeated_foreign_writes_cause_yielding_for_delay() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        writers.observe(now, 1, 1, None);
        writers.observe(now, 2, 4, None);
        writers.wrote(3, 4, 8);
        let later = now + Duration::from_secs(15);
        assert_eq!(writers.observe(later, 4, 4, None), ReplicaObservation::Foreign);
        assert_eq!(writers.replica_owner(later, DELAY), ReplicaOwner::Yielding);
        assert_eq!(writers.replica_owner(later + DELAY, DELAY), ReplicaOwner::Alone);
    }

    #[test]
    fn own_write_with_lost_response_is_not_foreign() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        writers.wrote(1, 1, 2);
        writers.observe(now, 1, 2, Some(2));
        // The write timed out, but succeeded.
        assert_eq!(writers.observe(now, 2, 5, Some(5)), ReplicaObservation::Same);
        assert_eq!(writers.replica_owner(now, DELAY), ReplicaOwner::Alone);
        // A writer that changes only the number leaves the note unchanged.
        assert_eq!(writers.observe(now, 3, 3, Some(5)), ReplicaObservation::Foreign);
    }

    #[test]
    fn new_leader_learns_previous_write_from_pool() {
        let now = Instant::now();
        assert_eq!(Writers::default().observe(now, 9, 3, Some(3)), ReplicaObservation::Same);
        assert_eq!(Writers::default().observe(now, 9, 4, Some(3)), ReplicaObservation::Foreign);
    }

    /// Returns what the operator does after each write by another, which comes this long after the operator's.
    fn after_each_undo(after: Duration, undos: u32) -> Vec<Duration> {
        let (mut writers, mut now) = (Writers::default(), Instant::now());
        writers.observe(now, 1, 4, None);
        let yields = (0..undos).map(|_| {
            writers.wrote(1, 4, 2);
            now += after;
            assert_eq!(writers.observe(now, 1, 3, None), ReplicaObservation::Foreign);
            let began = now;
            while writers.replica_owner(now, DELAY) == ReplicaOwner::Yielding {
                now += DELAY;
            }
            let yielded = now - began;
            // The operator may have scaled up meanwhile, which no writer undid.
            writers.observe(now, 1, 3, None);
            writers.wrote(1, 3, 4);
            now += DELAY;
            yielded
        });
        yields.collect()
    }

    #[test]
    fn slow_writer_undoing_scale_down_makes_yields_double() {
        let delays = |number: u32| DELAY * number;
        assert_eq!(after_each_undo(DELAY * 2, 5), [delays(0), delays(1), delays(2), delays(4), delays(8)]);
        let longest = *after_each_undo(DELAY * 2, 20).last().unwrap();
        assert_eq!(longest, LONGEST_YIELD);
        assert_eq!(after_each_undo(REMEMBERED, 3), [Duration::ZERO; 3], "it is forgotten");
    }

    #[test]
    fn foreign_write_in_own_direction_undoes_nothing() {
        let (mut writers, mut now) = (Writers::default(), Instant::now());
        writers.observe(now, 1, 4, None);
        for _ in 0..4 {
            writers.wrote(1, 4, 3);
            now += DELAY * 2;
            assert_eq!(writers.observe(now, 1, 2, None), ReplicaObservation::Foreign);
            assert_eq!(writers.replica_owner(now, DELAY), ReplicaOwner::Shared);
            writers.wrote(1, 2, 4);
        }
    }
}
