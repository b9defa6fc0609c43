//! Five times the workers' capacity: they continue at full speed, and the rest is rejected at once with a time to
//! retry.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use modelrelay_chaos::{
    exchange::{Manner, Outcome, Record},
    form,
    ledger::{Ledger, report_line},
    load::new_nonce,
    request::RequestSpec,
    site::Site,
};
use tokio::{task::JoinSet, time::MissedTickBehavior};

use crate::BACKEND;

/// The capacity: two workers of eight slots, each request a tenth of a second, so 160 a second.
const CAPACITY: f64 = 160.0;
const REQUEST_MS: u64 = 100;

const QUEUE: &str = "32";

/// The fraction of the successes at capacity that must be reached at five times the capacity. Usually it is all of
/// them, and a relay that collapses under load reaches almost none; on a machine that runs other suites, either run may
/// get less of the processors.
const GOODPUT: f64 = 0.6;

/// The limit for 99 % of the rejections. They wait for nothing and usually take 10 ms, but the machine may be busy.
const REFUSED_WITHIN: Duration = Duration::from_secs(1);

/// The allowed growth of the relay's memory over that at capacity: connections, not bodies.
const GROWTH: u64 = 32 << 20;

/// The results at one rate.
struct Run {
    answered_per_second: f64,
    refusals: Vec<Duration>,
    resident: u64,
}

/// Sends requests at this rate, regardless of their results.
async fn offer(site: &Site, ledger: &Arc<Ledger>, rate: f64) -> Run {
    let lasts = Duration::from_secs(5 * form::times(1) as u64);
    let target = &site.relays[0].target;
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let (start, mut sent, mut resident) = (Instant::now(), JoinSet::new(), 0);
    while start.elapsed() < lasts {
        ticks.tick().await;
        let (ledger, target) = (Arc::clone(ledger), Arc::clone(target));
        ledger.sent();
        sent.spawn(async move {
            let spec = RequestSpec::plain(new_nonce(), REQUEST_MS);
            let record = target.exchange(&spec, Manner::patient(Duration::from_secs(20))).await;
            ledger.ended(record.clone());
            record
        });
        if sent.len() % 50 == 0 {
            resident = resident.max(site.relays[0].relay.usage().resident_bytes);
        }
    }
    let records: Vec<Record> = sent.join_all().await;
    let took = start.elapsed();
    let answered = records.iter().filter(|record| record.outcome == Outcome::Answered).count();
    let refused = records.iter().filter(|record| matches!(record.outcome, Outcome::Failed(_)));
    let mut refusals: Vec<_> = refused.map(|record| Duration::from_nanos(record.ended - record.began)).collect();
    refusals.sort_unstable();
    Run { answered_per_second: answered as f64 / took.as_secs_f64(), refusals, resident }
}

#[tokio::test(flavor = "multi_thread")]
async fn fivefold_overload_keeps_throughput_and_rejects_excess_early() {
    let site = Site::with_workers(BACKEND, 2, |relay| relay.env("MAX_QUEUE_LEN", QUEUE), |worker| worker).await;
    let ledger = Arc::new(Ledger::default());
    let once = offer(&site, &ledger, CAPACITY).await;
    let five = offer(&site, &ledger, 5.0 * CAPACITY).await;
    let p99 = five.refusals.get(five.refusals.len() * 99 / 100).copied().unwrap_or_default();
    let p50 = five.refusals.get(five.refusals.len() / 2).copied().unwrap_or_default();
    report_line(&format!(
        "overload: answered {:.0}/s of {CAPACITY}/s offered, {:.0}/s of {}/s offered ({:.0} %); {} refused after {p50:.1?} \
         (p50), {p99:.1?} (p99); memory {} and {} MiB",
        once.answered_per_second,
        five.answered_per_second,
        5.0 * CAPACITY,
        100.0 * five.answered_per_second / once.answered_per_second,
        five.refusals.len(),
        once.resident >> 20,
        five.resident >> 20,
    ));
    let summary = site.summary(&ledger);
    summary.check("overload, five times capacity");
    let is_rejection = |reason: &String| reason == "429 queue_full" || reason == "503 overloaded";
    assert!(summary.failed.keys().all(is_rejection), "{summary}");
    assert!(ledger.records().iter().all(|record| record.first_byte.is_some() || record.retry_after), "no Retry-After");
    assert!(five.refusals.len() > 1000, "the relay was not overloaded: {summary}");
    assert!(five.answered_per_second >= GOODPUT * once.answered_per_second, "goodput fell");
    assert!(p99 <= REFUSED_WITHIN, "refused only after {p99:?}");
    assert!(five.resident <= once.resident + GROWTH, "memory grows with the offered load");
}
