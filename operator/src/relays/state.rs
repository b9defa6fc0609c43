//! The last reports of each Provider's relays, summed over its Pods.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::crd::worker_pool::{SlotFailure, SlotState};

/// Two computed times that differ by less are treated as equal: reports take time to arrive, and clocks are adjusted.
pub const SAME_MOMENT: SignedDuration = SignedDuration::from_secs(5);

/// The least time between two changes of the usage.
const USAGE_INTERVAL: Duration = Duration::from_secs(60);

/// The states of all Providers, by namespace and name.
#[derive(Debug, Default)]
pub struct RelayStates {
    // Each is locked for a lookup or an insertion, never across an await.
    by_provider: Mutex<HashMap<(String, String), KeptSnapshot>>,
    expected: Mutex<HashMap<(String, String), Expectation>>,
    /// Providers for which a caller awaits a new report.
    wanted: Mutex<HashSet<(String, String)>>,
    expectation_changes: watch::Sender<()>,
    reported: watch::Sender<()>,
}

/// The last snapshot of a Provider.
#[derive(Debug)]
struct KeptSnapshot {
    snapshot: Arc<RelaySnapshot>,
    /// When its usage was replaced.
    usage_at: Instant,
}

impl KeptSnapshot {
    /// Returns the usage of a newer snapshot, and when it was replaced. Usage changes with every request, and each
    /// change is a pass of the Provider's controller and a write of its status: there is one a minute.
    fn next_usage(&self, usage: Option<UsageReport>) -> (Option<UsageReport>, Instant) {
        let kept = self.snapshot.usage;
        let is_kept = match (&kept, &usage) {
            (Some(kept), Some(usage)) => usage.is_same(kept) || self.usage_at.elapsed() < USAGE_INTERVAL,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if is_kept { (kept, self.usage_at) } else { (usage, Instant::now()) }
    }
}

/// The report that is expected from a Provider's relays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expectation {
    /// Hash of the configuration.
    pub hash: String,
    /// The Pods that should report it.
    pub pods: BTreeSet<String>,
}

/// All relays of one Provider at about one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelaySnapshot {
    /// The report of each relay, by Pod name; `Err` with a human-readable line if it could not be polled.
    pub relays: BTreeMap<String, Result<RelayReport, String>>,
    /// Those of these Pods that have no address: nothing has reached them yet, so they hold no request.
    pub unreached: BTreeSet<String>,
    /// Workers by instance, each included once however many relays it is connected to.
    pub workers: BTreeMap<String, WorkerReport>,
    /// The number of waiting requests.
    pub queue_depth: u64,
    /// The number of running requests.
    pub in_flight: u64,
    /// Models by name.
    pub models: BTreeMap<String, ModelReport>,
    /// The sums of all relays, at most a minute old; `None` until each of them has reported.
    pub usage: Option<UsageReport>,
}

/// Requests and tokens of relays since they started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct UsageReport {
    /// The start of the oldest of them.
    pub since: Timestamp,
    /// The number of requests that ended.
    #[serde(default)]
    pub requests: u64,
    /// The number of input tokens that backends reported.
    #[serde(default)]
    pub input_tokens: u64,
    /// The number of output tokens.
    #[serde(default)]
    pub output_tokens: u64,
}

impl UsageReport {
    /// Returns the sums of both. A Pod's numbers may be anything.
    pub fn plus(self, other: Self) -> Self {
        Self {
            since: self.since.min(other.since),
            requests: self.requests.saturating_add(other.requests),
            input_tokens: self.input_tokens.saturating_add(other.input_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let counts = |usage: &Self| (usage.requests, usage.input_tokens, usage.output_tokens);
        counts(self) == counts(other) && self.since.duration_since(other.since).abs() <= SAME_MOMENT
    }
}

/// The state of one relay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayReport {
    /// Hash of the configuration in effect.
    pub config_hash: Option<String>,
    /// The reason that a newer configuration is not in effect.
    pub config_error: Option<String>,
    /// running, grace, draining…
    pub phase: String,
    /// The program's version.
    pub version: String,
}

/// The state of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerReport {
    /// Its display name; on Kubernetes, its Pod's name.
    pub name: String,
    /// Its pool.
    pub pool: Option<String>,
    /// The models that it serves.
    pub models: BTreeSet<String>,
    /// The number of requests that it may run at once.
    pub max_concurrent: u64,
    /// The number of requests that it runs, over all relays.
    pub in_flight: u64,
    /// True if it is draining on every relay that knows it.
    pub draining: bool,
    /// The number of its connections.
    pub links: u32,
    /// The Pods of the relays that it is connected to.
    pub relays: BTreeSet<String>,
    /// The slots of its multiplexer, in its own order.
    pub slots: Vec<SlotReport>,
}

/// One slot of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotReport {
    /// Its name.
    pub id: String,
    /// Its state.
    pub state: SlotState,
    /// The model that it holds.
    pub resident: Option<String>,
    /// The model that it is loading or about to load.
    pub target: Option<String>,
    /// The start of the current state.
    pub since: Since,
    /// Its models whose last load failed and that are not retried yet. Only the most recent failure has a message.
    pub failures: Vec<SlotFailure>,
    /// The last failed load, which relays remember until its model is resident, or for ten minutes.
    pub last_failure: Option<LastFailure>,
}

/// A failed load, perhaps a while ago.
#[derive(Clone, Debug)]
pub struct LastFailure {
    /// The failure.
    pub failure: SlotFailure,
    /// The time of the failure, computed from its age in a report.
    pub at: Timestamp,
}

impl PartialEq for LastFailure {
    fn eq(&self, other: &Self) -> bool {
        self.failure == other.failure && self.at.duration_since(other.at).abs() <= SAME_MOMENT
    }
}

impl Eq for LastFailure {}

/// The start of a state, computed from its age in a report. Each report yields a slightly different time, so two values
/// always compare as equal.
#[derive(Clone, Copy, Debug)]
pub struct Since(pub Timestamp);

impl PartialEq for Since {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Since {}

/// The state of one model, over all relays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelReport {
    /// The number of requests that wait for it.
    pub waiting: u64,
    /// The number of its running requests.
    pub in_flight: u64,
    /// The number of workers that serve it.
    pub workers: u64,
}

impl RelayStates {
    /// Returns the last report, or `None` before the first poll.
    pub fn of(&self, namespace: &str, provider: &str) -> Option<Arc<RelaySnapshot>> {
        let states = self.lock();
        states.get(&(namespace.to_owned(), provider.to_owned())).map(|kept| Arc::clone(&kept.snapshot))
    }

    /// Stores a new snapshot. Returns true if it differs from the previous one.
    pub fn keep(&self, namespace: &str, provider: &str, mut snapshot: RelaySnapshot) -> bool {
        let key = (namespace.to_owned(), provider.to_owned());
        let mut states = self.lock();
        let before = states.get(&key);
        let (usage, usage_at) =
            before.map_or_else(|| (snapshot.usage, Instant::now()), |before| before.next_usage(snapshot.usage));
        snapshot.usage = usage;
        let changed = before.is_none_or(|before| *before.snapshot != snapshot);
        if changed {
            states.insert(key.clone(), KeptSnapshot { snapshot: Arc::new(snapshot), usage_at });
        }
        drop(states);
        if self.wanted().remove(&key) {
            self.reported.send_replace(());
        }
        changed
    }

    /// Requests a new report and returns it, or the last one if that takes longer than `timeout`.
    pub async fn fresh(&self, namespace: &str, provider: &str, timeout: Duration) -> Option<Arc<RelaySnapshot>> {
        let key = (namespace.to_owned(), provider.to_owned());
        let mut reported = self.reported.subscribe();
        self.wanted().insert(key.clone());
        self.expectation_changes.send_replace(());
        let answer = reported.wait_for(|()| !self.wanted().contains(&key));
        if tokio::time::timeout(timeout, answer).await.is_err() {
            self.wanted().remove(&key);
        }
        self.of(namespace, provider)
    }

    /// True if a caller awaits a new report.
    pub fn is_wanted(&self, namespace: &str, provider: &str) -> bool {
        self.wanted().contains(&(namespace.to_owned(), provider.to_owned()))
    }

    /// Registers an expected report, so that the relays are polled soon.
    pub fn expect(&self, namespace: &str, provider: &str, expectation: Expectation) {
        let key = (namespace.to_owned(), provider.to_owned());
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if expected.get(&key) != Some(&expectation) {
            expected.insert(key, expectation);
            self.expectation_changes.send_replace(());
        }
    }

    /// Returns the report that is expected from a Provider's relays.
    pub fn expected(&self, namespace: &str, provider: &str) -> Option<Expectation> {
        let key = (namespace.to_owned(), provider.to_owned());
        self.expected.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    /// Changes when a new report is expected or awaited.
    pub fn expectations(&self) -> watch::Receiver<()> {
        self.expectation_changes.subscribe()
    }

    /// Removes a Provider that is gone.
    pub fn forget(&self, namespace: &str, provider: &str) {
        let key = (namespace.to_owned(), provider.to_owned());
        self.lock().remove(&key);
        self.expected.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        self.wanted().remove(&key);
    }

    /// Removes everything. A replica that leads again must not act on reports from its previous term.
    pub fn clear(&self) {
        self.lock().clear();
        self.expected.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn wanted(&self) -> std::sync::MutexGuard<'_, HashSet<(String, String)>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(String, String), KeptSnapshot>> {
        self.by_provider.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RelaySnapshot {
    /// Returns the workers of a pool.
    pub fn workers_of<'a>(&'a self, pool: &'a str) -> impl Iterator<Item = &'a WorkerReport> {
        self.workers.values().filter(move |worker| worker.pool.as_deref() == Some(pool))
    }

    /// True if each of these Pods runs the configuration with this hash.
    pub fn all_run<'a>(&self, pods: impl IntoIterator<Item = &'a String>, hash: &str) -> bool {
        let runs = |pod: &String| match self.relays.get(pod) {
            Some(Ok(report)) => report.config_hash.as_deref() == Some(hash),
            Some(Err(_)) | None => false,
        };
        pods.into_iter().all(runs)
    }

    /// True if no worker serves a model.
    pub fn serves_nothing(&self) -> bool {
        self.models.values().all(|model| model.workers == 0)
    }

    /// True if every relay that may hold requests was polled and responded. A relay whose Pod cannot be scheduled holds
    /// none, and may stay so indefinitely. If there is no other, nothing is known.
    pub fn is_complete(&self) -> bool {
        let mut holding = self.relays.iter().filter(|(pod, _)| !self.unreached.contains(*pod)).peekable();
        holding.peek().is_some() && holding.all(|(_, answer)| answer.is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn fresh_report_is_awaited_for_limited_time() {
        let states = RelayStates::default();
        let at = |depth| RelaySnapshot { queue_depth: depth, ..RelaySnapshot::default() };
        states.keep("llm", "local", at(1));
        let mut expectation_changes = states.expectations();
        let timeout = Duration::from_secs(1);
        let depth = async || states.fresh("llm", "local", timeout).await.map(|snapshot| snapshot.queue_depth);
        let relays = async {
            expectation_changes.changed().await.unwrap();
            assert!(states.is_wanted("llm", "local") && !states.is_wanted("llm", "other"));
            // A report of another Provider is irrelevant.
            states.keep("llm", "other", at(7));
            states.keep("llm", "local", at(2));
        };
        assert_eq!(tokio::join!(depth(), relays).0, Some(2));
        assert!(!states.is_wanted("llm", "local"));
        let began = Instant::now();
        assert_eq!((depth().await, began.elapsed()), (Some(2), timeout), "they are silent");
    }

    #[tokio::test(start_paused = true)]
    async fn usage_is_replaced_once_a_minute() {
        let states = RelayStates::default();
        let since = Timestamp::from_second(1_000).unwrap();
        let usage = |since, requests| Some(UsageReport { since, requests, input_tokens: 2, output_tokens: 3 });
        let keep = |usage| states.keep("llm", "local", RelaySnapshot { usage, ..RelaySnapshot::default() });
        let kept = || states.of("llm", "local").and_then(|snapshot| Some(snapshot.usage?.requests));
        assert!(keep(None), "the first snapshot");
        assert!(keep(usage(since, 1)), "the first sums are published at once");
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!((keep(usage(since, 2)), kept()), (false, Some(1)));
        assert_eq!((keep(None), kept()), (false, Some(1)), "a relay did not respond");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!((keep(usage(since, 3)), kept()), (true, Some(3)));
        tokio::time::advance(Duration::from_secs(90)).await;
        let later = Timestamp::from_second(1_001).unwrap();
        assert!(!keep(usage(later, 3)), "the same, computed by another clock");
        assert_eq!((keep(usage(since, 4)), kept()), (true, Some(4)));
    }

    #[test]
    fn cleared_state_forgets_previous_leadership() {
        let states = RelayStates::default();
        let expectation = Expectation { hash: "h".to_owned(), pods: BTreeSet::new() };
        states.keep("llm", "local", RelaySnapshot { queue_depth: 3, ..RelaySnapshot::default() });
        states.expect("llm", "local", expectation.clone());
        states.clear();
        assert_eq!((states.of("llm", "local"), states.expected("llm", "local")), (None, None));
        // The same values are new again.
        let expectation_changes = states.expectations();
        assert!(states.keep("llm", "local", RelaySnapshot::default()));
        states.expect("llm", "local", expectation);
        assert!(expectation_changes.has_changed().unwrap_or_default());
    }
}
