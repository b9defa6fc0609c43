//! One fault per scenario, under a verified load: lost or doubled requests are a failure, everything else is only
//! counted.

mod dns_failure;
mod frozen;
mod full_disk;
mod hanging_backend;
mod kill_backends;
mod kill_relay;
mod kill_workers;
mod memory_limit;
mod open_files;
mod partitions;
mod rolling_restart;
mod slow_network;
mod usage;

use std::future::Future;

use modelrelay_chaos::{
    ledger::{REPORT, report_line},
    site::{RelayNode, Site},
};
use modelrelay_harness::{
    namespace::{self, Namespace},
    relay::RelayBuilder,
};

/// The backends' program.
const BACKEND: &str = env!("CARGO_BIN_EXE_chaos-backend");

/// The addresses of a namespace's relays, under one name.
const RELAYS: [&str; 2] = ["127.0.0.2", "127.0.0.3"];

/// The URL that workers dial to have a link to each.
const RELAYS_URL: &str = "dns+http://relays.test:7001";

/// Runs a scenario in its own network, and shows the line that it prints there.
async fn inside<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Namespace) -> F) {
    let output = namespace::inside(test, body).await;
    for line in output.lines().filter_map(|line| line.strip_prefix(REPORT)) {
        report_line(line);
    }
}

/// Two relays under one name, and this number of workers with a link to each.
async fn two_relays(namespace: &Namespace, workers: usize, settings: impl Fn(RelayBuilder) -> RelayBuilder) -> Site {
    namespace.set_addresses(&RELAYS);
    let mut site = Site::new(BACKEND);
    for address in RELAYS {
        let relay = settings(Site::relay()).env("LISTEN_ADDR", &format!("{address}:7001"));
        site.relays.push(RelayNode::start(relay).await);
    }
    for _ in 0..workers {
        site.add_worker(RELAYS_URL, |worker| worker.concurrency(16)).await;
    }
    site.ready().await;
    site
}
