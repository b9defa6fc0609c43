//! Starts the built programs and plays their peers by hand, for the black-box suites.
//!
//! Rules of this crate:
//! - None of the project's programs is linked: wire messages are handwritten JSON, so that a test cannot agree with a
//!   program by sharing its mistake.
//! - Every wait is bounded by [`TEST_TIMEOUT`] and names the awaited event; if a process is involved, its log is
//!   printed.
//! - Everything is released when dropped: processes are killed, connections closed, folders removed.

pub mod balancer;
pub mod broken_stream;
pub mod client;
pub mod connect_proxy;
pub mod fake_backend;
pub mod fake_kubernetes;
pub mod fake_relay;
pub mod instructions;
pub mod namespace;
pub mod own_log;
pub mod process;
pub mod relay;
pub mod secrecy;
pub mod tls;
pub mod trace;
pub mod usage;
pub mod worker;
pub mod worker_process;

use std::{env, future::Future, io::Write, time::Duration};

use process::Log;

/// How long anything may take before a test fails. Generous: a busy machine must not fail a test, only a hang may.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The pause between two polls of a state.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Awaits `future` for at most [`TEST_TIMEOUT`]; otherwise panics with `what` was awaited and the log of the process.
pub async fn within<T>(what: &str, log: &Log, future: impl Future<Output = T>) -> T {
    within_for(TEST_TIMEOUT, what, log, future).await
}

/// The same as [`within`], with its own timeout: for rules that specify a time.
pub async fn within_for<T>(patience: Duration, what: &str, log: &Log, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(patience, future).await {
        Ok(value) => value,
        Err(_) => panic!("timed out after {patience:?} waiting for: {what}\n{}", log.dump()),
    }
}

/// Polls `find` until it returns a value, for at most `patience`: for state that is visible but not announced.
pub async fn poll_for<T>(patience: Duration, find: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    poll_every(POLL_INTERVAL, patience, find).await
}

/// The same as [`poll_for`], with its own pause between two polls.
pub async fn poll_every<T>(pause: Duration, patience: Duration, mut find: impl AsyncFnMut() -> Option<T>) -> Option<T> {
    let found = async {
        loop {
            if let Some(found) = find().await {
                return found;
            }
            #[expect(clippy::disallowed_methods, reason = "the pause between two polls, which have a deadline")]
            tokio::time::sleep(pause).await;
        }
    };
    tokio::time::timeout(patience, found).await.ok()
}

/// Polls until `condition` holds.
///
/// # Panics
/// After `patience`, with `what` was awaited and the log of the process.
pub async fn poll_until(patience: Duration, what: &str, log: &Log, mut condition: impl AsyncFnMut() -> bool) {
    let held = poll_for(patience, async || condition().await.then_some(())).await;
    held.unwrap_or_else(|| panic!("timed out after {patience:?} waiting for: {what}\n{}", log.dump()));
}

/// Reports in one line why this machine cannot run a test, bypassing the capture of test output. In CI, where such a
/// line would not be read, it fails the test instead.
///
/// # Panics
/// If `CI` is `true`.
pub fn cannot_run(why: &str) {
    assert!(env::var("CI").as_deref() != Ok("true"), "cannot run: {why}");
    let _ = writeln!(std::io::stderr(), "cannot run: {why}");
}
