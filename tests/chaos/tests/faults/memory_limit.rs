//! More data than fits: the relay rejects requests before the kernel would kill it.

use modelrelay_chaos::{cage::Cage, ledger::report_line, load::Plan, request::RequestSpec, site::Site};
use modelrelay_harness::cannot_run;

use crate::BACKEND;

/// The relay's budget, and the kernel's limit for the whole process.
const BUFFERED: &str = "32Mi";
const LIMIT: u64 = 128 << 20;

/// Together 200 MiB at any time.
const CLIENTS: usize = 200;
const UPLOAD: usize = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn uploads_beyond_memory_are_refused_and_relay_survives() {
    let cage = match Cage::new(LIMIT) {
        Ok(cage) => cage,
        Err(why) => return cannot_run(&why),
    };
    let enter = cage.enter();
    let relay = |relay: modelrelay_harness::relay::RelayBuilder| {
        relay.env("MAX_BUFFERED_BYTES", BUFFERED).under(["sh", "-c", &enter, "sh"])
    };
    let mut site = Site::with_workers(BACKEND, 2, relay, |worker| worker).await;
    let load = site.load(Plan::of(CLIENTS, |nonce, _| RequestSpec::plain(nonce, 100).upload(UPLOAD))).await;
    load.ledger().answers(50).await;
    let ledger = load.finish().await;
    let summary = site.summary(&ledger);
    summary.check("memory limit of 128 MiB, 200 MiB of uploads");
    let (peak, held) = (site.relays[0].relay.usage().peak_bytes, cage.peak());
    report_line(&format!("memory limit: peak RSS {} MiB, the cgroup's peak {} MiB", peak >> 20, held >> 20));
    assert_eq!(cage.kills(), 0, "the kernel killed the relay");
    assert!(summary.failed.contains_key("503 overloaded"), "no request was rejected: {summary}");
    assert!(summary.failed.keys().all(|reason| reason == "503 overloaded"), "{summary}");
    assert!(ledger.records().iter().all(|record| record.retry_after || record.first_byte.is_some()));
    assert!(peak < LIMIT, "{peak} bytes");
    drop(site);
    drop(cage);
}
