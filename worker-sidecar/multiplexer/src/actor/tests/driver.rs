//! Drivers that fail, hang, panic or return late. The slot continues, and nothing is loaded into memory that may not be
//! free.

use modelrelay_protocol::message::{Command, SlotState};
use tokio::time::Instant;

use super::super::calls::{Calls, SlotCall};
use super::super::{Message, SlotHandle};
use super::harness::{Play, Stage, config, fake, pass, secs, slot_driver};
use crate::Model;
use crate::error::{LoadFailure, SlotError};
use crate::estimate::LoadKind;
use crate::event::{Event, OpId, Outcome};

fn failure(error: SlotError) -> LoadFailure {
    let SlotError::LoadFailed { failure, .. } = error else { panic!("a failed load, not {error}") };
    failure
}

#[tokio::test(start_paused = true)]
async fn backend_exit_during_load_fails_requests_at_once() {
    let stage = Stage::new(&["a"]).await;
    stage.driver().play("load a", Play::Fail(secs(0.5)));
    let began = Instant::now();
    let (first, second) = tokio::join!(stage.send_request("a"), stage.send_request("a"));
    assert_eq!(failure(first.unwrap_err()), LoadFailure::Exited("load a failed".to_owned()));
    assert_eq!(failure(second.unwrap_err()), LoadFailure::Exited("load a failed".to_owned()));
    assert_eq!(began.elapsed(), secs(0.5));
    pass(0.01).await;
    assert_eq!(stage.driver().log(), ["load a", "force a"]);
    // The next request fails fast, with the rest of the wait.
    let error = stage.send_request("a").await.unwrap_err();
    assert!(error.retry_after().is_some_and(|left| left > secs(1.9) && left < secs(2.0)), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn overdue_load_is_dropped_and_killed() {
    for play in [Play::Never, Play::Done(secs(600.0)), Play::Done(secs(601.0))] {
        let stage = Stage::new(&["a"]).await;
        stage.driver().play("load a", play.clone());
        let began = Instant::now();
        let result = stage.send_request("a").await;
        // The relay without a queue learns earlier that its request was held too long.
        assert!(matches!(result.unwrap_err(), SlotError::HoldExpired { .. }));
        assert_eq!(began.elapsed(), secs(300.0));
        pass(302.0).await;
        let log = stage.driver().log();
        if log == ["load a"] {
            // It ended at that very instant: both results are right.
            assert!(matches!(play, Play::Done(after) if after == secs(600.0)));
            assert_eq!(stage.resident().await.as_deref(), Some("a"));
        } else if log == ["load a", "force a"] {
            // As above, and its time was over while its memory was measured.
            assert!(matches!(play, Play::Done(after) if after == secs(600.0)));
            assert_eq!(stage.resident().await, None);
        } else {
            assert_eq!(log, ["load a", "dropped load a", "force a"]);
            assert_eq!(stage.resident().await, None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn requests_waiting_for_overdue_load_report_timeout() {
    let stage = Stage::new(&["a"]).await;
    stage.driver().play("load a", Play::Never);
    let early = stage.send_request("a");
    pass(400.0).await;
    let late = stage.send_request("a");
    assert!(early.await.is_err());
    assert_eq!(failure(late.await.unwrap_err()), LoadFailure::TimedOut(secs(600.0)));
}

#[tokio::test(start_paused = true)]
async fn hanging_eviction_is_followed_by_kill() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    stage.driver().play("evict a", Play::Never);
    let began = Instant::now();
    assert!(stage.send_request("b").await.is_ok());
    assert_eq!(stage.driver().log(), ["evict a", "dropped evict a", "force a", "load b"]);
    assert!(began.elapsed() >= secs(62.0) && began.elapsed() < secs(62.1), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn hanging_kill_quarantines_slot_until_operator_unloads() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    stage.driver().play("evict a", Play::Never);
    stage.driver().play("force a", Play::Never);
    assert_eq!(stage.send_request("b").await.unwrap_err(), SlotError::Quarantined);
    assert!(!stage.mux.is_ready());
    assert_eq!(stage.send_request("a").await.unwrap_err(), SlotError::Quarantined);
    assert_eq!(stage.driver().log(), ["evict a", "dropped evict a", "force a"]);
    let command = Command {
        op_id: "op".into(),
        command: "unload".into(),
        model: "a".into(),
        slot: Some("gpu0".into()),
        mode: Some("now".into()),
    };
    stage.mux.handle_command(stage.new, &command);
    pass(1.0).await;
    assert!(stage.told.results().iter().all(|result| result.ok && result.op_id == "op"));
    assert!(stage.mux.is_ready() && stage.send_request("b").await.is_ok());
    assert_eq!(stage.driver().log(), ["dropped force a", "force a", "load b"]);
}

#[tokio::test(start_paused = true)]
async fn driver_panic_during_load_fails_load() {
    let stage = Stage::new(&["a"]).await;
    stage.driver().play("load a", Play::Panic);
    let error = stage.send_request("a").await.unwrap_err();
    assert_eq!(failure(error), LoadFailure::Driver("its driver panicked".to_owned()));
    pass(3.0).await;
    assert!(stage.send_request("a").await.is_ok());
    assert_eq!(stage.driver().log(), ["load a", "dropped load a", "force a", "load a"]);
}

#[tokio::test(start_paused = true)]
async fn driver_panics_during_eviction_and_kill_quarantine_slot() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    stage.driver().play("evict a", Play::Panic);
    stage.driver().play("force a", Play::Panic);
    assert_eq!(stage.send_request("b").await.unwrap_err(), SlotError::Quarantined);
    assert_eq!(stage.state().await, SlotState::Quarantined);
}

#[tokio::test(start_paused = true)]
async fn panic_in_slot_task_quarantines_slot() {
    let stage = Stage::serving("a", &["a", "b"]).await;
    let running = stage.send_request("a").await.unwrap();
    stage.command("1", "load", "b");
    pass(0.01).await;
    let waiting = stage.send_request("b");
    pass(0.01).await;
    stage.driver().play("url", Play::Panic);
    drop(running);
    assert_eq!(waiting.await.unwrap_err(), SlotError::Quarantined);
    assert_eq!(stage.send_request("a").await.unwrap_err(), SlotError::Quarantined);
    let slot = stage.told.slots_now().slots.remove(0);
    assert_eq!((slot.state, slot.models[0].code.as_deref()), (SlotState::Quarantined, Some("slot_quarantined")));
    assert_eq!((stage.told.granted("a"), stage.told.granted("b"), stage.mux.is_ready()), (None, None, false));
    let results = stage.told.results();
    assert!(matches!(&*results, [result] if result.op_id == "1" && !result.ok), "{results:?}");
    stage.mux.stop(secs(30.0)).await;
}

#[tokio::test(start_paused = true)]
async fn panicking_or_hanging_probe_is_inconclusive() {
    let stage = Stage::serving("a", &["a"]).await;
    let lease = stage.send_request("a").await.unwrap();
    stage.driver().play("probe", Play::Panic);
    stage.driver().play("probe", Play::Never);
    // 5 s and 10 s, and then it responds again.
    pass(40.0).await;
    assert_eq!((stage.resident().await.as_deref(), lease.generation()), (Some("a"), 1));
    assert_eq!(stage.driver().log(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn exited_backend_is_reloaded_for_next_request() {
    let stage = Stage::serving("a", &["a"]).await;
    let lease = stage.send_request("a").await.unwrap();
    stage.driver().die("a");
    assert_eq!(lease.cancelled().await.error(), Some(SlotError::BackendLost));
    lease.release(false).await;
    pass(3.0).await;
    assert_eq!(stage.send_request("a").await.unwrap().generation(), 2);
}

/// The regular probe would find it within five seconds.
#[tokio::test(start_paused = true)]
async fn exit_of_later_process_is_detected_at_once() {
    let stage = Stage::serving("a", &["a"]).await;
    stage.driver().die("a");
    pass(3.0).await;
    let lease = stage.send_request("a").await.unwrap();
    assert_eq!(lease.generation(), 2);
    stage.driver().die("a");
    let end = tokio::time::timeout(secs(0.1), lease.cancelled()).await.expect("it is heard at once");
    assert_eq!(end.error(), Some(SlotError::BackendLost));
}

#[tokio::test(start_paused = true)]
async fn externally_unloaded_model_is_detected_within_five_seconds() {
    let stage = Stage::serving("a", &["a"]).await;
    stage.driver().serve(None);
    pass(5.1).await;
    assert_eq!(stage.state().await, SlotState::Empty);
}

#[tokio::test(start_paused = true)]
async fn refused_connection_triggers_immediate_probe() {
    let stage = Stage::serving("a", &["a"]).await;
    let lease = stage.send_request("a").await.unwrap();
    stage.driver().serve(None);
    lease.failure_report().unwrap().send();
    pass(0.01).await;
    assert_eq!(lease.cancelled().await.error(), Some(SlotError::BackendLost));
}

#[tokio::test(start_paused = true)]
async fn backend_found_after_failed_connection_is_announced_again() {
    let stage = Stage::serving("a", &["a"]).await;
    let lease = stage.send_request("a").await.unwrap();
    let failure_report = lease.failure_report().unwrap();
    lease.release(false).await;
    assert_eq!(stage.told.announced(), [] as [Vec<Model>; 0]);
    failure_report.send();
    pass(0.01).await;
    assert_eq!(stage.told.announced(), [["a".into()]]);
    // A probe without a suspicion reports nothing.
    pass(20.0).await;
    assert_eq!(stage.told.announced().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn immediate_unload_order_kills_running_load() {
    let stage = Stage::new(&["a", "b"]).await;
    stage.command("1", "load", "a");
    pass(1.0).await;
    let now = Command {
        op_id: "2".into(),
        command: "unload".into(),
        model: "a".into(),
        slot: None,
        mode: Some("now".into()),
    };
    stage.mux.handle_command(stage.new, &now);
    pass(5.0).await;
    assert_eq!(stage.driver().log(), ["load a", "dropped load a", "force a"]);
    let results = stage.told.results();
    let results: Vec<_> = results.iter().map(|result| (result.op_id.as_str(), result.ok)).collect();
    assert!(results.contains(&("2", true)) && results.contains(&("1", false)), "{results:?}");
}

// Uses the real clock: only on two threads can a call begin while the previous one is still being dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_starts_after_previous_call_is_dropped() {
    let driver = fake(&config(&["a"]), false);
    let (mailbox, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let handle = SlotHandle { mailbox, is_listening: Default::default() };
    let mut calls = Calls::new(slot_driver(&driver), handle.mailbox.downgrade());
    driver.play("evict a", Play::Stuck);
    calls.start(OpId(1), SlotCall::Evict("a".into()));
    while driver.log().is_empty() {
        pass(0.001).await;
    }
    calls.start(OpId(2), SlotCall::ForceEvict("a".into()));
    let Some(Message::Event(Event::Done { op: OpId(2), outcome })) = heard.recv().await else {
        panic!("the second call's end")
    };
    assert!(matches!(outcome, Outcome::ForceEvicted(Ok(()))), "{outcome:?}");
    assert_eq!(driver.log(), ["dropped evict a", "force a"]);
}

// A load that begins while the remains of the same model are being killed would be killed with them.
#[tokio::test(start_paused = true)]
async fn load_waits_until_models_remains_are_killed() {
    let driver = fake(&config(&["a"]), false);
    let (mailbox, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let handle = SlotHandle { mailbox, is_listening: Default::default() };
    let mut calls = Calls::new(slot_driver(&driver), handle.mailbox.downgrade());
    driver.play("force a", Play::Done(secs(3.0)));
    calls.discard("a".into());
    calls.start(OpId(1), SlotCall::Load("a".into(), LoadKind::Cold));
    let began = Instant::now();
    assert!(matches!(heard.recv().await, Some(Message::Event(_))));
    assert_eq!(began.elapsed(), secs(5.0));
    assert_eq!(driver.log(), ["force a", "load a"]);
}
