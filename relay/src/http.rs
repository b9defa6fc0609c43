//! The HTTP server: routes, and the order in which a request is checked.

pub mod answer;
pub mod auth;
pub mod base_path;
pub mod browser;
pub mod coding;
pub mod framing;
pub mod health;
pub mod inference;
pub mod intake;
pub mod models;
pub mod parse;
pub mod peer;
pub mod respond;
pub mod spelling;
pub mod ticket;
pub mod url_forms;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::Response;
use axum::routing::{get, post};
use http::header::UPGRADE;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::paths::POST_PATHS;
use tower_service::Service;

use crate::relay::Relay;
use crate::{admin, dashboard, socket};
use respond::Client;

/// The routes that a listener serves.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// The API for clients.
    pub clients: bool,
    /// The worker socket.
    pub workers: bool,
    /// `/admin`, `/metrics` and the pages.
    pub admin: bool,
}

/// Returns the routes of one listener. Every listener responds to probes.
pub fn router(relay: Arc<Relay>, parts: Parts) -> Router {
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
        router = router.route("/v1/worker/connect", get(socket::connect));
    }
    if parts.admin {
        router = router.merge(admin::router(Arc::clone(&relay))).merge(dashboard::router());
        if !parts.clients {
            router = router.merge(dashboard::test_boxes(&relay));
        }
    }
    router
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        // Bodies are limited where they are read, by `MAX_REQUEST_BYTES` and the memory budget.
        .layer(DefaultBodyLimit::disable())
        .with_state(relay)
}

/// Returns the response to one request, which carries the request's id on every route.
pub async fn answer(router: &mut Router, mut request: Request<Body>) -> Response {
    url_forms::correct(&mut request);
    let client = Client::read(&request);
    let mut response = match framing::fault(&request) {
        None => {
            request.extensions_mut().insert(client.clone());
            router.call(request).await.unwrap_or_else(|never| match never {})
        }
        Some(fault) => {
            let mut response = client.refuse(request.method(), request.uri(), &fault);
            response.headers_mut().insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            response
        }
    };
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        client.stamp(response.headers_mut());
    }
    response
}

pub(crate) async fn not_found(request: Request<Body>) -> Response {
    let client = Client::of(&request);
    let path: String = request.uri().path().chars().take(256).collect();
    let meant = url_forms::meant(&path).map(|route| format!("; did you mean {route}?")).unwrap_or_default();
    let message = format!("no route for {} {path}{meant}", request.method());
    let error = ApiError::new(ErrorKind::NotFound, message);
    let response = client.refuse(request.method(), request.uri(), &error);
    discard(request);
    response
}

async fn method_not_allowed(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
    let client = Client::of(&request);
    let wants_websocket =
        request.headers().get(UPGRADE).is_some_and(|upgrade| upgrade.as_bytes().eq_ignore_ascii_case(b"websocket"));
    let response = if wants_websocket {
        let message = format!("{} does not support WebSocket: use HTTP POST", request.uri().path());
        let error = ApiError::new(ErrorKind::NoWebSocket, message);
        let mut response = client.refuse(request.method(), request.uri(), &error);
        response.headers_mut().insert(UPGRADE, HeaderValue::from_static("HTTP/1.1"));
        response
    } else {
        let message = format!("method {} not allowed for {}", request.method(), request.uri().path());
        client.refuse(request.method(), request.uri(), &ApiError::new(ErrorKind::MethodNotAllowed, message))
    };
    let response = browser::share(&relay.shared.config.load(), request.headers(), response);
    discard(request);
    response
}

/// Returns a header that is text; the first of several.
fn text_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn discard(request: Request<Body>) {
    let (parts, body) = request.into_parts();
    intake::discard(&parts.headers, body);
}
