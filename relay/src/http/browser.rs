//! What browsers may do with the routes for clients.
//!
//! | what | rule | where |
//! |---|---|---|
//! | a worker's response | not rendered, framed or run at the relay's origin; what could be a page is plain text | [`confine`] |
//! | a request of a navigation, a frame, a script or an image | refused | [`admit`] |
//! | a request of another site | refused, unless `ALLOWED_ORIGINS` has its origin | [`admit`] |
//! | a response, read by a page of another origin | with `ALLOWED_ORIGINS` only | [`share`], [`preflight`] |
//! | a relay on loopback that wants no keys, under an unknown name | refused, unless `PUBLIC_URL` or `ALLOWED_HOSTS` has it | [`check_host`] |
//!
//! The pages of the relay and `/admin` have rules of their own: `dashboard/pages.rs` and `admin.rs`.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_TYPE, HOST, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use modelrelay_protocol::error::{ApiError, ErrorKind};

use super::respond::Client;
use super::{discard, method_not_allowed};
use crate::config::{AllowedOrigins, Config};
use crate::relay::Relay;

/// With every response of a worker.
const CONFINED: [(HeaderName, &str); 3] = [
    (http::header::CONTENT_SECURITY_POLICY, "sandbox; default-src 'none'; frame-ancestors 'none'"),
    (http::header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

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

/// How long a browser remembers what a preflight said, in seconds; no browser takes more.
const PREFLIGHT_SECONDS: &str = "7200";

/// Refuses what a browser sends for somebody else than a program or a page that may use the relay.
///
/// # Errors
/// As [`check_host`], and for what a browser asked as a page, a script or an image, or for a page of another site.
pub fn admit(config: &Config, method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    check_host(config, headers)?;
    let origin = text(headers, &ORIGIN);
    if origin.is_some_and(|origin| config.allowed_origins.contains(origin)) {
        return Ok(());
    }
    let told = |name: &'static str| text(headers, &HeaderName::from_static(name));
    if told("sec-fetch-mode") == Some("navigate") || told("sec-fetch-dest").is_some_and(|dest| dest != "empty") {
        let message =
            "a browser asked for this as a page, a frame, a script or an image; this route is for fetch() and programs";
        return Err(ApiError::new(ErrorKind::CrossOrigin, message));
    }
    if *method == Method::POST && told("sec-fetch-site") == Some("cross-site") {
        return Err(other_origin(origin.unwrap_or("another site")));
    }
    Ok(())
}

fn other_origin(origin: impl Display) -> ApiError {
    let message =
        format!("pages of {origin} may not use this relay; ALLOWED_ORIGINS of the relay lists the origins that may");
    ApiError::new(ErrorKind::CrossOrigin, message)
}

/// A page that has its own name point to this machine (DNS rebinding) is of the same origin as the relay, for the browser. It cannot
/// choose the name, so names tell.
///
/// # Errors
/// For a relay on loopback that requires no API key: when `Host` is a name that is neither local, nor `PUBLIC_URL`'s, nor one of
/// `ALLOWED_HOSTS`.
pub fn check_host(config: &Config, headers: &HeaderMap) -> Result<(), ApiError> {
    if config.require_api_keys || !config.listen_addr.ip().is_loopback() {
        return Ok(());
    }
    let Some(host) = text(headers, &HOST).map(name_of) else { return Ok(()) };
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
        "this relay is for this machine and does not know the name {shown}; set PUBLIC_URL to the address that clients use, \
         list the name in ALLOWED_HOSTS, or require API keys"
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

/// Names that nobody on the internet can have: without a dot, or below a domain that is kept for private use (RFC 6761, RFC 6762,
/// RFC 8375, and ICANN for `internal`).
fn is_private_name(name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    !name.contains('.')
        || [".localhost", ".local", ".internal", ".home.arpa"].iter().any(|domain| name.ends_with(domain))
}

fn is_address(name: &str) -> bool {
    name.parse::<IpAddr>().is_ok()
}

/// `OPTIONS` of a route for clients: a browser asks before the request of a page of another origin. Before any key is looked at,
/// since a preflight has none.
pub async fn preflight(State(relay): State<Arc<Relay>>, request: Request<Body>) -> Response {
    let config = relay.shared.config.load();
    let headers = request.headers();
    let (Some(origin), true) = (text(headers, &ORIGIN), headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)) else {
        return method_not_allowed(State(Arc::clone(&relay)), request).await;
    };
    if let Err(error) = check_host(&config, headers) {
        return Client::of(&request).error(&error);
    }
    if !config.allowed_origins.contains(origin) {
        let shown: String = origin.chars().take(256).collect();
        let response = Client::of(&request).error(&other_origin(shown));
        discard(request);
        return response;
    }
    let asked = headers.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let wants_private_network = headers.contains_key("access-control-request-private-network");
    let mut response = share(&config, headers, Response::new(Body::empty()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let answer = response.headers_mut();
    answer.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    answer.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS));
    answer.append(VARY, HeaderValue::from_static("access-control-request-headers"));
    if let Some(asked) = asked {
        answer.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked);
    }
    if wants_private_network {
        answer.insert("access-control-allow-private-network", HeaderValue::from_static("true"));
    }
    discard(request);
    response
}

/// Lets the page that asked read a response or an error, if `ALLOWED_ORIGINS` has its origin.
pub fn share(config: &Config, asked: &HeaderMap, mut response: Response) -> Response {
    if config.allowed_origins == AllowedOrigins::None {
        return response;
    }
    let headers = response.headers_mut();
    let origin = match &config.allowed_origins {
        AllowedOrigins::Any => HeaderValue::from_static("*"),
        AllowedOrigins::None | AllowedOrigins::Listed(_) => {
            headers.append(VARY, HeaderValue::from_static("origin"));
            let Some(origin) = asked
                .get(ORIGIN)
                .filter(|_| text(asked, &ORIGIN).is_some_and(|origin| config.allowed_origins.contains(origin)))
            else {
                return response;
            };
            origin.clone()
        }
    };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("cross-origin"));
    response
}

/// Keeps a worker's response from being more than data at the relay's origin.
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
    let kind = text.split(';').next().unwrap_or(text).to_ascii_lowercase();
    ACTIVE_TYPES.iter().any(|part| kind.contains(part))
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
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
    fn names_lose_their_port() {
        let names = ["localhost:8080", "relay.example", "[::1]:8080", "127.0.0.1:1"].map(name_of);
        assert_eq!(names, ["localhost", "relay.example", "::1", "127.0.0.1"]);
    }
}
