//! What the relays of each Provider last reported, summed over its Pods.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tokio::sync::watch;

use crate::crd::worker_pool::{SlotFailure, SlotState};

/// Two reckonings of a moment that differ by less are the same: reports travel, and clocks are set.
pub const SAME_MOMENT: SignedDuration = SignedDuration::from_secs(5);

/// Of every Provider, by namespace and name.
#[derive(Debug, Default)]
pub struct RelayStates {
    // Each is held for a look-up or an insertion, never over an await.
    by_provider: Mutex<HashMap<(String, String), Arc<RelaySnapshot>>>,
    expected: Mutex<HashMap<(String, String), Expectation>>,
    /// Of whom somebody waits for a new report.
    wanted: Mutex<HashSet<(String, String)>>,
    news: watch::Sender<()>,
    reported: watch::Sender<()>,
}

/// What relays are about to report.
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
    /// By the name of the Pod: what each relay said; `Err` with a line for people where it could not be asked.
    pub relays: BTreeMap<String, Result<RelayReport, String>>,
    /// Of these, Pods that have no address: nothing has reached them yet, so they hold no request.
    pub unreached: BTreeSet<String>,
    /// Workers by instance, each counted once however many relays it is attached to.
    pub workers: BTreeMap<String, WorkerReport>,
    /// Requests that wait.
    pub queue_depth: u64,
    /// Requests that run.
    pub in_flight: u64,
    /// By model.
    pub models: BTreeMap<String, ModelReport>,
}

/// One relay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayReport {
    /// Hash of the configuration in force.
    pub config_hash: Option<String>,
    /// Why a newer configuration is not in force.
    pub config_error: Option<String>,
    /// running, grace, draining…
    pub phase: String,
    /// Its program's version.
    pub version: String,
}

/// One worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerReport {
    /// As people see it; on Kubernetes the name of its Pod.
    pub name: String,
    /// Its pool.
    pub pool: Option<String>,
    /// What it serves.
    pub models: BTreeSet<String>,
    /// Requests it may run at once.
    pub max_concurrent: u64,
    /// Requests it runs, over all relays.
    pub in_flight: u64,
    /// Whether it is leaving every relay that knows it.
    pub draining: bool,
    /// Relays it is attached to.
    pub links: u32,
    /// The slots of its multiplexer, in its own order.
    pub slots: Vec<SlotReport>,
}

/// One slot of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotReport {
    /// Its name.
    pub id: String,
    /// What it does.
    pub state: SlotState,
    /// The model that it holds.
    pub resident: Option<String>,
    /// The model that it is going to hold.
    pub target: Option<String>,
    /// Since when it does that.
    pub since: Since,
    /// Its models that could not be loaded when that was last tried, and are not tried again yet. Those that are not the last
    /// one have no message.
    pub failures: Vec<SlotFailure>,
    /// The last load that failed, which relays remember until its model is resident, or for ten minutes.
    pub last_failure: Option<LastFailure>,
}

/// A load that failed, perhaps a while ago.
#[derive(Clone, Debug)]
pub struct LastFailure {
    /// What failed.
    pub failure: SlotFailure,
    /// When, as reckoned from its age in a report.
    pub at: Timestamp,
}

impl PartialEq for LastFailure {
    fn eq(&self, other: &Self) -> bool {
        self.failure == other.failure && self.at.duration_since(other.at).abs() <= SAME_MOMENT
    }
}

impl Eq for LastFailure {}

/// When a state began, as reckoned from its age in a report. Each report says it a little differently, and two of them say the
/// same all the same.
#[derive(Clone, Copy, Debug)]
pub struct Since(pub Timestamp);

impl PartialEq for Since {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Since {}

/// One model, over all relays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelReport {
    /// Requests that wait for it.
    pub waiting: u64,
    /// Requests for it that run.
    pub in_flight: u64,
    /// Workers that serve it.
    pub workers: u64,
}

impl RelayStates {
    /// What was last reported; nothing before the first look.
    pub fn of(&self, namespace: &str, provider: &str) -> Option<Arc<RelaySnapshot>> {
        self.lock().get(&(namespace.to_owned(), provider.to_owned())).cloned()
    }

    /// Keeps a new snapshot; whether it differs from the one before.
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

    /// What the relays report when they are asked now, or last did if that takes longer than `patience`.
    pub async fn fresh(&self, namespace: &str, provider: &str, patience: Duration) -> Option<Arc<RelaySnapshot>> {
        let key = (namespace.to_owned(), provider.to_owned());
        let mut reported = self.reported.subscribe();
        self.wanted().insert(key.clone());
        self.news.send_replace(());
        let answer = reported.wait_for(|()| !self.wanted().contains(&key));
        if tokio::time::timeout(patience, answer).await.is_err() {
            self.wanted().remove(&key);
        }
        self.of(namespace, provider)
    }

    /// Whether somebody waits for a new report.
    pub fn is_wanted(&self, namespace: &str, provider: &str) -> bool {
        self.wanted().contains(&(namespace.to_owned(), provider.to_owned()))
    }

    /// Says what the relays are about to report, so that they are asked soon.
    pub fn expect(&self, namespace: &str, provider: &str, expectation: Expectation) {
        let key = (namespace.to_owned(), provider.to_owned());
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        if expected.get(&key) != Some(&expectation) {
            expected.insert(key, expectation);
            self.news.send_replace(());
        }
    }

    /// What the relays of a Provider are about to report.
    pub fn expected(&self, namespace: &str, provider: &str) -> Option<Expectation> {
        let key = (namespace.to_owned(), provider.to_owned());
        self.expected.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned()
    }

    /// Changes when somebody expects something new, or waits for a new report.
    pub fn expectations(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// Forgets a Provider that is gone.
    pub fn forget(&self, namespace: &str, provider: &str) {
        let key = (namespace.to_owned(), provider.to_owned());
        self.lock().remove(&key);
        self.expected.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        self.wanted().remove(&key);
    }

    /// Forgets everything. Whoever leads again must not decide by what relays reported when it last led.
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
    /// The workers of a pool.
    pub fn workers_of<'a>(&'a self, pool: &'a str) -> impl Iterator<Item = &'a WorkerReport> {
        self.workers.values().filter(move |worker| worker.pool.as_deref() == Some(pool))
    }

    /// Whether each of these Pods runs the configuration with this hash.
    pub fn all_run<'a>(&self, pods: impl IntoIterator<Item = &'a String>, hash: &str) -> bool {
        let runs = |pod: &String| match self.relays.get(pod) {
            Some(Ok(report)) => report.config_hash.as_deref() == Some(hash),
            Some(Err(_)) | None => false,
        };
        pods.into_iter().all(runs)
    }

    /// Whether no worker offers a model.
    pub fn serves_nothing(&self) -> bool {
        self.models.values().all(|model| model.workers == 0)
    }

    /// Whether every relay that may hold requests was asked and answered. One whose Pod no node takes holds none, and may
    /// stay so for ever. Where there is no other, nothing is known.
    pub fn is_complete(&self) -> bool {
        let mut holding = self.relays.iter().filter(|(pod, _)| !self.unreached.contains(*pod)).peekable();
        holding.peek().is_some() && holding.all(|(_, answer)| answer.is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_fresh_report_is_waited_for_and_not_for_long() {
        let states = RelayStates::default();
        let at = |depth| RelaySnapshot { queue_depth: depth, ..RelaySnapshot::default() };
        states.keep("llm", "local", at(1));
        let mut news = states.expectations();
        let patience = Duration::from_secs(1);
        let depth = async || states.fresh("llm", "local", patience).await.map(|snapshot| snapshot.queue_depth);
        let relays = async {
            news.changed().await.unwrap();
            assert!(states.is_wanted("llm", "local") && !states.is_wanted("llm", "other"));
            // Of another Provider it says nothing.
            states.keep("llm", "other", at(7));
            states.keep("llm", "local", at(2));
        };
        assert_eq!(tokio::join!(depth(), relays).0, Some(2));
        assert!(!states.is_wanted("llm", "local"));
        let began = tokio::time::Instant::now();
        assert_eq!((depth().await, began.elapsed()), (Some(2), patience), "they are silent");
    }

    #[test]
    fn who_leads_again_knows_nothing_of_before() {
        let states = RelayStates::default();
        let expectation = Expectation { hash: "h".to_owned(), pods: BTreeSet::new() };
        states.keep("llm", "local", RelaySnapshot { queue_depth: 3, ..RelaySnapshot::default() });
        states.expect("llm", "local", expectation.clone());
        states.clear();
        assert_eq!((states.of("llm", "local"), states.expected("llm", "local")), (None, None));
        // The same is news again.
        let news = states.expectations();
        assert!(states.keep("llm", "local", RelaySnapshot::default()));
        states.expect("llm", "local", expectation);
        assert!(news.has_changed().unwrap_or_default());
    }
}
