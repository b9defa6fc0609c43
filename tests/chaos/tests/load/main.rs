//! Too much, for too long, and all at once. These want the machine for themselves, one after the other.

mod overload;
mod soak;
mod thousand_workers;

use tokio::sync::{Mutex, MutexGuard};

/// The backends' program.
const BACKEND: &str = env!("CARGO_BIN_EXE_chaos-backend");

async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}
