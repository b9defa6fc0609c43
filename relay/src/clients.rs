//! The API for clients: the order in which a request is checked, and its response.

pub mod answer;
pub mod auth;
pub mod backend_headers;
pub mod browser;
pub mod class;
pub mod coding;
pub mod health;
pub mod inference;
pub mod intake;
pub mod models;
pub mod parse;
pub mod rewrite;
pub mod span;
pub mod spelling;
mod tenant;
pub mod ticket;
pub mod usage_request;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::header::UPGRADE;
use http::{HeaderMap, HeaderValue, Request};
use modelrelay_protocol::error::{ApiError, ErrorKind};

use crate::http::body::discard_request;
use crate::http::respond::Client;
use crate::state::Relay;

/// Returns 405; a WebSocket handshake gets its own error.
pub async fn method_not_allowed(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
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
    discard_request(request);
    response
}

/// Returns a header that is text; the first of several.
fn text_header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}
