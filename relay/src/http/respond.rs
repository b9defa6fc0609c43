//! The relay's responses to one client: its dialect, its request id, its errors.

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri};
use modelrelay_protocol::dialect::Dialect;
use modelrelay_protocol::error::ApiError;
use modelrelay_protocol::paths::{self, POST_PATHS};

use crate::net::peer::Flushed;
use crate::system::ids;
use crate::telemetry::journal::PER_REQUEST;

/// The longest request id that is accepted from a client.
const MAX_REQUEST_ID_CHARS: usize = 128;

/// The common part of every response to one request.
#[derive(Clone, Debug)]
pub struct Client {
    /// The id in the response: the client's own, or a new one.
    pub request_id: String,
    /// The format of errors.
    pub dialect: Dialect,
    /// Tracks whether its connection has sent all its output.
    pub flushed: Option<Flushed>,
}

impl Client {
    /// The client of a request. All callers get the same one, so that the id in an error is the one in the headers.
    pub fn of<B>(request: &Request<B>) -> Self {
        request.extensions().get().cloned().unwrap_or_else(|| Self::read(request))
    }

    /// Creates the client from a request's head.
    pub fn read<B>(request: &Request<B>) -> Self {
        let request_id = own_request_id(request.headers()).map_or_else(ids::client_request_id, str::to_owned);
        Self {
            request_id,
            dialect: dialect(request.uri().path(), request.headers()),
            flushed: request.extensions().get().cloned(),
        }
    }

    /// An error response.
    pub fn error(&self, error: &ApiError) -> Response {
        let mut response = self.json(error.status(), self.dialect.error_body(error, &self.request_id));
        for (name, value) in error.headers() {
            if let Ok(value) = HeaderValue::try_from(value) {
                response.headers_mut().insert(HeaderName::from_static(name), value);
            }
        }
        response
    }

    /// An error response to a request that reaches no provider, with its line in the log. A path may contain anything,
    /// so only the route is logged.
    pub fn refuse(&self, method: &Method, uri: &Uri, error: &ApiError) -> Response {
        tracing::info!(
            target: PER_REQUEST,
            request_id = self.request_id,
            method = method.as_str(),
            route = route_of(uri.path()),
            code = error.code(),
            status = error.status(),
            "request refused"
        );
        self.error(error)
    }

    /// A JSON response.
    pub fn json(&self, status: u16, body: Vec<u8>) -> Response {
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(http::header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }

    /// Adds the request id under both names that SDKs read.
    pub fn stamp(&self, headers: &mut HeaderMap) {
        if let Ok(value) = HeaderValue::try_from(self.request_id.as_str()) {
            headers.insert("x-request-id", value.clone());
            headers.insert("request-id", value);
        }
    }
}

/// The client route that a path belongs to, without the parts that the client chooses.
fn route_of(path: &str) -> Option<&'static str> {
    let fixed = POST_PATHS.iter().map(|(route, _)| *route).find(|route| *route == path);
    fixed.or_else(|| match path {
        "/v1/models" => Some("/v1/models"),
        "/props" => Some("/props"),
        _ if path.starts_with("/v1/models/") => Some("/v1/models/{id}"),
        _ if path.starts_with("/v1/responses/") => Some("/v1/responses/{id}"),
        _ => None,
    })
}

fn own_request_id(headers: &HeaderMap) -> Option<&str> {
    let id = headers.get("x-request-id")?.to_str().ok()?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    (!id.is_empty() && id.len() <= MAX_REQUEST_ID_CHARS && id.bytes().all(plain)).then_some(id)
}

fn dialect(path: &str, headers: &HeaderMap) -> Dialect {
    if path == "/v1/messages" || path.starts_with("/v1/messages/") || headers.contains_key("anthropic-version") {
        return Dialect::Anthropic;
    }
    paths::endpoint("POST", path)
        .or_else(|| paths::endpoint("GET", path))
        .map_or(Dialect::OpenAi, paths::Endpoint::dialect)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(path: &str, headers: &[(&'static str, &str)]) -> Client {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Client::of(&request.body(()).unwrap())
    }

    #[test]
    fn plain_request_id_of_client_is_kept() {
        assert_eq!(client("/", &[("x-request-id", "a.B_1-2")]).request_id, "a.B_1-2");
        for bad in ["", "a b", "ä", &"x".repeat(129)] {
            assert_ne!(client("/", &[("x-request-id", bad)]).request_id, bad);
        }
    }

    #[test]
    fn route_contains_no_client_text() {
        assert_eq!(route_of("/v1/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(route_of("/v1/models/secret"), Some("/v1/models/{id}"));
        assert_eq!(route_of("/secret"), None);
    }

    #[test]
    fn dialect_follows_path_or_version_header() {
        assert_eq!(client("/v1/messages/count_tokens?beta=true", &[]).dialect, Dialect::Anthropic);
        assert_eq!(client("/v1/models", &[("anthropic-version", "2023-06-01")]).dialect, Dialect::Anthropic);
        assert_eq!(client("/v1/responses", &[]).dialect, Dialect::Responses);
        assert_eq!(client("/v1/messagesx", &[]).dialect, Dialect::OpenAi);
    }
}
