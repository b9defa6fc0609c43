//! The last reports of each Provider's relays, summed over its Pods.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tokio::sync::watch;

use crate::crd::worker_pool::{SlotFailure, SlotState};

/// Two computed times that differ by less are treated as equal: reports take time to arrive, and clocks are adjusted.
pub const SAME_MOMENT: SignedDuration = SignedDuration::from_secs(5);

/// The states of all Providers, by namespace and name.
#[derive(Debug, Default)]
pub struct RelayStates {
    // Each is locked for a lookup or an insertion, never across an await.
    by_provider: Mutex<HashMap<(String, String), Arc<RelaySnapshot>>>,
    expected: Mutex<HashMap<(String, String), Expectation>>,
    /// Providers for which a caller awaits a new report.
    wanted: Mutex<HashSet<(String, String)>>,
    expectation_changes: watch::Sender<()>,
    reported: watch::Sender<()>,
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
    /// The number of relays that it is connected to.
    pub links: u32,
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
        self.lock().get(&(namespace.to_owned(), provider.to_owned())).cloned()
    }

    /// Stores a new snapshot. Returns true if it differs from the previous one.
    pub fn keep(&self, namespace: &str, provider: &str, snapshot: RelaySnapshot) -> bool {
        let key = (namespace.to_owned(), provider.to_owned());
        let mut states = self.lock();
        let changed = states.get(&key).is_none_or(|before| **before != snapshot);
        if changed {
            states.insert(key.clone(), Arc::new(snapshot));
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

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(String, String), Arc<RelaySnapshot>>> {
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
        let began = tokio::time::Instant::now();
        assert_eq!((depth().await, began.elapsed()), (Some(2), timeout), "they are silent");
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
