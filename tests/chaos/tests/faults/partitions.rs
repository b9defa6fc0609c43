//! Packets between a worker and its relay are lost, one way or both, for a while.

use std::time::Duration;

use modelrelay_chaos::{
    form,
    ledger::report_line,
    load::Plan,
    network::{Cut, FarSide, HERE, THERE, missing},
    site::{RelayNode, Site, Worker},
};
use modelrelay_harness::{cannot_run, relay::WORKER_SECRET, worker_process::WorkerProcess};
use tokio::time::Instant;

use crate::{BACKEND, inside};

/// A relay and a worker here, and a worker with its backend on the far side.
pub(crate) async fn site_with_far_worker(far: &FarSide, near_workers: usize) -> Site {
    let mut site = Site::new(BACKEND);
    site.relays.push(RelayNode::start(Site::relay().env("LISTEN_ADDR", &format!("{HERE}:7001"))).await);
    let url = format!("http://{HERE}:7001");
    for _ in 0..near_workers {
        site.add_worker(&url, |worker| worker).await;
    }
    let enter = far.enter();
    let under = || enter.each_ref().map(String::as_str);
    let backend = site.backend_under(&format!("{THERE}:0"), |spawn| spawn.under(under())).await;
    let worker = WorkerProcess::builder().relay(url).backend(backend.url()).concurrency(8);
    let worker = worker.env("WORKER_SECRET", WORKER_SECRET).env("LOG_LEVEL", "info").under(under());
    site.workers.push(Worker::start(worker).await);
    site.backends.push(backend);
    site.ready().await;
    site
}

#[tokio::test(flavor = "multi_thread")]
async fn partition_loses_and_repeats_nothing() {
    inside("partitions::partition_loses_and_repeats_nothing", |_namespace| async move {
        if let Some(why) = missing().await {
            return cannot_run(&why);
        }
        let far = FarSide::new().await;
        let mut site = site_with_far_worker(&far, 1).await;
        let load = site.load(Plan::mixed(16)).await;
        let mut back = Vec::new();
        for cut in [Cut::Incoming, Cut::Outgoing, Cut::Both].repeat(form::times(1)) {
            // Links are lost after three seconds; sometimes the cable is restored around that very moment.
            let pause = Duration::from_millis(site.dice.between(2_500..=5_000));
            load.ledger().fault();
            far.cut(cut).await;
            #[expect(clippy::disallowed_methods, reason = "how long packets are lost is the subject")]
            tokio::time::sleep(pause).await;
            far.heal().await;
            let healed = Instant::now();
            load.ledger().answers(10).await;
            site.ready().await;
            back.push(format!("{cut:?} for {pause:.1?}: all workers after {:.1?}", healed.elapsed()));
        }
        load.ledger().fault();
        far.cut(Cut::Both).await;
        site.relays[0].has_workers(1).await;
        far.heal().await;
        load.ledger().answers(10).await;
        site.ready().await;
        report_line(&back.join(", "));
        site.check("partitions", load).await;
    })
    .await;
}
