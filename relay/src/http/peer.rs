//! What a handler may know of the connection that a request came on.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Sleep;

use crate::net::TcpStream;

/// How long a client may take no byte of what is there for it.
pub const WRITE_PATIENCE: Duration = Duration::from_secs(120);

/// The address of the connection's other end, put into every request by the listener.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

/// Whether the connection has handed all it was given to the kernel.
#[derive(Clone, Debug, Default)]
pub struct Flushed(Arc<AtomicBool>);

impl Flushed {
    /// Whether nothing waits for the kernel.
    pub fn is_flushed(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }
}

/// A client's connection that says whether its output is stuck, and breaks when it is for too long: nothing else would
/// ever end an answer that is complete here and that nobody reads.
#[derive(Debug)]
pub struct ClientIo {
    inner: TcpStream,
    blocked: Flushed,
    patience: Duration,
    /// Runs while the output is stuck.
    giving_up: Option<Pin<Box<Sleep>>>,
    place: OwnedSemaphorePermit,
}

impl ClientIo {
    /// Watches `inner`, which takes one place of its listener, and breaks when its output is stuck for longer than
    /// `patience`.
    pub fn new(inner: TcpStream, patience: Duration, place: OwnedSemaphorePermit) -> Self {
        Self { inner, blocked: Flushed::default(), patience, giving_up: None, place }
    }

    /// A view on whether the output is stuck.
    pub fn flushed(&self) -> Flushed {
        self.blocked.clone()
    }

    /// The first bytes that the client sent, left where they are.
    pub async fn peek(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.inner.peek(buf).await
    }

    /// Breaks no more when its output is stuck: whoever has it now watches it.
    pub fn leave_patience_to_others(&mut self) {
        self.patience = Duration::MAX;
        self.giving_up = None;
    }

    /// The connection itself, and the place that it takes for as long as it is open.
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
        Pin::new(&mut self.inner).poll_read(cx, buf)
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

// They speak to the kernel.
#[cfg(all(test, not(feature = "simulation")))]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_nobody_reads_breaks() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let silent = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let mut io = ClientIo::new(accepted, Duration::from_millis(20), place);
        let flushed = io.flushed();
        let broke = io.write_all(&vec![0; 64 << 20]).await.unwrap_err();
        assert_eq!((broke.kind(), flushed.is_flushed()), (io::ErrorKind::TimedOut, false));
        drop(silent);
    }
}
