//! One fault each, under a checked load: what was lost or doubled is a failure, everything else is counted.

mod kill_backends;
mod kill_workers;

use std::future::Future;

use modelrelay_chaos::ledger::REPORT;
use modelrelay_harness::namespace::{self, Namespace};

/// The backends' program.
const BACKEND: &str = env!("CARGO_BIN_EXE_chaos-backend");

/// Runs a scenario in a network of its own, and shows the line that it prints there.
async fn inside<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Namespace) -> F) {
    let said = namespace::inside(test, body).await;
    for line in said.lines().filter_map(|line| line.strip_prefix(REPORT)) {
        modelrelay_chaos::ledger::say(line);
    }
}
