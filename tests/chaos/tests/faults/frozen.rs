//! Processes that stop and resume: after a short pause that is tolerated, and after a long one, when they are
//! considered lost. A resumed process must not repeat what another has done meanwhile.

use std::time::Duration;

use modelrelay_chaos::{
    dice::Dice,
    form,
    load::{Load, Plan},
    request::RequestSpec,
    site::Site,
};
use modelrelay_harness::process::Process;

use crate::BACKEND;

/// The timeout for a response.
const TIMEOUT_SECS: &str = "4";

/// A worker is lost after three heartbeats of a second, and a backend after [`TIMEOUT_SECS`]; half of the pauses are
/// longer.
async fn freeze(process: &Process, dice: &mut Dice, long: bool, load: &Load) {
    let pause = if long { dice.between(4_500..=5_500) } else { dice.between(200..=2_000) };
    load.ledger().fault();
    process.signal("STOP").await;
    #[expect(clippy::disallowed_methods, reason = "how long a process stops is the subject")]
    tokio::time::sleep(Duration::from_millis(pause)).await;
    process.signal("CONT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resumed_worker_repeats_nothing() {
    let mut site = Site::with_workers(BACKEND, 3, |relay| relay, |worker| worker).await;
    let load = site.load(Plan::mixed(24)).await;
    for round in 0..form::times(4) {
        let victim = site.dice.below(3);
        freeze(&site.workers[victim].process.process, &mut site.dice, round % 2 == 1, &load).await;
        load.ledger().answers(30).await;
    }
    site.ready().await;
    let summary = site.check("SIGSTOP of workers", load).await;
    assert!(summary.failures() + summary.repeated > 0, "no worker was declared lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn resumed_backend_repeats_nothing() {
    let mut site =
        Site::with_workers(BACKEND, 3, |relay| relay.env("REQUEST_TIMEOUT_SECS", TIMEOUT_SECS), |worker| worker).await;
    let load = site.load(Plan::mixed(24)).await;
    for round in 0..form::times(4) {
        let victim = site.dice.below(3);
        freeze(&site.backends[victim].process, &mut site.dice, round % 2 == 1, &load).await;
        load.ledger().answers(30).await;
    }
    site.ready().await;
    let summary = site.check("SIGSTOP of backends", load).await;
    assert!(summary.failures() > 0, "no request reached a frozen backend");
}

#[tokio::test(flavor = "multi_thread")]
async fn resumed_relay_repeats_nothing() {
    let mut site = Site::with_workers(BACKEND, 3, |relay| relay, |worker| worker).await;
    let load = site.load(Plan::mixed(24)).await;
    for round in 0..form::times(4) {
        freeze(site.relays[0].relay.process(), &mut site.dice, round % 2 == 1, &load).await;
        load.ledger().answers(30).await;
    }
    site.ready().await;
    let summary = site.check("SIGSTOP of the relay", load).await;
    assert!(summary.failures() + summary.repeated > 0, "no worker noticed the frozen backend");
}

/// Requests that a relay had sent to a frozen worker are in the worker's socket when it resumes, long after another
/// worker has served them.
#[tokio::test(flavor = "multi_thread")]
async fn resumed_worker_executes_no_stale_socket_data() {
    let mut site = Site::with_workers(BACKEND, 2, |relay| relay, |worker| worker.concurrency(100)).await;
    // More messages than a worker reads in one batch.
    let load = site.load(Plan::of(150, |nonce, _| RequestSpec::plain(nonce, 10).upload(3_000))).await;
    for _ in 0..form::times(3) {
        load.ledger().fault();
        let worker = &site.workers[0].process.process;
        worker.signal("STOP").await;
        site.relays[0].has_workers(1).await;
        load.ledger().answers(100).await;
        worker.signal("CONT").await;
        site.ready().await;
        load.ledger().answers(50).await;
    }
    site.check("SIGSTOP of a worker with requests in its socket", load).await;
}
