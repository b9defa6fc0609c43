//! Accepts connections.
//!
//! `axum::serve` sets neither `TCP_NODELAY`, without which each token can wait 40 ms, nor a timer, without which a
//! header may take indefinitely; so connections are accepted here.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::CONNECTION;
use ::http::{HeaderValue, Request, StatusCode, Version};
use axum::Router;
use axum::body::Body;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::router;
use crate::http::base_path;
use crate::net::connections::{AfterGrace, AfterResponse, ConnectionActivity, EndsWithRelay, ResponseBody};
use crate::net::peer::{ClientIo, Heads, Peer, WRITE_PATIENCE};
use crate::net::tls::{Connection, Tls};
use crate::net::{self, TcpListener, TcpStream};
use crate::provider::shared::{ProcessPhase, Shared};

/// The most bytes of the headers of one request, and so of the read buffer.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// The most headers of one request.
const MAX_HEADERS: usize = 128;

/// The pause after a failed accept. When no file descriptor is left, retrying at once would only spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The data that every connection of a listener is served with.
#[derive(Clone)]
pub struct Serving {
    /// The routes.
    pub router: Router,
    /// The path below which a proxy may serve them; see [`base_path`].
    pub base_path: Arc<str>,
    /// The state shared by the process.
    pub shared: Arc<Shared>,
    /// TLS, if connections are encrypted.
    pub tls: Option<Arc<Tls>>,
}

/// Serves `listener` until the process stops, with at most `limit` concurrent connections, which are tracked until
/// their last byte.
pub async fn serve(listener: TcpListener, serving: Serving, limit: usize, tracker: TaskTracker) {
    let places = Arc::new(Semaphore::new(limit));
    let mut phase = serving.shared.watch_phase();
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = phase.wait_for(|phase| *phase == ProcessPhase::Stopping) => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                let activity = admit(&serving.shared);
                tracker.spawn(connection((stream, peer), place, activity, serving.clone()));
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Counts an accepted connection; it carries no request if the grace period is over. Counted before the phase is read,
/// so that a relay that begins to drain either waits for it or refuses its requests.
fn admit(shared: &Shared) -> ConnectionActivity {
    let activity = shared.connections.open();
    if shared.phase() >= ProcessPhase::Draining {
        activity.close();
    }
    activity
}

/// Serves one connection. Its permit moves with the stream, also to a worker's socket.
async fn connection(
    (stream, peer): (TcpStream, SocketAddr),
    place: OwnedSemaphorePermit,
    activity: ConnectionActivity,
    serving: Serving,
) {
    net::tune(&stream);
    let Serving { router, base_path, shared, tls } = serving;
    let idle_timeout = shared.config.load().client_idle_timeout;
    let is_late = activity.is_closed();
    let io = ClientIo::new(stream, WRITE_PATIENCE, Arc::clone(&shared.budget), place);
    let heads = io.heads();
    let flushed = io.flushed();
    let mut retired = std::pin::pin!(retire(shared.watch_phase(), activity.clone(), heads.clone()));
    let io = match tls {
        None => Connection::Plain(io),
        Some(tls) => tokio::select! {
            // Boxed because it is large, and would take the same room in the task of a plain connection.
            shaken = Box::pin(tls.accept(io, peer)) => match shaken {
                Some(stream) => Connection::Tls(Box::new(stream)),
                None => return,
            },
            () = retired.as_mut() => return,
        },
    };
    heads.end_handshake();
    activity.end_handshake();
    let service = service_fn(move |mut request: Request<Incoming>| {
        activity.begin_request();
        base_path::strip(&base_path, &mut request);
        request.extensions_mut().insert(Peer(peer));
        request.extensions_mut().insert(flushed.clone());
        if is_late {
            request.extensions_mut().insert(AfterGrace);
        }
        let request = request.map(|body| Body::new(heads.end_with(body)));
        let (mut router, shared, activity) = (router.clone(), Arc::clone(&shared), activity.clone());
        let version = request.version();
        async move {
            let response = router::answer(&mut router, request).await;
            Ok::<_, Infallible>(begin_response((response, version), &shared, &activity))
        }
    });
    let connection = http(idle_timeout).serve_connection(TokioIo::new(io), service).with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        // The connection first: a request that has arrived is read before the connection is closed as idle.
        biased;
        result = connection.as_mut() => result,
        () = retired.as_mut() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        debug!(%peer, %error, "connection ended");
    }
}

fn http(idle_timeout: Duration) -> http1::Builder {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        // The time from the end of a response, or the start of the connection, to the end of the next headers: hyper
        // has one timer for slow headers and idle connections. The default setting is longer than the 60 s for which
        // nginx and others keep connections to the relay: if the relay closed first, their next request would be lost
        // on the way.
        .header_read_timeout(idle_timeout)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS);
    http
}

/// Tracks a response. Those of a relay that is shutting down end their connections, so that clients use another relay.
fn begin_response(
    (mut response, version): (Response, Version),
    shared: &Shared,
    activity: &ConnectionActivity,
) -> Response<ResponseBody> {
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return response.map(ResponseBody::untracked);
    }
    let after = if shared.phase() > ProcessPhase::Running {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        // Of HTTP/1.1, hyper would add `keep-alive` for a client with HTTP/1.0.
        if version == Version::HTTP_10 {
            *response.version_mut() = version;
        }
        AfterResponse::Close
    } else if response.extensions().get::<EndsWithRelay>().is_some() {
        AfterResponse::IdleAtLast
    } else {
        AfterResponse::Idle
    };
    response.map(|body| activity.begin_response(body, after))
}

/// Resolves when the connection may close: at a drain once it has been idle for a while, and at the end of the relay.
async fn retire(mut phase: watch::Receiver<ProcessPhase>, activity: ConnectionActivity, heads: Heads) {
    let _ = phase.wait_for(|phase| *phase >= ProcessPhase::Draining).await;
    let mut stopping = std::pin::pin!(phase.wait_for(|phase| *phase == ProcessPhase::Stopping));
    let (mut has_yielded, mut head_since) = (false, None);
    loop {
        head_since = heads.has_begun().then(|| head_since.unwrap_or_else(Instant::now));
        let linger = activity.linger(head_since);
        if linger.is_zero() {
            if has_yielded {
                break;
            }
            // The runtime now looks for input of the connection, which may have arrived in the meantime.
            tokio::task::yield_now().await;
            has_yielded = true;
            continue;
        }
        has_yielded = false;
        tokio::select! {
            () = tokio::time::sleep(linger) => {}
            _ = stopping.as_mut() => break,
        }
    }
    activity.close();
}
