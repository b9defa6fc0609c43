//! How the operator's servers take connections: a bounded number, each with bounded headers that must come in time.
//!
//! Anything in the cluster can open connections and keep them, and say next to nothing on each.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::warn;

/// Connections of one server at once.
const MAX_CONNECTIONS: usize = 512;
/// When no descriptor is left, accepting again at once would only spin.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener with as many places as it may have connections.
pub(crate) struct Door<'a> {
    listener: &'a TcpListener,
    places: Arc<Semaphore>,
    /// For the log.
    server: &'static str,
}

impl<'a> Door<'a> {
    pub(crate) fn new(listener: &'a TcpListener, server: &'static str) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(MAX_CONNECTIONS)), server }
    }

    /// The next connection, once there is a place, and that place: it is free when it is dropped.
    pub(crate) async fn next(&self) -> (TcpStream, OwnedSemaphorePermit) {
        loop {
            match self.try_next().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    warn!(%error, server = self.server, "a connection could not be accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn try_next(&self) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(std::io::Error::other)?;
        let (stream, _) = self.listener.accept().await?;
        // Without it the last piece of an answer could wait for an acknowledgement.
        let _ = stream.set_nodelay(true);
        Ok((stream, place))
    }
}

/// HTTP/1.1 for connections on which each request's headers come within `patience`, and have `max_header_bytes` at most.
pub(crate) fn http1(patience: Duration, max_header_bytes: usize) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(patience).max_buf_size(max_header_bytes);
    builder
}
