//! A narrow cable between worker and relay: every stream and upload arrives complete, and each gets its share.

use std::{sync::Arc, time::Duration};

use modelrelay_chaos::{
    exchange::{Manner, Outcome},
    ledger::{Ledger, report_line},
    load::new_nonce,
    network::{FarSide, missing},
    request::RequestSpec,
    site::Site,
};
use modelrelay_harness::cannot_run;

use crate::{inside, partitions::site_with_far_worker};

/// A megabyte a second.
const MEGABITS: u32 = 8;

/// As many as the worker has slots.
const AT_ONCE: usize = 8;

/// Sends all at once, each of 400 kB; returns the durations of the fastest and the slowest.
async fn together(site: &Site, ledger: &Arc<Ledger>, spec: impl Fn() -> RequestSpec) -> (Duration, Duration) {
    let target = &site.relays[0].target;
    let exchanges: Vec<_> = (0..AT_ONCE)
        .map(|_| {
            let (spec, target) = (spec(), Arc::clone(target));
            ledger.sent();
            tokio::spawn(async move { target.exchange(&spec, Manner::patient(Duration::from_secs(20))).await })
        })
        .collect();
    let mut took = Vec::new();
    for exchange in exchanges {
        let record = exchange.await.expect("an exchange does not panic");
        assert_eq!(record.outcome, Outcome::Answered);
        took.push(Duration::from_nanos(record.ended - record.began));
        ledger.ended(record);
    }
    (*took.iter().min().expect("some"), *took.iter().max().expect("some"))
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_over_slow_network_arrive_whole() {
    inside("slow_network::streams_over_slow_network_arrive_whole", |_namespace| async move {
        if let Some(why) = missing().await {
            return cannot_run(&why);
        }
        let far = FarSide::new().await;
        let site = site_with_far_worker(&far, 0).await;
        far.limit(MEGABITS).await;
        let ledger = Arc::new(Ledger::default());
        let streams = together(&site, &ledger, || RequestSpec::stream(new_nonce(), 50, 0).pieces_of(8_000)).await;
        let uploads = together(&site, &ledger, || RequestSpec::plain(new_nonce(), 0).upload(400_000)).await;
        report_line(&format!("{MEGABITS} Mbit/s, {AT_ONCE} at once: streams {streams:.1?}, uploads {uploads:.1?}"));
        site.summary(&ledger).check("bandwidth limit");
        for (kind, (fastest, slowest)) in [("streams", streams), ("uploads", uploads)] {
            assert!(slowest > Duration::from_secs(2), "bandwidth was not limited: {kind} took {slowest:?}");
            assert!(fastest * 2 > slowest, "{kind} are not fair: {fastest:?} and {slowest:?}");
        }
    })
    .await;
}
