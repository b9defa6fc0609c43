//! All measured times: a percentile is a time that was really measured, not the edge of a bucket.
//!
//! A run has a few million samples at most, so that four bytes for each cost less than a histogram's loss of precision.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The range in which Nagle's algorithm and delayed acknowledgements stall each other: 40 ms and a little on either
/// side.
const STALL: std::ops::RangeInclusive<Duration> = Duration::from_millis(35)..=Duration::from_millis(50);

/// Times in the order of their measurement.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<u32>);

/// The reported figures of [`Samples`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The number of samples.
    pub count: u64,
    /// The median, in milliseconds.
    pub p50_ms: f64,
    /// The 99th percentile, in milliseconds.
    pub p99_ms: f64,
    /// The longest, in milliseconds.
    pub max_ms: f64,
    /// The number of samples between 35 and 50 ms.
    pub stalls: u64,
}

impl Samples {
    /// Adds one, with a precision of a tenth of a microsecond and up to seven minutes.
    pub fn add(&mut self, took: Duration) {
        self.0.push(u32::try_from(took.as_nanos() / 100).unwrap_or(u32::MAX));
    }

    /// Adds all samples of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    /// The number of samples.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no samples.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The least time that `share` of the samples do not exceed; zero without samples.
    pub fn quantile(&mut self, share: f64) -> Duration {
        self.0.sort_unstable();
        let rank = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.max(1) - 1).map_or(Duration::ZERO, |ticks| duration(*ticks))
    }

    /// Calculates the reported figures.
    pub fn summary(&mut self) -> Summary {
        Summary {
            count: self.0.len() as u64,
            p50_ms: millis(self.quantile(0.5)),
            p99_ms: millis(self.quantile(0.99)),
            max_ms: millis(self.quantile(1.0)),
            stalls: self.0.iter().filter(|ticks| STALL.contains(&duration(**ticks))).count() as u64,
        }
    }
}

/// Milliseconds, as in the reports.
pub fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The median of the values, between the two in the middle for an even number of them; `None` without values.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some(f64::midpoint(values[middle - 1], values[middle])),
    }
}

fn duration(ticks: u32) -> Duration {
    Duration::from_nanos(u64::from(ticks) * 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_millis(times: impl IntoIterator<Item = u64>) -> Samples {
        let mut samples = Samples::default();
        times.into_iter().for_each(|time| samples.add(Duration::from_millis(time)));
        samples
    }

    #[test]
    fn quantiles_are_observed_times() {
        let mut hundred = of_millis((1..=100).rev());
        assert_eq!(hundred.quantile(0.5), Duration::from_millis(50));
        assert_eq!(hundred.quantile(0.99), Duration::from_millis(99));
        assert_eq!(hundred.quantile(1.0), Duration::from_millis(100));
        assert_eq!(hundred.quantile(0.0), Duration::from_millis(1));
        assert_eq!(of_millis([7]).quantile(0.99), Duration::from_millis(7));
        assert_eq!(Samples::default().quantile(0.5), Duration::ZERO);
    }

    #[test]
    fn only_stalls_near_forty_milliseconds_are_counted() {
        let summary = of_millis([1, 34, 35, 42, 50, 51]).summary();
        assert_eq!((summary.count, summary.stalls), (6, 3));
        assert_eq!((summary.p50_ms, summary.max_ms), (35.0, 51.0));
    }

    #[test]
    fn merged_samples_form_one_distribution() {
        let mut all = of_millis([1, 2]);
        all.merge(&of_millis([3]));
        assert_eq!((all.len(), all.quantile(1.0)), (3, Duration::from_millis(3)));
    }

    #[test]
    fn median_of_even_number_averages_middle_two() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }
}
