//! Client connections, and whether they may carry another request.
//!
//! A relay that drains serves the requests of connections that were open before. HTTP/1.1 has no message with which a
//! server ends an idle connection: it closes it, and a request that the client sends at that moment is lost. So every
//! response of a draining relay carries `Connection: close`, and a connection without a request closes only after it
//! has been idle for a while. The shutdown waits until no connection is left that may carry a request.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

/// How long a connection of a draining relay stays open without a request. Clients that send one request after the
/// other do so within milliseconds of a response that began before the drain, and did not announce the end of the
/// connection; on a busy machine it can take them more than a second.
pub const IDLE_LINGER: Duration = Duration::from_secs(3);

/// The longest time that the head of a request may take, from its first bytes, at a draining relay.
const HEAD_PATIENCE: Duration = Duration::from_secs(5);

/// Marks a request of a connection that was opened after the relay's grace period.
#[derive(Clone, Copy, Debug)]
pub struct AfterGrace;

/// Marks a response that ends only with the relay, so that the shutdown does not wait for it.
#[derive(Clone, Copy, Debug)]
pub struct EndsWithRelay;

/// The numbers of open client connections that the shutdown waits for.
#[derive(Debug, Default)]
pub struct ClientConnections {
    /// Those without a request, and those whose request has no response yet.
    expecting: AtomicUsize,
    /// Those whose response is being sent, and that may carry another request after it.
    responding: AtomicUsize,
    changed: Notify,
}

/// The state of one client connection. Its last clone is dropped with the connection.
#[derive(Clone, Debug)]
pub struct ConnectionActivity(Arc<Tracked>);

#[derive(Debug)]
struct Tracked {
    connections: Arc<ClientConnections>,
    stage: Mutex<ConnectionStage>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionStage {
    /// No request is on it.
    Idle { since: Instant },
    /// A request has no response yet.
    Handling,
    /// A response is being sent, after which the connection is idle.
    Responding,
    /// A response is being sent that ends only with the relay.
    Endless,
    /// It carries no other request.
    Last,
}

/// The state of a connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterResponse {
    /// Perhaps another request.
    Idle,
    /// The same, but the response ends only with the relay.
    IdleAtLast,
    /// The end of the connection.
    Close,
}

impl ClientConnections {
    /// Adds a connection.
    pub fn open(self: &Arc<Self>) -> ConnectionActivity {
        let stage = ConnectionStage::Idle { since: Instant::now() };
        self.add(stage);
        ConnectionActivity(Arc::new(Tracked { connections: Arc::clone(self), stage: Mutex::new(stage) }))
    }

    /// True if a connection is idle, or has a request without a response.
    pub fn expects_requests(&self) -> bool {
        self.expecting.load(Ordering::SeqCst) > 0
    }

    /// True if a response is being sent on a connection that may carry another request.
    pub fn is_responding(&self) -> bool {
        self.responding.load(Ordering::SeqCst) > 0
    }

    /// Resolves when one of the numbers has changed since this call.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    fn add(&self, stage: ConnectionStage) {
        if let Some(count) = self.count(stage) {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn remove(&self, stage: ConnectionStage) {
        if let Some(count) = self.count(stage) {
            count.fetch_sub(1, Ordering::SeqCst);
            self.changed.notify_waiters();
        }
    }

    fn count(&self, stage: ConnectionStage) -> Option<&AtomicUsize> {
        match stage {
            ConnectionStage::Idle { .. } | ConnectionStage::Handling => Some(&self.expecting),
            ConnectionStage::Responding => Some(&self.responding),
            ConnectionStage::Endless | ConnectionStage::Last => None,
        }
    }
}

impl ConnectionActivity {
    /// Records the head of a request.
    pub fn begin_request(&self) {
        self.change(|_| ConnectionStage::Handling);
    }

    /// Records that a response begins, and tracks its body.
    pub fn begin_response(&self, body: Body, after: AfterResponse) -> ResponseBody {
        self.change(|_| match after {
            AfterResponse::Idle => ConnectionStage::Responding,
            AfterResponse::IdleAtLast => ConnectionStage::Endless,
            AfterResponse::Close => ConnectionStage::Last,
        });
        ResponseBody { body, activity: Some(self.clone()) }
    }

    /// Records that the connection closes, after the bytes of the last response.
    pub fn close(&self) {
        self.change(|_| ConnectionStage::Last);
    }

    /// True if it carries no other request.
    pub fn is_closed(&self) -> bool {
        *self.0.stage.lock().unwrap_or_else(PoisonError::into_inner) == ConnectionStage::Last
    }

    /// Records the end of the TLS handshake: the client sends its first request after it.
    pub fn end_handshake(&self) {
        self.change(|_| ConnectionStage::Idle { since: Instant::now() });
    }

    /// Returns how much longer a draining relay keeps the connection open without a request, at most: zero if it may
    /// close now. `head_since`: the time since which the head of a request arrives.
    pub fn linger(&self, head_since: Option<Instant>) -> Duration {
        match *self.0.stage.lock().unwrap_or_else(PoisonError::into_inner) {
            ConnectionStage::Idle { since } => {
                let (patience, since) = head_since.map_or((IDLE_LINGER, since), |begun| (HEAD_PATIENCE, begun));
                patience.saturating_sub(since.elapsed()).min(IDLE_LINGER)
            }
            ConnectionStage::Handling
            | ConnectionStage::Responding
            | ConnectionStage::Endless
            | ConnectionStage::Last => IDLE_LINGER,
        }
    }

    fn change(&self, next: impl FnOnce(ConnectionStage) -> ConnectionStage) {
        let mut stage = self.0.stage.lock().unwrap_or_else(PoisonError::into_inner);
        if *stage == ConnectionStage::Last {
            return;
        }
        let before = *stage;
        *stage = next(before);
        self.0.connections.add(*stage);
        self.0.connections.remove(before);
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.connections.remove(*self.stage.get_mut().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The body of a response, whose end makes its connection idle.
#[derive(Debug)]
pub struct ResponseBody {
    body: Body,
    activity: Option<ConnectionActivity>,
}

impl ResponseBody {
    /// Wraps the body of a connection that is not tracked.
    pub fn untracked(body: Body) -> Self {
        Self { body, activity: None }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        let Some(activity) = &self.activity else { return };
        activity.change(|stage| match stage {
            ConnectionStage::Responding | ConnectionStage::Endless => ConnectionStage::Idle { since: Instant::now() },
            ConnectionStage::Idle { .. } | ConnectionStage::Handling | ConnectionStage::Last => stage,
        });
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> (Arc<ClientConnections>, ConnectionActivity) {
        let connections = Arc::new(ClientConnections::default());
        let activity = connections.open();
        (connections, activity)
    }

    fn numbers(connections: &ClientConnections) -> (bool, bool) {
        (connections.expects_requests(), connections.is_responding())
    }

    #[tokio::test(start_paused = true)]
    async fn connection_is_idle_again_after_its_response() {
        let (connections, activity) = open();
        assert_eq!(numbers(&connections), (true, false));
        activity.begin_request();
        assert_eq!(numbers(&connections), (true, false));
        let body = activity.begin_response(Body::empty(), AfterResponse::Idle);
        assert_eq!(numbers(&connections), (false, true));
        drop(body);
        assert_eq!(numbers(&connections), (true, false));
        drop(activity);
        assert_eq!(numbers(&connections), (false, false));
    }

    #[tokio::test(start_paused = true)]
    async fn closing_connection_expects_no_request() {
        let (connections, activity) = open();
        activity.begin_request();
        drop(activity.begin_response(Body::empty(), AfterResponse::Close));
        assert_eq!(numbers(&connections), (false, false));
        let (connections, activity) = open();
        activity.close();
        activity.begin_request();
        assert_eq!(numbers(&connections), (false, false));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_lingers_after_its_response() {
        let (_connections, activity) = open();
        activity.begin_request();
        let body = activity.begin_response(Body::empty(), AfterResponse::Idle);
        tokio::time::advance(10 * IDLE_LINGER).await;
        assert_eq!(activity.linger(None), IDLE_LINGER);
        drop(body);
        tokio::time::advance(IDLE_LINGER / 4).await;
        assert_eq!(activity.linger(None), IDLE_LINGER * 3 / 4);
        tokio::time::advance(IDLE_LINGER).await;
        assert_eq!(activity.linger(None), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_lingers_for_begun_head() {
        let (_connections, activity) = open();
        tokio::time::advance(60 * HEAD_PATIENCE).await;
        let begun = Instant::now();
        assert_eq!(activity.linger(Some(begun)), IDLE_LINGER);
        tokio::time::advance(HEAD_PATIENCE).await;
        assert_eq!(activity.linger(Some(begun)), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_lingers_after_slow_handshake() {
        let (connections, activity) = open();
        tokio::time::advance(2 * IDLE_LINGER).await;
        activity.end_handshake();
        assert_eq!((activity.linger(None), numbers(&connections)), (IDLE_LINGER, (true, false)));
        activity.close();
        activity.end_handshake();
        assert!(activity.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_shutdown_is_notified_of_changes() {
        let (connections, activity) = open();
        let changed = connections.changed();
        drop(activity);
        changed.await;
    }
}
