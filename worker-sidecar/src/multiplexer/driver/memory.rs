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
use crate::multiplexer::config::MEMORY_FREE_TIMEOUT;
use crate::multiplexer::event::Left;
use crate::multiplexer::memory::{Reading, Sleep};

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
    asking: Arc<Semaphore>,
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
            asking: Arc::new(Semaphore::new(1)),
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
        let turn = match Arc::clone(&self.asking).try_acquire_owned() {
            Ok(turn) => turn,
            Err(_) if self.hangs.load(Ordering::Relaxed) => return None,
            Err(_) => timeout(METER_TIMEOUT, Arc::clone(&self.asking).acquire_owned()).await.ok()?.ok()?,
        };
        let asked = self.measure(move |meter| {
            let free = meter.free();
            drop(turn);
            free
        });
        let answer = timeout(METER_TIMEOUT, asked).await;
        self.hangs.store(answer.is_err(), Ordering::Relaxed);
        let free = answer.unwrap_or_else(|_| {
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
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    use super::*;

    /// A device whose free memory the test sets.
    #[derive(Debug, Default)]
    struct Gpu {
        free: AtomicU64,
        host: AtomicU64,
        broken: AtomicBool,
    }

    impl Gpu {
        fn set(&self, free: u64) {
            self.free.store(free, Ordering::Relaxed);
        }
    }

    impl Meter for Gpu {
        fn free(&self) -> Option<u64> {
            (!self.broken.load(Ordering::Relaxed)).then(|| self.free.load(Ordering::Relaxed))
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

    #[tokio::test(start_paused = true)]
    async fn memory_freed_late_is_waited_for() {
        let (gpu, memory, model) = slot();
        load_and_evict(&gpu, &memory, &model).await;
        let freed = memory.is_freed(&model, Returns::ALL);
        let coming = async {
            tokio::task::yield_now().await;
            gpu.set(92); // nine tenths of 80 above 20
        };
        assert!(tokio::join!(freed, coming).0);
    }

    #[tokio::test(start_paused = true)]
    async fn unreleased_memory_is_reported() {
        let (gpu, memory, model) = slot();
        let memory = SlotMemory { patience: Duration::from_millis(1), ..memory };
        load_and_evict(&gpu, &memory, &model).await;
        gpu.set(91);
        // A second attempt at the eviction must not treat the remaining memory as all that was used.
        memory.note_evict(&model).await;
        assert!(!memory.is_freed(&model, Returns::ALL).await);
        assert!(memory.is_freed(&model, Returns { residual: 2, percent: 90 }).await);
    }

    async fn is_freed_soon(memory: SlotMemory, model: &Model) -> bool {
        let memory = SlotMemory { patience: Duration::from_millis(1), ..memory };
        memory.is_freed(model, Returns::ALL).await
    }

    #[tokio::test(start_paused = true)]
    async fn memory_of_crashed_model_must_be_released() {
        for (free, freed) in [(20, false), (91, false), (92, true)] {
            let (gpu, memory, model) = slot();
            memory.note_load(&model).await;
            gpu.set(20);
            memory.note_loaded(&model).await;
            gpu.set(free);
            assert_eq!(is_freed_soon(memory, &model).await, freed, "{free}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn memory_of_earlier_load_is_ignored() {
        let (gpu, memory, model) = slot();
        load_and_evict(&gpu, &memory, &model).await;
        memory.note_loaded(&model).await;
        gpu.set(100);
        memory.note_load(&model).await;
        gpu.set(60);
        memory.note_loaded(&model).await;
        gpu.set(94); // nine tenths of 80 above 20, and not of 40 above 60
        assert!(!is_freed_soon(memory, &model).await);
    }

    #[tokio::test(start_paused = true)]
    async fn found_model_must_release_some_memory() {
        for (has_lived, free, freed) in [(false, 20, false), (false, 60, true), (true, 20, false), (true, 60, true)] {
            let (gpu, memory, model) = slot();
            if has_lived {
                load_and_evict(&gpu, &memory, &model).await;
            }
            gpu.set(20);
            memory.note_found(&model).await;
            memory.note_evict(&model).await;
            gpu.set(free);
            assert_eq!(is_freed_soon(memory, &model).await, freed, "{free}, {has_lived}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failed_meter_does_not_report_memory_as_freed() {
        let (gpu, memory, model) = slot();
        load_and_evict(&gpu, &memory, &model).await;
        gpu.broken.store(true, Ordering::Relaxed);
        assert!(!is_freed_soon(memory, &model).await);
    }

    /// A GPU driver that hangs until the test releases it.
    #[derive(Debug)]
    struct Hung {
        released: Mutex<std::sync::mpsc::Receiver<()>>,
        asked: AtomicU64,
    }

    impl Meter for Hung {
        fn free(&self) -> Option<u64> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let _ = self.released.lock().unwrap().recv();
            Some(7)
        }

        fn host_free(&self) -> Option<u64> {
            None
        }
    }

    /// Returns a sender that releases the meter when dropped, the meter, and the memory.
    fn hung() -> (std::sync::mpsc::SyncSender<()>, Arc<Hung>, SlotMemory) {
        let (release, released) = std::sync::mpsc::sync_channel(1);
        let meter = Arc::new(Hung { released: Mutex::new(released), asked: AtomicU64::new(0) });
        let memory = SlotMemory::new(Arc::<Hung>::clone(&meter));
        (release, meter, memory)
    }

    impl Hung {
        async fn until_called(&self) {
            while self.asked.load(Ordering::Relaxed) == 0 {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_memory_queries_both_return_result() {
        let (release, meter, memory) = hung();
        let asked = async {
            meter.until_called().await;
            drop(release);
        };
        assert_eq!(tokio::join!(memory.free(), memory.free(), asked), (Some(7), Some(7), ()));
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_meter_blocks_one_thread_and_no_call() {
        let (release, meter, memory) = hung();
        // A paused clock stands still while a thread works, so the test advances it.
        let passing = async {
            meter.until_called().await;
            loop {
                tokio::time::advance(METER_TIMEOUT / 2).await;
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = async {
                for _ in 0..3 {
                    assert_eq!(memory.free().await, None);
                }
            } => {}
            () = passing => {}
        }
        assert_eq!(meter.asked.load(Ordering::Relaxed), 1, "while it hangs nobody else asks it");
        tokio::select! {
            biased;
            free = memory.free() => assert_eq!(free, None),
            () = std::future::ready(()) => panic!("what is known to hang is waited for"),
        }
        drop(release);
        // Its thread finishes in real time.
        let released = Instant::now();
        while memory.free().await != Some(7) {
            assert!(released.elapsed() < Duration::from_secs(10), "it answers, and is not heard");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn resident_is_credited_with_its_memory() {
        let (gpu, memory, model) = slot();
        memory.note_load(&model).await;
        gpu.set(30);
        let reading = memory.reading(Some(&model), Returns { residual: 10, percent: 90 }).await;
        assert_eq!(reading, Reading { free: Some(30), held: Some(60), sleep: None });
        let nobody = memory.reading(None, Returns::ALL).await;
        assert_eq!((nobody.free, nobody.held), (Some(30), None));
    }

    #[tokio::test]
    async fn repeated_load_keeps_original_free_memory() {
        let (gpu, memory, model) = slot();
        // In the first life, and in one after an eviction.
        for _ in 0..2 {
            gpu.set(100);
            memory.note_load(&model).await;
            gpu.set(30);
            memory.note_load(&model).await;
            assert_eq!(memory.reading(Some(&model), Returns::ALL).await.held, Some(70));
            memory.note_evict(&model).await;
        }
    }

    #[tokio::test]
    async fn free_memory_is_unknown_with_unmeasured_resident() {
        let (_, memory, _) = slot();
        let reading = memory.reading(Some(&Model::from("found")), Returns::ALL).await;
        assert_eq!((reading.free, reading.held), (None, None));
    }

    #[tokio::test]
    async fn sleeping_copy_is_measured_for_next_sleep() {
        let (gpu, memory, model) = slot();
        gpu.host.store(50, Ordering::Relaxed);
        load_and_evict(&gpu, &memory, &model).await;
        gpu.host.store(20, Ordering::Relaxed);
        memory.note_evicted(&model, Left::Asleep).await;
        let reading = memory.reading(Some(&model), Returns::ALL).await;
        assert_eq!(reading.sleep, Some(Sleep { copy: 30, host_free: 20 }));
    }

    #[tokio::test]
    async fn host_memory_of_first_sleep_is_remembered() {
        let (gpu, memory, model) = slot();
        for host in [50, 20] {
            gpu.host.store(host, Ordering::Relaxed);
            load_and_evict(&gpu, &memory, &model).await;
            gpu.host.store(20, Ordering::Relaxed);
            memory.note_evicted(&model, Left::Asleep).await;
        }
        assert_eq!(memory.reading(Some(&model), Returns::ALL).await.sleep.map(|sleep| sleep.copy), Some(30));
    }

    #[tokio::test]
    async fn unmeasured_memory_is_freed_when_driver_finishes() {
        let (memory, model) = (SlotMemory::new(Arc::new(Blind)), Model::from("m"));
        memory.note_load(&model).await;
        memory.note_evict(&model).await;
        let began = Instant::now();
        assert!(memory.is_freed(&model, Returns::ALL).await);
        assert!(began.elapsed() < MEMORY_FREE_TIMEOUT);
        assert_eq!(memory.reading(Some(&model), Returns::ALL).await, Reading::default());
    }
}
