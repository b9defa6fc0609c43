//! What the controller remembers of each pool between two looks. All of it may be lost: a new leader starts without.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use kube::ResourceExt;

use super::residency::Told;
use super::rivals::Rivals;
use super::scaling::History;
use super::writers::Writers;
use crate::crd::WorkerPool;
use crate::crd::worker_pool::WorkerPoolStatus;

/// Namespace and name.
pub type Key = (String, String);

/// The shortest and the longest time between two attempts at what failed.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(300);

/// Of every pool. Not `Debug`, because it knows drain tokens.
#[derive(Default)]
pub struct Memory {
    // Held for one access, never over an await.
    pools: Mutex<HashMap<Key, Entry>>,
}

/// Of one pool.
#[derive(Default)]
pub struct Entry {
    uid: String,
    /// Drain token for a workload that is not there yet: the same at each attempt, so that one that was refused is known again.
    pub drain_token: Option<String>,
    /// What was applied last, by kind and name.
    pub applied: HashMap<String, Attempt>,
    /// What was found or made absent, by kind and name.
    pub absent: HashSet<String>,
    /// The status that was written last, and when.
    pub written: Option<(Instant, WorkerPoolStatus)>,
    /// What its load was.
    pub history: History,
    /// Who writes its replicas.
    pub writers: Writers,
    /// Who writes those of its Deployment.
    pub rivals: Rivals,
    /// Whether it was said that Pods wait for the pool.
    pub told_waiting: bool,
    /// What was said of its slots.
    pub told_slots: Told,
    /// What relays and Provider last looked like.
    pub seen: Option<u64>,
    reconciling: Delays,
    scaling: Delays,
    /// When the replicas may be written again after a failure.
    pub scale_after: Option<Instant>,
}

/// What became of an object that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Hash of what was wanted.
    pub desired: u64,
    /// What came of it.
    pub result: AttemptResult,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttemptResult {
    /// It was done, and the object was at this version of its content.
    Done(String),
    /// The API server refused it, and will again.
    Refused {
        /// HTTP status.
        code: u16,
        /// What it said.
        message: String,
    },
}

/// Growing delays with jitter, so that many pools that failed together do not try together.
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

impl Memory {
    /// Reads or writes what is remembered of a pool; of another one of the same name nothing is.
    pub fn with<R>(&self, pool: &WorkerPool, access: impl FnOnce(&mut Entry) -> R) -> R {
        let uid = pool.uid().unwrap_or_default();
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = pools.entry(key(pool)).or_default();
        if entry.uid != uid {
            *entry = Entry { uid, ..Entry::default() };
        }
        access(entry)
    }

    /// Forgets all pools but those, and says which.
    pub fn retain(&self, there: impl Fn(&Key) -> bool) -> Vec<Key> {
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<Key> = pools.keys().filter(|key| !there(key)).cloned().collect();
        for key in &gone {
            pools.remove(key);
        }
        gone
    }
}

impl Entry {
    /// How long to wait after another failure of a reconciliation.
    pub fn reconciliation_failed(&mut self) -> Duration {
        self.reconciling.next()
    }

    /// The next failure is a first one again.
    pub fn reconciled(&mut self) {
        self.reconciling = Delays::default();
    }

    /// The replicas could not be written.
    pub fn scaling_failed(&mut self, now: Instant) {
        self.scale_after = Some(now + self.scaling.next());
    }

    /// The replicas were written.
    pub fn scaled(&mut self) {
        self.scaling = Delays::default();
        self.scale_after = None;
    }
}

/// Of a pool.
pub fn key(pool: &WorkerPool) -> Key {
    (pool.namespace().unwrap_or_default(), pool.name_any())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::manifests::testing;

    #[test]
    fn delays_grow_to_five_minutes_and_begin_again_after_a_success() {
        let (memory, pool) = (Memory::default(), testing::pool(&json!({"provider": "local"})));
        let delays: Vec<u64> =
            (0..12).map(|_| memory.with(&pool, Entry::reconciliation_failed).as_millis() as u64).collect();
        // Jitter adds up to as much again.
        assert!((1_000..2_000).contains(&delays[0]), "{delays:?}");
        assert!((8_000..16_000).contains(&delays[3]), "{delays:?}");
        assert!(delays[11] >= 300_000, "{delays:?}");
        memory.with(&pool, Entry::reconciled);
        assert!(memory.with(&pool, Entry::reconciliation_failed) < Duration::from_secs(2));
    }

    #[test]
    fn of_another_pool_of_that_name_nothing_is_known() {
        let (memory, mut pool) = (Memory::default(), testing::pool(&json!({"provider": "local"})));
        memory.with(&pool, |entry| entry.seen = Some(1));
        assert_eq!(memory.with(&pool, |entry| entry.seen), Some(1));
        pool.metadata.uid = Some("another".into());
        assert_eq!(memory.with(&pool, |entry| entry.seen), None);
        assert_eq!(memory.retain(|_| false), [("llm".to_owned(), "llama".to_owned())]);
    }
}
