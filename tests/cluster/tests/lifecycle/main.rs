//! The chart comes, changes and goes, and is not the only way to install. What users made stays, and goes on serving.
//!
//! Each of these tests takes the release away that all others share, and puts it back, so one runs at a time.

mod certificates;
mod kustomize;
mod namespaces;
mod release;
mod shared;
mod story;
mod user;

use tokio::sync::{Mutex, MutexGuard};

static TURN: Mutex<()> = Mutex::const_new(());

/// Waits until no other test of this binary runs.
async fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().await
}
