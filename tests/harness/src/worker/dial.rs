//! A worker's dial, valid or invalid.

use std::net::SocketAddr;

use tokio::net::TcpStream;
use tokio_tungstenite::{
    client_async_with_config,
    tungstenite::{client::IntoClientRequest, protocol::WebSocketConfig},
};

use super::FakeWorker;
use crate::{
    client::{Reply, Request},
    process::Log,
    within,
};

/// A connection to the worker socket that is being prepared.
#[derive(Debug, Clone)]
pub struct Dial {
    to: SocketAddr,
    query: Vec<(String, String)>,
    headers: Vec<(String, String)>,
    log: Log,
}

impl Dial {
    /// Prepares a dial of an address, with neither provider nor secret.
    #[must_use]
    pub fn new(to: SocketAddr, log: &Log) -> Self {
        Self { to, query: Vec::new(), headers: Vec::new(), log: log.clone() }
    }

    /// Dials another listener instead.
    #[must_use]
    pub fn to(mut self, to: SocketAddr) -> Self {
        self.to = to;
        self
    }

    /// Sets the provider, in place of an earlier one.
    #[must_use]
    pub fn provider(mut self, name: &str) -> Self {
        self.query.retain(|(key, _)| key != "provider");
        self.query("provider", name)
    }

    /// Sends the secret as header `x-worker-secret`, in place of an earlier one.
    #[must_use]
    pub fn secret(self, secret: &str) -> Self {
        self.no_secret().header("x-worker-secret", secret)
    }

    /// Sends the secret in the query string only, as old workers do.
    #[must_use]
    pub fn query_secret(self, secret: &str) -> Self {
        self.no_secret().query("worker_secret", secret)
    }

    /// Sends no secret.
    #[must_use]
    pub fn no_secret(mut self) -> Self {
        self.headers.retain(|(key, _)| key != "x-worker-secret");
        self.query.retain(|(key, _)| key != "worker_secret");
        self
    }

    /// Sends this token of a ServiceAccount, and no secret.
    #[must_use]
    pub fn token(self, token: &str) -> Self {
        self.no_secret().header("authorization", &format!("Bearer {token}"))
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Adds a query parameter, unescaped.
    #[must_use]
    pub fn query(mut self, key: &str, value: &str) -> Self {
        self.query.push((key.into(), value.into()));
        self
    }

    /// Connects; the worker is not registered yet.
    pub async fn open(self) -> FakeWorker {
        let mut request = format!("ws://{}{}", self.to, self.target()).into_client_request().expect("a proper address");
        for (name, value) in &self.headers {
            let name: http::HeaderName = name.parse().expect("a proper header name");
            request.headers_mut().append(name, value.parse().expect("a proper header value"));
        }
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        let connect = async {
            let stream = TcpStream::connect(self.to).await.expect("the relay accepts connections");
            stream.set_nodelay(true).expect("TCP_NODELAY can be set");
            client_async_with_config(request, stream, Some(config)).await
        };
        let opened = within("a worker's WebSocket handshake", &self.log, connect).await;
        match opened {
            Ok((socket, _)) => FakeWorker::new(socket, self.log),
            Err(error) => panic!("the worker's dial was refused: {error}\n{}", self.log.dump()),
        }
    }

    /// Sends a valid handshake and returns the response, which must be a rejection.
    pub async fn refused(self) -> Reply {
        let (to, log) = (self.to, self.log.clone());
        let reply = self.handshake().fetch(to, &log).await;
        assert_ne!(reply.status, 101, "the worker was accepted\n{}", log.dump());
        reply
    }

    /// The valid handshake as a plain request, for tests that invalidate it.
    #[must_use]
    pub fn handshake(self) -> Request {
        self.request()
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    }

    /// The request without any of the handshake's headers.
    #[must_use]
    pub fn request(self) -> Request {
        self.headers.iter().fold(Request::get(&self.target()), |request, (name, value)| request.header(name, value))
    }

    fn target(&self) -> String {
        let query: Vec<String> = self.query.iter().map(|(key, value)| format!("{key}={value}")).collect();
        format!("/v1/worker/connect?{}", query.join("&"))
    }
}
