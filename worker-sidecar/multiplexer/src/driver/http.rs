//! Small requests to backends: readiness, served models, load, unload.
//!
//! There are two kinds of request with different permissions. Reading is harmless and goes wherever requests go. A
//! request that changes a backend goes only to loopback and private addresses (RFC 1918, RFC 6598, IPv6 unique local:
//! the ranges of Pod networks): these endpoints require no credentials, so an address that leads elsewhere is a mistake
//! or an attack. A name is resolved once, all its addresses must pass, and the connection goes to an address that was
//! checked. Link-local addresses are rejected too: a cloud's metadata service has one.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ::http::header::AUTHORIZATION;
use ::http::{Method, StatusCode};
use bytes::Bytes;
use serde_json::Value;
use url::Url;

use super::DriverError;
use super::exchange::{Exchange, bearer, request, within};
use super::key::Key;
use crate::net::{self, Trust};

/// The longest time for one probe of a backend.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest time for a call that changes the backend: enough to move the largest models. The machine gives up
/// earlier.
const CALL_TIMEOUT: Duration = Duration::from_secs(1800);

/// Pauses before the retries of a call that failed because of the backend.
const RETRY_PAUSES: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

/// The number of bytes of an error response that are quoted.
const QUOTED_BYTES: usize = 300;

/// A client for one backend.
#[derive(Debug)]
pub struct Client {
    base: Url,
    trust: Trust,
    key: Key,
}

/// A complete response.
#[derive(Debug)]
pub struct Reply {
    url: String,
    /// The status.
    pub status: StatusCode,
    body: Bytes,
}

impl Client {
    /// Creates a client for the backend at `base`.
    pub fn new(base: Url) -> Self {
        Self { base, trust: Trust::new(None), key: Key::default() }
    }

    /// Sends this key with every request.
    #[must_use]
    pub fn with_key(self, key: Key) -> Self {
        Self { key, ..self }
    }

    /// The backend's URL.
    pub fn base(&self) -> &Url {
        &self.base
    }

    /// Sends a GET request. One attempt, [`PROBE_TIMEOUT`].
    pub async fn get(&self, path: &str) -> Result<Reply, DriverError> {
        let url = self.target(path);
        within(PROBE_TIMEOUT, &url, self.exchange(Method::GET, &url, None, &[])).await
    }

    /// Sends a query like [`get`](Self::get), for backends that require a POST.
    pub async fn post_query(&self, path: &str, body: &Value) -> Result<Reply, DriverError> {
        let url = self.target(path);
        let checked = self.check_addresses().await?;
        within(PROBE_TIMEOUT, &url, self.exchange(Method::POST, &url, Some(body), &checked)).await
    }

    /// Like [`get`](Self::get), for information that is required to continue: retried like
    /// [`post_retrying`](Self::post_retrying), and after any 5xx.
    pub async fn get_json_retrying(&self, path: &str) -> Result<Value, DriverError> {
        persist(|| self.get(path), StatusCode::is_server_error).await?.accepted()?.json()
    }

    /// Sends an idempotent command to the backend. A broken connection, a timeout, or a status for a temporary failure
    /// is retried three times; any other response is returned. That includes 500, which Ollama returns for a model that
    /// it cannot load.
    pub async fn post_retrying(&self, path: &str, body: Option<&Value>) -> Result<Reply, DriverError> {
        persist(|| self.post_once(path, body), is_not_now).await
    }

    /// Like [`post_retrying`](Self::post_retrying), without retries: if a repetition would do harm, or if the backend
    /// may be absent.
    pub async fn post_once(&self, path: &str, body: Option<&Value>) -> Result<Reply, DriverError> {
        let url = self.target(path);
        let checked = self.check_addresses().await?;
        within(CALL_TIMEOUT, &url, self.exchange(Method::POST, &url, body, &checked)).await
    }

    fn target(&self, path: &str) -> Url {
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        let mut url = self.base.clone();
        url.set_path(&format!("{}{path}", self.base.path().trim_end_matches('/')));
        url.set_query(query);
        url
    }

    /// Checks that requests that change the backend may be sent to its addresses.
    pub async fn ensure_private_address(&self) -> Result<(), DriverError> {
        self.check_addresses().await.map(drop)
    }

    /// Returns all addresses of the name, in order: the backend may listen on any of them, as for `localhost`.
    async fn check_addresses(&self) -> Result<Vec<SocketAddr>, DriverError> {
        let forbidden = |why: String| DriverError::Forbidden { url: self.base.to_string(), why };
        let (host, port) = net::host_and_port(&self.base);
        let found = net::look_up(host, port).await;
        let addresses = found.map_err(|error| self.unreachable(&self.base, &error))?;
        if let Some(stranger) = addresses.iter().find(|address| !is_local_network(address.ip())) {
            return Err(forbidden(format!(
                "{} is neither a loopback nor a private network address; run the backend on the worker's network",
                stranger.ip()
            )));
        }
        if addresses.is_empty() {
            return Err(forbidden("the name resolves to no address".to_owned()));
        }
        Ok(addresses)
    }

    /// Sends one request to one of the addresses; without any, to any address of the name.
    async fn exchange(
        &self,
        method: Method,
        url: &Url,
        body: Option<&Value>,
        to: &[SocketAddr],
    ) -> Result<Reply, DriverError> {
        let stream = net::connect_to(url, to, &self.trust).await.map_err(|error| self.unreachable(url, &error))?;
        let mut request = request(method, url, body.map(|body| ("application/json", body.to_string())));
        let key = self.key.now().and_then(|key| bearer(&key).ok());
        request.headers_mut().extend(key.map(|key| (AUTHORIZATION, key)));
        let exchange = Exchange::begin(stream, request, url, drop).await?;
        Ok(Reply { url: url.to_string(), status: exchange.answer.status(), body: exchange.body(url).await? })
    }

    fn unreachable(&self, url: &Url, error: &std::io::Error) -> DriverError {
        DriverError::Unreachable { url: url.to_string(), why: error.to_string() }
    }
}

impl Reply {
    /// Returns the reply if its status is a success, otherwise an error.
    pub fn accepted(self) -> Result<Self, DriverError> {
        if self.status.is_success() { Ok(self) } else { Err(self.refusal()) }
    }

    /// Returns the reply as an error.
    pub fn refusal(&self) -> DriverError {
        DriverError::Refused { url: self.url.clone(), status: self.status.as_u16(), message: self.quote() }
    }

    /// Parses its body as JSON.
    pub fn json(&self) -> Result<Value, DriverError> {
        serde_json::from_slice(&self.body).map_err(|error| self.unexpected(&format!("not JSON: {error}")))
    }

    /// Returns its body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns an error about its content.
    pub fn unexpected(&self, why: &str) -> DriverError {
        DriverError::Unexpected { url: self.url.clone(), why: format!("{why}: {}", self.quote()) }
    }

    fn quote(&self) -> String {
        String::from_utf8_lossy(&self.body[..self.body.len().min(QUOTED_BYTES)]).trim().to_owned()
    }
}

/// True if requests that change a backend may be sent to this address: loopback and the private ranges.
pub fn is_local_network(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            // Clusters use RFC 6598's 100.64.0.0/10 when RFC 1918 is used up.
            let [a, b, ..] = v4.octets();
            v4.is_loopback() || v4.is_private() || (a == 100 && b & 0xc0 == 0x40)
        }
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local(),
    }
}

/// Retries while that may help, with [`RETRY_PAUSES`] between. `is_passing`: whether a status may be temporary.
async fn persist<F>(attempt: impl Fn() -> F, is_passing: impl Fn(&StatusCode) -> bool) -> Result<Reply, DriverError>
where
    F: Future<Output = Result<Reply, DriverError>>,
{
    for pause in RETRY_PAUSES {
        let result = attempt().await;
        let is_worth_another = match &result {
            Ok(reply) => is_passing(&reply.status),
            Err(error) => matches!(error, DriverError::Unreachable { .. } | DriverError::Silent { .. }),
        };
        if !is_worth_another {
            return result;
        }
        tracing::debug!(?result, "retrying the request to the backend");
        tokio::time::sleep(pause).await;
    }
    attempt().await
}

fn is_not_now(status: &StatusCode) -> bool {
    matches!(status.as_u16(), 502..=504)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::Router;
    use axum::routing::post;

    use super::*;
    use crate::driver::tests::serve;

    #[test]
    fn loopback_and_private_addresses_are_allowed() {
        for address in ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.64.0.9", "::1", "fd00::5"] {
            assert!(is_local_network(address.parse().unwrap()), "{address}");
        }
        assert!(is_local_network("::ffff:10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn other_addresses_are_forbidden() {
        let metadata_service = "169.254.169.254";
        for address in [metadata_service, "8.8.8.8", "172.32.0.1", "100.128.0.1", "0.0.0.0", "::", "fe80::1", "2a00::1"]
        {
            assert!(!is_local_network(address.parse().unwrap()), "{address}");
        }
        assert!(!is_local_network("::ffff:8.8.8.8".parse().unwrap()));
    }

    #[tokio::test]
    async fn forbidden_address_is_named_and_not_contacted() {
        let client = Client::new("http://169.254.169.254:80".parse().unwrap());
        for error in [
            client.post_retrying("/sleep", None).await.unwrap_err(),
            client.ensure_private_address().await.unwrap_err(),
        ] {
            assert!(matches!(error, DriverError::Forbidden { .. }), "{error}");
            assert!(error.to_string().contains("169.254.169.254"), "{error}");
        }
    }

    async fn failing(times: usize) -> (Client, Arc<AtomicUsize>) {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&calls);
        let answer = move || {
            let nth = counter.fetch_add(1, Ordering::Relaxed);
            async move { if nth < times { StatusCode::BAD_GATEWAY } else { StatusCode::OK } }
        };
        let router = Router::new().route("/do", post(answer)).route("/no", post(|| async { StatusCode::NOT_FOUND }));
        (Client::new(serve(router).await), calls)
    }

    #[tokio::test]
    async fn backend_failure_is_retried_three_times() {
        let (client, calls) = failing(1).await;
        assert!(client.post_retrying("/do", None).await.unwrap().status.is_success());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        let (client, calls) = failing(9).await;
        assert!(client.post_retrying("/do", None).await.unwrap().accepted().is_err());
        assert_eq!(calls.load(Ordering::Relaxed), 4);
    }

    #[tokio::test]
    async fn request_reaches_listening_address_among_several() {
        let (client, calls) = failing(0).await;
        let listens: SocketAddr = client.base().authority().parse().unwrap();
        // Bound and closed again: nothing listens there.
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for addresses in [vec![closed, listens], vec![listens, closed], vec![listens]] {
            let reply = client.exchange(Method::POST, &client.target("/do"), None, &addresses).await;
            assert!(reply.unwrap().status.is_success(), "{addresses:?}");
        }
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        let nowhere = client.exchange(Method::POST, &client.target("/do"), None, &[closed, closed]).await;
        assert!(matches!(nowhere, Err(DriverError::Unreachable { .. })));
    }

    #[tokio::test]
    async fn refusal_is_returned_without_retry() {
        let (client, calls) = failing(0).await;
        assert!(matches!(
            client.post_retrying("/no", None).await.unwrap().accepted(),
            Err(DriverError::Refused { status: 404, .. })
        ));
        assert_eq!(calls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn only_gateway_and_unavailable_statuses_are_retried() {
        let again: Vec<_> = (200..600).filter(|status| is_not_now(&StatusCode::from_u16(*status).unwrap())).collect();
        assert_eq!(again, [502, 503, 504]);
    }
}
