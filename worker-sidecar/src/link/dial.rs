//! Opens a WebSocket to an address.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use modelrelay_multiplexer::net::{self, CONNECT_TIMEOUT, Stream, Trust};
use modelrelay_net::LivenessIo;
use modelrelay_protocol::limits::MAX_MESSAGE_BYTES;
use tokio::io::BufReader;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};

use super::liveness::{SilenceLimit, Traffic};
use super::writer::WebSocket;
use crate::settings::{Credential, Proxies, RelayHeaders, RelayUrl};

/// The most bytes of one read system call: a piece of a prompt. By itself tungstenite would read a header's 14 bytes,
/// then the rest of the payload.
const READ_AHEAD: usize = 64 << 10;

/// The part of that which tungstenite reads at a time. It zeroes that many bytes first: with 16 KiB, this was a sixth
/// of a short request's instructions.
const READ_BUFFER: usize = 4 << 10;

/// A batch and a frame's header: a whole batch is sent with one system call.
const WRITE_BUFFER: usize = 72 << 10;

const SECRET_HEADER: HeaderName = HeaderName::from_static("x-worker-secret");

/// The target of a dial.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The relay's URL.
    pub url: RelayUrl,
    /// One address of its name, if each is dialled separately.
    pub addr: Option<SocketAddr>,
}

impl Endpoint {
    /// Returns the name in logs and metrics.
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
    /// Headers that are added to each request.
    pub headers: &'a RelayHeaders,
    /// The proxies to dial through.
    pub proxies: &'a Proxies,
    /// The trusted certificates.
    pub trust: &'a Trust,
}

impl Way<'_> {
    /// Opens a connection for HTTP. The error is human-readable.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Stream, String> {
        let Endpoint { url, addr } = endpoint;
        let connected = match self.proxies.of(url, *addr).map_err(|error| error.to_string())? {
            Some(proxy) => net::connect_through(&proxy, &url.host, url.port, *addr, (url.tls, self.trust)).await,
            None => net::connect(&url.host, url.port, addr.as_slice(), url.tls.then_some(self.trust)).await,
        };
        connected.map_err(|error| error.to_string())
    }
}

/// The number of characters of a relay's own message that are repeated.
const MAX_MESSAGE_CHARS: usize = 300;

/// The reason why there is no WebSocket.
#[derive(Debug)]
pub(crate) enum DialError {
    /// 401: the relay rejected the credential.
    Unauthorized {
        /// The kind of credential.
        noun: &'static str,
        /// The relay's message.
        message: String,
    },
    /// Another status.
    Status {
        /// The status.
        status: StatusCode,
        /// The relay's message.
        message: String,
        /// The pause that the relay requested.
        retry_after: Option<Duration>,
    },
    /// No connection, or no HTTP.
    Io(String),
}

impl std::fmt::Display for DialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unauthorized { noun, message } => write!(f, "the relay rejected the {noun} (401){message}"),
            Self::Status { status, message, .. } => write!(f, "the relay returned {status}{message}"),
            Self::Io(detail) => f.write_str(detail),
        }
    }
}

impl DialError {
    fn refused(noun: &'static str, response: &Response<Option<Vec<u8>>>) -> Self {
        let status = response.status();
        let message = relay_message(response.body().as_deref().unwrap_or_default());
        if status == StatusCode::UNAUTHORIZED {
            return Self::Unauthorized { noun, message };
        }
        let after = response.headers().get(http::header::RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
        Self::Status { status, message, retry_after: after.map(|s: u64| Duration::from_secs(s.min(300))) }
    }
}

/// Returns the relay's message after a colon; empty if the response is not from a relay, or arrived in pieces.
fn relay_message(body: &[u8]) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = body["error"]["message"].as_str().unwrap_or_default();
    let message: String = message.chars().filter(|char| !char.is_control()).take(MAX_MESSAGE_CHARS).collect();
    if message.is_empty() { message } else { format!(": {message}") }
}

/// The reason why a relay does not admit this worker.
#[derive(Debug, PartialEq, Eq)]
pub enum RelayRefusal {
    /// It rejected the credential.
    Credential(String),
    /// Any other reason.
    Other(String),
}

/// Dials like a worker, and disconnects before it registers.
pub async fn try_dial(
    url: &RelayUrl,
    provider: &str,
    credential: &Credential,
    way: &Way<'_>,
) -> Result<(), RelayRefusal> {
    let endpoint = Endpoint { url: url.clone(), addr: None };
    match dial(&endpoint, provider, credential, way).await {
        Ok((mut socket, _)) => {
            // The relay has admitted the worker; how it handles the close does not matter.
            let leave = CloseFrame { code: CloseCode::Normal, reason: "only tried".into() };
            let _ = tokio::time::timeout(CONNECT_TIMEOUT, socket.close(Some(leave))).await;
            Ok(())
        }
        Err(error @ DialError::Unauthorized { .. }) => Err(RelayRefusal::Credential(error.to_string())),
        Err(error @ (DialError::Status { .. } | DialError::Io(_))) => Err(RelayRefusal::Other(error.to_string())),
    }
}

/// Dials. Secret and token are sent in a header, never in the URL, which appears in logs.
pub(crate) async fn dial(
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
    let mut value =
        value.map_err(|_| DialError::Io(format!("the {} is not a valid header value", credential.noun())))?;
    value.set_sensitive(true);
    request.headers_mut().extend(headers);
    request.headers_mut().insert(name, value);
    let config = WebSocketConfig::default()
        .read_buffer_size(READ_BUFFER)
        .write_buffer_size(WRITE_BUFFER)
        .max_message_size(Some(MAX_MESSAGE_BYTES))
        .max_frame_size(Some(MAX_MESSAGE_BYTES));
    let traffic = Traffic::new(Instant::now(), SilenceLimit::default());
    let counted = BufReader::with_capacity(READ_AHEAD, LivenessIo::new(stream, Arc::clone(&traffic)));
    let handshake = client_async_with_config(request, counted, Some(config));
    match tokio::time::timeout(CONNECT_TIMEOUT, handshake).await {
        Ok(Ok((socket, _))) => Ok((socket, traffic)),
        Ok(Err(Error::Http(response))) => Err(DialError::refused(credential.noun(), &response)),
        Ok(Err(error)) => Err(DialError::Io(error.to_string())),
        Err(_) => Err(DialError::Io("no WebSocket handshake within 10 s".to_owned())),
    }
}
