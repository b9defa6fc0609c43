//! Connections to the backend that wait for their next request.
//!
//! None of them has a task of its own. One task hears of their ends, so that a connection which the backend closed is
//! closed here too, however long no request comes; it runs for nothing else.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use super::connection::Connection;

/// Kept connections. More are closed after their request: dialling on the same machine costs less than a request's body.
const MAX_IDLE: usize = 64;

/// Backends keep an idle connection for 5 s (uvicorn, cpp-httplib); a shorter time avoids most races with their close.
const MAX_IDLE_TIME: Duration = Duration::from_secs(3);

/// The connections.
#[derive(Debug, Default)]
pub(super) struct Idle {
    kept: Arc<Kept>,
    watcher: OnceLock<AbortHandle>,
}

#[derive(Debug, Default)]
struct Kept {
    /// Newest last. Never held over an await.
    connections: Mutex<Vec<(Connection, Instant)>>,
    /// Wakes the task that hears of their ends, once it has begun.
    waker: OnceLock<Waker>,
}

impl Idle {
    /// The newest one that can carry a request.
    pub(super) fn take(&self) -> Option<Connection> {
        let now = Instant::now();
        let mut connections = self.kept.lock();
        while let Some((mut connection, since)) = connections.pop() {
            if now.duration_since(since) >= MAX_IDLE_TIME {
                // Those below are older still.
                connections.clear();
                return None;
            }
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// Closes them all; false when there are none.
    pub(super) fn close(&self) -> bool {
        !std::mem::take(&mut *self.kept.lock()).is_empty()
    }

    /// Keeps one whose answer was read to its end.
    pub(super) fn put(&self, mut connection: Connection) {
        self.watcher.get_or_init(|| tokio::spawn(watch(Arc::downgrade(&self.kept))).abort_handle());
        let now = Instant::now();
        let mut connections = self.kept.lock();
        // Nobody takes these any more, as long as there are newer ones.
        let too_old = connections.partition_point(|(_, since)| now.duration_since(*since) >= MAX_IDLE_TIME);
        connections.drain(..too_old);
        // Until the task has begun nobody is there to be told; it looks at all of them when it does.
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
        // Of a task it stays the same; under the lock, so that nobody puts a connection between this and the look.
        kept.waker.get_or_init(|| cx.waker().clone());
        connections.retain_mut(|(connection, _)| !connection.poll_closed(cx));
        Poll::Pending
    })
    .await;
}
