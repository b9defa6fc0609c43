//! When to try again.

use std::time::Duration;

use tokio::time::Instant;

/// Before the second try; twice that before the third, and so on.
const FIRST: Duration = Duration::from_millis(50);
/// Between two tries; also where a server asks for more.
const LONGEST: Duration = Duration::from_secs(2);

/// The waits between the tries of one change: longer each time, and random, so that relays that met once do not meet
/// again.
pub(super) struct Pace {
    deadline: Instant,
    next: Duration,
}

impl Pace {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { deadline, next: FIRST }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Waits; false, and at once, when there is no time for another try.
    pub(super) async fn wait(&mut self, at_least: Option<Duration>) -> bool {
        let wait = self.next.mul_f64(random_fraction()).max(at_least.unwrap_or_default()).min(LONGEST);
        self.next = (self.next * 2).min(LONGEST);
        let until = Instant::now() + wait;
        if until >= self.deadline {
            return false;
        }
        tokio::time::sleep_until(until).await;
        true
    }
}

/// From 0.0 to 1.0.
fn random_fraction() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness the longest wait is the safest.
    if getrandom::fill(&mut bytes).is_err() {
        return 1.0;
    }
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}
