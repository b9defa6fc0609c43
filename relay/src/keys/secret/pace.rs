//! The time of the next attempt.

use std::time::Duration;

use tokio::time::Instant;

/// The wait before the second attempt; doubled before each further one.
const FIRST: Duration = Duration::from_millis(50);
/// The longest wait between two attempts, even if a server requests more.
const LONGEST: Duration = Duration::from_secs(2);

/// The waits between the attempts of one change: longer each time, and random, so that relays that collided once do not
/// collide again.
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

    /// Waits; returns false at once if there is no time for another attempt.
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

/// A random number from 0.0 to 1.0.
fn random_fraction() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness the longest wait is the safest.
    if getrandom::fill(&mut bytes).is_err() {
        return 1.0;
    }
    f64::from(u32::from_le_bytes(bytes)) / f64::from(u32::MAX)
}
