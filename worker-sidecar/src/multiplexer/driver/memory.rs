//! What a GPU has free, and what a model was seen to take of it.
//!
//! A machine whose GPU cannot be asked, or does not know (unified memory), is no error: then nothing is measured, the sizes
//! that the operator declared are all there is, and an unloaded model's memory counts as back by its driver's word.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Model, Returns};
use crate::multiplexer::config::MEMORY_FREE_TIMEOUT;
use crate::multiplexer::event::Left;
use crate::multiplexer::memory::{Reading, Sleep};

/// Between two looks at memory that is to come back.
const FREE_POLL: Duration = Duration::from_millis(250);

/// Says how much is free. Asked off the async threads: a driver that hangs must not take the worker with it.
pub trait Meter: fmt::Debug + Send + Sync {
    /// Bytes that are free on the slot's devices; `None` where that cannot be known.
    fn free(&self) -> Option<u64>;

    /// Bytes that this control group may still take of the host's memory; `None` where there is no limit.
    fn host_free(&self) -> Option<u64>;
}

/// What a slot's models were seen to take.
#[derive(Debug)]
pub struct SlotMemory {
    meter: Arc<dyn Meter>,
    patience: Duration,
    /// Never held over an await.
    seen: Mutex<HashMap<Model, Seen>>,
}

/// What was free around a model's life, as far as it was measured.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    before_load: Option<u64>,
    at_evict: Option<u64>,
    /// What the host had free before the model was put to sleep.
    host_at_evict: Option<u64>,
    /// What its sleeping copy took of the host.
    copy: Option<u64>,
}

impl SlotMemory {
    /// Nothing was seen yet.
    pub fn new(meter: Arc<dyn Meter>) -> Self {
        Self { meter, patience: MEMORY_FREE_TIMEOUT, seen: Mutex::default() }
    }

    /// A load begins. One that repeats a load without an eviction between them says nothing about what was free before.
    pub async fn note_load(&self, model: &Model) {
        let free = self.free().await;
        let mut seen = self.lock();
        let seen = seen.entry(Arc::clone(model)).or_default();
        let is_repeated = seen.before_load.is_some() && seen.at_evict.is_none();
        let before_load = if is_repeated { seen.before_load } else { free };
        *seen = Seen { before_load, at_evict: None, ..*seen };
    }

    /// An eviction begins. The second of two attempts says nothing about what the model held.
    pub async fn note_evict(&self, model: &Model) {
        let (free, host) = (self.free().await, self.host_free().await);
        let mut seen = self.lock();
        let seen = seen.entry(Arc::clone(model)).or_default();
        seen.at_evict = seen.at_evict.or(free);
        seen.host_at_evict = host;
    }

    /// An eviction has ended well. What a first sleep takes of the host is what the next one will take.
    pub async fn note_evicted(&self, model: &Model, left: Left) {
        if left == Left::Nothing {
            return;
        }
        let host = self.host_free().await;
        if let Some(seen) = self.lock().get_mut(model) {
            let took = seen.host_at_evict.zip(host).map(|(before, now)| before.saturating_sub(now));
            seen.copy = took.filter(|copy| *copy > 0).or(seen.copy);
        }
    }

    /// What is known before the resident has to go.
    pub async fn reading(&self, resident: Option<&Model>, returns: Returns) -> Reading {
        let (free, host_free) = (self.free().await, self.host_free().await);
        let seen = resident.and_then(|model| self.lock().get(model).copied()).unwrap_or_default();
        let held = seen.before_load.zip(free).map(|(before, now)| before.saturating_sub(now));
        let sleep = seen.copy.zip(host_free).map(|(copy, host_free)| Sleep { copy, host_free });
        Reading { free, held: held.map(|held| held.saturating_sub(returns.residual)), reserve: 0, sleep }
    }

    /// Waits until the memory of an evicted model is back; yes, where nobody can know.
    pub async fn is_freed(&self, model: &Model, returns: Returns) -> bool {
        let seen = self.lock().get(model).copied().unwrap_or_default();
        let Some(wanted) = seen.wanted(returns) else { return true };
        let coming = async {
            while self.free().await.is_some_and(|free| free < wanted) {
                tokio::time::sleep(FREE_POLL).await;
            }
        };
        tokio::time::timeout(self.patience, coming).await.is_ok()
    }

    async fn free(&self) -> Option<u64> {
        let meter = Arc::clone(&self.meter);
        tokio::task::spawn_blocking(move || meter.free()).await.ok().flatten()
    }

    async fn host_free(&self) -> Option<u64> {
        let meter = Arc::clone(&self.meter);
        tokio::task::spawn_blocking(move || meter.host_free()).await.ok().flatten()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Model, Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seen {
    /// What has to be free again.
    fn wanted(self, returns: Returns) -> Option<u64> {
        let (before, at_evict) = self.before_load.zip(self.at_evict)?;
        let expected = before.saturating_sub(at_evict).saturating_sub(returns.residual);
        let part = u128::from(expected) * u128::from(returns.percent) / 100;
        Some(at_evict.saturating_add(u64::try_from(part).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;

    /// A device whose free memory the test sets.
    #[derive(Debug, Default)]
    struct Gpu {
        free: AtomicU64,
        host: AtomicU64,
    }

    impl Gpu {
        fn set(&self, free: u64) {
            self.free.store(free, Ordering::Relaxed);
        }
    }

    impl Meter for Gpu {
        fn free(&self) -> Option<u64> {
            Some(self.free.load(Ordering::Relaxed))
        }

        fn host_free(&self) -> Option<u64> {
            Some(self.host.load(Ordering::Relaxed))
        }
    }

    fn slot() -> (Arc<Gpu>, SlotMemory, Model) {
        let gpu = Arc::new(Gpu::default());
        gpu.set(100);
        let memory = SlotMemory::new(Arc::<Gpu>::clone(&gpu));
        (gpu, memory, Model::from("m"))
    }

    async fn load_and_evict(gpu: &Gpu, memory: &SlotMemory, model: &Model) {
        memory.note_load(model).await;
        gpu.set(20);
        memory.note_evict(model).await;
    }

    #[tokio::test]
    async fn memory_that_comes_back_late_is_waited_for() {
        let (gpu, memory, model) = slot();
        load_and_evict(&gpu, &memory, &model).await;
        let freed = memory.is_freed(&model, Returns::ALL);
        let coming = async {
            tokio::task::yield_now().await;
            gpu.set(92); // nine tenths of 80 above 20
        };
        assert!(tokio::join!(freed, coming).0);
    }

    #[tokio::test]
    async fn memory_that_does_not_come_back_is_told() {
        let (gpu, memory, model) = slot();
        let memory = SlotMemory { patience: Duration::from_millis(1), ..memory };
        load_and_evict(&gpu, &memory, &model).await;
        gpu.set(91);
        // A second attempt at the eviction must not take what is left for all there was.
        memory.note_evict(&model).await;
        assert!(!memory.is_freed(&model, Returns::ALL).await);
        assert!(memory.is_freed(&model, Returns { residual: 2, percent: 90 }).await);
    }

    #[tokio::test]
    async fn the_resident_is_credited_with_what_it_took() {
        let (gpu, memory, model) = slot();
        memory.note_load(&model).await;
        gpu.set(30);
        let reading = memory.reading(Some(&model), Returns { residual: 10, percent: 90 }).await;
        assert_eq!(reading, Reading { free: Some(30), held: Some(60), reserve: 0, sleep: None });
        let stranger = memory.reading(Some(&Model::from("other")), Returns::ALL).await;
        assert_eq!((stranger.free, stranger.held), (Some(30), None));
    }

    #[tokio::test]
    async fn a_sleeping_copy_is_measured_the_first_time_and_asked_for_the_next() {
        let (gpu, memory, model) = slot();
        gpu.host.store(50, Ordering::Relaxed);
        load_and_evict(&gpu, &memory, &model).await;
        gpu.host.store(20, Ordering::Relaxed);
        memory.note_evicted(&model, Left::Asleep).await;
        let reading = memory.reading(Some(&model), Returns::ALL).await;
        assert_eq!(reading.sleep, Some(Sleep { copy: 30, host_free: 20 }));
    }

    #[derive(Debug)]
    struct Blind;

    impl Meter for Blind {
        fn free(&self) -> Option<u64> {
            None
        }

        fn host_free(&self) -> Option<u64> {
            None
        }
    }

    #[tokio::test]
    async fn without_a_measure_memory_is_back_by_the_drivers_word() {
        let (memory, model) = (SlotMemory::new(Arc::new(Blind)), Model::from("m"));
        memory.note_load(&model).await;
        memory.note_evict(&model).await;
        let began = Instant::now();
        assert!(memory.is_freed(&model, Returns::ALL).await);
        assert!(began.elapsed() < MEMORY_FREE_TIMEOUT);
        assert_eq!(memory.reading(Some(&model), Returns::ALL).await, Reading::default());
    }
}
