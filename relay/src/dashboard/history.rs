//! The last hour as points for the charts: the counts of each interval, and the state at its end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::Dashboard;
use crate::provider::Provider;
use crate::system::blocking;
use crate::system::unix_time::unix_millis;
use crate::telemetry::metrics::Outcome;
use crate::telemetry::stats::StatsReport;

/// The time between two points.
pub(super) const INTERVAL: Duration = Duration::from_secs(10);
/// The points of an hour.
const MAX_POINTS: usize = 360;
/// The most providers in the charts, the busiest.
const MAX_PROVIDERS: usize = 32;

/// The points of the last hour.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<HistoryState>);

#[derive(Debug, Default)]
struct HistoryState {
    points: VecDeque<Arc<Point>>,
    before: BTreeMap<String, Totals>,
}

/// One interval of all providers.
#[derive(Debug, Serialize)]
pub(super) struct Point {
    /// Its end, Unix time in milliseconds.
    pub at: u64,
    providers: BTreeMap<String, ProviderPoint>,
}

/// One interval of one provider. Times in milliseconds, of the last five minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct ProviderPoint {
    requests: u64,
    errors: u64,
    tokens_in: u64,
    tokens_out: u64,
    ttft_p50: Option<f64>,
    ttft_p95: Option<f64>,
    queue_depth: usize,
    in_flight: usize,
    load: u64,
    capacity: u64,
}

/// Totals since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Totals {
    requests: u64,
    errors: u64,
    tokens_in: u64,
    tokens_out: u64,
}

impl History {
    /// The newest point, if any.
    pub(super) fn last(&self) -> Option<Arc<Point>> {
        self.lock().points.back().cloned()
    }

    /// All points, oldest first.
    pub(super) fn points(&self) -> Vec<Arc<Point>> {
        self.lock().points.iter().cloned().collect()
    }

    fn note(&self, now: SystemTime, providers: Vec<(String, StatsReport, ProviderPoint)>) {
        let mut state = self.lock();
        let mut after = BTreeMap::new();
        let mut points = Vec::new();
        for (name, report, point) in providers {
            let totals = Totals::of(&report);
            // A provider that was created again under the same name counts from zero.
            let before = state.before.get(&name).copied().unwrap_or_default();
            points.push((name.clone(), point.with(&report, totals.since(before))));
            after.insert(name, totals);
        }
        points.sort_by_key(|(_, point)| std::cmp::Reverse((point.requests, point.in_flight, point.queue_depth)));
        points.truncate(MAX_PROVIDERS);
        state.before = after;
        if state.points.len() == MAX_POINTS {
            state.points.pop_front();
        }
        state.points.push_back(Arc::new(Point { at: unix_millis(now), providers: points.into_iter().collect() }));
    }

    fn lock(&self) -> MutexGuard<'_, HistoryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Totals {
    fn of(report: &StatsReport) -> Self {
        // Errors of clients and cancelled requests do not show a problem of the fleet.
        let no_error = [Outcome::Ok, Outcome::ClientError, Outcome::Cancelled].map(Outcome::as_str);
        let is_error = |outcome: &&str| !no_error.contains(outcome);
        let tokens = |kind: &str| report.tokens.get(kind).copied().unwrap_or(0);
        Self {
            requests: report.requests.values().sum(),
            errors: report.requests.iter().filter(|(outcome, _)| is_error(outcome)).map(|(_, count)| count).sum(),
            tokens_in: tokens("input"),
            tokens_out: tokens("output"),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(before.requests),
            errors: self.errors.saturating_sub(before.errors),
            tokens_in: self.tokens_in.saturating_sub(before.tokens_in),
            tokens_out: self.tokens_out.saturating_sub(before.tokens_out),
        }
    }
}

impl ProviderPoint {
    fn current(provider: &Provider) -> Self {
        let state = provider.snapshot();
        let sum = |of: fn(&crate::dispatch::WorkerSnapshot) -> u32| {
            state.workers.iter().map(|worker| u64::from(of(&worker.core))).sum()
        };
        Self {
            queue_depth: state.queue_depth,
            in_flight: state.in_flight,
            load: sum(|worker| worker.load),
            capacity: sum(|worker| worker.max_concurrent),
            ..Self::default()
        }
    }

    fn with(self, report: &StatsReport, new: Totals) -> Self {
        Self {
            requests: new.requests,
            errors: new.errors,
            tokens_in: new.tokens_in,
            tokens_out: new.tokens_out,
            ttft_p50: report.ttft_ms.p50,
            ttft_p95: report.ttft_ms.p95,
            ..self
        }
    }
}

/// Adds a point after each interval, as long as the dashboard exists.
pub(crate) async fn record(dashboard: Weak<Dashboard>) {
    loop {
        tokio::time::sleep(INTERVAL).await;
        let Some(dashboard) = dashboard.upgrade() else { return };
        // With ten thousand workers this takes a while, during which a runtime thread would forward no tokens. After a
        // failure, a point is missing.
        let _ = blocking::run(move || {
            let providers = dashboard.relay.providers.all();
            let point = |provider: &Arc<Provider>| {
                (provider.name.to_string(), provider.series.stats(), ProviderPoint::current(provider))
            };
            dashboard.history.note(SystemTime::now(), providers.iter().map(point).collect());
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(requests: &[(&'static str, u64)], output: u64) -> StatsReport {
        StatsReport {
            requests: requests.iter().copied().collect(),
            tokens: [("output", output)].into(),
            ..StatsReport::default()
        }
    }

    fn point(history: &History, name: &str) -> ProviderPoint {
        history.last().unwrap().providers[name].clone()
    }

    #[test]
    fn history_point_covers_time_since_previous_point() {
        let history = History::default();
        let now = SystemTime::now();
        let tell = |requests: &[(&'static str, u64)], output| {
            history.note(now, vec![("p".into(), report(requests, output), ProviderPoint::default())]);
            point(&history, "p")
        };
        let first = tell(&[("ok", 5), ("cancelled", 2), ("client_error", 1), ("queue_full", 3)], 40);
        assert_eq!((first.requests, first.errors, first.tokens_out), (11, 3, 40));
        let second = tell(&[("ok", 6), ("cancelled", 2), ("client_error", 1), ("queue_full", 4)], 45);
        assert_eq!((second.requests, second.errors, second.tokens_out), (2, 1, 5));
        let anew = tell(&[("ok", 1)], 0);
        assert_eq!((anew.requests, anew.errors, anew.tokens_out), (0, 0, 0), "a provider that was created again");
    }

    #[test]
    fn history_keeps_one_hour_of_busiest_providers() {
        let history = History::default();
        for _ in 0..=MAX_POINTS {
            let providers = (0..=MAX_PROVIDERS).map(|index| {
                let point = ProviderPoint { queue_depth: index, ..ProviderPoint::default() };
                (format!("p{index}"), StatsReport::default(), point)
            });
            history.note(SystemTime::now(), providers.collect());
        }
        let points = history.points();
        assert_eq!((points.len(), points[0].providers.len()), (MAX_POINTS, MAX_PROVIDERS));
        assert!(!points[0].providers.contains_key("p0"));
    }
}
