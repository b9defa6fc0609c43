//! The live data of open pages: a snapshot, and then the changes.
//!
//! One task collects the data for all pages, once a second and only while a page is open. So a hundred pages cost as
//! much as one, and without a page there is no cost.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::Stream;
use http::HeaderValue;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

use super::Dashboard;
use super::frame::Frame;
use crate::net::connections::EndsWithRelay;
use crate::provider::shared::ProcessPhase;
use crate::system::blocking;

/// The interval between two frames.
const INTERVAL: Duration = Duration::from_secs(1);
/// The longest time without a message, even if nothing has changed.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// The least pause after a frame, as a multiple of the time that the frame took. Frames take long with very many
/// workers, and are then less frequent.
const PAUSE_FACTOR: u32 = 10;
/// The most changes that a page may be behind; a page that is further behind starts again with a snapshot.
const BACKLOG: usize = 16;

/// The last frame, and the channel to all pages.
pub(super) struct Live {
    state: Mutex<LiveState>,
    changes: broadcast::Sender<Bytes>,
}

#[derive(Default)]
struct LiveState {
    /// The state that the pages have; `None` while no task runs.
    frame: Option<Frame>,
}

impl Default for Live {
    fn default() -> Self {
        Self { state: Mutex::default(), changes: broadcast::Sender::new(BACKLOG) }
    }
}

impl Live {
    fn lock(&self) -> MutexGuard<'_, LiveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a snapshot, and the changes from then on.
    fn join(&self, dashboard: &Arc<Dashboard>) -> (Bytes, broadcast::Receiver<Bytes>) {
        let mut state = self.lock();
        let is_first = state.frame.is_none();
        let frame = state.frame.get_or_insert_with(|| Frame::of(dashboard));
        let joined = (event("snapshot", &frame.snapshot(dashboard)), self.changes.subscribe());
        if is_first {
            tokio::spawn(run_poll(Arc::clone(dashboard)));
        }
        joined
    }

    /// True if a page is still open.
    fn is_watched(&self) -> bool {
        let mut state = self.lock();
        let is_watched = self.changes.receiver_count() > 0;
        if !is_watched {
            state.frame = None;
        }
        is_watched
    }

    fn send_changes(&self, dashboard: &Dashboard, frame: Frame, is_due: bool) -> bool {
        let mut state = self.lock();
        let changes = state.frame.as_ref().and_then(|before| frame.changes_since(before, dashboard));
        let changes = changes.or_else(|| is_due.then(|| frame.heartbeat()));
        state.frame = Some(frame);
        // The last page may have closed.
        changes.map(|changes| self.changes.send(event("change", &changes))).is_some()
    }
}

async fn run_poll(dashboard: Arc<Dashboard>) {
    let live = &dashboard.live;
    let (mut pause, mut sent_at) = (INTERVAL, Instant::now());
    loop {
        tokio::time::sleep(pause).await;
        if !live.is_watched() {
            return;
        }
        let began = Instant::now();
        let reader = Arc::clone(&dashboard);
        // With ten thousand workers it takes a tenth of a second, in which a runtime thread would forward no token.
        let polling = blocking::run(move || {
            let frame = Frame::of(&reader);
            let is_due = sent_at.elapsed() >= HEARTBEAT;
            reader.live.send_changes(&reader, frame, is_due)
        });
        if polling.await.unwrap_or(false) {
            sent_at = Instant::now();
        }
        pause = INTERVAL.max(began.elapsed() * PAUSE_FACTOR);
    }
}

fn event(name: &str, data: &str) -> Bytes {
    // JSON in one line contains no line break.
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// The stream of one page, until it disconnects, the relay stops, or `is_admitted` returns false.
pub(super) async fn stream(dashboard: Arc<Dashboard>, is_admitted: impl Fn() -> bool + Send + 'static) -> Response {
    let joining = Arc::clone(&dashboard);
    let joined = blocking::run(move || joining.live.join(&joining)).await;
    let Ok((snapshot, changes)) = joined else {
        return super::problem(http::StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "cannot create the snapshot");
    };
    let mut response = Response::new(Body::from_stream(events(dashboard, snapshot, changes, is_admitted)));
    response.extensions_mut().insert(EndsWithRelay);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn events(
    dashboard: Arc<Dashboard>,
    snapshot: Bytes,
    changes: broadcast::Receiver<Bytes>,
    is_admitted: impl Fn() -> bool + Send + 'static,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    let first = Some(snapshot);
    futures_util::stream::unfold(
        (first, changes, dashboard, is_admitted),
        |(first, mut changes, dashboard, is_admitted)| async move {
            if let Some(snapshot) = first {
                return Some((Ok(snapshot), (None, changes, dashboard, is_admitted)));
            }
            let mut phase = dashboard.relay.shared.watch_phase();
            let next = tokio::select! {
                next = changes.recv() => next,
                _ = phase.wait_for(|phase| *phase == ProcessPhase::Stopping) => return None,
            };
            drop(phase);
            match next {
                Ok(change) if is_admitted() => Some((Ok(change), (None, changes, dashboard, is_admitted))),
                // A page that is too far behind connects again, and gets a snapshot.
                Ok(_) | Err(RecvError::Lagged(_) | RecvError::Closed) => None,
            }
        },
    )
}
