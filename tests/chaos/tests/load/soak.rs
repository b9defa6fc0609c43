//! Seventy of a hundred slots are busy for a long time, and now and then a process is killed: nothing grows.
//!
//! Neither program reports its number of tasks. Its resources show in memory, descriptors and threads as Linux counts
//! them, and in the relay's own gauges of requests and bytes, which must be zero when the clients have gone. The relay
//! and a worker that is never killed are measured.

use std::time::{Duration, Instant};

use modelrelay_chaos::{
    ledger::{Counts, report_line},
    load::Plan,
    site::{Site, eventually},
};
use modelrelay_harness::usage::Usage;

use crate::BACKEND;

/// The duration in minutes.
const MINUTES: &str = "MODELRELAY_SOAK_MINUTES";

/// Three workers of eight slots, and clients whose pauses leave the rest free.
const CLIENTS: usize = 18;

/// One of this number of requests meets a fault; as many are abandoned by their clients.
const REQUESTS_PER_FAULT: usize = 100;

/// The allowed growth from the first to the last third: buffers reach their size in the first minute.
const MEMORY_FACTOR: f64 = 1.10;
const MEMORY_MORE: f64 = 4e6;
const DESCRIPTORS_MORE: f64 = 8.0;
/// Threads that write files end ten seconds after their last work, and a slow disk keeps several of them busy. One that
/// was leaked with each fault would add dozens.
const THREADS_MORE: f64 = 6.0;

/// The resources of a process.
#[derive(Debug, Clone, Copy)]
struct Held {
    memory: f64,
    descriptors: f64,
    threads: f64,
}

impl Held {
    fn by(pid: u32) -> Self {
        let entries = |folder: &str| std::fs::read_dir(format!("/proc/{pid}/{folder}")).map_or(0, Iterator::count);
        let memory = Usage::of(pid).resident_bytes as f64;
        Self { memory, descriptors: entries("fd") as f64, threads: entries("task") as f64 }
    }

    fn mean(of: &[Self]) -> Self {
        let mean = |part: fn(&Self) -> f64| of.iter().map(part).sum::<f64>() / of.len() as f64;
        Self { memory: mean(|it| it.memory), descriptors: mean(|it| it.descriptors), threads: mean(|it| it.threads) }
    }
}

/// Compares the last third with the first.
fn check(name: &str, samples: &[Held]) {
    let third = samples.len() / 3;
    assert!(third > 0, "the run is too short to judge");
    let (first, last) = (Held::mean(&samples[..third]), Held::mean(&samples[samples.len() - third..]));
    report_line(&format!(
        "soak: {name} first and last third: memory {:.1} and {:.1} MB, descriptors {:.1} and {:.1}, threads {:.1} and {:.1}",
        first.memory / 1e6,
        last.memory / 1e6,
        first.descriptors,
        last.descriptors,
        first.threads,
        last.threads
    ));
    assert!(last.memory <= first.memory * MEMORY_FACTOR + MEMORY_MORE, "{name}: memory grows");
    assert!(last.descriptors <= first.descriptors + DESCRIPTORS_MORE, "{name}: descriptors grow");
    assert!(last.threads <= first.threads + THREADS_MORE, "{name}: threads grow");
}

/// Kills the second or third worker, or its backend.
async fn fault(site: &mut Site) {
    let victim = 1 + site.dice.below(2);
    if site.dice.percent(50) {
        site.workers[victim].kill_and_restart().await;
    } else {
        site.backends[victim].kill_and_restart().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn long_run_leaks_nothing_and_loses_no_request() {
    let minutes: f64 = std::env::var(MINUTES).map_or(1.0, |minutes| minutes.parse().expect("a number of minutes"));
    let mut site = Site::with_workers(BACKEND, 3, |relay| relay, |worker| worker).await;
    let plan = Plan { leave_percent: 1, pause: Duration::from_millis(30), ..Plan::mixed(CLIENTS) };
    let load = site.load(plan).await;
    let relay_pid = site.relays[0].relay.process().pid().expect("it runs");
    let worker_pid = site.workers[0].process.process.pid().expect("it runs");
    let (mut relay, mut worker, mut busy) = (Vec::new(), Vec::new(), Vec::new());
    let (start, mut ticks) = (Instant::now(), tokio::time::interval(Duration::from_millis(500)));
    let mut next_fault = REQUESTS_PER_FAULT;
    while start.elapsed().as_secs_f64() < minutes * 60.0 {
        ticks.tick().await;
        relay.push(Held::by(relay_pid));
        worker.push(Held::by(worker_pid));
        let Counts { sent, ended, .. } = load.ledger().counts();
        busy.push((sent - ended) as f64 / 24.0);
        if ended >= next_fault {
            next_fault = ended + REQUESTS_PER_FAULT;
            load.ledger().fault();
            fault(&mut site).await;
        }
    }
    let summary = site.check("soak", load).await;
    report_line(&format!(
        "soak: {minutes} min, {:.0} % of the slots busy",
        100.0 * busy.iter().sum::<f64>() / busy.len() as f64
    ));
    check("relay", &relay);
    check("worker", &worker);
    assert!(summary.failures() + summary.repeated > 0, "no fault met a request");
    let node = &site.relays[0].relay;
    for gauge in ["modelrelay_buffered_bytes ", "modelrelay_requests_in_flight", "modelrelay_queue_depth"] {
        eventually(gauge, async || node.metric(gauge).await == 0.0).await;
    }
}
