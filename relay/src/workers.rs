//! The endpoint for workers: authentication and the upgrade.
//!
//! The checks have this order, so that an unauthenticated peer learns nothing: a valid WebSocket handshake (400, 426),
//! the lockout (429), the secret or token (401, compared for an unknown provider too), the provider (404, 403), its
//! links (503).

mod admission;
pub mod io;
mod read_ahead;
pub mod recheck;
pub mod session;
pub mod upgrade;

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::{HeaderValue, Request, StatusCode};
use hyper::upgrade::{OnUpgrade, Upgraded};
use tracing::{debug, warn};

pub use admission::Admission;
use admission::WorkerHandshake;

use crate::net::unfinished::Unfinished;
use crate::provider::Provider;
use crate::provider::shared::ProcessPhase;
use crate::state::Relay;
use crate::telemetry::metrics::ConnectionResult;
use io::Liveness;

/// `GET /v1/worker/connect`
pub async fn connect(State(relay): State<Arc<Relay>>, mut request: Request<Body>) -> Response {
    let accept = match upgrade::accept(request.headers()) {
        Ok(accept) => accept,
        Err(refusal) => return *refusal,
    };
    if relay.shared.phase() >= ProcessPhase::Leaving {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "the relay is shutting down");
    }
    let (provider, admission) = match admission::admit(&relay, WorkerHandshake::of(&relay, &request)).await {
        Ok(admitted) => admitted,
        Err(refusal) => return *refusal,
    };
    let Some(upgrade) = request.extensions_mut().remove::<OnUpgrade>() else {
        return refuse(StatusCode::BAD_REQUEST, "the connection does not support upgrades");
    };
    let Some(place) = provider.places.take(admission.address, relay.shared.config.load().max_connections) else {
        provider.series.worker_connected(ConnectionResult::TooManyLinks);
        warn!(provider = %provider.name, address = %admission.address, "too many links; worker refused");
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "too many links of this provider or address (MAX_CONNECTIONS)");
    };
    tokio::spawn(async move {
        let _place = place;
        match upgrade.await {
            Ok(upgraded) => serve(upgraded, provider, admission).await,
            Err(error) => debug!(%error, "worker upgrade failed"),
        }
    });
    upgrade::switching(accept)
}

async fn serve(upgraded: Upgraded, provider: Arc<Provider>, admission: Admission) {
    let liveness = Liveness::new(Instant::now(), Unfinished::message(Arc::clone(&provider.shared.budget)));
    let Some((socket, _place)) = upgrade::open(upgraded, &liveness).await else {
        warn!("unexpected connection type of a worker");
        return;
    };
    session::serve(socket, liveness, provider, admission).await;
}

/// Returns a rejection that is readable in a worker's log and with curl.
fn refuse(status: StatusCode, message: &str) -> Response {
    let body = serde_json::json!({ "error": { "message": message, "code": status.as_u16() } }).to_string();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    response.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
