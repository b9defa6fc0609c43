//! Reports in the log about repeated failures, at most once a minute.

use std::time::{Duration, Instant};

/// The time between two reports.
const INTERVAL: Duration = Duration::from_secs(60);

/// Failures, and the time when they were last reported.
#[derive(Debug, Default)]
pub(super) struct Reports {
    failures: u64,
    reported_at: Option<Instant>,
}

impl Reports {
    /// Records failures. If it is time for a report, returns the number of failures since the last one.
    pub(super) fn note(&mut self, failures: u64, now: Instant) -> Option<u64> {
        self.failures += failures;
        let is_due = self.reported_at.is_none_or(|at| now.saturating_duration_since(at) >= INTERVAL);
        is_due.then(|| {
            self.reported_at = Some(now);
            std::mem::take(&mut self.failures)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_reported_once_a_minute() {
        let (mut reports, start) = (Reports::default(), Instant::now());
        assert_eq!(reports.note(3, start), Some(3));
        assert_eq!(reports.note(4, start + INTERVAL / 2), None);
        assert_eq!(reports.note(1, start + INTERVAL), Some(5));
        assert_eq!(reports.note(1, start + INTERVAL), None);
    }
}
