//! How often a worker may cause something: a line in the log, a new list of models.

use std::time::{Duration, Instant};

/// Between two lines of one kind, when a worker repeats what makes no sense.
const NONSENSE_LOGGED_EVERY: Duration = Duration::from_secs(60);
/// Between two lines of one kind about what a worker may well repeat.
const NEWS_LOGGED_EVERY: Duration = Duration::from_secs(1);

/// Between two updates of a worker's models, when there are many. Each costs all requests of its provider a moment.
const UPDATES_EVERY: Duration = Duration::from_millis(250);
/// Updates that may come at once.
const UPDATES_AT_ONCE: u32 = 8;

/// When a line of one kind was last logged, and how many were not.
#[derive(Debug)]
pub struct Lines {
    every: Duration,
    logged_at: Option<Instant>,
    unsaid: u64,
}

impl Lines {
    /// For what makes no sense.
    pub fn of_nonsense() -> Self {
        Self { every: NONSENSE_LOGGED_EVERY, logged_at: None, unsaid: 0 }
    }

    /// For what may well be repeated.
    pub fn of_news() -> Self {
        Self { every: NEWS_LOGGED_EVERY, ..Self::of_nonsense() }
    }

    /// Notes one more. Where it is time for a line in the log: how many there were without one.
    pub fn note(&mut self, now: Instant) -> Option<u64> {
        if self.logged_at.is_some_and(|logged| now.saturating_duration_since(logged) < self.every) {
            self.unsaid += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

/// The updates of a worker's models.
#[derive(Debug, Default)]
pub struct Updates {
    /// When all that came so far would have come, had it come at the allowed pace.
    paid_until: Option<Instant>,
}

impl Updates {
    /// Notes one more. How long the next message of the worker has to wait.
    pub fn pause(&mut self, now: Instant) -> Duration {
        let paid_until = self.paid_until.map_or(now, |paid_until| paid_until.max(now)) + UPDATES_EVERY;
        self.paid_until = Some(paid_until);
        paid_until.saturating_duration_since(now).saturating_sub(UPDATES_EVERY * UPDATES_AT_ONCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_left_out_are_counted() {
        let (start, mut lines) = (Instant::now(), Lines::of_news());
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!([0, 1, 999, 1000, 1001].map(|millis| lines.note(at(millis))), [Some(0), None, None, Some(2), None]);
    }

    #[test]
    fn eight_updates_are_free_and_later_ones_wait() {
        let (start, mut updates) = (Instant::now(), Updates::default());
        for _ in 0..UPDATES_AT_ONCE {
            assert_eq!(updates.pause(start), Duration::ZERO);
        }
        assert_eq!(updates.pause(start), UPDATES_EVERY);
        assert_eq!(updates.pause(start + UPDATES_EVERY), UPDATES_EVERY);
        assert_eq!(updates.pause(start + Duration::from_secs(60)), Duration::ZERO);
    }
}
