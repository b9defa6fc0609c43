//! The path of `PUBLIC_URL`, below which a reverse proxy serves the relay, such as `/llm` of `https://host/llm`.
//!
//! Some proxies strip this path from the requests that they pass on, others keep it. The relay strips a path that was
//! kept before it routes the request, so that no route, log line or limit knows of it.

use http::Request;

use super::url_forms;

/// The first segments of the relay's own routes. A base path that begins with one of them would be ambiguous.
pub const RESERVED: [&str; 8] = ["admin", "dashboard", "health", "integrate", "livez", "metrics", "readyz", "setup"];

/// The path of a URL that has no slash at its end; empty where it has none.
pub fn of(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.find('/').map_or("", |at| &rest[at..])
}

/// True if a path can be a base path: no segment of it is empty, and the first is none of the relay's own.
pub fn is_usable(base: &str) -> bool {
    let first = base.split('/').nth(1);
    !base.contains("//") && first.is_none_or(|first| !RESERVED.contains(&first))
}

/// Strips `base` from the request's path.
pub fn strip<B>(base: &str, request: &mut Request<B>) {
    if base.is_empty() {
        return;
    }
    if let Some(path) = below(base, request.uri().path()).map(str::to_owned) {
        url_forms::set_path(request, &path);
    }
}

/// The rest of a path that begins with all segments of `base`. A path that is a route already is none: a proxy stripped
/// its base.
fn below<'a>(base: &str, path: &'a str) -> Option<&'a str> {
    let rest = path.strip_prefix(base)?;
    match rest {
        "" => Some("/"),
        _ if rest.starts_with('/') && !is_route(path) => Some(rest),
        _ => None,
    }
}

fn is_route(path: &str) -> bool {
    path == "/v1/worker/connect" || url_forms::is_route(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_path_follows_authority() {
        for (url, base) in
            [("https://relay.example", ""), ("https://relay.example:8443/llm", "/llm"), ("http://[::1]:80/a/b", "/a/b")]
        {
            assert_eq!(of(url), base, "{url}");
        }
        assert!(is_usable("") && is_usable("/a/b") && is_usable("/administration") && is_usable("/llm/admin"));
        assert!(!is_usable("/admin") && !is_usable("/setup/x") && !is_usable("//llm") && !is_usable("/llm//x"));
    }

    #[test]
    fn base_path_is_stripped_at_segment_boundary() {
        for (path, rest) in [
            ("/llm", Some("/")),
            ("/llm/", Some("/")),
            ("/llm/v1/models", Some("/v1/models")),
            ("/llm//v1/models", Some("//v1/models")),
            ("/llm/llm/health", Some("/llm/health")),
            ("/llmfoo/v1/models", None),
            ("/llmfoo", None),
            ("/v1/models", None),
            ("/LLM/v1/models", None),
            ("*", None),
        ] {
            assert_eq!(below("/llm", path), rest, "{path}");
        }
    }

    #[test]
    fn route_path_keeps_its_segments() {
        assert_eq!(below("/api", "/api/chat"), None);
        assert_eq!(below("/api", "/api/api/chat"), Some("/api/chat"));
        assert_eq!(below("/api", "/api/v1/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(below("/v1", "/v1/worker/connect"), None);
        assert_eq!(below("/v1", "/v1/admin/state"), Some("/admin/state"));
    }
}
