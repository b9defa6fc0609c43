//! Limits on what a worker may cause: log lines, new lists of models and reports on homes.

use std::time::{Duration, Instant};

use modelrelay_protocol::limits::HOMES_INTERVAL;

/// The interval between two log lines of one kind if a worker repeats invalid messages.
const NONSENSE_LOGGED_EVERY: Duration = Duration::from_secs(60);
/// The interval between two log lines of one kind about messages that a worker may repeat.
const NEWS_LOGGED_EVERY: Duration = Duration::from_secs(1);

/// The interval between frequent updates of a worker's models. Each update delays all requests of its provider for a
/// moment.
const UPDATES_EVERY: Duration = Duration::from_millis(250);
/// The same for reports on homes. A worker sends less than half as many, unless the network has delayed some.
const HOMES_EVERY: Duration = Duration::from_millis(100);
/// The number of updates that may come at once.
const UPDATES_AT_ONCE: u32 = 8;

const _: () = assert!(HOMES_INTERVAL.as_millis() > 2 * HOMES_EVERY.as_millis(), "our own worker must not be slowed");

/// The time when a line of one kind was last logged, and the number of suppressed lines since.
#[derive(Debug)]
pub struct Lines {
    every: Duration,
    logged_at: Option<Instant>,
    suppressed: u64,
}

impl Lines {
    /// Limits lines about invalid messages.
    pub fn of_nonsense() -> Self {
        Self { every: NONSENSE_LOGGED_EVERY, logged_at: None, suppressed: 0 }
    }

    /// Limits lines about messages that may be repeated.
    pub fn of_news() -> Self {
        Self { every: NEWS_LOGGED_EVERY, ..Self::of_nonsense() }
    }

    /// Records one event. If it is to be logged, returns the number of suppressed lines before it.
    pub fn note(&mut self, now: Instant) -> Option<u64> {
        if self.logged_at.is_some_and(|logged| now.saturating_duration_since(logged) < self.every) {
            self.suppressed += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// The updates of one kind that a worker sends.
#[derive(Debug)]
pub struct Updates {
    every: Duration,
    /// The time by which all updates so far would have come at the allowed pace.
    paid_until: Option<Instant>,
}

impl Updates {
    /// Limits updates of its models.
    pub fn of_models() -> Self {
        Self { every: UPDATES_EVERY, paid_until: None }
    }

    /// Limits reports on homes.
    pub fn of_homes() -> Self {
        Self { every: HOMES_EVERY, paid_until: None }
    }

    /// Records one update. Returns how long the worker's next message must wait.
    pub fn pause(&mut self, now: Instant) -> Duration {
        let paid_until = self.paid_until.map_or(now, |paid_until| paid_until.max(now)) + self.every;
        self.paid_until = Some(paid_until);
        paid_until.saturating_duration_since(now).saturating_sub(self.every * UPDATES_AT_ONCE)
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
        let (start, mut updates) = (Instant::now(), Updates::of_models());
        for _ in 0..UPDATES_AT_ONCE {
            assert_eq!(updates.pause(start), Duration::ZERO);
        }
        assert_eq!(updates.pause(start), UPDATES_EVERY);
        assert_eq!(updates.pause(start + UPDATES_EVERY), UPDATES_EVERY);
        assert_eq!(updates.pause(start + Duration::from_secs(60)), Duration::ZERO);
    }
}
