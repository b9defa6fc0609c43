//! One HTTP/1.1 connection to the backend, owned by the caller that waits for its response.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::response::Parts;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use modelrelay_multiplexer::net::{self, Stream, Trust};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use url::Url;

use super::upload::{Upload, UploadBody};

/// The limit of hyper's read buffer, which also limits a response's head: a slow client must not cost more than a
/// piece.
const MAX_READ_BUFFER: usize = 64 << 10;

/// How long a connection may take to become reusable after a response.
const REUSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason why an exchange has no response.
pub(super) enum ExchangeError {
    /// The connection ended first.
    Broken(String),
    /// The response is not HTTP.
    Garbage(String),
}

/// A connection without a request. Dropping it closes the socket at once.
#[derive(Debug)]
pub(super) struct Connection {
    sender: SendRequest<UploadBody>,
    driver: ConnectionDriver,
}

/// Moves the connection's bytes while it is open. It has no separate task, which each piece of a response would wake
/// only to wake the request's task: the caller that waits for the connection drives it.
#[derive(Debug)]
struct ConnectionDriver(Option<Pin<Box<Http>>>);

type Http = http1::Connection<TokioIo<ReadWins>, UploadBody>;

impl ConnectionDriver {
    /// Runs `work`, which may need bytes to move.
    async fn drive<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|cx| {
            if let Poll::Ready(done) = work.as_mut().poll(cx) {
                return Poll::Ready(done);
            }
            self.poll(cx);
            work.as_mut().poll(cx)
        })
        .await
    }

    /// Moves the bytes that can be moved now. The end of the connection shows in its exchange.
    fn poll(&mut self, cx: &mut Context<'_>) {
        if self.0.as_mut().is_some_and(|connection| connection.as_mut().poll(cx).is_ready()) {
            self.0 = None;
        }
    }
}

/// A response whose head has arrived and whose body is being read. Dropping it closes the connection at once.
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
        let stream = net::connect_to(url, &[], trust).await?;
        let io = TokioIo::new(ReadWins { stream, write_broken: false });
        let (sender, driver) =
            http1::Builder::new().max_buf_size(MAX_READ_BUFFER).handshake(io).await.map_err(io::Error::other)?;
        Ok(Self { sender, driver: ConnectionDriver(Some(Box::pin(driver))) })
    }

    pub(super) async fn exchange(mut self, head: Request<()>, upload: &Upload) -> Result<Answer, ExchangeError> {
        let request = head.map(|()| upload.body());
        let sending = self.sender.send_request(request);
        match self.driver.drive(sending).await {
            Ok(response) => {
                let (head, body) = response.into_parts();
                Ok(Answer { head, body, connection: self, upload: upload.clone(), ended: false })
            }
            Err(error) if error.is_parse() => Err(ExchangeError::Garbage(error.to_string())),
            Err(error) => Err(ExchangeError::Broken(error.to_string())),
        }
    }

    /// True if the connection ended while it was unused. From now on `cx` is woken at its end.
    pub(super) fn poll_closed(&mut self, cx: &mut Context<'_>) -> bool {
        self.driver.poll(cx);
        self.sender.is_closed()
    }

    /// True if a request can be sent now. From now on only the caller that drives the connection notices its end.
    pub(super) fn is_ready(&mut self) -> bool {
        self.driver.poll(&mut Context::from_waker(Waker::noop()));
        self.sender.is_ready()
    }
}

impl Answer {
    /// Returns the body's length, if its framing determines it. The header alone proves nothing: with chunked encoding
    /// it is ignored, and in a 304 it is the length of a body that is not sent.
    pub fn content_length(&self) -> Option<u64> {
        let bodiless = matches!(self.head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        self.body.size_hint().exact().filter(|_| !bodiless)
    }

    /// Returns the next bytes of the body, `None` at its end, or an error if the backend broke the connection.
    pub async fn next(&mut self) -> Option<Result<Bytes, String>> {
        while !self.ended {
            match self.connection.driver.drive(self.body.frame()).await {
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

    /// Runs `work` while the request is still being sent to the backend: its response may begin before all of it is
    /// sent.
    pub async fn run_while_sending<T>(&mut self, work: impl Future<Output = T>) -> T {
        self.connection.driver.drive(work).await
    }

    /// Reads the rest of a body of the worker's own request, up to `limit` bytes.
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

    /// Returns the connection, if both bodies are complete and the backend keeps it open.
    pub(super) async fn into_reusable(self) -> Option<Connection> {
        let Connection { mut sender, mut driver } = self.connection;
        if !self.ended || !self.upload.is_sent() {
            return None;
        }
        drop(self.body);
        match tokio::time::timeout(REUSE_TIMEOUT, driver.drive(sender.ready())).await {
            Ok(Ok(())) => Some(Connection { sender, driver }),
            Ok(Err(_)) | Err(_) => None,
        }
    }
}

/// A backend that rejects a request early may respond, close, and reset the half-sent body. hyper would report the
/// failed write and lose the response, so after a failure writes pretend to succeed: the result comes from reading.
#[derive(Debug)]
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
