//! No descriptor left: running requests continue, new ones wait or are rejected, and everything works again once some
//! are free.

use std::time::Duration;

use modelrelay_chaos::{
    load::Plan,
    request::RequestSpec,
    site::{Site, eventually},
};
use modelrelay_harness::client::RawConnection;

use crate::BACKEND;

/// Fewer than descriptors.
const CLIENTS: usize = 12;

#[tokio::test(flavor = "multi_thread")]
async fn relay_without_descriptors_finishes_running_requests() {
    let few = ["sh", "-c", "ulimit -n 80 && exec \"$@\"", "sh"];
    let mut site = Site::with_workers(BACKEND, 2, |relay| relay.under(few), |worker| worker).await;
    let load = site.load(Plan::of(CLIENTS, |nonce, _| RequestSpec::stream(nonce, 40, 50))).await;
    // Each has just begun a stream of two seconds.
    let running = || load.ledger().counts().sent - load.ledger().counts().ended;
    eventually("a stream of each client", async || running() == CLIENTS).await;
    let before = load.ledger().counts();
    let relay = &site.relays[0].relay;
    load.ledger().fault();
    let mut idle = Vec::new();
    while !relay.log().contains("cannot accept a connection") {
        assert!(idle.len() < 1000, "the relay never ran out of descriptors");
        idle.push(RawConnection::open(relay.addr(), relay.log()).await);
    }
    // Running requests end normally; the next requests of their clients wait to be accepted.
    eventually("running requests are answered", async || {
        load.ledger().counts().answered >= before.answered + CLIENTS / 2
    })
    .await;
    drop(idle);
    load.ledger().answers_within(50, Duration::from_secs(30)).await;
    let summary = site.check("relay without descriptors", load).await;
    assert_eq!(summary.failures(), 0, "{summary}");
}

#[tokio::test(flavor = "multi_thread")]
async fn worker_without_descriptors_reports_it_and_recovers() {
    let few = ["sh", "-c", "ulimit -n 40 && exec \"$@\"", "sh"];
    let mut site = Site::with_workers(BACKEND, 1, |relay| relay, |worker| worker.concurrency(64).under(few)).await;
    let load = site.load(Plan::of(60, |nonce, _| RequestSpec::stream(nonce, 10, 50))).await;
    load.ledger().fault();
    if cfg!(target_os = "linux") {
        let pid = site.workers[0].process.process.pid().expect("it runs");
        let open = || std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        eventually("the worker has opened all descriptors that it may", async || open() >= 39).await;
    }
    load.ledger().answers(150).await;
    let crowded = load.finish().await;
    let summary = site.summary(&crowded);
    summary.check("worker without descriptors, 60 at once");
    // Fewer clients than descriptors: none fails.
    site.ready().await;
    let load = site.load(Plan::of(8, |nonce, _| RequestSpec::stream(nonce, 10, 20))).await;
    load.ledger().answers(50).await;
    let after = site.check("worker without descriptors, later 8 at once", load).await;
    assert_eq!(after.failures(), 0, "{after}");
}
