//! Decides when a changed status is written. Conditions are written at once. Numbers change with every request and are
//! written every ten seconds at most.
//!
//! The first worker or model after there were none matters like a condition, because users wait for it. It is written
//! at once too, and cannot cause a storm: it is written again only after its loss was, and the loss is a number like
//! any other.

use std::time::Duration;

use super::status::without_numbers;
use crate::crd::ProviderStatus;

/// The minimum interval between writes of workers, queue depths and other numbers.
const NUMBERS_INTERVAL: Duration = Duration::from_secs(10);

/// The time of the next write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Immediately.
    Now,
    /// After this time.
    In(Duration),
    /// There is nothing to write.
    Never,
}

/// Returns when to write. `since` is the time since the last write, `None` if this operator has written nothing yet.
pub(super) fn due(before: &ProviderStatus, after: &ProviderStatus, since: Option<Duration>) -> Due {
    if before == after {
        return Due::Never;
    }
    let left = NUMBERS_INTERVAL.saturating_sub(since.unwrap_or(NUMBERS_INTERVAL));
    let only_numbers = without_numbers(before) == without_numbers(after);
    if !only_numbers || left.is_zero() || has_first(before, after) { Due::Now } else { Due::In(left) }
}

/// True if there are workers or models now, and there were none before.
fn has_first(before: &ProviderStatus, after: &ProviderStatus) -> bool {
    let is_first = |before: Option<i32>, after: Option<i32>| before.unwrap_or(0) == 0 && after.unwrap_or(0) > 0;
    is_first(before.workers, after.workers) || is_first(before.model_count, after.model_count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(workers: i32, models: i32, queued: i32) -> ProviderStatus {
        ProviderStatus {
            workers: Some(workers),
            model_count: Some(models),
            queue_depth: Some(queued),
            ..ProviderStatus::default()
        }
    }

    const SECOND: Option<Duration> = Some(Duration::from_secs(1));

    #[test]
    fn number_changes_are_delayed() {
        let (before, after) = (status(1, 1, 0), status(2, 1, 7));
        assert_eq!(due(&before, &after, SECOND), Due::In(Duration::from_secs(9)));
        assert_eq!(due(&before, &after, Some(NUMBERS_INTERVAL)), Due::Now);
        assert_eq!(due(&before, &after, None), Due::Now);
        assert_eq!(due(&before, &before, None), Due::Never);
    }

    #[test]
    fn first_worker_and_first_model_are_published_immediately() {
        assert_eq!(due(&status(0, 0, 0), &status(3, 0, 0), SECOND), Due::Now);
        assert_eq!(due(&status(3, 0, 0), &status(3, 1, 0), SECOND), Due::Now);
        assert_eq!(due(&ProviderStatus::default(), &status(1, 0, 0), SECOND), Due::Now);
    }

    #[test]
    fn non_numeric_changes_are_published_immediately() {
        let after = ProviderStatus { observed_generation: Some(2), ..status(1, 1, 0) };
        assert_eq!(due(&status(1, 1, 0), &after, SECOND), Due::Now);
    }

    /// A worker that connects and disconnects each second, for a minute.
    #[test]
    fn flapping_worker_causes_limited_writes() {
        let (mut written, mut written_at, mut writes) = (status(0, 0, 0), 0, 0);
        for second in 1..=60 {
            let after = status(second % 2, second % 2, 0);
            let since = Duration::from_secs(u64::try_from(second - written_at).unwrap());
            if due(&written, &after, Some(since)) == Due::Now {
                (written, written_at, writes) = (after, second, writes + 1);
            }
        }
        // Two writes per ten seconds: the loss when it is due, and the return at once.
        assert!((6..=13).contains(&writes), "{writes}");
    }
}
