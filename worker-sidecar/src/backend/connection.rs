//! One HTTP/1.1 connection to the backend, owned by whoever waits for its answer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::response::Parts;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;
use url::Url;

use super::upload::{Upload, UploadBody};
use crate::net::{self, Stream, Trust};

/// hyper's read buffer at most, which also bounds an answer's head: a slow client must not cost more than a piece.
const MAX_READ_BUFFER: usize = 64 << 10;

/// How long an answered connection may take to become usable again.
const REUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why an exchange gave no answer.
pub(super) enum ExchangeError {
    /// The connection ended first.
    Broken(String),
    /// Something came that is not HTTP.
    Garbage(String),
}

/// A connection without a request. Dropping it closes the socket at once.
#[derive(Debug)]
pub(super) struct Connection {
    sender: SendRequest<UploadBody>,
    // Held for its drop.
    _driver: Driver,
}

/// The task that moves bytes; it ends with its owner.
#[derive(Debug)]
struct Driver(AbortHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer whose head is there and whose body is being read. Dropping it closes the connection at once.
#[derive(Debug)]
pub struct Answer {
    /// Status and headers.
    pub head: Parts,
    body: Incoming,
    connection: Connection,
    upload: Upload,
    ended: bool,
}

impl Connection {
    pub(super) async fn dial(url: &Url, trust: &Trust) -> io::Result<Self> {
        let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let port = url.port_or_known_default().unwrap_or(80);
        let tls = (url.scheme() == "https").then_some(trust);
        let stream = net::connect(host, port, None, tls).await?;
        let io = TokioIo::new(ReadWins { stream, write_broken: false });
        let (sender, driver) =
            http1::Builder::new().max_buf_size(MAX_READ_BUFFER).handshake(io).await.map_err(io::Error::other)?;
        // Its end shows in the exchange that it carries.
        let driver = tokio::spawn(async move { drop(driver.await) });
        Ok(Self { sender, _driver: Driver(driver.abort_handle()) })
    }

    pub(super) async fn exchange(mut self, head: Request<()>, upload: &Upload) -> Result<Answer, ExchangeError> {
        let request = head.map(|()| upload.body());
        match self.sender.send_request(request).await {
            Ok(response) => {
                let (head, body) = response.into_parts();
                Ok(Answer { head, body, connection: self, upload: upload.clone(), ended: false })
            }
            Err(error) if error.is_parse() => Err(ExchangeError::Garbage(error.to_string())),
            Err(error) => Err(ExchangeError::Broken(error.to_string())),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    pub(super) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }
}

impl Answer {
    /// The body's length, where its framing tells it. The header alone proves nothing: beside chunks it does not count, and
    /// in a 304 it tells the length of a body that does not come.
    pub fn content_length(&self) -> Option<u64> {
        let bodiless = matches!(self.head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        self.body.size_hint().exact().filter(|_| !bodiless)
    }

    /// The next bytes of the body, `None` at its end; an error when the backend broke off.
    pub async fn next(&mut self) -> Option<Result<Bytes, String>> {
        while !self.ended {
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Some(Ok(data));
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    return Some(Err(error.to_string()));
                }
                None => self.ended = true,
            }
        }
        None
    }

    /// Reads the rest of a body that we asked for ourselves, up to `limit` bytes.
    pub async fn read_all(&mut self, limit: usize) -> Result<Vec<u8>, String> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await {
            all.extend_from_slice(&bytes?);
            if all.len() > limit {
                return Err(format!("more than {limit} bytes"));
            }
        }
        Ok(all)
    }

    /// The connection, when both bodies went to their end and the backend keeps it open.
    pub(super) async fn into_reusable(self) -> Option<Connection> {
        let mut connection = self.connection;
        if !self.ended || !self.upload.is_sent() {
            return None;
        }
        drop(self.body);
        match tokio::time::timeout(REUSE_TIMEOUT, connection.sender.ready()).await {
            Ok(Ok(())) => Some(connection),
            Ok(Err(_)) | Err(_) => None,
        }
    }
}

/// A backend that refuses a request early may answer, close, and reset our half-sent body. hyper would report the failed
/// write and lose the answer, so writes pretend to succeed from then on: what there is to know comes from reading.
struct ReadWins {
    stream: Stream,
    write_broken: bool,
}

impl ReadWins {
    fn judge(&mut self, len: usize, wrote: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match wrote {
            Poll::Ready(Err(_)) => {
                self.write_broken = true;
                Poll::Ready(Ok(len))
            }
            Poll::Ready(Ok(_)) | Poll::Pending => wrote,
        }
    }
}

impl AsyncRead for ReadWins {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for ReadWins {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.write_broken {
            return Poll::Ready(Ok(buf.len()));
        }
        let wrote = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.judge(buf.len(), wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let len = bufs.iter().map(|buf| buf.len()).sum();
        if self.write_broken {
            return Poll::Ready(Ok(len));
        }
        let wrote = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.judge(len, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_broken {
            return Poll::Ready(Ok(()));
        }
        match Pin::new(&mut self.stream).poll_flush(cx) {
            Poll::Ready(Err(_)) => {
                self.write_broken = true;
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
