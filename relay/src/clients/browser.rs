//! Rules for browsers on the routes for clients.
//!
//! | what | rule | where |
//! |---|---|---|
//! | a worker's response | not rendered, framed or run at the relay's origin; content that could be a page is plain text | [`confine`] |
//! | a request of a navigation, a frame, a script or an image | rejected | [`admit`] |
//! | a request of another site | rejected, unless `ALLOWED_ORIGINS` has its origin | [`admit`] |
//! | a response, read by a page of another origin | with `ALLOWED_ORIGINS` only | [`share`], [`preflight`] |
//! | a relay on loopback that requires no keys, under an unknown name | rejected, unless `PUBLIC_URL` or `ALLOWED_HOSTS` has it | [`check_host`] |
//!
//! The pages of the relay and `/admin` have rules of their own: `dashboard/pages.rs` and `admin.rs`.

use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ALLOW, CONTENT_TYPE, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use modelrelay_protocol::error::{ApiError, ErrorKind};
use modelrelay_protocol::paths::endpoint;

use super::{method_not_allowed, text_header};
use crate::http::body::discard_request;
use crate::http::respond::Client;
use crate::settings::config::{AllowedOrigins, Config};
use crate::state::Relay;

/// Headers of every response of a worker.
const CONFINED: [(HeaderName, &str); 3] = [
    (http::header::CONTENT_SECURITY_POLICY, "sandbox; default-src 'none'; frame-ancestors 'none'"),
    (http::header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// The content types of nearly all responses, which no browser runs or renders as a document.
const PASSIVE_TYPES: [&str; 2] = ["application/json", "text/event-stream"];

/// Parts of content types that a browser would run or render as a document.
const ACTIVE_TYPES: [&str; 13] = [
    "css",
    "ecmascript",
    "html",
    "javascript",
    "manifest",
    "mixed-replace",
    "pdf",
    "rfc822",
    "rules",
    "svg",
    "wasm",
    "xml",
    "xsl",
];

/// How long a browser caches a preflight, in seconds; no browser allows more.
const PREFLIGHT_SECONDS: &str = "7200";

/// Rejects requests that a browser sends for a page which may not use the relay.
///
/// # Errors
/// As [`check_host`], for a page, a script or an image, and for a POST from a page of another site.
pub fn admit(config: &Config, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    check_host(config, headers)?;
    let is_page = text_header(headers, "sec-fetch-mode") == Some("navigate")
        || text_header(headers, "sec-fetch-dest").is_some_and(|dest| dest != "empty");
    if is_page {
        let message =
            "this route is for fetch() and programs; a browser requested it as a page, a frame, a script or an image";
        return Err(ApiError::new(ErrorKind::CrossOrigin, message));
    }
    let is_cross_site = *method == Method::POST && text_header(headers, "sec-fetch-site") == Some("cross-site");
    if is_cross_site { check_origin(config, headers) } else { Ok(()) }
}

/// The origin of the page that sends a request, if `ALLOWED_ORIGINS` has it.
fn allowed_origin<'a>(config: &Config, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
    headers.get(ORIGIN).filter(|origin| origin.to_str().is_ok_and(|origin| config.allowed_origins.contains(origin)))
}

fn check_origin(config: &Config, headers: &HeaderMap) -> Result<(), ApiError> {
    if allowed_origin(config, headers).is_some() {
        return Ok(());
    }
    let origin: String = text_header(headers, "origin").unwrap_or("another site").chars().take(256).collect();
    let message = format!(
        "pages of {origin} may not use this relay; add the origin to ALLOWED_ORIGINS of the relay to allow them"
    );
    Err(ApiError::new(ErrorKind::CrossOrigin, message))
}

/// For a browser, a page whose name resolves to this machine (DNS rebinding) has the same origin as the relay. But it
/// cannot choose the name in `Host`, so unknown names are rejected.
///
/// # Errors
/// For a relay on loopback that requires no API key: when `Host` is a name that is neither local, nor `PUBLIC_URL`'s,
/// nor one of `ALLOWED_HOSTS`.
pub fn check_host(config: &Config, headers: &HeaderMap) -> Result<(), ApiError> {
    if config.require_api_keys || !config.listen_addr.ip().is_loopback() {
        return Ok(());
    }
    let Some(host) = text_header(headers, "host").map(name_of) else { return Ok(()) };
    let public = config
        .public_url
        .as_deref()
        .and_then(|url| url.split_once("://"))
        .map(|(_, rest)| name_of(rest.split('/').next().unwrap_or(rest)));
    let is_known = |known: &str| known.eq_ignore_ascii_case(host);
    if is_address(host)
        || is_private_name(host)
        || public.is_some_and(is_known)
        || config.allowed_hosts.iter().any(|known| is_known(known))
    {
        return Ok(());
    }
    let shown: String = host.chars().take(256).collect();
    let message = format!(
        "this relay serves only this machine and does not accept the host name {shown}; set PUBLIC_URL to the address that clients use, \
         add the name to ALLOWED_HOSTS, or require API keys"
    );
    Err(ApiError::new(ErrorKind::UnknownHost, message))
}

/// The name in `name:port`, without the brackets of an IPv6 address.
fn name_of(host: &str) -> &str {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split(']').next().unwrap_or(rest);
    }
    host.rsplit_once(':').map_or(host, |(name, _)| name)
}

/// True for names that cannot be registered on the internet: without a dot, or below a domain that is reserved for
/// private use (RFC 6761, RFC 6762, RFC 8375, and ICANN for `internal`).
fn is_private_name(name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    !name.contains('.')
        || [".localhost", ".local", ".internal", ".home.arpa"].iter().any(|domain| name.ends_with(domain))
}

fn is_address(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok()
}

/// `OPTIONS` of a route for clients: browsers send it before a request from a page of another origin. The key is not
/// checked, since a preflight has none.
pub async fn preflight(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
    let config = relay.shared.config.load();
    let headers = request.headers();
    if !headers.contains_key(ORIGIN) || !headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        // axum adds `Allow` only for methods that a route lacks, and this route has OPTIONS.
        let takes_post = endpoint("POST", request.uri().path()).is_some();
        let mut response = method_not_allowed(State(Arc::clone(&relay)), request).await;
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(if takes_post { "POST" } else { "GET" }));
        return response;
    }
    let response = match check_host(&config, headers).and_then(|()| check_origin(&config, headers)) {
        Ok(()) => permission(&config, headers),
        Err(error) => Client::of(&request).error(&error),
    };
    discard_request(request);
    response
}

/// The response to a preflight of an allowed origin.
fn permission(config: &Config, preflight: &HeaderMap) -> Response {
    let mut response = share(config, preflight, Response::new(Body::empty()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS));
    headers.append(VARY, HeaderValue::from_static("access-control-request-headers"));
    if let Some(names) = preflight.get(ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    if preflight.contains_key("access-control-request-private-network") {
        headers.insert("access-control-allow-private-network", HeaderValue::from_static("true"));
    }
    response
}

/// Lets the page that sent a request with these headers read the response or error, if `ALLOWED_ORIGINS` has its
/// origin.
pub fn share(config: &Config, request: &HeaderMap, mut response: Response) -> Response {
    let headers = response.headers_mut();
    let origin = match &config.allowed_origins {
        AllowedOrigins::None => return response,
        AllowedOrigins::Any => HeaderValue::from_static("*"),
        AllowedOrigins::Listed(_) => {
            headers.append(VARY, HeaderValue::from_static("origin"));
            let Some(origin) = allowed_origin(config, request) else { return response };
            origin.clone()
        }
    };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("cross-origin"));
    response
}

/// Restricts a worker's response to data at the relay's origin.
pub fn confine(headers: &mut HeaderMap) {
    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (first, second) = (types.next(), types.next());
    if second.is_some() || first.is_some_and(is_active) {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    }
    for (name, value) in CONFINED {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

fn is_active(content_type: &HeaderValue) -> bool {
    let Ok(text) = content_type.to_str() else { return true };
    let kind = text.split(';').next().unwrap_or(text);
    if PASSIVE_TYPES.iter().any(|passive| kind.eq_ignore_ascii_case(passive)) {
        return false;
    }
    let kind = kind.to_ascii_lowercase();
    ACTIVE_TYPES.iter().any(|part| kind.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_content_types_become_plain_text() {
        for active in [
            "text/html",
            "Text/HTML; charset=utf-8",
            "application/xhtml+xml",
            "image/svg+xml",
            "text/javascript",
            "application/pdf",
        ] {
            let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(active))]);
            confine(&mut headers);
            assert_eq!(headers[CONTENT_TYPE], "text/plain; charset=utf-8", "{active}");
        }
        for passive in [
            "application/json",
            "text/event-stream; charset=utf-8",
            "audio/mpeg",
            "image/png",
            "text/vtt",
            "application/x-odd; v=1",
        ] {
            let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(passive))]);
            confine(&mut headers);
            assert_eq!(headers[CONTENT_TYPE], passive);
        }
    }

    #[test]
    fn host_names_are_stripped_of_port() {
        let names = ["localhost:8080", "relay.example", "[::1]:8080", "127.0.0.1:1"].map(name_of);
        assert_eq!(names, ["localhost", "relay.example", "::1", "127.0.0.1"]);
    }
}
