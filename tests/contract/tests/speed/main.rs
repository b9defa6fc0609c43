//! What can be said of speed on a machine that is busy with something else: that the benchmark measures what it says, and how
//! many instructions a request and a token take. No test here looks at a clock.

mod benchmark;
mod instructions;
mod scale;

use tokio::sync::{Mutex, MutexGuard};

/// One at a time: what valgrind slows down has patience for itself, not for a benchmark beside it.
async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}
