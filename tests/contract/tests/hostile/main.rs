//! Peers that mean harm, or behave as if they did: what they can reach, and what their neighbours notice.

mod disconnects;
mod floods;
mod lying_worker;
mod neighbour;
mod slow_crowds;
mod smuggling;
mod websocket;

use tokio::sync::{Mutex, MutexGuard};

/// One at a time: tests that measure want the machine for themselves.
async fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::const_new(());
    TURN.lock().await
}
