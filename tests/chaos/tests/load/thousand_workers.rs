//! A relay with a thousand workers is killed and restarted: no thundering herd, no failed handshake, all reconnected in
//! ten seconds.
//!
//! A thousand worker processes would measure the machine. These are links of the benchmark's crowd: in one process,
//! over the wire protocol, with the worker's own code for the pause before a dial. Two real workers serve the verified
//! load next to them.

use std::time::{Duration, Instant};

use modelrelay_bench::{crowd::Crowd, systems::SECRET};
use modelrelay_chaos::{ledger::report_line, load::Plan, site::Site};
use modelrelay_harness::usage::may_open;

use crate::BACKEND;

const WORKERS: u32 = 1000;
const OPEN_FILES: u64 = 1500;

/// From the moment at which the relay listens again.
const ALL_BACK: Duration = Duration::from_secs(10);

/// The window in which dials are counted, and the maximum in any window: the first pause is uniform over 0.8 s, so its
/// share would be 125.
const WINDOW: Duration = Duration::from_millis(100);
const HERD: usize = 300;

/// Returns the largest number of dials within one window.
fn busiest(dials: &mut [Instant]) -> usize {
    dials.sort_unstable();
    let until = |at: Instant| dials.partition_point(|dial| *dial < at + WINDOW);
    dials.iter().enumerate().map(|(first, at)| until(*at) - first).max().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn thousand_workers_reconnect_within_ten_seconds() {
    if !may_open(OPEN_FILES) {
        return;
    }
    let secret = |it: modelrelay_harness::worker_process::WorkerBuilder| it.env("WORKER_SECRET", SECRET);
    let relay = |it: modelrelay_harness::relay::RelayBuilder| it.env("WORKER_SECRET", SECRET);
    let mut site = Site::with_workers(BACKEND, 2, relay, secret).await;
    let crowd = Crowd::connect(site.relays[0].relay.addr(), WORKERS).await.expect("a thousand workers are accepted");
    let load = site.load(Plan::mixed(8)).await;
    load.ledger().fault();
    site.relays[0].kill().await;
    site.relays[0].restart().await;
    let listening = Instant::now();
    assert!(crowd.returned(WORKERS, ALL_BACK).await, "{} of {WORKERS} reconnected", crowd.away().count);
    let all_back = listening.elapsed();
    load.ledger().answers(50).await;
    site.relays[0].has_workers(WORKERS as usize + 2).await;
    let (away, mut dials) = (crowd.away(), crowd.dials());
    let busiest = busiest(&mut dials);
    report_line(&format!(
        "{WORKERS} workers: away {:.0} ms (p50), {:.0} ms (p99), {:.0} ms (max); all back {all_back:.0?} after the relay \
         listened; {} dials, at most {busiest} in {WINDOW:?}, {} handshakes failed",
        away.p50_ms,
        away.p99_ms,
        away.max_ms,
        dials.len(),
        crowd.failed_handshakes(),
    ));
    site.check("relay killed under 1,000 workers", load).await;
    assert_eq!(crowd.failed_handshakes(), 0);
    assert!(busiest <= HERD, "{busiest} dials in {WINDOW:?}");
}
