//! The policy's measurements: what a swap costs, how soon a model's next request arrives, how many run at once.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Weight of the newest cost in the average.
const COST_WEIGHT: f64 = 0.3;

/// Weight of the newest sample of concurrent requests.
const CONCURRENCY_WEIGHT: f64 = 0.3;

/// A cost of more than this many times the average is an outlier, such as a first load that also downloaded the
/// weights.
const OUTLIER: u32 = 4;

/// The number of gaps that are remembered.
const GAPS: usize = 16;

/// The assumed cost of a cold load before any was measured: a small model on a fast disk.
pub const PRIOR_COLD: Duration = Duration::from_secs(15);

/// The assumed cost of waking a sleeping model before any was measured.
pub const PRIOR_WAKE: Duration = Duration::from_secs(3);

/// The same, if waking reads the weights.
pub const PRIOR_READING_WAKE: Duration = Duration::from_secs(8);

/// From nothing, or from host memory. Two averages, because they differ by a factor of ten and more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoadKind {
    /// The backend is started and reads the weights.
    Cold,
    /// The backend sleeps and is woken.
    Wake,
}

/// A moving average of the durations of successes.
///
/// A single outlier is ignored; a second in a row is accepted, because then conditions have changed.
#[derive(Clone, Debug, Default)]
pub struct CostAverage {
    average: Option<Duration>,
    passed_over: bool,
}

impl CostAverage {
    /// Returns the average; `None` before the first sample.
    pub fn value(&self) -> Option<Duration> {
        self.average
    }

    /// Records the duration of a success.
    pub fn record(&mut self, took: Duration) {
        let Some(average) = self.average else {
            self.average = Some(took);
            return;
        };
        if took > average * OUTLIER && !self.passed_over {
            self.passed_over = true;
            return;
        }
        self.passed_over = false;
        self.average = Some(took.mul_f64(COST_WEIGHT) + average.mul_f64(1.0 - COST_WEIGHT));
    }
}

/// The costs of a model's loads and evictions.
///
/// Kept per model; the cost of a swap is the sum of one eviction and one load. That needs n measurements, while an
/// average per pair would need n².
#[derive(Clone, Debug, Default)]
pub struct Costs {
    /// Cold loads.
    pub cold: CostAverage,
    /// Loads from sleep.
    pub wake: CostAverage,
    /// Evictions, until the memory was back.
    pub evict: CostAverage,
}

impl Costs {
    /// Returns the average of loads of this kind.
    pub fn load(&self, kind: LoadKind) -> &CostAverage {
        match kind {
            LoadKind::Cold => &self.cold,
            LoadKind::Wake => &self.wake,
        }
    }

    /// Records a successful load of this kind.
    pub fn record_load(&mut self, kind: LoadKind, took: Duration) {
        match kind {
            LoadKind::Cold => self.cold.record(took),
            LoadKind::Wake => self.wake.record(took),
        }
    }
}

/// Returns the assumed cost of a load that was never measured: the average of others of its kind in this slot, or else
/// the guess.
pub fn prior(guess: Duration, others: impl Iterator<Item = Duration>) -> Duration {
    let (sum, count) = others.fold((Duration::ZERO, 0), |(sum, count), cost| (sum + cost, count + 1));
    sum.checked_div(count).unwrap_or(guess)
}

/// The assumed load costs of a slot's kind of backend before any was measured.
///
/// Rather too low than too high: a load that seems cheap is measured soon, but a swap that seems expensive is put off
/// while the resident has work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priors {
    /// Of a cold load.
    pub cold: Duration,
    /// Of a wake.
    pub wake: Duration,
}

impl Priors {
    /// Nothing is loaded: the backends run all the time.
    pub const NONE: Self = Self { cold: Duration::ZERO, wake: Duration::ZERO };

    /// Backends that sleep without their weights and read them again to wake.
    pub const EMPTIED: Self = Self { wake: PRIOR_READING_WAKE, ..Self::USUAL };

    /// Backends that are started, or sleep with their weights.
    pub const USUAL: Self = Self { cold: PRIOR_COLD, wake: PRIOR_WAKE };

    /// The assumed cost of a load of this kind.
    pub fn of(self, kind: LoadKind) -> Duration {
        match kind {
            LoadKind::Cold => self.cold,
            LoadKind::Wake => self.wake,
        }
    }
}

/// How long a model was idle before its next request arrived, for the last few times.
///
/// A gap runs from the model's last request to its next one even if it was swapped out in between: that is exactly the
/// gap for which waiting would not have paid off.
#[derive(Clone, Debug, Default)]
pub struct Gaps {
    last: VecDeque<Duration>,
    idle_since: Option<Instant>,
}

impl Gaps {
    /// The model has no running or waiting requests any more.
    pub fn handle_idle(&mut self, now: Instant) {
        self.idle_since.get_or_insert(now);
    }

    /// A request arrived, or waits at a relay. Returns the gap that it ends.
    pub fn handle_wanted(&mut self, now: Instant) -> Option<Duration> {
        let gap = now.saturating_duration_since(self.idle_since.take()?);
        if self.last.len() == GAPS {
            self.last.pop_front();
        }
        self.last.push_back(gap);
        Some(gap)
    }

    /// The gaps, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Duration> + Clone {
        self.last.iter().copied()
    }

    /// The number of gaps.
    pub fn len(&self) -> usize {
        self.last.len()
    }

    /// True if there are none yet.
    pub fn is_empty(&self) -> bool {
        self.last.is_empty()
    }
}

/// The number of a model's requests that run or wait at once, averaged over request starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Concurrency(Option<f64>);

impl Concurrency {
    /// A request starts; `at_once` requests now run or wait.
    pub fn record(&mut self, at_once: u32) {
        let sample = f64::from(at_once);
        self.0 = Some(
            self.0.map_or(sample, |average| sample.mul_add(CONCURRENCY_WEIGHT, average * (1.0 - CONCURRENCY_WEIGHT))),
        );
    }

    /// The average; zero before the first request.
    pub fn value(self) -> f64 {
        self.0.unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn average(samples: &[u64]) -> Duration {
        let mut average = CostAverage::default();
        samples.iter().for_each(|took| average.record(secs(*took)));
        average.value().expect("a sample")
    }

    #[test]
    fn cost_average_follows_slowly_and_skips_outlier() {
        assert_eq!(average(&[10]), secs(10));
        assert_eq!(average(&[10, 20]), secs(13));
        assert_eq!(average(&[10, 40]), secs(19), "four times as long is none yet");
        assert_eq!(average(&[10, 600]), secs(10));
        assert_eq!(average(&[10, 600, 20]), secs(13));
        assert_eq!(average(&[10, 600, 600]), secs(187), "twice in a row is no accident");
    }

    #[test]
    fn cold_loads_do_not_change_wake_cost() {
        let mut costs = Costs::default();
        costs.record_load(LoadKind::Wake, secs(2));
        costs.record_load(LoadKind::Cold, secs(40));
        assert_eq!(costs.load(LoadKind::Wake).value(), Some(secs(2)));
        assert_eq!(costs.load(LoadKind::Cold).value(), Some(secs(40)));
    }

    #[test]
    fn unmeasured_load_costs_average_of_others() {
        assert_eq!(prior(PRIOR_COLD, [secs(10), secs(30)].into_iter()), secs(20));
        assert_eq!(prior(PRIOR_COLD, std::iter::empty()), PRIOR_COLD);
        assert_eq!((Priors::USUAL.of(LoadKind::Cold), Priors::EMPTIED.of(LoadKind::Wake)), (secs(15), secs(8)));
        assert_eq!(Priors::NONE.of(LoadKind::Cold), secs(0));
    }

    #[test]
    fn last_16_gaps_between_requests_are_kept() {
        let start = Instant::now();
        let mut gaps = Gaps::default();
        assert_eq!(gaps.handle_wanted(start), None, "it was never idle");
        assert!(gaps.is_empty());
        gaps.handle_idle(start);
        gaps.handle_idle(start + secs(1));
        assert_eq!(gaps.handle_wanted(start + secs(2)), Some(secs(2)));
        assert!(!gaps.is_empty());
        assert_eq!(gaps.handle_wanted(start + secs(3)), None, "one gap, one end");
        for _ in 0..20 {
            gaps.handle_idle(start);
            gaps.handle_wanted(start + secs(7));
        }
        assert_eq!(gaps.len(), 16);
        assert!(gaps.iter().all(|gap| gap == secs(7)));
    }

    #[test]
    fn concurrency_is_averaged_over_beginnings() {
        let mut concurrency = Concurrency::default();
        assert_eq!(concurrency.value(), 0.0);
        concurrency.record(1);
        concurrency.record(1);
        assert_eq!(concurrency.value(), 1.0);
        concurrency.record(2);
        assert!((concurrency.value() - 1.3).abs() < 1e-9);
    }
}
