//! Decides which requests may drain the worker through its probe server.
//!
//! With a token, any client that sends it, by any method: a kubelet's hook sends a GET. Without one, any client that
//! reaches the port, except web pages in a browser on this machine. A page can make a browser send a GET or a form to
//! any address, but not a custom header to another site. By DNS rebinding it can make this address its own site; then
//! `Host` is a name of its choice. So without a token the worker requires a POST with such a header, and a `Host` that
//! no page can have as its name.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::{HeaderMap, Method, header};
use modelrelay_protocol::secret::Secret;

/// The header that is required without a token.
const DRAIN_HEADER: &str = "x-modelrelay-drain";

/// The header that contains the token.
const TOKEN_HEADER: &str = "x-modelrelay-drain-token";

/// Returns the reason to reject a drain, if there is one.
pub(super) fn refusal(token: Option<&Secret>, method: &Method, headers: &HeaderMap) -> Option<&'static str> {
    if let Some(token) = token {
        let presented = headers.get(TOKEN_HEADER).and_then(|value| value.to_str().ok());
        let is_right = token.verify(presented.unwrap_or_default());
        return (!is_right).then_some("x-modelrelay-drain-token is missing or wrong\n");
    }
    if ["origin", "referer", "sec-fetch-site"].iter().any(|name| headers.contains_key(*name)) {
        return Some("a browser cannot drain without a token: set DRAIN_TOKEN, or use curl\n");
    }
    if *method != Method::POST || !headers.contains_key(DRAIN_HEADER) {
        return Some("without a token, send a POST with the header `x-modelrelay-drain: 1`, or set DRAIN_TOKEN\n");
    }
    let host = headers.get(header::HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    (!is_address(host)).then_some("without a token, use an IP address or localhost in the URL, or set DRAIN_TOKEN\n")
}

/// True for an IP address or `localhost`, with or without a port.
fn is_address(host: &str) -> bool {
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok());
    }
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: (&str, &str) = (DRAIN_HEADER, "1");

    fn headers(of: &[(&'static str, &'static str)]) -> HeaderMap {
        of.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn is_refused(token: Option<&Secret>, method: &Method, of: &[(&'static str, &'static str)]) -> bool {
        refusal(token, method, &headers(of)).is_some()
    }

    #[test]
    fn tokenless_drain_needs_post_header_and_address() {
        for host in ["127.0.0.1:17990", "127.0.0.1", "[::1]:17990", "localhost:17990", "LOCALHOST", "10.0.0.7:1"] {
            assert!(!is_refused(None, &Method::POST, &[OURS, ("host", host)]), "{host}");
            assert!(is_refused(None, &Method::GET, &[OURS, ("host", host)]), "{host}");
            assert!(is_refused(None, &Method::POST, &[("host", host)]), "{host}");
            assert!(is_refused(None, &Method::POST, &[OURS, ("host", host), ("origin", "null")]), "{host}");
        }
        for host in ["evil.example:17990", "localhost.evil.example", "127.0.0.1.evil.example", "[evil]", ""] {
            assert!(is_refused(None, &Method::POST, &[OURS, ("host", host)]), "{host}");
        }
        assert!(is_refused(None, &Method::POST, &[OURS]));
    }

    #[test]
    fn token_suffices_by_any_method_and_host() {
        let token = Secret::new("right");
        let shown = [(TOKEN_HEADER, "right"), ("host", "gpu-1.example")];
        assert!(!is_refused(Some(&token), &Method::GET, &shown) && !is_refused(Some(&token), &Method::POST, &shown));
        assert!(is_refused(Some(&token), &Method::POST, &[(TOKEN_HEADER, "wrong"), OURS, ("host", "127.0.0.1")]));
        assert!(is_refused(Some(&token), &Method::POST, &[OURS, ("host", "127.0.0.1")]));
    }
}
