//! An HTTP proxy played by hand. It supports only `CONNECT`, and every name leads to the same address.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use crate::TEST_TIMEOUT;
use crate::fake_relay::Wire;
use crate::tls::Certificates;

/// A listening proxy.
#[derive(Debug)]
pub struct ConnectProxy {
    addr: SocketAddr,
    requests: mpsc::UnboundedReceiver<String>,
    listening: JoinHandle<()>,
}

impl ConnectProxy {
    /// Starts a proxy that opens each tunnel to this address.
    pub async fn start(to: SocketAddr) -> Self {
        Self::listen(Ok(to), None).await
    }

    /// The same, but the proxy itself is reached over TLS.
    pub async fn start_tls(to: SocketAddr, certificates: &Certificates) -> Self {
        Self::listen(Ok(to), Some(certificates.acceptor())).await
    }

    /// Starts a proxy that responds to each request with this status line.
    pub async fn refusing(status: &'static str) -> Self {
        Self::listen(Err(status), None).await
    }

    async fn listen(to: Result<SocketAddr, &'static str>, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket");
        let (heads, requests) = mpsc::unbounded_channel();
        let listening = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, tls.clone(), to, heads.clone()));
            }
        });
        Self { addr, requests, listening }
    }

    /// The address on which it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The head of the next request.
    ///
    /// # Panics
    /// If none arrives within ten seconds.
    pub async fn next_request(&mut self) -> String {
        let request = tokio::time::timeout(TEST_TIMEOUT, self.requests.recv()).await;
        request.ok().flatten().expect("the proxy received no request")
    }

    /// True if no request has come.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.requests.is_empty()
    }
}

impl Drop for ConnectProxy {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

async fn serve(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    to: Result<SocketAddr, &'static str>,
    heads: mpsc::UnboundedSender<String>,
) -> Option<()> {
    let mut inbound: Box<dyn Wire> = match tls {
        Some(tls) => Box::new(tls.accept(stream).await.ok()?),
        None => Box::new(stream),
    };
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(inbound.read_u8().await.ok()?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let is_connect = head.starts_with("CONNECT ");
    heads.send(head).ok()?;
    let to = if is_connect { to } else { Err("405 Method Not Allowed") };
    match to {
        Ok(to) => {
            let mut outbound = TcpStream::connect(to).await.ok()?;
            inbound.write_all(b"HTTP/1.1 200 Connection established\r\nvia: 1.1 played\r\n\r\n").await.ok()?;
            inbound.flush().await.ok()?;
            tokio::io::copy_bidirectional(&mut inbound, &mut outbound).await.ok()?;
        }
        Err(status) => {
            inbound.write_all(format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").as_bytes()).await.ok()?;
            inbound.flush().await.ok()?;
        }
    }
    Some(())
}
