//! A relay played by hand.
//!
//! [`FakeRelay`] listens; each worker that dials becomes a [`Dial`], which the test rejects with a status or upgrades
//! to a [`RelayLink`]. The link reads all the time (as a relay must) and keeps the received messages in order, so that
//! a test can request messages in any order and still check which came first. Messages are plain JSON: nothing here
//! shares the programs' types.

mod exchange;
mod link;
mod piece;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};

pub use crate::tls::Certificates;
pub use exchange::{Reply, RequestSpec, SentRequest};
pub use link::{Event, LinkSender, Message, RelayLink};
pub use piece::{REQUEST_PIECE, RESPONSE_PIECE, piece};

use crate::TEST_TIMEOUT;

/// The default credit that each side gives per stream.
pub const WINDOW: u64 = 262_144;

/// The socket under a link: TCP or TLS.
pub trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// A listening relay.
pub struct FakeRelay {
    addr: SocketAddr,
    scheme: &'static str,
    dials: mpsc::UnboundedReceiver<Dial>,
    listening: JoinHandle<()>,
}

/// A worker's dial, before a response.
pub struct Dial {
    /// `/v1/worker/connect`.
    pub path: String,
    /// The part after the `?`, as sent.
    pub query: String,
    /// Headers as sent.
    pub headers: Vec<(String, String)>,
    /// The time at which the request head was complete.
    pub at: std::time::Instant,
    wire: Box<dyn Wire>,
}

/// The content of a relay's `register_ack`.
#[derive(Clone, Debug)]
pub struct Ack {
    /// The capabilities in common.
    pub capabilities: Vec<String>,
    /// `limits.heartbeat_ms`.
    pub heartbeat_ms: u64,
    /// `relay_id`.
    pub relay_id: String,
    /// `relay_count`.
    pub relay_count: u64,
    /// `limits.stream_window_bytes`.
    pub window: u64,
    /// `duplicate`, left out when false.
    pub duplicate: bool,
    /// `request_headers`, left out when empty.
    pub request_headers: Vec<&'static str>,
}

impl Ack {
    /// The ack of an old relay, which supports only the original messages.
    #[must_use]
    pub fn old() -> Self {
        Self { capabilities: Vec::new(), ..Self::core1() }
    }

    /// The ack of a relay with `core1`.
    #[must_use]
    pub fn core1() -> Self {
        Self {
            capabilities: vec!["core1".to_owned()],
            heartbeat_ms: 15_000,
            relay_id: "relay-a".to_owned(),
            relay_count: 1,
            window: WINDOW,
            duplicate: false,
            request_headers: Vec::new(),
        }
    }

    /// The ack of a relay with `homes1`.
    #[must_use]
    pub fn homes1() -> Self {
        Self { capabilities: vec!["core1".to_owned(), "homes1".to_owned()], ..Self::core1() }
    }

    /// The message for this `register`: models and version echoed.
    #[must_use]
    pub fn message(&self, register: &Value) -> Value {
        let mut ack = json!({
            "type": "register_ack",
            "worker_id": "w-1",
            "models": register["models"],
            "warnings": [],
            "protocol_version": register["protocol_version"],
        });
        if !self.capabilities.is_empty() {
            ack["relay_id"] = json!(self.relay_id);
            ack["relay_count"] = json!(self.relay_count);
            ack["capabilities"] = json!(self.capabilities);
            ack["limits"] = json!({
                "max_request_bytes": 33_554_432,
                "stream_window_bytes": self.window,
                "heartbeat_ms": self.heartbeat_ms,
                "cold_timeout_ms": 300_000,
            });
        }
        if self.duplicate {
            ack["duplicate"] = json!(true);
        }
        if !self.request_headers.is_empty() {
            ack["request_headers"] = json!(self.request_headers);
        }
        ack
    }
}

impl FakeRelay {
    /// Starts a relay on a free port of 127.0.0.1.
    pub async fn start() -> Self {
        Self::listen("127.0.0.1:0", None).await
    }

    /// Starts a relay at an address where one listened before.
    pub async fn start_at(addr: SocketAddr) -> Self {
        Self::listen(&addr.to_string(), None).await
    }

    /// Starts a relay that uses TLS with this certificate.
    pub async fn start_tls(certificates: &Certificates) -> Self {
        Self::listen("127.0.0.1:0", Some(certificates.acceptor())).await
    }

    async fn listen(addr: &str, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind(addr).await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (sender, dials) = mpsc::unbounded_channel();
        let listening = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(greet(stream, tls.clone(), sender.clone()));
            }
        });
        Self { addr, scheme, dials, listening }
    }

    /// The address on which it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The value for `PROXY_URL`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.addr)
    }

    /// The next worker that dials.
    ///
    /// # Panics
    /// If none does within ten seconds.
    pub async fn dial(&mut self) -> Dial {
        self.dial_within(TEST_TIMEOUT).await.expect("no worker dialled within 10 s")
    }

    /// The next worker that dials, if one does within `patience`.
    pub async fn dial_within(&mut self, patience: Duration) -> Option<Dial> {
        tokio::time::timeout(patience, self.dials.recv()).await.ok().flatten()
    }

    /// Accepts the next worker and acknowledges its `register` with these capabilities.
    pub async fn accept_registered(&mut self, capabilities: &[&str]) -> RelayLink {
        let capabilities = capabilities.iter().map(ToString::to_string).collect();
        self.accept_with(&Ack { capabilities, ..Ack::core1() }).await
    }

    /// Accepts the next worker and acknowledges its `register` with this ack.
    pub async fn accept_with(&mut self, ack: &Ack) -> RelayLink {
        let mut link = self.dial().await.upgrade().await;
        link.register(ack).await;
        link
    }
}

impl Drop for FakeRelay {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

impl Dial {
    /// The first header of this name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// Responds with an HTTP status instead of upgrading.
    pub async fn refuse(mut self, status: u16) {
        let head = format!("HTTP/1.1 {status} Refused\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        let _ = self.wire.write_all(head.as_bytes()).await;
        let _ = self.wire.shutdown().await;
    }

    /// Completes the WebSocket handshake.
    ///
    /// # Panics
    /// If the dial has no `sec-websocket-key`.
    pub async fn upgrade(mut self) -> RelayLink {
        let key = self.header("sec-websocket-key").expect("a WebSocket key").to_owned();
        let accept = derive_accept_key(key.as_bytes());
        let head = format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-accept: {accept}\r\n\r\n"
        );
        self.wire.write_all(head.as_bytes()).await.expect("the worker waits for the handshake");
        self.wire.flush().await.expect("the worker waits for the handshake");
        let mut config = WebSocketConfig::default();
        config.max_message_size = Some(256 << 20);
        config.max_frame_size = Some(256 << 20);
        let socket = WebSocketStream::from_raw_socket(self.wire, Role::Server, Some(config)).await;
        RelayLink::new(socket)
    }
}

/// Reads a dial's request head. Connections that close first (probes of the port) are dropped.
async fn greet(stream: TcpStream, tls: Option<TlsAcceptor>, dials: mpsc::UnboundedSender<Dial>) {
    let mut wire: Box<dyn Wire> = match tls {
        Some(acceptor) => match acceptor.accept(stream).await {
            Ok(stream) => Box::new(stream),
            Err(_) => return,
        },
        None => Box::new(stream),
    };
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        match wire.read_u8().await {
            Ok(byte) => bytes.push(byte),
            Err(_) => return,
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let mut lines = text.lines();
    let target = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let headers = lines.filter_map(|line| line.split_once(':'));
    let headers = headers.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect();
    let at = std::time::Instant::now();
    let _ = dials.send(Dial { path: path.to_owned(), query: query.to_owned(), headers, at, wire });
}
