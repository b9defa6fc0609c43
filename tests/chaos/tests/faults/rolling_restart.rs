//! Everything is replaced one by one while a hundred streams run: none is truncated, and no request is rejected.

use std::{sync::Arc, time::Duration};

use modelrelay_chaos::{
    load::{Load, Plan},
    request::RequestSpec,
    site::{Site, eventually},
};

use crate::{BACKEND, inside, two_relays};

const STREAMS: usize = 100;

/// Far longer than a restart takes, well within the drain time of 20 s.
fn long_stream(nonce: u64, _: &mut modelrelay_chaos::dice::Dice) -> RequestSpec {
    RequestSpec::stream(nonce, 30, 100)
}

async fn a_hundred_streams(site: &mut Site) -> Load {
    let load = site.load(Plan::of(STREAMS, long_stream)).await;
    eventually("a hundred streams at once", async || {
        let counts = load.ledger().counts();
        counts.sent - counts.ended == STREAMS
    })
    .await;
    load
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_relay_restart_cuts_no_stream() {
    inside("rolling_restart::rolling_relay_restart_cuts_no_stream", |namespace| async move {
        let mut site = two_relays(&namespace, 8, |relay| relay.env("SHUTDOWN_GRACE_SECS", "1")).await;
        let load = a_hundred_streams(&mut site).await;
        for number in 0..2 {
            load.ledger().fault();
            let relay = &mut site.relays[number];
            relay.relay.process().terminate().await;
            // By readiness, like a load balancer.
            eventually("it is unready", async || relay.relay.get("/readyz").await.status == 503).await;
            relay.target.balance(false);
            let status = relay.relay.process().wait_exit_within(Duration::from_secs(25)).await;
            assert_eq!(status.code(), Some(0));
            relay.restart().await;
            relay.has_workers(8).await;
            relay.target.balance(true);
            load.ledger().answers(STREAMS).await;
        }
        let summary = site.check("rolling restart of relays, 100 streams", load).await;
        assert_eq!(summary.failures(), 0, "{summary}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_worker_restart_cuts_no_stream() {
    let mut site = Site::with_workers(BACKEND, 8, |relay| relay, |worker| worker.concurrency(16)).await;
    let load = a_hundred_streams(&mut site).await;
    load.ledger().fault();
    for worker in &mut site.workers {
        worker.roll().await;
    }
    let ledger = Arc::clone(load.ledger());
    ledger.answers(STREAMS).await;
    let summary = site.check("rolling restart of workers, 100 streams", load).await;
    assert_eq!(summary.failures(), 0, "{summary}");
}
