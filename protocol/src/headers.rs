//! The headers that the relay forwards, in each direction.
//!
//! Both directions use an allow-list. An unknown header must not reach a GPU machine, and a header of a backend must
//! not control the browser or the proxy that reads the response: set a cookie, register a service worker, name a file
//! to serve.

use http::{HeaderMap, HeaderName};

/// Headers of a client that go to the backend, besides the credentials.
pub const REQUEST_HEADERS: [&str; 14] = [
    "content-type",
    "accept",
    "anthropic-version",
    "anthropic-beta",
    "openai-organization",
    "openai-project",
    "openai-beta",
    "x-request-id",
    "traceparent",
    "tracestate",
    "baggage",
    "idempotency-key",
    "x-session-affinity",
    "x-session-id",
];

/// Headers that carry a client's credentials; forwarded only when they are not the relay's own.
pub const CREDENTIAL_HEADERS: [&str; 2] = ["authorization", "x-api-key"];

/// The prefix of every API key of a relay; such a value is never forwarded.
pub const OWN_KEY_PREFIX: &str = "mr-";

/// The prefix of every API key of the published relay. Clients that migrate may still send one.
pub const PUBLISHED_KEY_PREFIX: &str = "mr_live_";

/// Hop-by-hop headers (RFC 9110 §7.6.1 and similar ones).
const HOP_BY_HOP: [&str; 10] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "trailers",
    "transfer-encoding",
    "upgrade",
];

/// Headers of a backend that clients receive, because SDKs and agents read them.
pub const RESPONSE_HEADERS: [&str; 20] = [
    "age",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "date",
    "deprecation",
    "etag",
    "expires",
    "last-modified",
    "pragma",
    "retry-after",
    "retry-after-ms",
    "server-timing",
    "sunset",
    "vary",
    "x-process-time",
    "x-response-time",
    "x-should-retry",
];

/// Prefixes of further names: rate limits, and headers of OpenAI and Anthropic.
pub const RESPONSE_HEADER_PREFIXES: [&str; 4] = ["anthropic-", "openai-", "ratelimit-", "x-ratelimit-"];

/// Headers that steer a browser or a proxy, by the beginnings of their names. No setting lets them through.
const STEERING_HEADERS: [&str; 33] = [
    "accept-ch",
    "access-control-",
    "alt-svc",
    "attribution-reporting-",
    "clear-site-data",
    "content-location",
    "content-security-policy",
    "critical-ch",
    "cross-origin-",
    "document-policy",
    "expect-ct",
    "link",
    "location",
    "nel",
    "origin-",
    "permissions-policy",
    "refresh",
    "report-to",
    "reporting-endpoints",
    "sec-",
    "service-worker-",
    "set-cookie",
    "sourcemap",
    "speculation-rules",
    "strict-transport-security",
    "supports-loading-mode",
    "timing-allow-origin",
    "www-authenticate",
    "x-accel-",
    "x-content-type-options",
    "x-frame-options",
    "x-lighttpd-",
    "x-sendfile",
];

/// True if a client's header of this (lower-case) name may go to the backend.
pub fn is_request_header(name: &str) -> bool {
    REQUEST_HEADERS.contains(&name) || CREDENTIAL_HEADERS.contains(&name)
}

/// Headers of a client that no setting forwards to backends: those of the connection and of the body's encoding, those
/// that name the relay itself, and those that browsers or workers present to the relay.
const KEPT_REQUEST_HEADERS: [&str; 10] = [
    "accept-encoding",
    "content-encoding",
    "content-length",
    "cookie",
    "expect",
    "forwarded",
    "host",
    "origin",
    "referer",
    "x-worker-secret",
];

/// True if a setting may let a client's header of this (lower-case) name through to backends.
pub fn may_be_request_header(name: &str) -> bool {
    !HOP_BY_HOP.contains(&name) && !KEPT_REQUEST_HEADERS.contains(&name) && !name.starts_with("x-modelrelay-")
}

/// True if the relay forwards a client's header of this (lower-case) name. `further` are the names that a setting adds.
pub fn is_forwarded_header(name: &str, further: &[String]) -> bool {
    is_request_header(name) || further.iter().any(|known| known == name)
}

/// True if a backend's header of this (lower-case) name may go to the client, before `Connection` is consulted. The
/// relay's own request ids replace the backend's, and the length is that of the bytes actually sent.
pub fn is_response_header(name: &str) -> bool {
    !HOP_BY_HOP.contains(&name) && !matches!(name, "content-length" | "x-request-id" | "request-id")
}

/// True if clients receive a backend's header of this (lower-case) name. `further` are the names that a setting adds.
pub fn is_client_header(name: &str, further: &[String]) -> bool {
    RESPONSE_HEADERS.contains(&name)
        || RESPONSE_HEADER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || further.iter().any(|known| known == name)
}

/// True if a setting may let a header of this (lower-case) name through to clients.
pub fn may_be_client_header(name: &str) -> bool {
    is_response_header(name)
        && !name.starts_with("x-modelrelay-")
        && !STEERING_HEADERS.iter().any(|start| name.starts_with(start))
}

/// True if a credential header's value holds one of a relay's own API keys: under any scheme or none, alone or in a
/// list.
pub fn is_own_key(value: &str) -> bool {
    credential_words(value).any(|word| word.starts_with(OWN_KEY_PREFIX) || word.starts_with(PUBLISHED_KEY_PREFIX))
}

/// The minimum length in characters of a text with a key's prefix that is treated as a key; all real keys are longer.
const SHORTEST_KEY: usize = 28;

/// True if a text resembles an API key, of a relay or of another vendor: such a text is not logged, wherever it was
/// written.
pub fn looks_like_key(text: &str) -> bool {
    let begins = [OWN_KEY_PREFIX, PUBLISHED_KEY_PREFIX, "sk-", "Bearer "].iter().any(|start| text.starts_with(start));
    begins && text.len() >= SHORTEST_KEY
}

/// The parts of a credential header's value that may be a credential: each token, under any scheme or none, alone or in
/// a list.
pub fn credential_words(value: &str) -> impl Iterator<Item = &str> {
    value.split([' ', '\t', ','])
}

/// The token of `Bearer <token>`, or the unchanged value.
pub fn bearer_token(value: &str) -> &str {
    let value = value.trim();
    match value.split_at_checked(7) {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer ") => token.trim(),
        _ => value,
    }
}

/// Returns the backend's headers that may go to the client, in order, with repeats. Headers named in `Connection` are
/// left out, and so are values that are not text, which JSON cannot carry.
pub fn response_pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let named = connection_tokens(headers);
    headers
        .iter()
        .filter(|(name, _)| is_response_header(name.as_str()) && !named.contains(name))
        .filter_map(|(name, value)| Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned())))
        .collect()
}

/// The names that a `Connection` header lists.
pub fn connection_tokens(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(http::header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|token| token.trim().parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn token_is_read_with_and_without_scheme() {
        for value in ["Bearer t-1", "bearer  t-1 ", " BEARER t-1", "t-1", " t-1"] {
            assert_eq!(bearer_token(value), "t-1", "{value}");
        }
        assert_eq!(bearer_token("Basic eHg6eQ=="), "Basic eHg6eQ==");
    }

    #[test]
    fn only_listed_headers_reach_backend() {
        for name in ["content-type", "authorization", "x-api-key", "anthropic-beta", "idempotency-key"] {
            assert!(is_request_header(name), "{name}");
        }
        for name in [
            "host",
            "cookie",
            "user-agent",
            "x-forwarded-for",
            "x-stainless-os",
            "x-conversation-id",
            "accept-encoding",
            "content-length",
            "connection",
        ] {
            assert!(!is_request_header(name), "{name}");
        }
    }

    #[test]
    fn setting_adds_request_headers_but_no_steering_ones() {
        let further = ["user-agent".to_owned()];
        assert!(is_forwarded_header("user-agent", &further) && !is_forwarded_header("user-agent", &[]));
        for name in ["cookie", "host", "te", "transfer-encoding", "x-worker-secret", "x-modelrelay-provider"] {
            assert!(!may_be_request_header(name), "{name}");
        }
        assert!(REQUEST_HEADERS.iter().all(|name| may_be_request_header(name)));
    }

    #[test]
    fn relay_keys_are_recognised_in_either_header() {
        assert!(is_own_key("Bearer mr-abc-def") && is_own_key("bearer  mr-abc") && is_own_key("mr-abc-def"));
        assert!(is_own_key("Bearer mr_live_abc") && is_own_key("mr_live_abc"));
        for odd in ["Bearer\tmr-abc", "Token mr-abc", "Bearer sk-abc, Bearer mr-abc", "sk-abc,mr-abc", " mr-abc"] {
            assert!(is_own_key(odd), "{odd:?} would reach a backend");
        }
        assert!(!is_own_key("Bearer sk-abc") && !is_own_key("sk-mr-abc") && !is_own_key(""));
    }

    #[test]
    fn keys_are_distinguished_from_model_names() {
        for key in ["mr-f7ipcwmraanq-mqx2fcp3hkw6d7kq282xw5qf7ncmq72k", "sk-ant-api03-aaaaaaaaaaaaaaaaaaaaaaaa"] {
            assert!(looks_like_key(key), "{key}");
        }
        assert!(!looks_like_key("mr-small") && !looks_like_key("meta-llama/Llama-3.3-70B-Instruct-FP8-dynamic"));
    }

    #[test]
    fn headers_that_steer_browsers_never_reach_clients() {
        let steering = ["set-cookie", "service-worker-allowed", "x-accel-redirect", "location", "link", "refresh"];
        for name in steering.into_iter().chain(["access-control-allow-origin", "www-authenticate", "x-request-id"]) {
            assert!(!is_client_header(name, &[]) && !may_be_client_header(name), "{name}");
        }
        assert!(RESPONSE_HEADERS.iter().all(|name| may_be_client_header(name)));
    }

    #[test]
    fn listed_and_configured_headers_reach_clients() {
        for name in ["content-type", "retry-after", "x-ratelimit-limit-requests", "openai-processing-ms"] {
            assert!(is_client_header(name, &[]), "{name}");
        }
        assert!(!is_client_header("x-build", &[]) && is_client_header("x-build", &["x-build".to_owned()]));
    }

    #[test]
    fn response_headers_keep_repeats_but_no_connection_headers() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("connection", "close, x-hop"),
            ("x-hop", "1"),
            ("content-length", "3"),
            ("x-request-id", "theirs"),
            ("x-kept", "yes"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers.append("x-binary", HeaderValue::from_bytes(b"\xff").unwrap());
        let kept = response_pairs(&headers);
        let kept: Vec<_> = kept.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(kept, [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-kept", "yes")]);
    }
}
