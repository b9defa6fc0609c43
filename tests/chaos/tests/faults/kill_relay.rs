//! `kill -9` of one of two relays: the other continues, and the workers reconnect.

use modelrelay_chaos::{form, load::Plan};

use crate::{inside, two_relays};

#[tokio::test(flavor = "multi_thread")]
async fn killed_relay_ends_only_its_own_requests() {
    let test = "kill_relay::killed_relay_ends_only_its_own_requests";
    inside(test, |namespace| async move {
        let mut site = two_relays(&namespace, 3, |relay| relay).await;
        let load = site.load(Plan::mixed(24)).await;
        for _ in 0..form::times(5) {
            load.ledger().answers(site.dice.between(20..=80) as usize).await;
            let victim = site.dice.below(2);
            load.ledger().fault();
            site.relays[victim].kill().await;
            // Meanwhile the other one serves.
            load.ledger().answers(20).await;
            site.relays[victim].restart().await;
            site.relays[victim].has_workers(3).await;
        }
        load.ledger().answers(50).await;
        let summary = site.check("kill -9 of a relay", load).await;
        let others: Vec<_> = summary.failed.keys().filter(|reason| !excused(reason)).collect();
        assert!(others.is_empty(), "requests at the other relay failed: {summary}");
        assert!(summary.failed.contains_key("relay gone"), "no request was at a relay that was killed");
    })
    .await;
}

/// A relay that has just restarted knows no model until its first worker reconnects.
fn excused(reason: &str) -> bool {
    reason == "relay gone" || reason.contains("model_not_found") || reason.contains("queue_timeout")
}
