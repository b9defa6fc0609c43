//! The response to a request that no route serves.

use axum::body::Body;
use axum::response::Response;
use http::Request;
use modelrelay_protocol::error::{ApiError, ErrorKind};

use super::body::discard_request;
use super::respond::Client;
use super::url_forms;

/// Returns 404 with the route that the path probably means.
pub(crate) async fn not_found(request: Request<Body>) -> Response {
    let client = Client::of(&request);
    let path: String = request.uri().path().chars().take(256).collect();
    let meant = url_forms::meant(&path).map(|route| format!("; did you mean {route}?")).unwrap_or_default();
    let message = format!("no route for {} {path}{meant}", request.method());
    let error = ApiError::new(ErrorKind::NotFound, message);
    let response = client.refuse(request.method(), request.uri(), &error);
    discard_request(request);
    response
}
