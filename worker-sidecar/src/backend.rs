//! The local backend as an HTTP/1.1 peer: its address, the headers that are added to its requests, and the connections
//! to it.
//!
//! hyper's connections are used directly and not through a client with its own pool, for three reasons: a request with
//! a body of known length must carry exactly that `content-length`; dropping a response must close its socket at once,
//! because that is how a backend learns of a cancel; and a kept connection that the backend has closed in the meantime
//! must not cost a request.
//!
//! No redirects, no proxy from the environment, no cookies, no decompression: clients receive the response unchanged.

pub mod condition;
mod connection;
pub mod health;
mod idle;
mod spare;
mod upload;

pub use connection::Answer;
pub use spare::SpareMemory;
pub use upload::{Upload, UploadError};

use http::header::{AUTHORIZATION, CONTENT_LENGTH, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use modelrelay_multiplexer::net::Trust;
use modelrelay_protocol::dialect::Dialect;
use modelrelay_protocol::headers::{CREDENTIAL_HEADERS, REQUEST_HEADERS, is_forwarded_header, is_own_key};
use modelrelay_protocol::paths::BackendPath;
use url::Url;

use crate::settings::BackendSettings;
use connection::{Connection, ExchangeError};
use idle::Idle;

/// A kept connection is used only for a request that can be sent again on a fresh one, so its body must be kept until
/// the response begins.
const MAX_REPLAY_BYTES: u64 = 1 << 20;

/// The reason why there is no response.
#[derive(Debug)]
pub enum BackendError {
    /// No connection.
    Unreachable(std::io::Error),
    /// The connection broke before a response began.
    Reset(String),
    /// The response is not HTTP, or may not be forwarded.
    BadAnswer(String),
}

impl std::fmt::Display for BackendError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unreachable(error) => write!(f, "the backend cannot be reached: {error}"),
            Self::Reset(detail) => write!(f, "the backend closed the connection: {detail}"),
            Self::BadAnswer(detail) => write!(f, "invalid response from the backend: {detail}"),
        }
    }
}

impl std::error::Error for BackendError {}

/// One backend.
#[derive(Debug)]
pub struct Backend {
    settings: BackendSettings,
    host_header: HeaderValue,
    trust: Trust,
    idle: Idle,
}

impl Backend {
    /// Creates a backend at the given address; nothing is dialled yet. For TLS it trusts the system's roots.
    pub fn new(settings: BackendSettings) -> Self {
        let authority = settings.url.authority();
        // A parsed URL's authority is ASCII.
        let host_header = HeaderValue::from_str(authority).unwrap_or_else(|_| HeaderValue::from_static("localhost"));
        Self { settings, host_header, trust: Trust::new(None), idle: Idle::default() }
    }

    /// The settings that it was created from.
    pub fn settings(&self) -> &BackendSettings {
        &self.settings
    }

    /// Returns the head of a request for an allowed path; `None` if the URL would lead to another host. `further` are
    /// the names of headers that the relay forwards in addition to the usual ones.
    pub fn request_head<'a>(
        &self,
        method: &Method,
        path: &BackendPath<'_>,
        headers: impl Iterator<Item = (&'a str, &'a str)>,
        further: &[String],
        content_length: u64,
    ) -> Option<Request<()>> {
        let uri = target(&self.settings.url, path.path, path.query)?;
        let mut head = Request::builder().method(method).uri(uri).body(()).ok()?;
        *head.headers_mut() = self.headers(headers, further, path.endpoint.dialect());
        if *method != Method::GET || content_length > 0 {
            head.headers_mut().insert(CONTENT_LENGTH, content_length.into());
        }
        Some(head)
    }

    /// Sends a request and returns the response once its head has arrived. Dropping the future, or the response, closes
    /// the connection.
    pub async fn send(&self, head: Request<()>, upload: &Upload) -> Result<Answer, BackendError> {
        if upload.length() <= MAX_REPLAY_BYTES
            && upload.keep_for_replay()
            && let Some(kept) = self.idle.take()
        {
            match kept.exchange(clone_head(&head), upload).await {
                Ok(answer) => {
                    upload.forget_replay();
                    return Ok(answer);
                }
                // The backend closed it while it was idle; no part of a response arrived, so a fresh connection is
                // used.
                Err(ExchangeError::Broken(detail)) => {
                    tracing::debug!(detail, "the backend closed an idle connection");
                    upload.rewind();
                }
                Err(ExchangeError::Garbage(detail)) => return Err(BackendError::BadAnswer(detail)),
            }
        }
        upload.forget_replay();
        // On the heap: the state for dialling would otherwise be part of each request's task, and moved with it.
        let fresh = Box::pin(self.dial()).await?;
        fresh.exchange(head, upload).await.map_err(|error| match error {
            ExchangeError::Broken(detail) => BackendError::Reset(detail),
            ExchangeError::Garbage(detail) => BackendError::BadAnswer(detail),
        })
    }

    /// Requests a path for the worker itself, such as `/health`. Uses a fresh connection, because a kept one would
    /// prove nothing.
    pub async fn fetch(&self, path: &str) -> Result<Answer, BackendError> {
        let uri = target(&self.settings.url, path, None)
            .ok_or_else(|| BackendError::BadAnswer("the path is outside of the backend's URL".to_owned()))?;
        let mut head = Request::new(());
        *head.uri_mut() = uri;
        *head.headers_mut() = self.headers(std::iter::empty(), &[], Dialect::OpenAi);
        let fresh = self.dial().await?;
        fresh.exchange(head, &Upload::empty()).await.map_err(|error| match error {
            ExchangeError::Broken(detail) => BackendError::Reset(detail),
            ExchangeError::Garbage(detail) => BackendError::BadAnswer(detail),
        })
    }

    /// Keeps the connection of a response that was read to its end.
    pub async fn recycle(&self, answer: Answer) {
        if let Some(connection) = answer.into_reusable().await {
            self.idle.put(connection);
        }
    }

    /// Dials a fresh connection. When no more files may be open, kept connections are closed to make room: most
    /// backends never close them, and without a request nothing else would.
    async fn dial(&self) -> Result<Connection, BackendError> {
        let dial = || Connection::dial(&self.settings.url, &self.trust);
        let dialled = match dial().await {
            Err(error) if is_out_of_files(&error) && self.idle.close() => dial().await,
            dialled => dialled,
        };
        dialled.map_err(BackendError::Unreachable)
    }

    fn headers<'a>(
        &self,
        of: impl Iterator<Item = (&'a str, &'a str)>,
        further: &[String],
        dialect: Dialect,
    ) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in of {
            let name = name.to_ascii_lowercase();
            let is_replaced = self.settings.api_key.is_some() && CREDENTIAL_HEADERS.contains(&name.as_str());
            let may_be_secret = !REQUEST_HEADERS.contains(&name.as_str());
            if is_replaced || !is_forwarded_header(&name, further) || may_be_secret && is_own_key(value) {
                continue;
            }
            if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
                headers.append(name, value);
            }
        }
        if let Some(key) = &self.settings.api_key {
            insert_sensitive(&mut headers, AUTHORIZATION, &format!("Bearer {}", key.expose()));
            if dialect == Dialect::Anthropic {
                insert_sensitive(&mut headers, HeaderName::from_static("x-api-key"), key.expose());
            }
        }
        for (name, value) in &self.settings.headers {
            headers.insert(name, value.clone());
        }
        headers.insert(HOST, self.host_header.clone());
        headers
    }
}

/// True if this process, or its machine, has no file descriptor left.
fn is_out_of_files(error: &std::io::Error) -> bool {
    #[cfg(unix)]
    {
        use rustix::io::Errno;
        matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
    }
    #[cfg(not(unix))]
    {
        const WSAEMFILE: i32 = 10024;
        error.raw_os_error() == Some(WSAEMFILE)
    }
}

fn insert_sensitive(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(mut value) = HeaderValue::from_str(value) {
        value.set_sensitive(true);
        headers.insert(name, value);
    }
}

fn clone_head(head: &Request<()>) -> Request<()> {
    let mut copy = Request::new(());
    *copy.method_mut() = head.method().clone();
    *copy.uri_mut() = head.uri().clone();
    *copy.headers_mut() = head.headers().clone();
    copy
}

/// Returns the request target for `path` under the backend's base, built with a URL's own rules and then checked:
/// whatever the path contains, it cannot lead to another host.
fn target(base: &Url, path: &str, query: Option<&str>) -> Option<Uri> {
    let mut url = base.clone();
    url.set_path(&format!("{}{path}", base.path().trim_end_matches('/')));
    let same = url.scheme() == base.scheme()
        && url.host_str() == base.host_str()
        && url.port_or_known_default() == base.port_or_known_default();
    if !same {
        return None;
    }
    let Some(query) = query else { return url.path().parse().ok() };
    // The query is the client's, byte for byte; only characters that a request line must not contain are escaped.
    let exact = format!("{}?{query}", url.path()).parse();
    url.set_query(Some(query));
    exact.ok().or_else(|| url[url::Position::BeforePath..].parse().ok())
}

#[cfg(test)]
mod tests {
    use modelrelay_protocol::paths::backend_path;
    use modelrelay_protocol::secret::Secret;

    use super::*;
    use crate::settings::Engine;

    fn backend(url: &str, api_key: Option<&str>) -> Backend {
        let settings = BackendSettings {
            url: url.parse().unwrap(),
            engine: Engine::OpenAi,
            api_key: api_key.map(Secret::new),
            headers: HeaderMap::new(),
        };
        Backend::new(settings)
    }

    fn head(backend: &Backend, path: &str, headers: &[(&str, &str)]) -> Request<()> {
        let path = backend_path("POST", path).unwrap();
        backend.request_head(&Method::POST, &path, headers.iter().copied(), &["x-tenant".to_owned()], 2).unwrap()
    }

    #[test]
    fn path_and_query_are_appended_to_base_url() {
        let head = head(&backend("http://127.0.0.1:9/base/", None), "/v1/messages?beta=true", &[]);
        assert_eq!(head.uri(), "/base/v1/messages?beta=true");
        assert_eq!(
            (&head.headers()["host"], &head.headers()["content-length"]),
            (&"127.0.0.1:9".parse().unwrap(), &2.into())
        );
    }

    #[test]
    fn query_keeps_every_byte() {
        let head = head(&backend("http://h:1", None), "/tokenize?q='a'%2f+[b]|", &[]);
        assert_eq!(head.uri().path_and_query().unwrap(), "/tokenize?q='a'%2f+[b]|");
        let head = self::head(&backend("http://h:1/base", None), "/tokenize?q=<b>", &[]);
        assert_eq!(head.uri().path_and_query().unwrap(), "/base/tokenize?q=%3Cb%3E");
    }

    #[test]
    fn only_listed_headers_without_relay_keys_are_forwarded() {
        let backend = backend("http://h:1", None);
        let head = head(
            &backend,
            "/v1/messages",
            &[
                ("Content-Type", "application/json"),
                ("authorization", "Bearer mr-1-2"),
                ("x-api-key", "sk-theirs"),
                ("cookie", "a=b"),
                ("accept-encoding", "gzip"),
                ("x-request-id", "r\n1"),
                ("x-tenant", "mr-1-2"),
            ],
        );
        let mut names: Vec<_> = head.headers().keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-length", "content-type", "host", "x-api-key"]);
    }

    #[test]
    fn headers_added_by_relay_are_forwarded() {
        let head = head(&backend("http://h:1", None), "/v1/messages", &[("X-Tenant", "t-1"), ("x-other", "1")]);
        assert_eq!(head.headers()["x-tenant"], "t-1");
        assert!(!head.headers().contains_key("x-other"));
    }

    #[test]
    fn backend_key_replaces_client_credentials() {
        let backend = backend("http://h:1", Some("ours"));
        let head = head(&backend, "/v1/messages", &[("authorization", "Bearer theirs"), ("x-api-key", "theirs")]);
        assert_eq!(
            (&head.headers()["authorization"], &head.headers()["x-api-key"]),
            (&HeaderValue::from_static("Bearer ours"), &HeaderValue::from_static("ours"))
        );
    }

    #[test]
    fn no_path_escapes_backend() {
        let base: Url = "http://127.0.0.1:9".parse().unwrap();
        for path in ["//evil/v1", "/../..", "@evil", "http://evil/", "\\\\evil", "/v1/%2e%2e/x"] {
            if let Some(uri) = target(&base, path, None) {
                assert!(uri.host().is_none() && uri.path().starts_with('/'), "{path} became {uri}");
            }
        }
    }
}
