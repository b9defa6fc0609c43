//! The sums of one row, and how a request ended for them.

use std::ops::AddAssign;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::telemetry::metrics::Outcome;

/// Sums over the requests of one key, model and day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageSums {
    /// The number of requests, by how they ended.
    pub requests: RequestCounts,
    /// Tokens of prompts, according to the backend, as the next two.
    pub input_tokens: u64,
    /// Those from the backend's cache.
    pub cached_tokens: u64,
    /// Tokens of responses.
    pub output_tokens: u64,
    /// Estimated tokens of prompts for which the backend reported nothing.
    #[serde(default)]
    pub estimated_input_tokens: u64,
    /// Estimated tokens of their responses.
    #[serde(default)]
    pub estimated_output_tokens: u64,
    /// The time for which slots of workers were held, over all attempts.
    #[serde(rename = "slot_seconds", with = "seconds")]
    pub slot_time: Duration,
    /// The time in queues.
    #[serde(rename = "wait_seconds", with = "seconds")]
    pub wait_time: Duration,
}

/// Numbers of requests, by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    /// The backend's whole response was sent, with a status below 400.
    pub answered: u64,
    /// A worker had it, and it ended with an error.
    pub failed: u64,
    /// The client disconnected, or an admin cancelled it.
    pub cancelled: u64,
    /// The relay rejected it before a worker had it.
    pub refused: u64,
}

impl RequestCounts {
    /// One request that ended with this outcome after this number of attempts.
    pub fn one(outcome: Outcome, attempts: u32) -> Self {
        let mut counts = Self::default();
        let count = if outcome == Outcome::Ok {
            &mut counts.answered
        } else if outcome == Outcome::Cancelled {
            &mut counts.cancelled
        } else if attempts == 0 {
            &mut counts.refused
        } else {
            &mut counts.failed
        };
        *count = 1;
        counts
    }

    /// The number of all of them.
    pub fn total(&self) -> u64 {
        self.answered.saturating_add(self.failed).saturating_add(self.cancelled).saturating_add(self.refused)
    }
}

impl UsageSums {
    /// All tokens, reported and estimated, of prompts and responses.
    pub fn tokens(&self) -> u64 {
        let estimated = self.estimated_input_tokens.saturating_add(self.estimated_output_tokens);
        self.input_tokens.saturating_add(self.output_tokens).saturating_add(estimated)
    }
}

impl AddAssign<&Self> for UsageSums {
    fn add_assign(&mut self, other: &Self) {
        let pairs = [
            (&mut self.requests.answered, other.requests.answered),
            (&mut self.requests.failed, other.requests.failed),
            (&mut self.requests.cancelled, other.requests.cancelled),
            (&mut self.requests.refused, other.requests.refused),
            (&mut self.input_tokens, other.input_tokens),
            (&mut self.cached_tokens, other.cached_tokens),
            (&mut self.output_tokens, other.output_tokens),
            (&mut self.estimated_input_tokens, other.estimated_input_tokens),
            (&mut self.estimated_output_tokens, other.estimated_output_tokens),
        ];
        for (sum, more) in pairs {
            *sum = sum.saturating_add(more);
        }
        self.slot_time = self.slot_time.saturating_add(other.slot_time);
        self.wait_time = self.wait_time.saturating_add(other.wait_time);
    }
}

/// Durations as seconds, exact to the microsecond.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    /// 10,000 years: more cannot be meant.
    const MOST: f64 = 3.2e11;

    pub(super) fn serialize<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(time.as_micros() as f64 / 1e6)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        if !(0.0..=MOST).contains(&seconds) {
            return Err(serde::de::Error::custom("expected a number of seconds"));
        }
        Ok(Duration::from_micros((seconds * 1e6).round() as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_decides_with_attempts_which_count_rises() {
        let one = |outcome, attempts| {
            let RequestCounts { answered, failed, cancelled, refused } = RequestCounts::one(outcome, attempts);
            [answered, failed, cancelled, refused]
        };
        assert_eq!(one(Outcome::Ok, 1), [1, 0, 0, 0]);
        for failed in [Outcome::UpstreamError, Outcome::WorkerLost, Outcome::ClientError, Outcome::RequestTimeout] {
            assert_eq!(one(failed, 1), [0, 1, 0, 0], "{failed}");
        }
        assert_eq!([one(Outcome::Cancelled, 0), one(Outcome::Cancelled, 2)], [[0, 0, 1, 0]; 2]);
        for refused in [Outcome::QueueFull, Outcome::QueueTimeout, Outcome::ClientError, Outcome::ModelNotFound] {
            assert_eq!(one(refused, 0), [0, 0, 0, 1], "{refused}");
        }
    }

    #[test]
    fn times_are_exact_to_the_microsecond() {
        let sums = UsageSums { slot_time: Duration::from_micros(1_234_567_890_123), ..UsageSums::default() };
        let text = serde_json::to_string(&sums).unwrap();
        assert!(text.contains("\"slot_seconds\":1234567.890123"), "{text}");
        assert_eq!(serde_json::from_str::<UsageSums>(&text).unwrap(), sums);
        for wrong in ["-1", "1e300", "\"1\"", "null"] {
            assert!(serde_json::from_str::<UsageSums>(&text.replace("1234567.890123", wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sums_do_not_overflow() {
        let mut sums = UsageSums { input_tokens: u64::MAX - 1, slot_time: Duration::MAX, ..UsageSums::default() };
        sums += &UsageSums { input_tokens: 5, slot_time: Duration::from_secs(1), ..UsageSums::default() };
        assert_eq!((sums.input_tokens, sums.slot_time), (u64::MAX, Duration::MAX));
    }
}
