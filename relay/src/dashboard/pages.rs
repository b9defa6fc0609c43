//! The pages and what they are made of: files of `relay/web`, as they are, in the program.

use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use sha2::{Digest, Sha256};

/// What a page may load and do: only what comes from here, nothing that is written into it, and in nobody's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'";

/// With every page and file.
const HEADERS: [(&str, &str); 4] = [
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
];

/// A file of `relay/web` and where it is found.
struct File {
    path: &'static str,
    content_type: &'static str,
    text: &'static str,
}

macro_rules! files {
    ($($path:literal => $file:literal, $content_type:literal;)*) => {
        &[$(File { path: $path, content_type: $content_type, text: include_str!(concat!("../../web/", $file)) }),*]
    };
}

static FILES: &[File] = files! {};

/// One for all files: a browser asks again after each new program, and is told at once that nothing is new else.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let mut digest = Sha256::new();
    FILES.iter().for_each(|file| digest.update(file.text));
    let digest: String = digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digest}\"")
});

/// All of them.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let add = |router: Router<S>, file: &'static File| {
        router.route(file.path, get(move |headers: HeaderMap| async move { file.answer(&headers) }))
    };
    FILES.iter().fold(Router::new(), add)
}

impl File {
    fn answer(&self, asked: &HeaderMap) -> Response {
        let is_known = asked.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == VERSION.as_bytes());
        let mut response = match is_known {
            true => StatusCode::NOT_MODIFIED.into_response(),
            false => Response::new(Body::from(self.text)),
        };
        let headers = response.headers_mut();
        for (name, value) in HEADERS {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.content_type));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        if let Ok(version) = HeaderValue::from_str(&VERSION) {
            headers.insert(ETAG, version);
        }
        response
    }
}
