//! `kill -9` of workers, in the middle of streams and of uploads.

use modelrelay_chaos::{form, load::Plan, site::Site};
use modelrelay_harness::relay::RelayBuilder;

use crate::BACKEND;

#[tokio::test(flavor = "multi_thread")]
async fn killed_workers_lose_no_request() {
    let site = Site::with_workers(BACKEND, 3, |relay| relay, |worker| worker).await;
    kill_workers(site, "kill -9 of workers", Plan::mixed(24)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_homes_lose_no_request() {
    // Few slots, so that requests wait, and those whose home is free overtake others.
    let place = |relay: RelayBuilder| relay.env("PLACEMENT", "cache");
    let site = Site::with_workers(BACKEND, 3, place, |worker| worker.concurrency(2)).await;
    let site = kill_workers(site, "kill -9 of workers, placement by cache", Plan::of_conversations(24)).await;
    let placed = async |decision: &str, reason: &str| {
        let labels = format!("decision=\"{decision}\",provider=\"local\",reason=\"{reason}\"");
        site.relays[0].relay.metric(&format!("modelrelay_placement_total{{{labels}}}")).await
    };
    let (home, gone) = (placed("home", "").await, placed("moved", "gone").await);
    assert!(home > 0.0 && gone > 0.0, "{home} requests went home, {gone} to another worker because it was gone");
}

async fn kill_workers(mut site: Site, scenario: &str, plan: Plan) -> Site {
    let load = site.load(plan).await;
    for _ in 0..form::times(12) {
        load.ledger().answers(site.dice.between(20..=80) as usize).await;
        let victim = site.dice.below(3);
        load.ledger().fault();
        site.workers[victim].kill_and_restart().await;
    }
    load.ledger().answers(100).await;
    site.ready().await;
    let summary = site.check(scenario, load).await;
    assert!(summary.failures() + summary.repeated > 0, "no request was on a worker that was killed");
    site
}
