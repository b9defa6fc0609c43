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
    calls: AtomicU64,
}

impl Meter for Hung {
    fn free(&self) -> Option<u64> {
        self.calls.fetch_add(1, Ordering::Relaxed);
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
    let meter = Arc::new(Hung { released: Mutex::new(released), calls: AtomicU64::new(0) });
    let memory = SlotMemory::new(Arc::<Hung>::clone(&meter));
    (release, meter, memory)
}

impl Hung {
    async fn until_called(&self) {
        while self.calls.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn concurrent_memory_queries_both_return_result() {
    let (release, meter, memory) = hung();
    let releasing = async {
        meter.until_called().await;
        drop(release);
    };
    assert_eq!(tokio::join!(memory.free(), memory.free(), releasing), (Some(7), Some(7), ()));
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
    assert_eq!(meter.calls.load(Ordering::Relaxed), 1, "a hanging meter is not called again");
    tokio::select! {
        biased;
        free = memory.free() => assert_eq!(free, None),
        () = std::future::ready(()) => panic!("a meter that is known to hang is awaited"),
    }
    drop(release);
    // Its thread finishes in real time.
    let released = Instant::now();
    while memory.free().await != Some(7) {
        assert!(released.elapsed() < Duration::from_secs(10), "the meter returned, but its result is ignored");
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
    let without_resident = memory.reading(None, Returns::ALL).await;
    assert_eq!((without_resident.free, without_resident.held), (Some(30), None));
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
