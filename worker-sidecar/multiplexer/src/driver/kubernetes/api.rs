//! The four requests to the API server: read and write a Deployment's scale, list and watch Pods.
//!
//! A plain HTTP client instead of a Kubernetes library, see this crate's Cargo.toml. Each request uses its own
//! connection and reads token and CA again: both rotate, and nothing is held in between.
//!
//! Temporary failures (no connection, no response, an overload) are [`DriverError::Silent`]; failures that an operator
//! has to fix first are [`DriverError::NotOurs`] and state the fix. An API server that is unavailable is no evidence
//! about Pods, so it is never [`DriverError::Unreachable`], which means "no backend is running".

use std::time::Duration;

use ::http::header::{ACCEPT, AUTHORIZATION, USER_AGENT};
use ::http::{HeaderValue, Method, StatusCode};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::access::Access;
use super::pods::Pod;
use crate::driver::DriverError;
use crate::driver::exchange::{self, Exchange, MAX_ANSWER_BYTES, bearer, silent, within};
use crate::net;

/// The timeout of one request. Two of them fit into the machine's timeout for a question.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);
/// The server ends a watch after this time.
const WATCH_SECONDS: u64 = 30;
/// The client ends a watch a moment later, in case its connection has died silently.
const WATCH_PATIENCE: Duration = Duration::from_secs(35);
/// The number of characters of an error response that are quoted.
const QUOTED_CHARS: usize = 300;

/// A client of the API server.
#[derive(Debug)]
pub(super) struct Api {
    access: Access,
}

/// The URL of a request, which errors shorten.
struct ServerUrl(Url);

impl std::fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the API server ({})", self.0.path())
    }
}

/// A Deployment's scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scale {
    /// The desired number of Pods.
    pub(super) replicas: u32,
    /// The label selector of its Pods.
    pub(super) selector: String,
}

/// Pods, as they were at `version`.
#[derive(Debug)]
pub(super) struct PodList {
    pub(super) pods: Vec<Pod>,
    pub(super) version: String,
}

/// A change of a Pod.
#[derive(Debug)]
pub(super) enum PodChange {
    Is(Box<Pod>),
    Gone(Box<Pod>),
}

/// Changes of Pods, as they arrive.
#[derive(Debug)]
pub(super) struct Watch {
    exchange: Exchange,
    /// Received bytes that are not yet a whole line.
    rest: Vec<u8>,
    until: Instant,
}

/// One request, and how errors describe it.
struct ApiRequest<'a> {
    method: Method,
    path: String,
    query: Vec<(&'a str, &'a str)>,
    body: Option<String>,
    /// Its object: `Deployment NAME`, or `Pods of SELECTOR`.
    about: String,
    /// The permission that a Role must grant for it.
    right: &'static str,
}

impl Api {
    pub(super) fn new(access: Access) -> Self {
        Self { access }
    }

    /// Returns the Deployment's human-readable name.
    pub(super) fn name(&self, deployment: &str) -> String {
        format!("Deployment {deployment} in namespace {}", self.access.namespace())
    }

    pub(super) async fn scale(&self, deployment: &str) -> Result<Scale, DriverError> {
        let ask = self.scale_request(Method::GET, deployment, "get on deployments/scale");
        self.read_scale(ask).await
    }

    /// Sets the number of Pods. `is_rehearsal`: a dry run, which changes nothing.
    pub(super) async fn set_scale(
        &self,
        deployment: &str,
        replicas: u32,
        is_rehearsal: bool,
    ) -> Result<Scale, DriverError> {
        let mut ask = self.scale_request(Method::PATCH, deployment, "patch on deployments/scale");
        ask.body = Some(json!({"spec": {"replicas": replicas}}).to_string());
        if is_rehearsal {
            ask.query.push(("dryRun", "All"));
        }
        self.read_scale(ask).await
    }

    pub(super) async fn pods(&self, selector: &str) -> Result<PodList, DriverError> {
        #[derive(Deserialize)]
        struct PodListBody {
            metadata: ListMeta,
            items: Vec<Pod>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct ListMeta {
            resource_version: String,
        }
        let ask = self.pods_request(selector, "list on pods");
        let PodListBody { metadata, items } = self.read(ask).await?;
        Ok(PodList { pods: items, version: metadata.resource_version })
    }

    /// Watches for changes after `version`, for [`WATCH_SECONDS`].
    pub(super) async fn watch(&self, selector: &str, version: &str) -> Result<Watch, DriverError> {
        let mut ask = self.pods_request(selector, "watch on pods");
        let seconds = WATCH_SECONDS.to_string();
        ask.query.extend([("watch", "1"), ("resourceVersion", version), ("timeoutSeconds", &seconds)]);
        let until = Instant::now() + WATCH_PATIENCE;
        let url = self.url(&ask);
        let exchange = within(REQUEST_TIMEOUT, &url, self.send(&ask, &url)).await?;
        if exchange.answer.status().is_success() {
            return Ok(Watch { exchange, rest: Vec::new(), until });
        }
        let status = exchange.answer.status();
        let body = within(REQUEST_TIMEOUT, &url, exchange.body(&url)).await?;
        Err(self.refusal(&ask, status, &body))
    }

    fn scale_request<'a>(&self, method: Method, deployment: &str, right: &'static str) -> ApiRequest<'a> {
        let path = format!("apis/apps/v1/namespaces/{}/deployments/{deployment}/scale", self.access.namespace());
        ApiRequest { method, path, query: Vec::new(), body: None, about: self.name(deployment), right }
    }

    fn pods_request<'a>(&self, selector: &'a str, right: &'static str) -> ApiRequest<'a> {
        let path = format!("api/v1/namespaces/{}/pods", self.access.namespace());
        let about = format!("Pods with {selector} in namespace {}", self.access.namespace());
        ApiRequest { method: Method::GET, path, query: vec![("labelSelector", selector)], body: None, about, right }
    }

    async fn read_scale(&self, ask: ApiRequest<'_>) -> Result<Scale, DriverError> {
        // The specification omits a zero.
        #[derive(Deserialize)]
        struct Object {
            #[serde(default)]
            spec: ScaleSpec,
            status: Status,
        }
        #[derive(Default, Deserialize)]
        struct ScaleSpec {
            #[serde(default)]
            replicas: u32,
        }
        #[derive(Deserialize)]
        struct Status {
            selector: String,
        }
        let Object { spec, status } = self.read(ask).await?;
        Ok(Scale { replicas: spec.replicas, selector: status.selector })
    }

    async fn read<T: for<'de> Deserialize<'de>>(&self, ask: ApiRequest<'_>) -> Result<T, DriverError> {
        let url = self.url(&ask);
        let (status, body) = within(REQUEST_TIMEOUT, &url, async {
            let exchange = self.send(&ask, &url).await?;
            Ok((exchange.answer.status(), exchange.body(&url).await?))
        })
        .await?;
        if !status.is_success() {
            return Err(self.refusal(&ask, status, &body));
        }
        serde_json::from_slice(&body)
            .map_err(|error| DriverError::Unexpected { url: url.0.to_string(), why: error.to_string() })
    }

    fn url(&self, ask: &ApiRequest<'_>) -> ServerUrl {
        let mut url = self.access.server().clone();
        url.set_path(&ask.path);
        if !ask.query.is_empty() {
            url.query_pairs_mut().extend_pairs(&ask.query);
        }
        ServerUrl(url)
    }

    async fn send(&self, ask: &ApiRequest<'_>, url: &ServerUrl) -> Result<Exchange, DriverError> {
        let token = self.access.token().map_err(|why| silent(url, &why))?;
        let stream = net::connect_to(&url.0, &[], &self.access.trust()).await.map_err(|error| silent(url, &error))?;
        let body = ask.body.clone().map(|text| ("application/merge-patch+json", text));
        let mut request = exchange::request(ask.method.clone(), &url.0, body);
        let credentials = bearer(&token).map_err(|_| silent(url, &"the ServiceAccount token is invalid"))?;
        let agent = concat!("modelrelay-worker/", env!("CARGO_PKG_VERSION"));
        request.headers_mut().extend([
            (AUTHORIZATION, credentials),
            (ACCEPT, HeaderValue::from_static("application/json")),
            (USER_AGENT, HeaderValue::from_static(agent)),
        ]);
        let log_lost = |error| tracing::debug!(%error, "lost a connection to the API server");
        Exchange::begin(stream, request, url, log_lost).await
    }

    fn refusal(&self, ask: &ApiRequest<'_>, status: StatusCode, body: &[u8]) -> DriverError {
        let message = quote(body);
        let about = &ask.about;
        match status {
            StatusCode::FORBIDDEN => DriverError::NotOurs(format!(
                "{about}: permission denied; grant the worker's ServiceAccount {} in a Role of namespace {} (403: {message})",
                ask.right,
                self.access.namespace(),
            )),
            StatusCode::NOT_FOUND => DriverError::Refused {
                url: format!("the API server, queried for {about},"),
                status: status.as_u16(),
                message: "not found; create it there, or correct the model's `deployment`".to_owned(),
            },
            StatusCode::UNAUTHORIZED
            | StatusCode::CONFLICT
            | StatusCode::GONE
            | StatusCode::TOO_MANY_REQUESTS
            | StatusCode::REQUEST_TIMEOUT => silent(&self.url(ask), &format!("{status}: {message}")),
            _ if status.is_server_error() => silent(&self.url(ask), &format!("{status}: {message}")),
            _ => DriverError::NotOurs(format!("{about}: the API server returned {status}: {message}")),
        }
    }
}

impl Watch {
    /// Returns the next change; `None` once the watch is over, for whatever reason. The future may be dropped and
    /// called again.
    pub(super) async fn next(&mut self) -> Option<PodChange> {
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                match event(&line) {
                    WatchEvent::Changed(change) => return Some(change),
                    WatchEvent::Other => {}
                    WatchEvent::Over => return None,
                }
            }
            let frame = timeout_at(self.until, self.exchange.answer.body_mut().frame()).await.ok()??.ok()?;
            if let Some(data) = frame.data_ref() {
                self.rest.extend_from_slice(data);
            }
            if self.rest.len() > MAX_ANSWER_BYTES {
                return None;
            }
        }
    }
}

/// True if the Deployment does not exist, and so has no Pods.
pub(super) fn is_absent(error: &DriverError) -> bool {
    matches!(error, DriverError::Refused { status: 404, .. })
}

/// The meaning of a line of a watch.
enum WatchEvent {
    Changed(PodChange),
    /// A bookmark, or an event of a later version.
    Other,
    /// An error: usually the version is too old (410).
    Over,
}

fn event(line: &[u8]) -> WatchEvent {
    #[derive(Deserialize)]
    struct Line {
        #[serde(rename = "type")]
        kind: String,
        object: serde_json::Value,
    }
    let Ok(Line { kind, object }) = serde_json::from_slice(line) else { return WatchEvent::Over };
    let pod = || serde_json::from_value::<Pod>(object.clone()).map(Box::new);
    match kind.as_str() {
        "ADDED" | "MODIFIED" => pod().map_or(WatchEvent::Over, |pod| WatchEvent::Changed(PodChange::Is(pod))),
        "DELETED" => pod().map_or(WatchEvent::Over, |pod| WatchEvent::Changed(PodChange::Gone(pod))),
        "ERROR" => {
            tracing::debug!(reason = %object["message"], code = %object["code"], "a watch of Pods ended");
            WatchEvent::Over
        }
        _ => WatchEvent::Other,
    }
}

/// Returns the message of a `Status`, on one line.
fn quote(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Status {
        message: String,
    }
    let message = serde_json::from_slice(body).map_or_else(|_| String::new(), |Status { message }| message);
    message.chars().filter(|char| !char.is_control()).take(QUOTED_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::time::timeout;

    use super::*;

    #[test]
    fn only_transient_statuses_are_treated_as_silence() {
        let account = tempfile::tempdir().unwrap();
        let api = Api::new(Access::new("http://127.0.0.1:1".parse().unwrap(), account.path(), "llm"));
        let error = |status: u16| {
            let ask = api.scale_request(Method::GET, "qwen", "get on deployments/scale");
            api.refusal(&ask, StatusCode::from_u16(status).unwrap(), br#"{"message": "why"}"#)
        };
        for status in [401, 408, 409, 410, 429, 500, 503] {
            assert!(matches!(error(status), DriverError::Silent { why, .. } if why.contains("why")), "{status}");
        }
        assert!(
            matches!(error(403), DriverError::NotOurs(why) if why.contains("permission denied") && why.contains("get on deployments/scale"))
        );
        assert!(matches!(error(422), DriverError::NotOurs(why) if why.contains("422") && why.contains("why")));
        assert!(is_absent(&error(404)) && !is_absent(&error(403)) && !is_absent(&error(503)));
    }

    #[test]
    fn watch_line_is_change_end_or_ignored() {
        let of =
            |kind: &str| event(json!({"type": kind, "object": {"metadata": {"name": "p"}}}).to_string().as_bytes());
        assert!(matches!(of("ADDED"), WatchEvent::Changed(PodChange::Is(_))));
        assert!(matches!(of("MODIFIED"), WatchEvent::Changed(PodChange::Is(_))));
        assert!(matches!(of("DELETED"), WatchEvent::Changed(PodChange::Gone(_))));
        assert!(matches!(of("ERROR"), WatchEvent::Over));
        assert!(matches!(of("BOOKMARK"), WatchEvent::Other));
        assert!(matches!(event(b"{}"), WatchEvent::Over));
    }

    /// Runs a fake API server's side of a watch, and in parallel the test's reading side.
    async fn watched(sends: impl AsyncFnOnce(&mut TcpStream), reads: impl AsyncFnOnce(Watch)) {
        let account = tempfile::tempdir().unwrap();
        std::fs::write(account.path().join("token"), "token").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let serving = async {
            let (mut connection, _) = listener.accept().await.unwrap();
            connection.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await.unwrap();
            sends(&mut connection).await;
            std::future::pending::<()>().await;
        };
        let reading = async {
            let api = Api::new(Access::new(server, account.path(), "llm"));
            reads(api.watch("app=a", "1").await.unwrap()).await;
        };
        tokio::select! {
            () = serving => {}
            () = reading => {}
        }
    }

    async fn send(connection: &mut TcpStream, chunk: &[u8]) {
        let head = format!("{:x}\r\n", chunk.len());
        // The reader may have closed the connection.
        let _ = connection.write_all(&[head.as_bytes(), chunk, b"\r\n"].concat()).await;
    }

    #[tokio::test]
    async fn watch_waits_for_late_change() {
        let (wait, mut waiting) = tokio::sync::mpsc::channel(1);
        let sends = async |connection: &mut TcpStream| {
            waiting.recv().await;
            send(connection, b"{\"type\": \"ADDED\", \"object\": {\"metadata\": {\"name\": \"p\"}}}\n").await;
        };
        let reads = async |mut watch: Watch| {
            let (change, sent) = tokio::join!(biased; watch.next(), wait.send(()));
            sent.unwrap();
            assert!(matches!(change, Some(PodChange::Is(_))));
        };
        watched(sends, reads).await;
    }

    #[tokio::test]
    async fn watch_ends_on_oversized_line() {
        let line = vec![b' '; MAX_ANSWER_BYTES + 1];
        let reads = async |mut watch: Watch| {
            let over = timeout(Duration::from_secs(WATCH_SECONDS / 2), watch.next()).await;
            assert!(over.expect("its end, long before its time").is_none());
        };
        watched(async |connection: &mut TcpStream| send(connection, &line).await, reads).await;
    }
}
