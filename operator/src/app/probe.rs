//! The operator's `/metrics`, `/livez` and `/readyz`.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tracing::debug;

use crate::context::Context;
use crate::net::accept::{self, AcceptLimiter};

/// The timeout for a request's headers, and between requests. A client that scrapes less often reconnects.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Kubelets and Prometheus send some hundreds of bytes.
const MAX_HEADER_BYTES: usize = 16 << 10;

/// Returns the reason that the replica is not ready, if any.
pub type Readiness = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

struct Probe {
    context: Arc<Context>,
    readiness: Readiness,
}

/// Serves until the process ends.
pub async fn serve(listener: TcpListener, context: Arc<Context>, readiness: Readiness) {
    let app = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(Probe { context, readiness }));
    let limiter = AcceptLimiter::new(&listener, "probes");
    loop {
        let (stream, place) = limiter.next().await;
        let service = TowerToHyperService::new(app.clone());
        let connection =
            accept::http1(HEADER_TIMEOUT, MAX_HEADER_BYTES).serve_connection(TokioIo::new(stream), service);
        tokio::spawn(async move {
            let _place = place;
            if let Err(error) = connection.await {
                debug!(%error, "probe connection ended");
            }
        });
    }
}

async fn readyz(State(probe): State<Arc<Probe>>) -> impl IntoResponse {
    match (probe.readiness)() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

async fn metrics(State(probe): State<Arc<Probe>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], probe.context.metrics.render())
}

#[cfg(test)]
mod tests;
