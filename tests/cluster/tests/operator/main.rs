//! The operator as a program on a cluster: two replicas, their certificates, what they ask for, hold, write and never say.
//!
//! Each of these tests disturbs the operator, or looks at what it does while nothing happens, so one runs at a time.

mod certificates;
mod deep;
mod leading;
mod quiet;
mod replicas;
mod secrets;

use tokio::sync::{Mutex, MutexGuard};

static TURN: Mutex<()> = Mutex::const_new(());

/// Waits until no other test of this binary runs.
async fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().await
}
