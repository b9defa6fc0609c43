//! Backends that hang at every stage of a request. A hanging request ends with its timeout; no other request is
//! affected.

use std::time::Duration;

use modelrelay_chaos::{
    exchange::{Manner, Outcome},
    form,
    load::{Plan, new_nonce},
    request::{RequestSpec, STALLS},
    site::Site,
};

use crate::BACKEND;

/// The limit of a request, many times what a request that does not hang takes on a busy machine.
const TIMEOUT_SECS: &str = "10";

/// The limit of a request where ordinary ones may reach it as well.
const SHORT_TIMEOUT_SECS: &str = "2";

/// A hang fails, a busy machine does not: other scenarios compare megabytes on the same threads.
const ENDED: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn hanging_backend_does_not_delay_other_requests() {
    let mut site = Site::with_workers(BACKEND, 2, |it| it.env("REQUEST_TIMEOUT_SECS", TIMEOUT_SECS), |it| it).await;
    // Six clients, and at most five hanging requests: a slot is always free.
    let load = site.load(Plan::of(6, RequestSpec::mixed)).await;
    let target = site.relays[0].target.clone();
    let mut reasons = Vec::new();
    for _ in 0..form::times(2) {
        load.ledger().fault();
        let hanging: Vec<_> = STALLS
            .into_iter()
            .map(|stall| {
                let spec = RequestSpec::stream(new_nonce(), 10, 1).upload(3_000_000).stalling(stall);
                let target = target.clone();
                tokio::spawn(async move {
                    let record = target.exchange(&spec, Manner::patient(ENDED)).await;
                    (stall, record)
                })
            })
            .collect();
        for ended in hanging {
            let (stall, record) = ended.await.expect("an exchange does not panic");
            let Outcome::Failed(reason) = &record.outcome else { panic!("{stall:?}: {:?}", record.outcome) };
            reasons.push(format!("{stall:?} {reason}"));
            load.ledger().sent();
            load.ledger().ended(record);
        }
    }
    load.ledger().answers(30).await;
    let summary = site.check("backends that hang", load).await;
    assert_eq!(summary.failures(), reasons.len(), "others failed too: {summary}\n{reasons:?}");
    let right = |reason: &String| reason.contains("request_timeout");
    assert!(reasons.iter().all(right), "{reasons:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn backend_accepting_no_connection_leads_to_timeout() {
    let limit = SHORT_TIMEOUT_SECS;
    let mut site = Site::with_workers(BACKEND, 2, |it| it.env("REQUEST_TIMEOUT_SECS", limit), |it| it).await;
    let load = site.load(Plan::of(6, RequestSpec::mixed)).await;
    load.ledger().fault();
    // While stopped, it accepts nothing; the kernel still completes connections for it.
    site.backends[0].process.signal("STOP").await;
    load.ledger().answers(100).await;
    site.backends[0].process.signal("CONT").await;
    load.ledger().answers(30).await;
    let summary = site.check("a backend that accepts nothing", load).await;
    assert!(summary.failures() > 0, "no request reached the backend that accepts no connections");
    let stated = |reason: &String| reason.contains("request_timeout") || reason == "JSON body cut";
    assert!(summary.failed.keys().all(stated), "{summary}");
}
