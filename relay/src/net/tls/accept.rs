//! The handshake, and a helpful error for clients that use plain HTTP.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::debug;

use super::Tls;
use crate::net::peer::ClientIo;

/// The time from the accepted connection to the end of its handshake. The connection occupies a place meanwhile, as any
/// other.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes that are read of a request that cannot be served here, so that its response is not lost in a reset.
const DISCARDED_BYTES: u64 = 64 << 10;

const SPEAKS_HTTPS: &str = r#"{"error":{"message":"this port requires HTTPS: use https:// instead of http://","type":"invalid_request_error","param":null,"code":"https_required"}}"#;

impl Tls {
    /// Performs the handshake. A failure is logged at debug level, and has no effect on other connections.
    pub async fn accept(&self, io: ClientIo, peer: SocketAddr) -> Option<TlsStream<ClientIo>> {
        match tokio::time::timeout(HANDSHAKE_TIMEOUT, self.handshake(io)).await {
            Ok(Ok(stream)) => return Some(stream),
            Ok(Err(error)) => debug!(%peer, %error, "TLS handshake failed"),
            Err(_) => debug!(%peer, "TLS handshake timed out"),
        }
        None
    }

    async fn handshake(&self, mut io: ClientIo) -> io::Result<TlsStream<ClientIo>> {
        let mut first = [0];
        // A handshake begins with 22, a request with a method.
        if io.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
            refuse_plain_http(io).await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the client sent plain HTTP"));
        }
        TlsAcceptor::from(self.current.load_full()).accept(io).await
    }
}

async fn refuse_plain_http(mut io: ClientIo) -> io::Result<()> {
    let length = SPEAKS_HTTPS.len();
    let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length";
    io.write_all(format!("{head}: {length}\r\n\r\n{SPEAKS_HTTPS}").as_bytes()).await?;
    io.shutdown().await?;
    tokio::io::copy(&mut io.take(DISCARDED_BYTES), &mut tokio::io::sink()).await?;
    Ok(())
}
