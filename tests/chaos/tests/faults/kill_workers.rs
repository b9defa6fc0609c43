//! `kill -9` of workers, in the middle of streams and of uploads.

use modelrelay_chaos::{form, load::Plan, site::Site};

use crate::BACKEND;

#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_lose_no_request() {
    let mut site = Site::with_workers(BACKEND, 3, |relay| relay, |worker| worker).await;
    let load = site.load(Plan::mixed(24)).await;
    for _ in 0..form::times(12) {
        load.ledger().answers(site.dice.between(20..=80) as usize).await;
        let victim = site.dice.below(3);
        load.ledger().fault();
        site.workers[victim].kill_and_restart().await;
    }
    load.ledger().answers(100).await;
    site.ready().await;
    let summary = site.check("kill -9 of workers", load).await;
    assert!(summary.failures() + summary.repeated > 0, "no request was on a worker that was killed");
}
