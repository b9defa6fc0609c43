//! Races that need a driver and a GPU; those of the machine alone are in `machine::tests::races`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use modelrelay_protocol::message::{RequestClass, SlotState};
use prometheus::Registry;

use super::harness::{Play, Sink, Stage, config, fake, pass, secs};
use crate::actor::now;
use crate::board::Peer;
use crate::driver::memory::{Meter, SlotMemory};
use crate::driver::slot::SlotDriver;
use crate::error::SlotError;
use crate::metrics::MultiplexerMetrics;
use crate::slots::Multiplexer;

#[tokio::test(start_paused = true)]
async fn resident_dying_during_drain_is_replaced_without_eviction() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    pass(20.0).await;
    let waiting = stage.send_request("b");
    pass(1.0).await;
    assert_eq!(stage.state().await, SlotState::Draining);
    stage.driver().die("a");
    assert_eq!(running.cancelled().await.error(), Some(SlotError::BackendLost));
    assert_eq!(waiting.await.unwrap().generation(), 2);
    assert_eq!(stage.driver().log(), ["load b"], "a dead backend is not unloaded");
    running.release(false).await;
    assert_eq!(stage.counts().await, (0, 0));
}

#[tokio::test(start_paused = true)]
async fn target_dying_during_load_restores_former_resident() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    stage.driver().play("load b", Play::Fail(secs(1.0)));
    assert!(matches!(stage.send_request("b").await.unwrap_err(), SlotError::LoadFailed { .. }));
    pass(3.0).await;
    assert_eq!(stage.driver().log(), ["evict a", "load b", "force b", "load a"]);
    assert_eq!(stage.resident().await.as_deref(), Some("a"));
}

/// A GPU whose free memory the test sets.
#[derive(Debug)]
struct Gpu(AtomicU64);

impl Meter for Gpu {
    fn free(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed))
    }

    fn host_free(&self) -> Option<u64> {
        None
    }
}

#[tokio::test(start_paused = true)]
async fn eviction_freeing_no_memory_leads_to_quarantine() {
    let config = config(&["a", "b"]);
    let (driver, gpu) = (fake(&config, false), Arc::new(Gpu(AtomicU64::new(100))));
    let slot = SlotDriver::new(Arc::clone(&driver) as _, SlotMemory::new(Arc::<Gpu>::clone(&gpu)));
    let metrics = Arc::new(MultiplexerMetrics::new(&Registry::new()));
    let mux = Multiplexer::start_unjittered(vec![(config, Arc::new(slot))], metrics);
    let old = mux.join(Peer::Old, Arc::new(Sink::default()));
    let waiting = mux.arrive(old, ("a", RequestClass::Normal), now());
    pass(1.0).await;
    // The load has used the memory by now, and nothing that is done later frees it.
    gpu.0.store(20, Ordering::Relaxed);
    waiting.await.unwrap().release(true).await;
    pass(10.0).await;
    assert_eq!(mux.arrive(old, ("b", RequestClass::Normal), now()).await.unwrap_err(), SlotError::Quarantined);
    assert_eq!(driver.log(), ["load a", "evict a", "force a"], "b is not loaded next to what is left of a");
}

#[tokio::test(start_paused = true)]
async fn relay_with_stale_resident_is_corrected() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    assert_eq!(stage.told.granted("a"), Some(4));
    stage.driver().serve(Some("b"));
    pass(5.1).await;
    let slot = stage.told.slots_now().slots.remove(0);
    assert_eq!((slot.resident.as_deref(), slot.generation), (Some("b"), 2));
    assert_eq!((stage.told.granted("a"), stage.told.granted("b")), (None, Some(4)));
    assert_eq!(stage.send("a").await.unwrap_err(), SlotError::AtCapacity, "it goes back to the relay's queue");
}
