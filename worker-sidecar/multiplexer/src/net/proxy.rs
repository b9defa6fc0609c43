//! HTTP proxies, and the tunnel through them (`CONNECT`, RFC 9110, section 9.3.6).

use std::fmt;
use std::io;

use http::HeaderValue;
use modelrelay_protocol::names::marked;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Stream, Trust, connect_directly};

/// The size limit of a proxy's response head.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// The number of its characters that errors repeat.
const MAX_STATUS_CHARS: usize = 100;

/// An HTTP proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// True if it is itself reached over TLS.
    pub tls: bool,
    /// Name or address, without brackets.
    pub host: String,
    /// Port.
    pub port: u16,
    /// `Proxy-Authorization`.
    pub authorization: Option<HeaderValue>,
}

impl fmt::Display for Proxy {
    /// Formats its address, without credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", super::authority(&self.host, self.port))
    }
}

impl Proxy {
    /// Opens a tunnel to `target`, written as host and port.
    pub(super) async fn tunnel(&self, target: &str, trust: &Trust) -> io::Result<Stream> {
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("the proxy {self}: {error}"));
        let stream = Box::pin(connect_directly(&self.host, self.port, &[], self.tls.then_some(trust))).await;
        let mut stream = stream.map_err(failed)?;
        stream.write_all(&self.request(target)).await.map_err(failed)?;
        stream.flush().await.map_err(failed)?;
        let head = read_head(&mut stream).await.map_err(failed)?;
        match status(&head) {
            Some(status) if status.starts_with('2') => Ok(stream),
            Some(status) => Err(io::Error::other(format!("the proxy {self} returned {status} for CONNECT {target}"))),
            None => Err(io::Error::other(format!("the proxy {self} does not speak HTTP"))),
        }
    }

    fn request(&self, target: &str) -> Vec<u8> {
        let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes();
        if let Some(value) = &self.authorization {
            request.extend([b"Proxy-Authorization: ", value.as_bytes(), b"\r\n"].concat());
        }
        request.extend(b"\r\n");
        request
    }
}

/// Reads byte by byte, because the bytes after the head belong to the tunnel.
async fn read_head(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == MAX_HEAD_BYTES {
            return Err(io::Error::other("the response is too long"));
        }
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}

/// Returns the status and its reason.
fn status(head: &[u8]) -> Option<String> {
    let line = String::from_utf8_lossy(head.split(|byte| *byte == b'\r').next()?).into_owned();
    let (_, status) = line.strip_prefix("HTTP/1.")?.split_once(' ')?;
    let is_status = status.len() >= 3 && status.bytes().take(3).all(|byte| byte.is_ascii_digit());
    is_status.then(|| marked(&status.chars().take(MAX_STATUS_CHARS).collect::<String>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_status_is_read_with_its_reason() {
        let told = |head: &str| status(head.as_bytes());
        assert_eq!(told("HTTP/1.1 200 OK\r\n\r\n").as_deref(), Some("200 OK"));
        assert_eq!(told("HTTP/1.0 407 Who?\r\nX: 1\r\n\r\n").as_deref(), Some("407 Who?"));
        assert_eq!(told("HTTP/1.1 502\r\n\r\n").as_deref(), Some("502"));
        for other in ["SSH-2.0 200 OK\r\n\r\n", "HTTP/1.1 OK\r\n\r\n", "HTTP/1.1 20\r\n\r\n", ""] {
            assert_eq!(told(other), None, "{other}");
        }
    }
}
