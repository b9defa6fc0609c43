//! The routes of each listener.

use std::sync::Arc;

use ::http::header::CONNECTION;
use ::http::{HeaderValue, Request, StatusCode};
use axum::body::Body;
use axum::extract::DefaultBodyLimit;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Router, middleware};
use modelrelay_protocol::paths::POST_PATHS;
use tower_service::Service;

use crate::clients::{self, browser, health, inference, models};
use crate::dashboard::Dashboard;
use crate::http::respond::Client;
use crate::http::{fallback, framing, url_forms};
use crate::login::authenticate_page;
use crate::state::Relay;
use crate::{admin, dashboard, workers};

/// The routes that a listener serves.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ListenerRoutes {
    /// The API for clients.
    pub(super) clients: bool,
    /// The worker socket.
    pub(super) workers: bool,
    /// `/admin`, `/metrics` and the pages.
    pub(super) admin: bool,
}

/// Returns the routes of one listener. Every listener responds to probes.
pub(super) fn router(relay: Arc<Relay>, pages: &Arc<Dashboard>, parts: ListenerRoutes) -> Router {
    let mut router = Router::new()
        .route("/health", get(health::health))
        .route("/livez", get(health::livez))
        .route("/readyz", get(health::readyz));
    if parts.clients {
        for (path, _) in POST_PATHS {
            router = router.route(path, post(inference::by_model).options(browser::preflight));
        }
        router = router
            .route("/v1/responses/{id}", get(inference::by_response_id).options(browser::preflight))
            .route("/v1/responses/{id}/cancel", post(inference::by_response_id).options(browser::preflight))
            .route("/v1/models", get(models::list).options(browser::preflight))
            .route("/v1/models/{*id}", get(models::one).options(browser::preflight))
            .route("/props", get(models::props).options(browser::preflight));
    }
    if parts.workers {
        router = router.route("/v1/worker/connect", get(workers::connect));
    }
    if parts.admin {
        router = router
            .merge(admin::router(Arc::clone(&relay), dashboard::admin_routes(pages)))
            .merge(dashboard::router(pages));
        if !parts.clients {
            router = router.merge(test_boxes(&relay));
        }
    }
    router
        .fallback(fallback::not_found)
        .method_not_allowed_fallback(clients::method_not_allowed)
        // Bodies are limited where they are read, by `MAX_REQUEST_BYTES` and the memory budget.
        .layer(DefaultBodyLimit::disable())
        .with_state(relay)
}

/// The routes for the pages' test boxes if clients have a separate listener. They require a client's credentials and
/// also a login, because this listener is for admins.
fn test_boxes(relay: &Arc<Relay>) -> Router<Arc<Relay>> {
    Router::new()
        .route("/v1/chat/completions", post(inference::by_model).fallback(fallback::not_found))
        .route("/v1/models", get(models::list).fallback(fallback::not_found))
        .layer(middleware::from_fn_with_state(Arc::clone(relay), authenticate_page))
}

/// Returns the response to one request, which carries the request's id on every route.
pub(super) async fn answer(router: &mut Router, mut request: Request<Body>) -> Response {
    url_forms::correct(&mut request);
    let client = Client::read(&request);
    let mut response = match framing::fault(&request) {
        None => {
            request.extensions_mut().insert(client.clone());
            router.call(request).await.unwrap_or_else(|never| match never {})
        }
        Some(fault) => {
            let mut response = client.refuse(request.method(), request.uri(), &fault);
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            response
        }
    };
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        client.stamp(response.headers_mut());
    }
    response
}
