//! Accepts the probe server's connections.
//!
//! `axum::serve` waits for a header indefinitely, buffers up to 400 KiB of each, and accepts any number of connections:
//! any client that reaches the port could exhaust the worker's memory and thereby end its running requests. So all
//! three are limited here.
//!
//! When all places are in use, the oldest connection makes way for the newest. If the newest had to wait or were
//! rejected, silent connections would block kubelet's probes, and kubelet would restart a healthy worker; a probe takes
//! milliseconds and is never the oldest. Connections with a response in progress stay: such a connection is a hook that
//! waits at `/drain`, and the backend next to the worker is stopped when it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// The most connections at once. Kubelet and Prometheus need a handful.
const MAX_CONNECTIONS: usize = 128;
/// The timeout for a header, and between two requests: hyper has one timer for both. Prometheus sends requests less
/// often over a connection that it keeps, and opens another one.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// The most bytes of one request's headers, and thus of the read buffer.
const MAX_HEADER_BYTES: usize = 16 << 10;
/// When no file descriptor is left, accepting again at once would only spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves `router` until the process ends.
pub(super) async fn serve(listener: TcpListener, router: Router) {
    let router = TowerToHyperService::new(router);
    // The oldest first.
    let mut open: Vec<Open> = Vec::with_capacity(MAX_CONNECTIONS);
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the probe server");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        open.retain(|connection| !connection.task.is_finished());
        if open.len() == MAX_CONNECTIONS {
            let Some(oldest) = open.iter().position(|connection| !connection.answering.load(Ordering::Relaxed)) else {
                continue;
            };
            open.remove(oldest).task.abort();
        }
        let answering = Arc::default();
        let task = tokio::spawn(connection(stream, router.clone(), Arc::clone(&answering))).abort_handle();
        open.push(Open { task, answering });
    }
}

/// An open connection.
struct Open {
    task: AbortHandle,
    answering: Arc<AtomicBool>,
}

/// Serves one connection, and sets `answering` while a response is in progress.
async fn connection(stream: TcpStream, router: TowerToHyperService<Router>, answering: Arc<AtomicBool>) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| {
        let (answer, answering) = (router.call(request), Arc::clone(&answering));
        async move {
            answering.store(true, Ordering::Relaxed);
            let answer = answer.await;
            answering.store(false, Ordering::Relaxed);
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        tracing::debug!(%error, "connection to the probe server failed");
    }
}
