//! The free memory of a GPU, and the memory that models were measured to use.
//!
//! A GPU that cannot be queried, or has no memory of its own to report (unified memory), is not an error: then nothing
//! is measured, the sizes declared by the operator apply, and an unloaded model's memory is treated as free when its
//! driver reports success. But if the query has worked before and now fails, memory is not treated as free.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::{Model, Returns};
use crate::config::MEMORY_FREE_TIMEOUT;
use crate::event::Left;
use crate::memory::{Reading, Sleep};

/// Between two measurements while memory is expected to become free.
const FREE_POLL: Duration = Duration::from_millis(250);

/// A GPU that takes longer to respond is treated as unavailable. Longer than a meter's own limit.
const METER_TIMEOUT: Duration = Duration::from_secs(8);

/// Measures free memory. Called off the async threads: a GPU driver that hangs must not block the worker.
pub trait Meter: fmt::Debug + Send + Sync {
    /// Returns the free bytes on the slot's devices; `None` if that cannot be known.
    fn free(&self) -> Option<u64>;

    /// Returns the bytes of host memory left to this control group; `None` if there is no limit.
    fn host_free(&self) -> Option<u64>;
}

/// The memory that a slot's models were measured to use.
#[derive(Debug)]
pub struct SlotMemory {
    meter: Arc<dyn Meter>,
    patience: Duration,
    /// True if the meter has ever returned a measurement.
    measures: AtomicBool,
    /// Allows one measurement at a time: while one hangs, no further thread may hang with it.
    permit: Arc<Semaphore>,
    /// True if the last measurement that was waited for hung.
    hangs: AtomicBool,
    /// Never held over an await.
    seen: Mutex<HashMap<Model, MemoryHistory>>,
}

/// The free memory at the events of a model's life, as far as it was measured.
#[derive(Clone, Copy, Debug, Default)]
struct MemoryHistory {
    before_load: Option<u64>,
    /// Once it was loaded or found.
    after_load: Option<u64>,
    at_evict: Option<u64>,
    /// The host's free memory before the model was put to sleep.
    host_at_evict: Option<u64>,
    /// The host memory of its sleeping copy.
    copy: Option<u64>,
}

impl SlotMemory {
    /// Creates an empty record.
    pub fn new(meter: Arc<dyn Meter>) -> Self {
        Self {
            meter,
            patience: MEMORY_FREE_TIMEOUT,
            measures: AtomicBool::new(false),
            permit: Arc::new(Semaphore::new(1)),
            hangs: AtomicBool::new(false),
            seen: Mutex::default(),
        }
    }

    /// Measures once, for the log lines that this causes.
    pub async fn measure_once(&self) {
        self.free().await;
    }

    /// A load begins. If it repeats a load without an eviction between them, the current free memory is not the one
    /// before the load.
    pub async fn note_load(&self, model: &Model) {
        let free = self.free().await;
        let mut seen = self.lock();
        let seen = seen.entry(Arc::clone(model)).or_default();
        let is_repeated = seen.before_load.is_some() && seen.at_evict.is_none();
        let before_load = if is_repeated { seen.before_load } else { free };
        let after_load = seen.after_load.filter(|_| is_repeated);
        *seen = MemoryHistory { before_load, after_load, at_evict: None, ..*seen };
    }

    /// A load has succeeded: records what the model holds, however it ends later.
    pub async fn note_loaded(&self, model: &Model) {
        let free = self.free().await;
        if let Some(seen) = self.lock().get_mut(model) {
            seen.after_load = seen.after_load.or(free);
        }
    }

    /// A probe found a model that this worker did not load: the memory before its load is unknown.
    pub async fn note_found(&self, model: &Model) {
        let free = self.free().await;
        let mut seen = self.lock();
        let seen = seen.entry(Arc::clone(model)).or_default();
        *seen = MemoryHistory { before_load: None, after_load: free, ..*seen };
    }

    /// An eviction begins. The second of two attempts does not show what the model held.
    pub async fn note_evict(&self, model: &Model) {
        let (free, host) = (self.free().await, self.host_free().await);
        let mut seen = self.lock();
        let seen = seen.entry(Arc::clone(model)).or_default();
        seen.at_evict = seen.at_evict.or(free);
        seen.host_at_evict = host;
    }

    /// An eviction has succeeded. The host memory used by a first sleep predicts that of the next one.
    pub async fn note_evicted(&self, model: &Model, left: Left) {
        // Only a sleeper that keeps its weights keeps them in host memory.
        if left != Left::Asleep {
            return;
        }
        let host = self.host_free().await;
        if let Some(seen) = self.lock().get_mut(model) {
            let took = seen.host_at_evict.zip(host).map(|(before, now)| before.saturating_sub(now));
            seen.copy = took.filter(|copy| *copy > 0).or(seen.copy);
        }
    }

    /// Drops the measurements of a model that the slot no longer has.
    pub fn forget(&self, model: &Model) {
        self.lock().remove(model);
    }

    /// Measures memory before the resident is unloaded.
    pub async fn reading(&self, resident: Option<&Model>, returns: Returns) -> Reading {
        let (free, host_free) = (self.free().await, self.host_free().await);
        let seen = resident.and_then(|model| self.lock().get(model).copied()).unwrap_or_default();
        let held = seen.before_load.zip(free).map(|(before, now)| before.saturating_sub(now));
        let sleep = seen.copy.zip(host_free).map(|(copy, host_free)| Sleep { copy, host_free });
        // A resident of unknown size will free some memory: no bound is better than a bound without it.
        let free = free.filter(|_| resident.is_none() || held.is_some());
        Reading { free, held: held.map(|held| held.saturating_sub(returns.residual)), sleep }
    }

    /// Waits until the memory of an unloaded model is free; returns true if that cannot be known.
    pub async fn is_freed(&self, model: &Model, returns: Returns) -> bool {
        let seen = self.lock().get(model).copied().unwrap_or_default();
        let wanted = seen.wanted(returns);
        let is_back = |free: Option<u64>| match free {
            Some(free) => free >= wanted,
            None => !self.measures.load(Ordering::Relaxed),
        };
        let coming = async {
            while !is_back(self.free().await) {
                tokio::time::sleep(FREE_POLL).await;
            }
        };
        timeout(self.patience, coming).await.is_ok()
    }

    async fn free(&self) -> Option<u64> {
        let turn = match Arc::clone(&self.permit).try_acquire_owned() {
            Ok(turn) => turn,
            Err(_) if self.hangs.load(Ordering::Relaxed) => return None,
            Err(_) => timeout(METER_TIMEOUT, Arc::clone(&self.permit).acquire_owned()).await.ok()?.ok()?,
        };
        let measured = self.measure(move |meter| {
            let free = meter.free();
            drop(turn);
            free
        });
        let result = timeout(METER_TIMEOUT, measured).await;
        self.hangs.store(result.is_err(), Ordering::Relaxed);
        let free = result.unwrap_or_else(|_| {
            let seconds = METER_TIMEOUT.as_secs();
            tracing::warn!(seconds, "GPU memory is unknown: the GPU driver did not respond in time");
            None
        });
        self.measures.fetch_or(free.is_some(), Ordering::Relaxed);
        free
    }

    async fn host_free(&self) -> Option<u64> {
        self.measure(|meter| meter.host_free()).await
    }

    #[cfg(not(feature = "simulation"))]
    #[expect(clippy::disallowed_methods, reason = "the feature `simulation` leaves it out")]
    async fn measure(&self, read: impl FnOnce(&dyn Meter) -> Option<u64> + Send + 'static) -> Option<u64> {
        let meter = Arc::clone(&self.meter);
        tokio::task::spawn_blocking(move || read(&*meter)).await.ok().flatten()
    }

    /// This machine's memory and the timing of its threads would not be determined by the seed.
    #[cfg(feature = "simulation")]
    #[allow(clippy::unused_async)]
    async fn measure(&self, read: impl FnOnce(&dyn Meter) -> Option<u64> + Send + 'static) -> Option<u64> {
        let _ = (&self.meter, read);
        None
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Model, MemoryHistory>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryHistory {
    /// Returns the memory that must be free again; 0 if the model is not known to have used any.
    fn wanted(self, returns: Returns) -> u64 {
        // A failed load has no measurement after it; the one at its eviction is used instead.
        match (self.before_load, self.after_load.or(self.at_evict)) {
            (Some(before), Some(with_it)) => {
                let expected = before.saturating_sub(with_it).saturating_sub(returns.residual);
                let part = u128::from(expected) * u128::from(returns.percent) / 100;
                let part = u64::try_from(part).unwrap_or(u64::MAX);
                if part == 0 { 0 } else { with_it.saturating_add(part) }
            }
            // It was found, and held something.
            (None, _) => self.after_load.map_or(0, |with_it| with_it.saturating_add(1)),
            (Some(_), None) => 0,
        }
    }
}

/// For tests: measures nothing, like a machine without a GPU library.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct Blind;

#[cfg(test)]
impl Meter for Blind {
    fn free(&self) -> Option<u64> {
        None
    }

    fn host_free(&self) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests;
