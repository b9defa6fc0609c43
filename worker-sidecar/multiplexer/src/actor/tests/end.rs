//! The shutdown of the worker, in each state of the slot.

use std::sync::Arc;

use modelrelay_protocol::message::SlotState;
use tokio::time::Instant;

use super::harness::{Play, Stage, config, pass, secs};
use crate::effect::LeaseEnd;
use crate::error::SlotError;

async fn stop(stage: &Stage, timeout: f64) -> f64 {
    let began = Instant::now();
    stage.mux.stop(secs(timeout)).await;
    began.elapsed().as_secs_f64()
}

async fn assert_ended(stage: &Stage) {
    assert_eq!(stage.state().await, SlotState::Stopping);
    assert_eq!(stage.counts().await, (0, 0));
    assert_eq!(stage.send_request("a").await.unwrap_err(), SlotError::Draining);
}

#[tokio::test(start_paused = true)]
async fn idle_slot_stops_at_once_sparing_foreign_backend() {
    for resident in [false, true] {
        let stage = Stage::new(&["a", "b"]).await;
        if resident {
            drop(stage.send_request("a").await.unwrap());
        }
        stage.driver().log();
        assert!(stop(&stage, 30.0).await < 0.1);
        assert_ended(&stage).await;
        assert_eq!(stage.driver().log(), Vec::<String>::new());
        // Stopping again changes nothing.
        assert!(stop(&stage, 30.0).await < 0.1);
    }
}

#[tokio::test(start_paused = true)]
async fn only_child_backends_are_stopped() {
    let stage = Stage::with(vec![config(&["a", "foreign-b"])], true).await;
    stop(&stage, 30.0).await;
    assert_eq!(stage.driver().log(), ["stop a"]);
}

#[tokio::test(start_paused = true)]
async fn running_requests_end_at_shutdown_timeout() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let (quick, slow) = (stage.send_request("a").await.unwrap(), stage.send_request("a").await.unwrap());
    let holders = async {
        pass(5.0).await;
        quick.release(true).await;
        slow.cancelled().await
    };
    let (took, why) = tokio::join!(stop(&stage, 30.0), holders);
    assert!((29.9..30.1).contains(&took), "{took}");
    assert_eq!(why, LeaseEnd::Shutdown);
    assert_ended(&stage).await;
}

#[tokio::test(start_paused = true)]
async fn slot_stops_during_each_swap_step() {
    let steps = [
        (SlotState::Draining, 1.0, true),
        (SlotState::Severing, 31.0, true),
        (SlotState::Evicting, 0.5, false),
        (SlotState::Loading, 1.5, false),
    ];
    for (state, after, busy) in steps {
        let stage = Stage::serving("a", &["a", "b"]).await;
        let running = if busy { Some(stage.send_request("a").await.unwrap()) } else { None };
        pass(20.0).await;
        let waiting = stage.send_request("b");
        pass(after).await;
        assert_eq!(stage.state().await, state);
        let holder = async {
            if let Some(running) = running {
                running.cancelled().await;
                drop(running);
            }
        };
        let (took, waited, ()) = tokio::join!(stop(&stage, 3.0), waiting, holder);
        assert!(took < 3.1, "{state:?}: {took}");
        assert_eq!(waited.unwrap_err(), SlotError::Draining, "{state:?}");
        assert_ended(&stage).await;
    }
}

#[tokio::test(start_paused = true)]
async fn slot_stops_during_backoff_and_quarantine() {
    let stage = Stage::new(&["a"]).await;
    stage.driver().play("load a", Play::Fail(secs(0.1)));
    assert!(stage.send_request("a").await.is_err());
    pass(0.1).await;
    assert_eq!(stage.state().await, SlotState::Backoff);
    assert!(stop(&stage, 3.0).await < 0.1);
    assert_ended(&stage).await;

    let stage = Stage::new(&["a"]).await;
    stage.driver().play("load a", Play::Fail(secs(0.1)));
    stage.driver().play("force a", Play::Fail(secs(0.1)));
    assert!(stage.send_request("a").await.is_err());
    pass(1.0).await;
    assert_eq!(stage.state().await, SlotState::Quarantined);
    assert!(stop(&stage, 3.0).await < 0.1);
    assert_ended(&stage).await;
}

#[tokio::test(start_paused = true)]
async fn child_backends_stop_concurrently_with_slot() {
    let stage = Stage::with(vec![config(&["a", "b"])], true).await;
    drop(stage.send_request("a").await.unwrap());
    stage.driver().log();
    for call in ["stop a", "stop b"] {
        stage.driver().play(call, Play::Done(secs(4.0)));
    }
    let took = stop(&stage, 30.0).await;
    assert!((4.0..4.1).contains(&took), "{took}");
    assert_eq!(stage.driver().log(), ["stop a", "stop b"]);
}

#[tokio::test(start_paused = true)]
async fn unstoppable_child_is_killed_without_blocking_shutdown() {
    let stage = Stage::with(vec![config(&["a", "b"])], true).await;
    stage.driver().play("stop a", Play::Fail(secs(4.0)));
    stage.driver().play("stop b", Play::Panic);
    stop(&stage, 30.0).await;
    assert_eq!(stage.driver().log(), ["stop a", "stop b", "dropped stop b", "force b", "force a"]);

    let stage = Stage::with(vec![config(&["a"])], true).await;
    stage.driver().play("stop a", Play::Never);
    let took = stop(&stage, 30.0).await;
    assert!((60.0..60.1).contains(&took), "{took}");
}

#[tokio::test(start_paused = true)]
async fn slot_task_ends_with_its_last_handle() {
    let stage = Stage::serving("a", &["a"]).await;
    let lease = stage.send_request("a").await.unwrap();
    let Stage { mux, drivers, .. } = stage;
    drop(mux);
    pass(1.0).await;
    // The slot's calls, and the resources that they hold, are dropped with the task: only once the lease is gone too.
    let held = Arc::strong_count(&drivers[0]);
    drop(lease);
    pass(1.0).await;
    assert!(Arc::strong_count(&drivers[0]) < held);
}
