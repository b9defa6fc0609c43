//! The connection of a request, as far as handlers need it.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use crate::net::TcpStream;
use crate::net::budget::Budget;
use crate::net::unfinished::Unfinished;

/// How long a client may read no byte of its pending output.
pub const WRITE_PATIENCE: Duration = Duration::from_secs(120);

/// The address of the connection's peer, which the listener adds to every request.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Tracks whether the connection has passed all its output to the kernel.
#[derive(Clone, Debug, Default)]
pub struct Flushed(Arc<AtomicBool>);

impl Flushed {
    /// True if no output waits for the kernel.
    pub fn is_flushed(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }
}

/// The heads of a connection's requests. The received bytes of a head are in the budget until it is complete. Bodies
/// are counted where they are read.
#[derive(Clone, Debug)]
pub struct Heads(Arc<HeadsState>);

#[derive(Debug)]
struct HeadsState {
    unfinished: Unfinished,
    /// True while a body is read, not a head.
    in_body: AtomicBool,
}

impl Heads {
    fn new(budget: Arc<Budget>) -> Self {
        Self(Arc::new(HeadsState { unfinished: Unfinished::head(budget), in_body: AtomicBool::new(false) }))
    }

    fn receive(&self, bytes: usize) -> io::Result<()> {
        if self.0.in_body.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.0.unfinished.receive(bytes as u64, Instant::now)
    }

    /// True if the first bytes of a head have arrived, and not all of it.
    pub fn has_begun(&self) -> bool {
        !self.0.in_body.load(Ordering::Relaxed) && self.0.unfinished.has_begun()
    }

    /// Forgets the bytes of a handshake, which precede the first head.
    pub fn end_handshake(&self) {
        self.0.unfinished.end();
    }

    /// Marks a head as complete. The next one begins when its body is dropped.
    pub fn end_with(&self, body: Incoming) -> RequestBody {
        self.0.in_body.store(true, Ordering::Relaxed);
        self.0.unfinished.end();
        RequestBody { body, heads: self.clone() }
    }
}

/// The body of a request, as it arrives.
#[derive(Debug)]
pub struct RequestBody {
    body: Incoming,
    heads: Heads,
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.heads.0.in_body.store(false, Ordering::Relaxed);
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A client's connection that tracks whether its output is blocked, and breaks if it is for too long: nothing else
/// would ever end a response that is complete here and that its client does not read.
#[derive(Debug)]
pub struct ClientIo {
    inner: TcpStream,
    blocked: Flushed,
    patience: Duration,
    /// Runs while the output is blocked.
    giving_up: Option<Pin<Box<Sleep>>>,
    heads: Heads,
    place: OwnedSemaphorePermit,
}

impl ClientIo {
    /// Wraps `inner`, which occupies one place of its listener. The connection breaks if its output is blocked for
    /// longer than `patience`.
    pub fn new(inner: TcpStream, patience: Duration, budget: Arc<Budget>, place: OwnedSemaphorePermit) -> Self {
        Self { inner, blocked: Flushed::default(), patience, giving_up: None, heads: Heads::new(budget), place }
    }

    /// A view of whether the output is blocked.
    pub fn flushed(&self) -> Flushed {
        self.blocked.clone()
    }

    /// The heads of its requests.
    pub fn heads(&self) -> Heads {
        self.heads.clone()
    }

    /// The first bytes from the client, without consuming them.
    pub async fn peek(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.peek(buf).await
    }

    /// Disables the timeout of blocked output: the new owner of the connection watches it.
    pub fn leave_patience_to_others(&mut self) {
        self.patience = Duration::MAX;
        self.giving_up = None;
    }

    /// The connection itself, and the place that it occupies while it is open.
    pub fn into_parts(self) -> (TcpStream, OwnedSemaphorePermit) {
        (self.inner, self.place)
    }

    fn note(&mut self, polled: Poll<io::Result<usize>>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.blocked.0.store(polled.is_pending(), Ordering::Relaxed);
        if polled.is_ready() {
            self.giving_up = None;
            return polled;
        }
        let patience = self.patience;
        let giving_up = self.giving_up.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(giving_up.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client has stopped reading")))
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            self.heads.receive(read)?;
        }
        polled
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.note(polled, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.note(polled, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

// These tests use real sockets.
#[cfg(all(test, not(feature = "simulation")))]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn unread_connection_times_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let mut io = ClientIo::new(accepted, Duration::from_millis(20), Budget::new(0), place);
        let flushed = io.flushed();
        let broke = io.write_all(&vec![0; 64 << 20]).await.unwrap_err();
        assert_eq!((broke.kind(), flushed.is_flushed()), (io::ErrorKind::TimedOut, false));
        drop(silent);
    }
}
