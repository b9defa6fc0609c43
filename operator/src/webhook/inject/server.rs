//! The webhook's TLS server.
//!
//! Handshakes run outside the accept loop: one peer that connects and sends nothing must not keep the API server out.
//! The certificate is looked up at each handshake, so a rotation needs no restart and closes no connection.
//!
//! Only HTTP/1.1 is offered: the API server then keeps a connection per running review, and a review takes
//! milliseconds.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, Request, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::debug;

use crate::net::accept::{self, AcceptLimiter};
use crate::webhook::certs::Certificates;

/// The timeout for a handshake; the whole review has 5 s.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// The idle timeout between responses. It exceeds the 90 s after which the API server closes an idle connection: if the
/// webhook closed first, the next review could already be on its way, and Go does not send a POST twice.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum size of one request's headers, in bytes.
const MAX_HEADER_BYTES: usize = 32 << 10;
/// The timeout for the last responses, after accepting has stopped; each takes less than 5 s.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Serves `router` until `shutdown`, and for `grace` after it: the Service still sends connections here until every
/// node has been updated. Each response in that period is the last on its connection, so that no connection is closed
/// during a review.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    certificates: Arc<Certificates>,
    grace: Duration,
    shutdown: CancellationToken,
) -> Result<(), rustls::Error> {
    let acceptor = TlsAcceptor::from(Arc::new(tls(certificates)?));
    let connections = Connections {
        acceptor,
        router,
        leaving: shutdown.clone(),
        closing: CancellationToken::new(),
        tracker: TaskTracker::new(),
    };
    let left = async {
        shutdown.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    connections.accept(&listener, left).await;
    drop(listener);
    connections.closing.cancel();
    connections.tracker.close();
    let _ = tokio::time::timeout(LAST_ANSWERS, connections.tracker.wait()).await;
    Ok(())
}

fn tls(certificates: Arc<Certificates>) -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(certificates);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

struct Connections {
    acceptor: TlsAcceptor,
    router: Router,
    /// Cancelled when each response becomes the last on its connection.
    leaving: CancellationToken,
    /// Cancelled when idle connections are closed.
    closing: CancellationToken,
    tracker: TaskTracker,
}

impl Connections {
    async fn accept(&self, listener: &TcpListener, end: impl Future<Output = ()>) {
        let limiter = AcceptLimiter::new(listener, "webhook");
        let mut end = std::pin::pin!(end);
        loop {
            let (stream, place) = tokio::select! {
                () = &mut end => return,
                accepted = limiter.next() => accepted,
            };
            self.tracker.spawn(connection(
                stream,
                place,
                self.acceptor.clone(),
                self.router.clone(),
                self.leaving.clone(),
                self.closing.clone(),
            ));
        }
    }
}

/// Serves one connection, from its handshake to its end. Its place is released with it.
async fn connection(
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
    acceptor: TlsAcceptor,
    router: Router,
    leaving: CancellationToken,
    closing: CancellationToken,
) {
    let stream = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        // Port scans and probes end here too, so this is no warning; a real mismatch shows at the API server.
        Ok(Err(error)) => return debug!(%error, "TLS handshake failed"),
        Err(_) => return debug!("TLS handshake timed out"),
    };
    let service = service_fn(move |request: Request<Incoming>| {
        let (mut router, leaving) = (router.clone(), leaving.clone());
        async move {
            let response = router.call(request.map(Body::new)).await;
            response.map(|response| if leaving.is_cancelled() { last(response) } else { response })
        }
    });
    let connection = accept::http1(IDLE_TIMEOUT, MAX_HEADER_BYTES).serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = closing.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        debug!(%error, "webhook connection ended");
    }
}

/// Signals that the next review must use another connection.
fn last(mut response: Response) -> Response {
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

#[cfg(test)]
mod tests;
