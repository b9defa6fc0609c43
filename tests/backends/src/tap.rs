//! A proxy in front of a server that keeps a copy of everything that the server sends. A test can then compare the
//! bytes of one response at both ends.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use url::Url;

/// The bytes that the server sent on each connection.
type Copies = Arc<Mutex<Vec<Vec<u8>>>>;

/// The proxy. Dropping it ends it.
#[derive(Debug)]
pub struct Tap {
    /// The proxy's address, for the worker.
    pub url: Url,
    copies: Copies,
    _task: JoinSet<()>,
}

impl Tap {
    /// Starts a proxy for this server.
    ///
    /// # Panics
    /// If there is no free port, or the server has no address.
    pub async fn on(server: &Url) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound")).parse().expect("this is a URL");
        let server = server.socket_addrs(|| None).expect("an address")[0];
        let copies = Copies::default();
        let mut task = JoinSet::new();
        task.spawn(accept(listener, server, Arc::clone(&copies)));
        Self { url, copies, _task: task }
    }

    /// Returns the bodies of all complete responses so far.
    ///
    /// # Panics
    /// If one of them is not HTTP.
    #[must_use]
    pub fn bodies(&self) -> Vec<Vec<u8>> {
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.iter().flat_map(|copy| bodies(copy)).collect()
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, copies: Copies) {
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(carry(client, server, Arc::clone(&copies)));
    }
}

/// Forwards bytes both ways until either side closes its connection, and then closes the other.
async fn carry(mut client: TcpStream, server: SocketAddr, copies: Copies) {
    let Ok(mut server) = TcpStream::connect(server).await else { return };
    let number = {
        let mut copies = copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.push(Vec::new());
        copies.len() - 1
    };
    let (mut from_client, mut to_client) = client.split();
    let (mut from_server, mut to_server) = server.split();
    let back = async {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from_server.read(&mut buffer).await {
            copies.lock().unwrap_or_else(PoisonError::into_inner)[number].extend_from_slice(&buffer[..count]);
            if to_client.write_all(&buffer[..count]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = back => {}
        _ = tokio::io::copy(&mut from_client, &mut to_server) => {}
    }
}

/// Returns the complete bodies among the responses of one connection, without the framing of chunks.
fn bodies(mut sent: &[u8]) -> Vec<Vec<u8>> {
    let mut bodies = Vec::new();
    while let Some((head, rest)) = split(sent, b"\r\n\r\n") {
        let head = String::from_utf8_lossy(head).to_ascii_lowercase();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let body = match field("content-length:") {
            Some(length) => {
                rest.split_at_checked(length.parse().expect("a length")).map(|(body, rest)| (body.to_vec(), rest))
            }
            None if field("transfer-encoding:").is_some() => dechunked(rest),
            None => Some((Vec::new(), rest)),
        };
        let Some((body, rest)) = body else { break };
        bodies.push(body);
        sent = rest;
    }
    bodies
}

fn dechunked(mut rest: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut body = Vec::new();
    loop {
        let (size, after) = split(rest, b"\r\n")?;
        let size = usize::from_str_radix(std::str::from_utf8(size).expect("ASCII"), 16).expect("the size of a chunk");
        let (chunk, after) = after.split_at_checked(size)?;
        body.extend_from_slice(chunk);
        rest = after.get(2..)?;
        if size == 0 {
            return Some((body, rest));
        }
    }
}

fn split<'a>(bytes: &'a [u8], at: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let found = bytes.windows(at.len()).position(|window| window == at)?;
    Some((&bytes[..found], &bytes[found + at.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complete_bodies_are_found_without_framing() {
        let sent = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab\
            HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nc\r\nA\r\n0123456789\r\n0\r\n\r\n\
            HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nde";
        assert_eq!(bodies(sent.as_bytes()), [&b"ab"[..], b"c0123456789"]);
    }
}
