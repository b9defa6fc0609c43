//! Errors for admins, in the shape of the API's other errors.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::{CACHE_CONTROL, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, StatusCode};
use serde_json::json;

/// Keeps responses to admins out of caches, and keeps browsers from guessing their content type.
pub(crate) async fn unstored(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// An error for an admin, in the shape of the API's other errors.
pub(crate) fn problem(status: StatusCode, code: &str, message: impl Into<String>) -> Response {
    problem_in(status, code, message, None)
}

/// The same, with the name of the field at fault.
pub(crate) fn problem_in(status: StatusCode, code: &str, message: impl Into<String>, field: Option<&str>) -> Response {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let body = json!({ "error": { "message": message.into(), "type": kind, "param": field, "code": code } });
    (status, Json(body)).into_response()
}
