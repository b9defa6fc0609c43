//! A parent process that runs this program as one of its parts over pipes, as `modelrelay up` does.
//!
//! Windows has no signal that reaches a single child, so signals are not used for it. Pipes work the same way
//! everywhere, and they close even when the parent is killed:
//! - The end of standard input requests a stop, as SIGTERM does.
//! - The line [`READY`] on standard output reports that the start is complete. The log goes to standard error.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tokio::sync::Notify;

/// The line that reports a complete start.
pub const READY: &str = "ready";

static HAS_PARENT: AtomicBool = AtomicBool::new(false);
static STOP: Notify = Notify::const_new();

/// Makes this program a part of its parent from now on.
pub fn follow() {
    HAS_PARENT.store(true, Ordering::Relaxed);
    // A thread of its own: it blocks until the parent closes the pipe, and the process does not wait for it.
    thread::spawn(|| {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        STOP.notify_one();
    });
}

/// Waits until the parent closes standard input. Without a parent it never returns.
pub(crate) async fn stop_requested() {
    STOP.notified().await;
}

pub(crate) fn report_ready() {
    if HAS_PARENT.load(Ordering::Relaxed) {
        let mut stdout = io::stdout();
        // The parent may be gone already; then standard input has ended too.
        let _ = writeln!(stdout, "{READY}").and_then(|()| stdout.flush());
    }
}
