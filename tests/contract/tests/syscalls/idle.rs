//! Idle programs: a few system calls for each heartbeat, and none between them.

use std::time::Duration;

use modelrelay_harness::{
    fake_backend::FakeBackend,
    fake_relay::{Ack, FakeRelay},
    relay::Relay,
    trace::{Call, Trace},
    worker::{FakeWorker, Frame},
    worker_process::WorkerProcess,
};
use serde_json::json;

const HEARTBEATS: usize = 4;

/// For one heartbeat of one link: wake, write the ping, sleep; wake, read the pong, find nothing more, sleep; and the
/// runtime's calls between its threads. Polling every 50 ms, in one place, would double it.
const CALLS_PER_HEARTBEAT: usize = 20;

/// A heartbeat that is long compared with any polling interval.
const LONG_HEARTBEAT: Duration = Duration::from_secs(5);

/// The number of long heartbeats that are counted.
const LONG_HEARTBEATS: usize = 2;

/// The number of wake-ups by a clock for each timer of that length: the runtime checks a distant timer again when it is
/// four seconds and when it is 64 ms away. A second timer of half that length would double it.
const WAKES_PER_TIMER: usize = 4;

/// Replies to this number of pings.
async fn heartbeats(worker: &mut FakeWorker, count: usize) {
    for _ in 0..count {
        match worker.recv().await {
            Frame::Json(message) if message["type"] == "ping" => worker.report_load(0).await,
            frame @ (Frame::Json(_) | Frame::Binary(_) | Frame::Pong(_) | Frame::Close(..)) => {
                panic!("an idle worker received {frame:?}")
            }
        }
    }
}

async fn all_beat(workers: &mut [FakeWorker; 3], count: usize) {
    let [a, b, c] = workers;
    tokio::join!(heartbeats(a, count), heartbeats(b, count), heartbeats(c, count));
}

/// Returns how often a clock woke the program.
fn wakes_of_clocks(calls: &[Call]) -> usize {
    calls
        .iter()
        .filter(|call| ["epoll_wait", "epoll_pwait", "epoll_pwait2"].contains(&call.name.as_str()))
        .filter(|call| call.result == "0")
        .count()
}

/// Returns the most frequent calls, for a failure's message.
fn summary(calls: &[Call]) -> String {
    let mut counts = std::collections::BTreeMap::new();
    for call in calls {
        *counts.entry(call.name.as_str()).or_insert(0) += 1;
    }
    format!("{counts:?}")
}

#[tokio::test]
async fn idle_relay_makes_few_calls_per_heartbeat() {
    let Some(trace) = Trace::new() else { return };
    let relay = Relay::builder().traced(&trace, "all").env("HEARTBEAT_INTERVAL", "1").start().await;
    let mut workers =
        [relay.worker(&["m"], 1).await, relay.core1_worker(&["m"], 1).await, relay.core1_worker(&["n"], 1).await];
    all_beat(&mut workers, 2).await;
    let before = trace.calls().len();
    all_beat(&mut workers, HEARTBEATS).await;
    let calls = trace.calls();
    let made = &calls[before..];
    eprintln!("{} calls: {}", made.len(), summary(made));
    assert!(made.len() <= 3 * HEARTBEATS * CALLS_PER_HEARTBEAT, "{} calls: {}", made.len(), summary(made));
    assert!(made.iter().filter(|call| call.is_send()).count() >= 3 * (HEARTBEATS - 1), "{}", summary(made));
}

#[tokio::test]
async fn idle_worker_makes_few_calls_per_heartbeat() {
    let Some(trace) = Trace::new() else { return };
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let _worker = worker.traced(&trace, "all").start().await;
    let mut link = relay.accept_with(&Ack { heartbeat_ms: 1000, ..Ack::core1() }).await;
    link.ready(&["m"], 1).await;
    let mut before = 0;
    for beat in 0..=HEARTBEATS {
        link.send(&json!({"type": "ping", "timestamp_unix_ms": 1}));
        link.expect("pong").await;
        if beat == 0 {
            before = trace.calls().len();
        }
        if beat < HEARTBEATS {
            link.websocket_pings(1).await;
        }
    }
    let calls = trace.calls();
    let made = &calls[before..];
    eprintln!("{} calls: {}", made.len(), summary(made));
    // Each beat is a JSON ping of the relay and a WebSocket ping of the worker.
    assert!(made.len() <= 2 * HEARTBEATS * CALLS_PER_HEARTBEAT, "{} calls: {}", made.len(), summary(made));
}

#[tokio::test]
async fn no_timer_wakes_idle_relay_between_heartbeats() {
    let Some(trace) = Trace::new() else { return };
    let seconds = LONG_HEARTBEAT.as_secs().to_string();
    let relay = Relay::builder().traced(&trace, "all").env("HEARTBEAT_INTERVAL", &seconds).start().await;
    let mut worker = relay.core1_worker(&["m"], 1).await;
    let mut before = 0;
    for beat in 0..=LONG_HEARTBEATS {
        match worker.recv_within(3 * LONG_HEARTBEAT).await {
            Frame::Json(message) if message["type"] == "ping" => {}
            frame @ (Frame::Json(_) | Frame::Binary(_) | Frame::Pong(_) | Frame::Close(..)) => {
                panic!("an idle worker received {frame:?}")
            }
        }
        if beat == 0 {
            before = trace.calls().len();
        }
        worker.report_load(0).await;
    }
    let calls = trace.calls();
    let (made, wakes) = (&calls[before..], wakes_of_clocks(&calls[before..]));
    eprintln!("{wakes} wakes by a clock in {LONG_HEARTBEATS} heartbeats: {}", summary(made));
    assert!((1..=WAKES_PER_TIMER * LONG_HEARTBEATS).contains(&wakes), "{wakes} wakes: {}", summary(made));
}

#[tokio::test]
async fn no_timer_wakes_idle_worker_between_heartbeats() {
    let Some(trace) = Trace::new() else { return };
    let mut relay = FakeRelay::start().await;
    let backend = FakeBackend::start().await;
    let worker = WorkerProcess::builder().relay(relay.url()).backend(backend.url());
    let _worker = worker.traced(&trace, "all").start().await;
    let heartbeat_ms = LONG_HEARTBEAT.as_millis() as u64;
    let mut link = relay.accept_with(&Ack { heartbeat_ms, ..Ack::core1() }).await;
    link.ready(&["m"], 1).await;
    let mut before = 0;
    for beat in 0..=LONG_HEARTBEATS {
        // The relay is silent, so the worker pings it.
        link.websocket_pings(1).await;
        if beat == 0 {
            before = trace.calls().len();
        }
    }
    let calls = trace.calls();
    let (made, wakes) = (&calls[before..], wakes_of_clocks(&calls[before..]));
    eprintln!("{wakes} wakes by a clock in {LONG_HEARTBEATS} heartbeats: {}", summary(made));
    // The backend is probed as often as the heartbeat comes here, and its models are listed every 30 s.
    let most = WAKES_PER_TIMER * (2 * LONG_HEARTBEATS + 1);
    assert!((1..=most).contains(&wakes), "{wakes} wakes: {}", summary(made));
}
