//! The end of a `/drain`: the backend for whose end it was requested has gone and returned.

use std::sync::Arc;

use super::Worker;
use crate::shutdown::DrainState;

/// Undoes each `/drain` when the backend has returned. Never returns.
pub(super) async fn undo_drains(worker: Arc<Worker>) {
    let mut drain = worker.drain.subscribe();
    let mut unlinked = worker.unlinked.subscribe();
    loop {
        let _ = drain.wait_for(DrainState::is_undoable).await;
        tokio::select! {
            () = worker.serving.backend_returned() => {}
            // A stronger drain is final, so the checks end.
            _ = drain.wait_for(|state| !state.is_undoable()) => continue,
        }
        // Links that still end because of the drain must not be mistaken for new ones.
        let _ = unlinked.wait_for(|unlinked| *unlinked).await;
        if worker.drain.is_undoable() {
            tracing::info!("the backend is back; drain undone");
        }
        worker.drain.undo();
        let _ = drain.wait_for(|state| *state == DrainState::Serving).await;
    }
}
