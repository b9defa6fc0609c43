//! The usage ledger while workers and backends are killed: its sums are those that the backends reported.

use std::sync::Arc;

use modelrelay_chaos::{
    exchange::Outcome,
    form,
    load::Plan,
    request::{RequestSpec, tokens_of},
    site::{Site, eventually},
};
use modelrelay_harness::relay::{Relay, RelayBuilder};
use serde_json::{Value, json};

use crate::BACKEND;

#[tokio::test(flavor = "multi_thread")]
async fn ledger_has_exact_tokens_of_backends() {
    let settings = |relay: RelayBuilder| relay.env("MODELRELAY_REQUIRE_API_KEYS", "true");
    let mut site = Site::with_workers(BACKEND, 3, settings, |worker| worker).await;
    let key = site.relays[0].relay.admin_post("/admin/keys", &json!({"name": "team"})).await.with_status(201).json();
    site.relays[0].target.wants(key["secret"].as_str().expect("a secret"));
    // No client disconnects: a stream that its client leaves is charged an estimate.
    let load = site.load(Plan::of(24, RequestSpec::mixed)).await;
    let ledger = Arc::clone(load.ledger());
    for _ in 0..form::times(10) {
        ledger.answers(site.dice.between(20..=60) as usize).await;
        let victim = site.dice.below(3);
        ledger.fault();
        if site.dice.percent(50) {
            site.workers[victim].kill_and_restart().await;
        } else {
            site.backends[victim].kill_and_restart().await;
        }
    }
    ledger.answers(50).await;
    site.ready().await;
    let summary = site.check("usage under kill -9 of workers and backends", load).await;
    assert!(summary.failures() + summary.repeated > 0, "no request was on a process that was killed");

    let answered = ledger.records().into_iter().filter(|record| record.outcome == Outcome::Answered);
    let reported = answered
        .map(|record| tokens_of(record.nonce))
        .fold([0, 0], |[input, output], next| [input + next[0], output + next[1]]);
    let relay = &site.relays[0].relay;
    eventually("every request is counted", async || counted(relay).await.iter().sum::<u64>() == summary.sent as u64)
        .await;
    let [is_answered, failed, cancelled, refused] = counted(relay).await;
    let rows = usage(relay).await;
    let sum = |name: &str| rows.iter().map(|row| row[name].as_u64().expect("a number")).sum::<u64>();
    assert_eq!([sum("input_tokens"), sum("output_tokens")], reported, "{rows:#?}");
    assert_eq!((is_answered, failed + refused, cancelled), (summary.answered as u64, summary.failures() as u64, 0));
    assert!(rows.iter().all(|row| row["key"] == "team"), "{rows:#?}");
}

async fn usage(relay: &Relay) -> Vec<Value> {
    relay.admin_json("/admin/usage").await["usage"].as_array().expect("rows").clone()
}

/// The requests that the ledger has, by outcome.
async fn counted(relay: &Relay) -> [u64; 4] {
    let rows = usage(relay).await;
    ["answered", "failed", "cancelled", "refused"]
        .map(|outcome| rows.iter().map(|row| row["requests"][outcome].as_u64().expect("a number")).sum())
}
