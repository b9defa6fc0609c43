//! 1,000 idle workers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use modelrelay_harness::{
    TEST_TIMEOUT, poll_until,
    relay::Relay,
    usage::{Usage, may_open},
    worker::{FakeWorker, Frame},
};
use tokio::task::JoinSet;

/// One for each connection here, and some for the rest.
const OPEN_FILES: u64 = 1500;

const WORKERS: u32 = 1000;

/// The limit of their memory.
const MEMORY: u64 = 25_000_000;

/// The number of heartbeats of 2 s within which the allocator returns free memory: it keeps it for 10 s.
const RETURNS_WITHIN: u32 = 10;

/// "Next to no CPU": half a hundredth of a core for all of them at the default heartbeat of 15 s is 75 µs per
/// heartbeat; ten times that, because it is asserted on busy machines.
const CPU_PER_HEARTBEAT: Duration = Duration::from_micros(750);

/// An interval without any heartbeat, and the limit for other threads of the process in it.
const QUIET: Duration = Duration::from_secs(2);
const QUIET_CPU: Duration = Duration::from_millis(100);

/// Replies to heartbeats until it is dropped.
async fn idle(mut worker: FakeWorker, heartbeats: Arc<AtomicU32>) {
    loop {
        match worker.recv_within(Duration::from_secs(300)).await {
            Frame::Json(message) if message["type"] == "ping" => {
                worker.report_load(0).await;
                heartbeats.fetch_add(1, Ordering::SeqCst);
            }
            frame @ (Frame::Json(_) | Frame::Binary(_) | Frame::Pong(_) | Frame::Close(..)) => {
                panic!("an idle worker received {frame:?}")
            }
        }
    }
}

/// Connects all of them, half with `core1` and half with only the seeds' protocol, each with its own model and one that
/// all share.
async fn connect(relay: &Relay, heartbeats: &Arc<AtomicU32>) -> JoinSet<()> {
    let mut workers = JoinSet::new();
    for number in 0..WORKERS {
        let own = format!("model-{number}");
        let models = ["shared", own.as_str()];
        let worker =
            if number % 2 == 0 { relay.core1_worker(&models, 4).await } else { relay.worker(&models, 4).await };
        workers.spawn(idle(worker, Arc::clone(heartbeats)));
    }
    relay.wait_for_workers(WORKERS as usize).await;
    workers
}

async fn until(heartbeats: &AtomicU32, count: u32, workers: &mut JoinSet<()>) {
    let start = Instant::now();
    while heartbeats.load(Ordering::SeqCst) < count {
        assert!(start.elapsed() < Duration::from_secs(60), "the heartbeats stopped");
        let lost = tokio::time::timeout(Duration::from_millis(10), workers.join_next()).await;
        assert!(lost.is_err(), "a worker was lost: {lost:?}");
    }
}

/// A relay that has done each kind of its work once, so that its own allocations are done.
async fn warm_relay(heartbeat: &str) -> (Relay, Usage) {
    let relay = Relay::builder().env("HEARTBEAT_INTERVAL", heartbeat).start().await;
    let worker = relay.core1_worker(&["warm"], 1).await;
    relay.wait_for_workers(1).await;
    worker.vanish();
    relay.wait_for_workers(0).await;
    let usage = relay.usage();
    (relay, usage)
}

#[tokio::test]
async fn thousand_idle_workers_need_little_memory_and_time() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let (relay, before) = warm_relay("2").await;
    let heartbeats = Arc::new(AtomicU32::new(0));
    let mut workers = connect(&relay, &heartbeats).await;
    // Each has had its first heartbeat, so that every buffer has been used.
    until(&heartbeats, 2 * WORKERS, &mut workers).await;
    let first = relay.usage();
    let counted = heartbeats.load(Ordering::SeqCst);
    until(&heartbeats, counted + 3 * WORKERS, &mut workers).await;
    let last = relay.usage();
    let counted = heartbeats.load(Ordering::SeqCst) - counted;
    let each = (last.cpu - first.cpu) / counted;
    assert!(each < CPU_PER_HEARTBEAT, "a heartbeat costs {each:?}");
    // Memory that connecting needed temporarily is returned to the system later.
    let mut memory = last.resident_bytes.saturating_sub(before.resident_bytes);
    for _ in 0..RETURNS_WITHIN {
        if memory < MEMORY {
            break;
        }
        let counted = heartbeats.load(Ordering::SeqCst);
        until(&heartbeats, counted + WORKERS, &mut workers).await;
        memory = relay.usage().resident_bytes.saturating_sub(before.resident_bytes);
    }
    eprintln!("{} bytes a worker, {each:?} a heartbeat", memory / u64::from(WORKERS));
    assert!(memory < MEMORY, "1,000 idle workers cost {memory} bytes");
    workers.shutdown().await;
    relay.wait_for_workers(0).await;
}

#[tokio::test]
async fn thousand_workers_cost_nothing_between_heartbeats() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let (relay, _) = warm_relay("120").await;
    let heartbeats = Arc::new(AtomicU32::new(0));
    let _workers = connect(&relay, &heartbeats).await;
    // Registrations leave work behind without a visible end: a quiet interval shows it.
    let mut before = Duration::ZERO;
    let settled = async || {
        let cpu = relay.usage().cpu;
        std::mem::replace(&mut before, cpu) == cpu
    };
    poll_until(TEST_TIMEOUT, "the relay to be idle", relay.log(), settled).await;
    let (start, first) = (Instant::now(), relay.usage());
    #[expect(clippy::disallowed_methods, reason = "the processor time of this interval is the subject")]
    tokio::time::sleep(QUIET).await;
    let (took, cpu) = (start.elapsed(), relay.usage().cpu - first.cpu);
    eprintln!("{cpu:?} in {took:?}");
    assert!(cpu < QUIET_CPU, "{cpu:?} of processor time in {took:?} while idle");
}
