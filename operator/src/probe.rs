//! `/metrics`, `/livez` and `/readyz` of the operator.

use std::io;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::context::Context;

/// Says why the replica is not ready, if so.
pub type Readiness = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

struct Probe {
    context: Arc<Context>,
    readiness: Readiness,
}

/// Serves until the process ends.
pub async fn serve(listener: TcpListener, context: Arc<Context>, readiness: Readiness) -> io::Result<()> {
    let app = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(Probe { context, readiness }));
    axum::serve(listener, app).await
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
