//! Alternative forms of paths: a base URL with `/v1` twice, without it, or with an additional slash.
//!
//! A path that can mean only one route is treated as that route. For any other path, the error names the route that was
//! probably meant.

use axum::body::Body;
use http::uri::PathAndQuery;
use http::{Request, Uri};
use modelrelay_protocol::paths::{POST_PATHS, endpoint};

/// Gives the request the path of the route that it means.
pub fn correct(request: &mut Request<Body>) {
    if let Some(path) = canonical(request.uri().path()) {
        set_path(request, &path);
    }
}

/// Replaces the request's path, and keeps its query.
pub(super) fn set_path<B>(request: &mut Request<B>, path: &str) {
    let path_and_query = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(path_and_query).ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
}

/// The client route that a path means; `None` if the path is a route already, or means none.
fn canonical(path: &str) -> Option<String> {
    if is_route(path) {
        return None;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let versions = parts.iter().take_while(|part| **part == "v1").count();
    let rest = parts.get(versions..)?.join("/");
    // llama-server has commands below `/models`.
    if versions == 0 && rest.starts_with("models/") {
        return None;
    }
    [format!("/v1/{rest}"), format!("/{rest}")].into_iter().find(|path| is_route(path))
}

/// The route whose end a path has.
pub fn meant(path: &str) -> Option<&'static str> {
    let path = path.trim_end_matches('/');
    let ends_like = |route: &str| path.ends_with(route.strip_prefix("/v1").unwrap_or(route));
    let routes = POST_PATHS.iter().map(|(route, _)| *route).chain(["/v1/models"]);
    routes.filter(|route| ends_like(route)).max_by_key(|route| route.len())
}

/// True if a path is a route for clients as it stands.
pub(super) fn is_route(path: &str) -> bool {
    ["POST", "GET"].iter().any(|method| endpoint(method, path).is_some())
        || matches!(path, "/v1/models" | "/props")
        || path.strip_prefix("/v1/models/").is_some_and(|id| !id.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_route_is_unchanged() {
        for path in
            ["/v1/chat/completions", "/rerank", "/v1/models", "/v1/models/org/m", "/health", "/admin/keys", "/metrics"]
        {
            assert_eq!(canonical(path), None, "{path}");
        }
    }

    #[test]
    fn alternative_spellings_become_route() {
        for (path, route) in [
            ("//v1/chat/completions", "/v1/chat/completions"),
            ("/v1//chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions/", "/v1/chat/completions"),
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/messages", "/v1/messages"),
            ("/models", "/v1/models"),
            ("/v1/props", "/props"),
            ("/v1/rerank/", "/v1/rerank"),
            ("//rerank", "/v1/rerank"),
            ("/v1/tokenize", "/tokenize"),
            ("/responses/resp_1/cancel", "/v1/responses/resp_1/cancel"),
        ] {
            assert_eq!(canonical(path).as_deref(), Some(route), "{path}");
        }
    }

    #[test]
    fn unknown_path_is_unchanged() {
        for path in [
            "/",
            "//",
            "/v1",
            "/v1/",
            "/v1/files",
            "/v2/chat/completions",
            "/api/chat",
            "/v1/responses/a/b",
            "/models/load",
        ] {
            assert_eq!(canonical(path), None, "{path}");
        }
    }

    #[test]
    fn intended_route_is_found_for_error() {
        assert_eq!(meant("/openai/v1/chat/completions"), Some("/v1/chat/completions"));
        assert_eq!(meant("/api/v1/models/"), Some("/v1/models"));
        assert_eq!(meant("/v1/files"), None);
    }
}
