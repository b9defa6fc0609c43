//! Accepts connections for the operator's servers: a bounded number, each with bounded request headers and a header
//! timeout.
//!
//! Any program in the cluster can open connections, keep them open and send almost nothing on them.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

/// The maximum number of concurrent connections of one server.
const MAX_CONNECTIONS: usize = 512;
/// The pause after a failed accept. When no file descriptor is left, accepting again at once would only spin.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener with a bounded number of connections.
pub(crate) struct AcceptLimiter<'a> {
    listener: &'a TcpListener,
    places: Arc<Semaphore>,
    /// The server's name in the log.
    server: &'static str,
}

impl<'a> AcceptLimiter<'a> {
    pub(crate) fn new(listener: &'a TcpListener, server: &'static str) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(MAX_CONNECTIONS)), server }
    }

    /// Waits for a free place and returns the next connection with its place. The place is released when the permit is
    /// dropped.
    pub(crate) async fn next(&self) -> (TcpStream, OwnedSemaphorePermit) {
        loop {
            match self.try_next().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    warn!(%error, server = self.server, "failed to accept a connection");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn try_next(&self) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(std::io::Error::other)?;
        let (stream, _) = self.listener.accept().await?;
        // Without it, the last piece of a response could wait for an acknowledgement.
        let _ = stream.set_nodelay(true);
        Ok((stream, place))
    }
}

/// Returns an HTTP/1.1 builder that limits each request's headers to `max_header_bytes` and the time to receive them to
/// `header_timeout`.
pub(crate) fn http1(header_timeout: Duration, max_header_bytes: usize) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(header_timeout).max_buf_size(max_header_bytes);
    builder
}
