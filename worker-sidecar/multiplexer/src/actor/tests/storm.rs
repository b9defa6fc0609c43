//! Many requests at once, on several threads and by the real clock: in whatever order events happen, every lease is
//! released, and driver calls never overlap (the fake driver panics if they do, which quarantines the slot).

use std::sync::Arc;
use std::time::Duration;

use modelrelay_protocol::message::{RequestClass, SlotState};

use super::harness::{Play, Sink, Stage, config, fake};
use crate::actor::now;
use crate::board::Peer;
use crate::error::SlotError;
use crate::slots::Multiplexer;

const REQUESTS: u64 = 400;

/// Returns a pseudo-random number for the number of a request.
fn scatter(number: u64) -> u64 {
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 20
}

async fn request(mux: Arc<Multiplexer>, relays: [crate::event::RelayKey; 3], number: u64) -> bool {
    let dice = scatter(number);
    tokio::time::sleep(Duration::from_millis(dice % 300)).await;
    let relay = relays[(dice / 7 % 3) as usize];
    let model = ["a", "b", "c"][(dice / 31 % 3) as usize];
    let arriving = mux.arrive(relay, (model, RequestClass::Normal), now());
    if dice.is_multiple_of(5) {
        let patience = Duration::from_millis(dice / 5 % 20);
        return tokio::time::timeout(patience, arriving).await.is_ok_and(|answer| answer.is_ok());
    }
    let lease = match arriving.await {
        Ok(lease) => lease,
        Err(error) => {
            assert_eq!(error, SlotError::AtCapacity, "request {number}");
            return false;
        }
    };
    tokio::select! {
        _ = lease.cancelled() => drop(lease),
        () = tokio::time::sleep(Duration::from_millis(dice / 100 % 5)) => match dice / 1000 % 3 {
            0 => lease.release(true).await,
            1 => drop(lease),
            _ => {
                let panicked = tokio::spawn(async move {
                    let _lease = lease;
                    panic!("as the test wants it");
                });
                assert!(panicked.await.is_err());
            }
        },
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn all_leases_are_returned_after_storm() {
    let mut configs = vec![config(&["a", "b"]), config(&["b", "c"])];
    configs[1].id = "gpu1".to_owned();
    for config in &mut configs {
        config.knobs.min_residency = Duration::ZERO;
        config.knobs.drain_timeout = Duration::from_millis(2);
    }
    let drivers: Vec<_> = configs.iter().map(|config| fake(config, false)).collect();
    for driver in &drivers {
        for call in ["load a", "load b", "load c", "evict a", "evict b", "evict c"] {
            (0..2 * REQUESTS).for_each(|_| driver.play(call, Play::Done(Duration::from_millis(1))));
        }
    }
    let stage = Stage::start(configs, drivers).await;
    let told = Arc::new(Sink::default());
    let core1 = stage.mux.join(Peer::Core1, Arc::<Sink>::clone(&told));
    let relays = [stage.old, stage.new, core1];
    let requests: Vec<_> =
        (0..REQUESTS).map(|number| tokio::spawn(request(Arc::clone(&stage.mux), relays, number))).collect();
    let mut served = 0;
    for request in requests {
        served += u32::from(request.await.unwrap());
    }
    assert!(served > 100, "{served}");
    for report in stage.mux.reports().await {
        assert!(report.requests.iter().all(|(_, of)| of.leases == 0 && of.held == 0), "{report:?}");
        assert_ne!(report.slot.state, SlotState::Quarantined);
        assert!(report.failures.is_empty(), "{:?}", report.failures);
    }
    // All places are free.
    assert_eq!(told.grant_now().others, 0);
    let calls: usize = stage.drivers.iter().map(|driver| driver.log().len()).sum();
    // Swaps happened: fewer on a busy machine, where more requests find their model loaded.
    assert!(calls > 4, "{calls}");
}
