//! The state that the controller keeps of each pool between two reconciliations. All of it may be lost: a new leader
//! starts without.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use kube::ResourceExt;

use super::residency::PublishedEvents;
use super::rivals::Rivals;
use super::scaling::History;
use super::target::TargetState;
use super::writers::Writers;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::WorkerPoolStatus;
use crate::resources::names::ObjectKey;

/// The shortest and the longest time between two attempts at what failed.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(300);

/// The memory of all pools. Not `Debug`, because it contains drain tokens.
#[derive(Default)]
pub struct PoolMemories {
    // Locked for one access, never across an await.
    pools: Mutex<HashMap<ObjectKey, PoolMemory>>,
    /// The failures of foreign Deployments, by namespace, with the number of changes after which they were read.
    failures: Mutex<HashMap<String, (u64, PodFailures)>>,
}

/// The reasons that foreign Deployments cannot create Pods, by pool.
pub type PodFailures = Arc<HashMap<String, String>>;

/// The memory of one pool.
#[derive(Default)]
pub struct PoolMemory {
    uid: String,
    /// Drain token for a workload that does not exist yet: the same at each attempt, so that a rejected template is
    /// recognized.
    pub drain_token: Option<String>,
    /// The last attempts to apply objects, by kind and name.
    pub applied: HashMap<String, Attempt>,
    /// Objects that are known to be absent, by kind and name.
    pub absent: HashSet<String>,
    /// The status that was last written, and when.
    pub written: Option<(Instant, WorkerPoolStatus)>,
    /// The history of its load.
    pub history: History,
    /// The writers of its replicas.
    pub writers: Writers,
    /// The workload of another owner that it scales.
    pub target: TargetState,
    /// The writers of its Deployment's replicas.
    pub rivals: Rivals,
    /// True if an Event about waiting Pods was published.
    pub published_waiting: bool,
    /// True if an Event about Pods that another pool has was published.
    pub published_taken: bool,
    /// The Events that were published about its slots.
    pub published_slots: PublishedEvents,
    /// Fingerprint of the last observed state of relays and Provider.
    pub seen: Option<u64>,
    reconciling: Delays,
    scaling: Delays,
    /// The time after which the replicas may be written again after a failure.
    pub scale_after: Option<Instant>,
}

/// An attempt to apply an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Hash of the desired object.
    pub desired: u64,
    /// The result.
    pub result: AttemptResult,
}

/// The version of an applied object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedVersion {
    /// The version of its content.
    pub content: String,
    /// The inputs of its template, if it has one.
    pub rendered: Option<String>,
}

/// The result of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptResult {
    /// It succeeded, and the object had this version.
    Done(AppliedVersion),
    /// The API server rejected it, and will again.
    Refused {
        /// HTTP status.
        code: u16,
        /// The API server's message.
        message: String,
    },
}

/// Growing delays with jitter, so that many pools that failed together do not retry together.
#[derive(Debug, Default)]
struct Delays {
    backoff: Option<ExponentialBackoff>,
}

impl Delays {
    fn next(&mut self) -> Duration {
        let fresh = || {
            ExponentialBuilder::new()
                .with_min_delay(FIRST_DELAY)
                .with_max_delay(LONGEST_DELAY)
                .with_factor(2.0)
                .without_max_times()
                .with_jitter()
                .build()
        };
        self.backoff.get_or_insert_with(fresh).next().unwrap_or(LONGEST_DELAY)
    }
}

impl PoolMemories {
    /// Accesses the memory of a pool; another pool of the same name starts with an empty one.
    pub fn with<R>(&self, pool: &WorkerPool, access: impl FnOnce(&mut PoolMemory) -> R) -> R {
        let uid = pool.uid().unwrap_or_default();
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = pools.entry(key(pool)).or_default();
        if entry.uid != uid {
            *entry = PoolMemory { uid, ..PoolMemory::default() };
        }
        access(entry)
    }

    /// Returns the failures of foreign Deployments of a namespace, unless Deployments changed since they were read.
    pub fn failures(&self, namespace: &str, changes: u64) -> Option<PodFailures> {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.get(namespace).filter(|(at, _)| *at == changes).map(|(_, failures)| failures.clone())
    }

    /// Stores the failures that were read after that number of changes.
    pub fn store_failures(&self, namespace: String, changes: u64, found: PodFailures) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).insert(namespace, (changes, found));
    }

    /// Removes all pools for which `there` is false, and returns their keys.
    pub fn retain(&self, there: impl Fn(&ObjectKey) -> bool) -> Vec<ObjectKey> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<ObjectKey> = pools.keys().filter(|key| !there(key)).cloned().collect();
        for key in &gone {
            pools.remove(key);
        }
        gone
    }
}

impl PoolMemory {
    /// Returns the delay after another failed reconciliation.
    pub fn reconciliation_failed(&mut self) -> Duration {
        self.reconciling.next()
    }

    /// Resets the delay after a success.
    pub fn reconciled(&mut self) {
        self.reconciling = Delays::default();
    }

    /// Records that the replicas could not be written.
    pub fn scaling_failed(&mut self, now: Instant) {
        self.scale_after = Some(now + self.scaling.next());
    }

    /// Records that the replicas were written.
    pub fn scaled(&mut self) {
        self.scaling = Delays::default();
        self.scale_after = None;
    }
}

/// Returns the key of a pool.
pub fn key(pool: &WorkerPool) -> ObjectKey {
    (pool.namespace().unwrap_or_default(), pool.name_any())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::manifests::testing;

    #[test]
    fn delays_grow_and_reset_after_success() {
        let (memory, pool) = (PoolMemories::default(), testing::pool(&json!({"provider": "local"})));
        let delays: Vec<u64> =
            (0..12).map(|_| memory.with(&pool, PoolMemory::reconciliation_failed).as_millis() as u64).collect();
        // Jitter at most doubles a delay.
        assert!((1_000..2_000).contains(&delays[0]), "{delays:?}");
        assert!((8_000..16_000).contains(&delays[3]), "{delays:?}");
        assert!(delays[11] >= 300_000, "{delays:?}");
        memory.with(&pool, PoolMemory::reconciled);
        assert!(memory.with(&pool, PoolMemory::reconciliation_failed) < Duration::from_secs(2));
    }

    #[test]
    fn recreated_pool_inherits_no_memory() {
        let (memory, mut pool) = (PoolMemories::default(), testing::pool(&json!({"provider": "local"})));
        memory.with(&pool, |entry| entry.seen = Some(1));
        assert_eq!(memory.with(&pool, |entry| entry.seen), Some(1));
        pool.metadata.uid = Some("another".into());
        assert_eq!(memory.with(&pool, |entry| entry.seen), None);
        assert_eq!(memory.retain(|_| false), [("llm".to_owned(), "llama".to_owned())]);
    }
}
