//! The pages and their assets: the files of `relay/web`, compiled into the program unchanged.

use std::sync::LazyLock;

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, IF_NONE_MATCH};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use modelrelay_protocol::config_hash::content_hash;

/// The pages' content security policy: they may load only the relay's own files, run no inline code, and appear in no
/// frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; \
                      font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'";

/// The headers of every page and file.
const HEADERS: [(&str, &str); 4] = [
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
];

/// A file of `relay/web` and its path.
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

static FILES: &[File] = files! {
    "/dashboard" => "dashboard.html", "text/html; charset=utf-8";
    "/setup" => "setup.html", "text/html; charset=utf-8";
    "/integrate" => "integrate.html", "text/html; charset=utf-8";
    "/dashboard/assets/api.js" => "api.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/base.css" => "base.css", "text/css; charset=utf-8";
    "/dashboard/assets/chart.js" => "chart.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/chat.js" => "chat.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/choice.js" => "choice.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/clock.js" => "clock.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/commands.js" => "commands.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/concerns.js" => "concerns.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/controls.css" => "controls.css", "text/css; charset=utf-8";
    "/dashboard/assets/copying.js" => "copying.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/dashboard.js" => "dashboard.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/days.js" => "days.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/dialogs.js" => "dialogs.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/dom.js" => "dom.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/early.js" => "early.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/edit-key.js" => "edit-key.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/fleet.css" => "fleet.css", "text/css; charset=utf-8";
    "/dashboard/assets/format.js" => "format.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/guide.css" => "guide.css", "text/css; charset=utf-8";
    "/dashboard/assets/icons.js" => "icons.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/integrate.js" => "integrate.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/key-form.js" => "key-form.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/live.js" => "live.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/login.js" => "login.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/logo.svg" => "logo.svg", "image/svg+xml";
    "/dashboard/assets/machines.js" => "machines.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/new-key.js" => "new-key.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/notices.js" => "notices.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/parts.js" => "parts.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/quoting.js" => "quoting.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/reasons.js" => "reasons.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/secret.js" => "secret.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/setup-test.js" => "setup-test.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/setup-wait.js" => "setup-wait.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/setup.js" => "setup.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/shell.js" => "shell.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/slots.js" => "slots.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/snippets.js" => "snippets.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/store.js" => "store.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/summary.js" => "summary.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/table.js" => "table.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/temporary-key.js" => "temporary-key.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/theme.js" => "theme.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/try-box.js" => "try-box.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/usage-sums.js" => "usage-sums.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-journal.js" => "view-journal.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-keys.js" => "view-keys.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-overview.js" => "view-overview.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-providers.js" => "view-providers.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-queue.js" => "view-queue.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-requests.js" => "view-requests.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-usage.js" => "view-usage.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-worker.js" => "view-worker.js", "text/javascript; charset=utf-8";
    "/dashboard/assets/view-workers.js" => "view-workers.js", "text/javascript; charset=utf-8";
};

/// The `ETag` of all files. Browsers revalidate each file and get 304 until the relay is updated.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("\"{}\"", content_hash(FILES.iter().map(|file| file.text))));

/// The routes of all files.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let add = |router: Router<S>, file: &'static File| {
        router.route(file.path, get(move |headers: HeaderMap| async move { file.answer(&headers) }))
    };
    FILES.iter().fold(Router::new(), add)
}

impl File {
    fn answer(&self, request: &HeaderMap) -> Response {
        let is_known = request.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == VERSION.as_bytes());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_and_asset_is_served() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/web");
        let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        for name in names {
            let path = match name.strip_suffix(".html") {
                Some(page) => format!("/{page}"),
                None => format!("/dashboard/assets/{name}"),
            };
            assert!(FILES.iter().any(|file| file.path == path), "{path} is not in the table");
        }
    }
}
