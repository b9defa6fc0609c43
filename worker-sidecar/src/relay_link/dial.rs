//! From an address to an open WebSocket.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, StatusCode};
use modelrelay_protocol::limits::MAX_MESSAGE_BYTES;
use modelrelay_protocol::secret::Secret;
use tokio::io::BufReader;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use super::liveness::{Counted, Traffic};
use super::writer::WebSocket;
use crate::config::RelayUrl;
use crate::net::{self, CONNECT_TIMEOUT, Trust};

/// What one system call reads at most: a piece of a prompt. By itself tungstenite would ask for a header's 14 bytes, then for
/// what the payload lacks.
const READ_AHEAD: usize = 64 << 10;

/// What tungstenite takes of that at a time. It clears so much before: with 16 KiB, a sixth of what a short request executes.
const READ_BUFFER: usize = 4 << 10;

/// A batch and a frame's header: a whole batch goes out with one system call.
const WRITE_BUFFER: usize = 72 << 10;

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

/// Why there is no WebSocket.
#[derive(Debug)]
pub(super) enum DialError {
    /// 401: our secret is not good.
    Unauthorized,
    /// Another status.
    Status(StatusCode, Option<Duration>),
    /// No connection, or no HTTP.
    Io(String),
}

impl std::fmt::Display for DialError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unauthorized => f.write_str("the relay refused the worker secret (401)"),
            Self::Status(status, _) => write!(f, "the relay answered {status}"),
            Self::Io(detail) => f.write_str(detail),
        }
    }
}

/// Dials. The secret goes into a header, never into the URL, which lands in logs.
pub(super) async fn dial(
    endpoint: &Endpoint,
    provider: &str,
    secret: &Secret,
    trust: &Trust,
) -> Result<(WebSocket, Arc<Traffic>), DialError> {
    let io = |error: std::io::Error| DialError::Io(error.to_string());
    let url = &endpoint.url;
    let stream = net::connect(&url.host, url.port, endpoint.addr, url.tls.then_some(trust)).await.map_err(io)?;
    net::tune_for_relay(stream.tcp());
    let mut request = url.connect_url(provider).into_client_request().map_err(|e| DialError::Io(e.to_string()))?;
    let mut secret =
        HeaderValue::from_str(secret.expose()).map_err(|_| DialError::Io("the secret is no header value".into()))?;
    secret.set_sensitive(true);
    request.headers_mut().insert("x-worker-secret", secret);
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
        Ok(Err(Error::Http(response))) if response.status() == StatusCode::UNAUTHORIZED => Err(DialError::Unauthorized),
        Ok(Err(Error::Http(response))) => {
            let after = response.headers().get(http::header::RETRY_AFTER);
            let after = after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
            Err(DialError::Status(response.status(), after.map(|s: u64| Duration::from_secs(s.min(300)))))
        }
        Ok(Err(error)) => Err(DialError::Io(error.to_string())),
        Err(_) => Err(DialError::Io("no WebSocket handshake within 10 s".to_owned())),
    }
}
