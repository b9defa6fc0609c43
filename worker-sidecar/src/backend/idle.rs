//! Idle connections to the backend.
//!
//! They have no separate tasks. One task notices their ends, so that a connection which the backend closed is closed
//! here too, even if no request comes; it does nothing else.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use super::connection::Connection;

/// The most idle connections. Further ones are closed after their request: dialling on the same machine costs less than
/// a request's body.
const MAX_IDLE: usize = 64;

/// Backends keep an idle connection for 5 s (uvicorn, cpp-httplib); a shorter time avoids most races with their close.
const MAX_IDLE_TIME: Duration = Duration::from_secs(3);

/// The idle connections.
#[derive(Debug, Default)]
pub(super) struct Idle {
    kept: Arc<Kept>,
    watcher: OnceLock<AbortHandle>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Newest last. Never held over an await.
    connections: Mutex<Vec<(Connection, Instant)>>,
    /// Wakes the task that notices their ends, once it has started.
    waker: OnceLock<Waker>,
}

impl Idle {
    /// Returns the newest one that can carry a request.
    pub(super) fn take(&self) -> Option<Connection> {
        let now = Instant::now();
        let mut connections = self.kept.lock();
        while let Some((mut connection, since)) = connections.pop() {
            if now.duration_since(since) >= MAX_IDLE_TIME {
                // The ones below are older still.
                connections.clear();
                return None;
            }
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// Closes all of them; returns false if there are none.
    pub(super) fn close(&self) -> bool {
        !std::mem::take(&mut *self.kept.lock()).is_empty()
    }

    /// Keeps a connection whose response was read to its end.
    pub(super) fn put(&self, mut connection: Connection) {
        self.watcher.get_or_init(|| tokio::spawn(watch(Arc::downgrade(&self.kept))).abort_handle());
        let now = Instant::now();
        let mut connections = self.kept.lock();
        // These are not used any more, as long as there are newer ones.
        let too_old = connections.partition_point(|(_, since)| now.duration_since(*since) >= MAX_IDLE_TIME);
        connections.drain(..too_old);
        // Until the task has started there is no waker; the task checks all of them when it starts.
        let waker = self.kept.waker.get().unwrap_or(Waker::noop());
        if connections.len() < MAX_IDLE && !connection.poll_closed(&mut Context::from_waker(waker)) {
            connections.push((connection, now));
        }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.abort();
        }
    }
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Vec<(Connection, Instant)>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops connections when they end.
async fn watch(kept: Weak<Kept>) {
    poll_fn(|cx| {
        let Some(kept) = kept.upgrade() else { return Poll::Ready(()) };
        let mut connections = kept.lock();
        // A task's waker stays the same; set under the lock, so that no connection is added between this and the check.
        kept.waker.get_or_init(|| cx.waker().clone());
        connections.retain_mut(|(connection, _)| !connection.poll_closed(cx));
        Poll::Pending
    })
    .await;
}
