//! The pause before the next dial.
//!
//! - After a lost link, and while its relay is unavailable: uniformly 0.2 s … min(10 s, 2ⁿ s), so that a thousand
//!   workers do not return at the same instant.
//! - An address that never admitted this worker: 1, 2, 4 … 30 s plus up to 500 ms of jitter. The same after a rejected
//!   secret.
//! - The address of an already linked relay (a load balancer may choose another next time): 1–60 s, at first at most 2
//!   s. A balancer adds a new relay only once it is ready, and then sends clients to it at once: their requests wait
//!   there until a dial happens to reach it. With n relays that takes about n dials, so the pause grows only after
//!   several times that; but not after many, because each is a TLS handshake and a registration, by every worker of a
//!   fleet.

use std::time::Duration;

/// The number of dials per relay that reach an already linked relay before the pause doubles.
const DIALS_PER_RELAY: u32 = 4;

/// How a dial, or the resulting link, ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndKind {
    /// A link was established and has ended.
    Linked,
    /// No link was established.
    Failed,
    /// The relay rejected the worker's secret.
    Refused,
    /// There is already a link to that relay.
    Duplicate,
    /// The relay requires another protocol version, which this worker supports.
    OtherVersion,
}

/// The failures at one address.
#[derive(Clone, Debug, Default)]
pub struct Backoff {
    admitted: bool,
    failures: u32,
    duplicates: u32,
}

impl Backoff {
    /// Returns the pause after this end; `relays` is the number of relays. `random` is uniform in 0..1.
    pub fn next_pause(&mut self, end: EndKind, relays: u32, random: f64) -> Duration {
        match end {
            EndKind::Linked => {
                (self.admitted, self.failures, self.duplicates) = (true, 0, 0);
                between(0.2, 1.0, random)
            }
            EndKind::Failed if self.admitted => {
                self.failures += 1;
                between(0.2, power(self.failures).min(10.0), random)
            }
            EndKind::Failed | EndKind::Refused => {
                self.failures += 1;
                Duration::from_secs_f64(power(self.failures - 1).min(30.0) + 0.5 * random)
            }
            EndKind::Duplicate => {
                self.admitted = true;
                self.failures = 0;
                let doublings = self.duplicates / DIALS_PER_RELAY.saturating_mul(relays.max(1));
                self.duplicates = self.duplicates.saturating_add(1);
                between(1.0, power(doublings + 1).min(60.0), random)
            }
            EndKind::OtherVersion => between(0.0, 0.2, random),
        }
    }
}

/// A random number, uniform in 0..1.
pub fn random() -> f64 {
    // If the system's random number generator fails, a fixed pause still works.
    let bits = getrandom::u64().unwrap_or(u64::MAX / 2);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn power(n: u32) -> f64 {
    f64::from(1_u32 << n.min(10))
}

fn between(low: f64, high: f64, random: f64) -> Duration {
    Duration::from_secs_f64(low + (high - low) * random)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(backoff: &mut Backoff, end: EndKind, random: f64) -> f64 {
        backoff.next_pause(end, 1, random).as_secs_f64()
    }

    #[test]
    fn unreachable_address_is_redialled_within_30_s() {
        let mut backoff = Backoff::default();
        let pauses: Vec<f64> = (0..7).map(|_| seconds(&mut backoff, EndKind::Failed, 0.0)).collect();
        assert_eq!(pauses, [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]);
        assert_eq!(seconds(&mut backoff, EndKind::Failed, 1.0), 30.5);
    }

    #[test]
    fn lost_link_is_redialled_within_10_s() {
        let mut backoff = Backoff::default();
        assert_eq!(seconds(&mut backoff, EndKind::Linked, 0.0), 0.2);
        assert_eq!(seconds(&mut backoff, EndKind::Linked, 1.0), 1.0);
        let most: Vec<f64> = (0..5).map(|_| seconds(&mut backoff, EndKind::Failed, 1.0)).collect();
        assert_eq!(most, [2.0, 4.0, 8.0, 10.0, 10.0]);
        assert_eq!(seconds(&mut backoff, EndKind::Failed, 0.0), 0.2);
    }

    #[test]
    fn duplicate_relay_address_is_redialled_within_60_s() {
        let mut backoff = Backoff::default();
        let most: Vec<f64> = (0..32).map(|_| seconds(&mut backoff, EndKind::Duplicate, 1.0)).step_by(4).collect();
        assert_eq!(most, [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]);
        assert_eq!(seconds(&mut backoff, EndKind::Duplicate, 0.0), 1.0);
    }

    #[test]
    fn more_relays_delay_growth_of_duplicate_pause() {
        let mut backoff = Backoff::default();
        let pause = |backoff: &mut Backoff| backoff.next_pause(EndKind::Duplicate, 3, 1.0).as_secs_f64();
        let most: Vec<f64> = (0..13).map(|_| pause(&mut backoff)).collect();
        assert!(most[..12].iter().all(|pause| *pause == 2.0), "{most:?}");
        assert_eq!(most[12], 4.0);
    }

    #[test]
    fn refused_secret_is_never_retried_early() {
        let mut backoff = Backoff::default();
        seconds(&mut backoff, EndKind::Linked, 0.0);
        assert!(seconds(&mut backoff, EndKind::Refused, 0.0) >= 1.0);
    }
}
