//! Who else writes `spec.replicas` of a pool that the operator scales: pure, with the time handed in.
//!
//! A number that the operator did not write is somebody else's: a person's, an autoscaler's, or that of a manifest that is
//! applied again and again. One such write is respected like load, so it is not lowered for one scale-down delay, while
//! waiting requests may still raise it. Two within a delay are a program that disagrees, and two programs that correct each
//! other restart backends for ever: then the operator yields, and writes nothing until a whole delay has gone by in peace.

use std::time::{Duration, Instant};

/// What is known of the number's writers.
#[derive(Clone, Debug, Default)]
pub struct Writers {
    /// The number as it was last seen or written.
    known: Option<i32>,
    /// Generation of our last write: what a cache shows of an earlier one is old.
    wrote: i64,
    /// The last two writes by somebody else, the newer first.
    foreign: [Option<Instant>; 2],
}

/// What a look at the number shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The object is older than our own last write.
    Stale,
    /// Nobody else wrote.
    Same,
    /// Somebody else wrote.
    Foreign,
}

/// Whose number it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// Ours.
    #[default]
    Alone,
    /// Somebody wrote once, lately.
    Shared,
    /// Somebody keeps writing: we do not.
    Yielding,
}

impl Writers {
    /// Looks at the pool. `noted` is what the pool itself says that the operator last wrote. It comes with the number in one
    /// write, so where both are the same the number is ours, even if the answer to that write was lost, or another leader's.
    pub fn observe(&mut self, now: Instant, generation: i64, replicas: i32, noted: Option<i32>) -> Seen {
        if generation < self.wrote {
            return Seen::Stale;
        }
        let expected = self.known.or(noted);
        self.known = Some(replicas);
        if expected.is_none_or(|expected| expected == replicas) || noted == Some(replicas) {
            return Seen::Same;
        }
        self.foreign = [Some(now), self.foreign[0]];
        Seen::Foreign
    }

    /// We wrote the number, which gave the pool this generation.
    pub fn wrote(&mut self, generation: i64, replicas: i32) {
        self.known = Some(replicas);
        self.wrote = generation;
    }

    /// Whose number it is now.
    pub fn standing(&self, now: Instant, delay: Duration) -> Standing {
        let recent = self.foreign.iter().flatten().filter(|at| now.saturating_duration_since(**at) < delay).count();
        match recent {
            0 => Standing::Alone,
            1 => Standing::Shared,
            _ => Standing::Yielding,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_secs(600);

    #[test]
    fn our_own_number_is_nobody_elses() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        assert_eq!(writers.observe(now, 1, 2, None), Seen::Same);
        writers.wrote(2, 5);
        assert_eq!(writers.observe(now, 1, 2, None), Seen::Stale);
        assert_eq!(writers.observe(now, 2, 5, None), Seen::Same);
        assert_eq!(writers.standing(now, DELAY), Standing::Alone);
    }

    #[test]
    fn one_write_is_respected_and_forgotten_after_the_delay() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        writers.observe(now, 1, 2, None);
        assert_eq!(writers.observe(now, 2, 6, None), Seen::Foreign);
        assert_eq!(writers.standing(now, DELAY), Standing::Shared);
        assert_eq!(writers.standing(now + DELAY, DELAY), Standing::Alone);
    }

    #[test]
    fn to_whom_keeps_writing_we_yield_for_a_delay_after_the_last_time() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        writers.observe(now, 1, 1, None);
        writers.observe(now, 2, 4, None);
        writers.wrote(3, 8);
        let later = now + Duration::from_secs(15);
        assert_eq!(writers.observe(later, 4, 4, None), Seen::Foreign);
        assert_eq!(writers.standing(later, DELAY), Standing::Yielding);
        assert_eq!(writers.standing(later + DELAY, DELAY), Standing::Alone);
    }

    #[test]
    fn a_write_of_ours_whose_answer_was_lost_is_nobody_elses() {
        let (mut writers, now) = (Writers::default(), Instant::now());
        writers.wrote(1, 2);
        writers.observe(now, 1, 2, Some(2));
        // It timed out, and was done all the same.
        assert_eq!(writers.observe(now, 2, 5, Some(5)), Seen::Same);
        assert_eq!(writers.standing(now, DELAY), Standing::Alone);
        // Whoever writes the number alone leaves the note as it was.
        assert_eq!(writers.observe(now, 3, 3, Some(5)), Seen::Foreign);
    }

    #[test]
    fn a_new_leader_knows_from_the_pool_what_the_last_one_wrote() {
        let now = Instant::now();
        assert_eq!(Writers::default().observe(now, 9, 3, Some(3)), Seen::Same);
        assert_eq!(Writers::default().observe(now, 9, 4, Some(3)), Seen::Foreign);
    }
}
