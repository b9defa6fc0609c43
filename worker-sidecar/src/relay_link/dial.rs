//! From an address to an open WebSocket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use modelrelay_protocol::limits::MAX_MESSAGE_BYTES;
use tokio::io::BufReader;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};

use super::liveness::{Counted, Traffic};
use super::writer::WebSocket;
use crate::config::{Credential, Proxies, RelayHeaders, RelayUrl};
use crate::net::{self, CONNECT_TIMEOUT, Stream, Trust};

/// What one system call reads at most: a piece of a prompt. By itself tungstenite would ask for a header's 14 bytes, then for
/// what the payload lacks.
const READ_AHEAD: usize = 64 << 10;

/// What tungstenite takes of that at a time. It clears so much before: with 16 KiB, a sixth of what a short request executes.
const READ_BUFFER: usize = 4 << 10;

/// A batch and a frame's header: a whole batch goes out with one system call.
const WRITE_BUFFER: usize = 72 << 10;

const SECRET_HEADER: HeaderName = HeaderName::from_static("x-worker-secret");

/// Where to dial.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The relay's URL.
    pub url: RelayUrl,
    /// One address behind its name, where each is dialled for itself.
    pub addr: Option<SocketAddr>,
}

impl Endpoint {
    /// For people and metrics.
    pub fn name(&self) -> Arc<str> {
        match self.addr {
            Some(addr) => addr.to_string().into(),
            None => self.url.authority().into(),
        }
    }
}

/// How relays are reached.
#[derive(Clone, Copy, Debug)]
pub struct Way<'a> {
    /// Added to each request.
    pub headers: &'a RelayHeaders,
    /// Which proxy is on the way.
    pub proxies: &'a Proxies,
    /// Who is trusted.
    pub trust: &'a Trust,
}

impl Way<'_> {
    /// Opens a connection over which HTTP can be spoken; an error is for people.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Stream, String> {
        let Endpoint { url, addr } = endpoint;
        let connected = match self.proxies.of(url, *addr).map_err(|error| error.to_string())? {
            Some(proxy) => net::connect_through(&proxy, &url.host, url.port, *addr, (url.tls, self.trust)).await,
            None => net::connect(&url.host, url.port, addr.as_slice(), url.tls.then_some(self.trust)).await,
        };
        connected.map_err(|error| error.to_string())
    }
}

/// What is repeated of a relay's own words.
const MAX_SAID_CHARS: usize = 300;

/// Why there is no WebSocket.
#[derive(Debug)]
pub(super) enum DialError {
    /// 401: what we showed is not good.
    Unauthorized {
        /// What was shown.
        noun: &'static str,
        /// Why, in the relay's words.
        said: String,
    },
    /// Another status.
    Status {
        /// Which.
        status: StatusCode,
        /// Why, in the relay's words.
        said: String,
        /// The relay asked for this much patience.
        retry_after: Option<Duration>,
    },
    /// No connection, or no HTTP.
    Io(String),
}

impl std::fmt::Display for DialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unauthorized { noun, said } => write!(f, "the relay refused the {noun} (401){said}"),
            Self::Status { status, said, .. } => write!(f, "the relay answered {status}{said}"),
            Self::Io(detail) => f.write_str(detail),
        }
    }
}

impl DialError {
    fn refused(noun: &'static str, response: &Response<Option<Vec<u8>>>) -> Self {
        let status = response.status();
        let said = said(response.body().as_deref().unwrap_or_default());
        if status == StatusCode::UNAUTHORIZED {
            return Self::Unauthorized { noun, said };
        }
        let after = response.headers().get(http::header::RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Self::Status { status, said, retry_after: after.map(|s: u64| Duration::from_secs(s.min(300))) }
    }
}

/// What a relay said, behind a colon; nothing where it is not one of ours, or the answer came in pieces.
fn said(body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = body["error"]["message"].as_str().unwrap_or_default();
    let message: String = message.chars().filter(|char| !char.is_control()).take(MAX_SAID_CHARS).collect();
    if message.is_empty() { message } else { format!(": {message}") }
}

/// Why a relay would not have this worker.
#[derive(Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It does not like what was shown.
    Credential(String),
    /// Anything else.
    Other(String),
}

/// Dials as a worker would, and hangs up before it registers.
pub async fn try_dial(url: &RelayUrl, provider: &str, credential: &Credential, way: &Way<'_>) -> Result<(), Refusal> {
    let endpoint = Endpoint { url: url.clone(), addr: None };
    match dial(&endpoint, provider, credential, way).await {
        Ok((mut socket, _)) => {
            // It has let us in; how it takes our leave is its own matter.
            let leave = CloseFrame { code: CloseCode::Normal, reason: "only tried".into() };
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, socket.close(Some(leave))).await;
            Ok(())
        }
        Err(error @ DialError::Unauthorized { .. }) => Err(Refusal::Credential(error.to_string())),
        Err(error @ (DialError::Status { .. } | DialError::Io(_))) => Err(Refusal::Other(error.to_string())),
    }
}

/// Dials. Secret and token go into a header, never into the URL, which lands in logs.
pub(super) async fn dial(
    endpoint: &Endpoint,
    provider: &str,
    credential: &Credential,
    way: &Way<'_>,
) -> Result<(WebSocket, Arc<Traffic>), DialError> {
    let headers = way.headers.read().map_err(|error| DialError::Io(error.to_string()))?;
    let url = &endpoint.url;
    let stream = way.connect(endpoint).await.map_err(DialError::Io)?;
    net::tune_for_relay(stream.tcp());
    let mut request = url.connect_url(provider).into_client_request().map_err(|e| DialError::Io(e.to_string()))?;
    let (name, value) = match credential {
        Credential::Secret(secret) => (SECRET_HEADER, HeaderValue::from_str(secret.expose())),
        Credential::Token(token) => (AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {}", token.expose()))),
    };
    let mut value = value.map_err(|_| DialError::Io(format!("the {} is no header value", credential.noun())))?;
    value.set_sensitive(true);
    request.headers_mut().extend(headers);
    request.headers_mut().insert(name, value);
    let config = WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(WRITE_BUFFER)
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    let traffic = Traffic::new();
    let counted = BufReader::with_capacity(READ_AHEAD, Counted::new(stream, Arc::clone(&traffic)));
    let handshake = client_async_with_config(request, counted, Some(config));
    match tokio::time::timeout(CONNECT_TIMEOUT, handshake).await {
        Ok(Ok((socket, _))) => Ok((socket, traffic)),
        Ok(Err(Error::Http(response))) => Err(DialError::refused(credential.noun(), &response)),
        Ok(Err(error)) => Err(DialError::Io(error.to_string())),
        Err(_) => Err(DialError::Io("no WebSocket handshake within 10 s".to_owned())),
    }
}
