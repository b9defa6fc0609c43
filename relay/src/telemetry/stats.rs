//! The part of `/admin/stats` beyond the live state: totals since the start, and quantiles over the last minutes.
//!
//! Quantiles come from a ring of one-minute histograms with buckets of constant ratio, so that a window costs a few
//! kilobytes and one increment per value, however busy the relay is; a quantile is exact to about 5 %.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::telemetry::metrics::{Outcome, TokenKind};

/// The window of quantiles: this minute and the four before it.
pub const WINDOW: Duration = Duration::from_secs(60 * SLICES as u64);

const SLICES: usize = 5;
const SLICE: Duration = Duration::from_secs(60);

/// Buckets per doubling; values within one differ by at most 9 %.
const PER_DOUBLING: u32 = 8;
/// Values below 64 µs share the first bucket, values above 71 minutes the last.
const FIRST_DOUBLING: u32 = 6;
const LAST_DOUBLING: u32 = 32;
const BUCKETS: usize = ((LAST_DOUBLING - FIRST_DOUBLING) * PER_DOUBLING) as usize;

/// The counts of one provider.
#[derive(Debug)]
pub struct ProviderStats {
    outcomes: Vec<AtomicU64>,
    tokens: Vec<AtomicU64>,
    requeues: AtomicU64,
    /// Locked once per wait that ended.
    queue_wait: Mutex<RollingWindow>,
    /// Locked once per response that began.
    first_byte: Mutex<RollingWindow>,
}

/// [`ProviderStats`] at one moment, as `/admin/stats` shows it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StatsReport {
    /// Requests that ended, by outcome; outcomes that never happened are left out.
    pub requests: std::collections::BTreeMap<&'static str, u64>,
    /// Tokens by type; types that no backend reported are left out.
    pub tokens: std::collections::BTreeMap<&'static str, u64>,
    /// Requests that went back into the queue.
    pub requeues: u64,
    /// The time in the queue, over the last minutes.
    pub queue_wait_ms: Quantiles,
    /// The time from acceptance to the first byte of a body, over the last minutes.
    pub ttft_ms: Quantiles,
}

/// Two quantiles in milliseconds; absent while nothing was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// The number of values.
    pub count: u64,
    /// The median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50: Option<f64>,
    /// The 95th percentile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p95: Option<f64>,
}

impl ProviderStats {
    /// Creates empty counts.
    pub fn new(now: Instant) -> Self {
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            outcomes: zeros(Outcome::ALL.len()),
            tokens: zeros(TokenKind::ALL.len()),
            requeues: AtomicU64::new(0),
            queue_wait: Mutex::new(RollingWindow::new(now)),
            first_byte: Mutex::new(RollingWindow::new(now)),
        }
    }

    /// Counts a request that ended.
    pub fn finished(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts tokens that a backend reported.
    pub fn tokens_used(&self, kind: TokenKind, count: u64) {
        self.tokens[kind as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Counts a requeue.
    pub fn requeued(&self) {
        self.requeues.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a wait in the queue that ended.
    pub fn queue_waited(&self, waited: Duration, now: Instant) {
        self.queue_wait.lock().unwrap_or_else(PoisonError::into_inner).record(waited, now);
    }

    /// Records the time to the first byte of a response's body.
    pub fn first_byte_sent(&self, since_accepted: Duration, now: Instant) {
        self.first_byte.lock().unwrap_or_else(PoisonError::into_inner).record(since_accepted, now);
    }

    /// The report as of `now`.
    pub fn report(&self, now: Instant) -> StatsReport {
        let quantiles =
            |window: &Mutex<RollingWindow>| window.lock().unwrap_or_else(PoisonError::into_inner).quantiles(now);
        let outcomes = Outcome::ALL.iter().map(|outcome| outcome.as_str()).zip(&self.outcomes);
        let tokens = TokenKind::ALL.iter().map(|kind| kind.as_str()).zip(&self.tokens);
        StatsReport {
            requests: non_zero(outcomes),
            tokens: non_zero(tokens),
            requeues: self.requeues.load(Ordering::Relaxed),
            queue_wait_ms: quantiles(&self.queue_wait),
            ttft_ms: quantiles(&self.first_byte),
        }
    }
}

/// Values of the last minutes.
#[derive(Debug)]
pub struct RollingWindow {
    slices: [Slice; SLICES],
    current: usize,
    current_began: Instant,
}

#[derive(Debug, Clone)]
struct Slice {
    buckets: Box<[u32; BUCKETS]>,
    count: u64,
}

impl RollingWindow {
    /// An empty window.
    pub fn new(now: Instant) -> Self {
        let empty = || Slice { buckets: Box::new([0; BUCKETS]), count: 0 };
        Self { slices: std::array::from_fn(|_| empty()), current: 0, current_began: now }
    }

    /// Adds one value.
    pub fn record(&mut self, value: Duration, now: Instant) {
        self.turn(now);
        let slice = &mut self.slices[self.current];
        let bucket = &mut slice.buckets[bucket_of(value)];
        *bucket = bucket.saturating_add(1);
        slice.count += 1;
    }

    /// p50 and p95 of the values of the last minutes.
    pub fn quantiles(&mut self, now: Instant) -> Quantiles {
        self.turn(now);
        let count = self.slices.iter().map(|slice| slice.count).sum();
        Quantiles { count, p50: self.quantile(count, 50), p95: self.quantile(count, 95) }
    }

    fn quantile(&self, count: u64, percent: u64) -> Option<f64> {
        let rank = (count * percent).div_ceil(100);
        let mut seen = 0;
        let bucket = (0..BUCKETS).find(|bucket| {
            seen += self.slices.iter().map(|slice| u64::from(slice.buckets[*bucket])).sum::<u64>();
            seen >= rank
        })?;
        (count > 0).then(|| middle_of(bucket))
    }

    /// Empties the slices whose minute is over.
    fn turn(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.current_began).as_secs() / SLICE.as_secs();
        for _ in 0..passed.min(SLICES as u64) {
            self.current = (self.current + 1) % SLICES;
            let slice = &mut self.slices[self.current];
            slice.buckets.fill(0);
            slice.count = 0;
        }
        self.current_began += SLICE * u32::try_from(passed).unwrap_or(u32::MAX);
    }
}

fn bucket_of(value: Duration) -> usize {
    let micros = u64::try_from(value.as_micros()).unwrap_or(u64::MAX).max(1 << FIRST_DOUBLING);
    let doubling = micros.ilog2();
    // The bits after the first one: the position between this power of two and the next, in eighths.
    let eighth = (micros >> (doubling - PER_DOUBLING.ilog2())) & u64::from(PER_DOUBLING - 1);
    let bucket = u64::from((doubling - FIRST_DOUBLING) * PER_DOUBLING) + eighth;
    usize::try_from(bucket).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The middle of a bucket in milliseconds.
fn middle_of(bucket: usize) -> f64 {
    let (doubling, eighth) = (bucket / PER_DOUBLING as usize, bucket % PER_DOUBLING as usize);
    let base = f64::from(1_u32 << FIRST_DOUBLING) * 2_f64.powi(i32::try_from(doubling).unwrap_or(i32::MAX));
    let micros = base * (1.0 + (eighth as f64 + 0.5) / f64::from(PER_DOUBLING));
    (micros / 10.0).round() / 100.0
}

fn non_zero<'a>(
    counts: impl Iterator<Item = (&'static str, &'a AtomicU64)>,
) -> std::collections::BTreeMap<&'static str, u64> {
    counts.map(|(name, count)| (name, count.load(Ordering::Relaxed))).filter(|(_, count)| *count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(value: Option<f64>, expected: f64) -> bool {
        value.is_some_and(|value| (value - expected).abs() <= expected * 0.07)
    }

    #[test]
    fn quantiles_approximate_exact_values() {
        let now = Instant::now();
        let mut window = RollingWindow::new(now);
        for millis in 1..=1000 {
            window.record(Duration::from_millis(millis), now);
        }
        let quantiles = window.quantiles(now);
        assert!(quantiles.count == 1000 && near(quantiles.p50, 500.0) && near(quantiles.p95, 950.0), "{quantiles:?}");
    }

    #[test]
    fn extreme_values_have_buckets() {
        let now = Instant::now();
        let mut window = RollingWindow::new(now);
        window.record(Duration::ZERO, now);
        window.record(Duration::MAX, now);
        assert_eq!(window.quantiles(now).count, 2);
        assert_eq!((bucket_of(Duration::ZERO), bucket_of(Duration::MAX)), (0, BUCKETS - 1));
    }

    #[test]
    fn values_older_than_window_are_forgotten() {
        let now = Instant::now();
        let mut window = RollingWindow::new(now);
        window.record(Duration::from_secs(1), now);
        window.record(Duration::from_secs(1), now + SLICE);
        assert_eq!(window.quantiles(now + WINDOW - Duration::from_secs(1)).count, 2);
        assert_eq!(window.quantiles(now + WINDOW).count, 1);
        assert_eq!(window.quantiles(now + WINDOW + SLICE), Quantiles::default());
        window.record(Duration::from_secs(1), now + WINDOW * 1000);
        assert_eq!(window.quantiles(now + WINDOW * 1000).count, 1);
    }

    #[test]
    fn report_omits_absent_outcomes() {
        let now = Instant::now();
        let stats = ProviderStats::new(now);
        stats.finished(Outcome::Ok);
        stats.finished(Outcome::Overloaded);
        stats.tokens_used(TokenKind::Output, 7);
        stats.requeued();
        stats.queue_waited(Duration::from_millis(10), now);
        let json = serde_json::to_value(stats.report(now)).expect("json");
        assert_eq!(json["requests"], serde_json::json!({"ok": 1, "overloaded": 1}));
        assert_eq!(
            (json["tokens"].clone(), json["requeues"].clone()),
            (serde_json::json!({"output": 7}), serde_json::json!(1))
        );
        assert_eq!(
            (json["queue_wait_ms"]["count"].clone(), json["ttft_ms"].clone()),
            (serde_json::json!(1), serde_json::json!({"count": 0}))
        );
    }
}
