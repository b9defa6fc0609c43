//! What a handler may know of the connection that a request came on.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

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

/// A client's connection that says whether its output is stuck.
#[derive(Debug)]
pub struct ClientIo {
    inner: TcpStream,
    blocked: Flushed,
    place: OwnedSemaphorePermit,
}

impl ClientIo {
    /// Watches `inner`, which takes one place of its listener.
    pub fn new(inner: TcpStream, place: OwnedSemaphorePermit) -> Self {
        Self { inner, blocked: Flushed::default(), place }
    }

    /// A view on whether the output is stuck.
    pub fn flushed(&self) -> Flushed {
        self.blocked.clone()
    }

    /// The connection itself, and the place that it takes for as long as it is open.
    pub fn into_parts(self) -> (TcpStream, OwnedSemaphorePermit) {
        (self.inner, self.place)
    }

    fn note<T>(&self, polled: Poll<T>) -> Poll<T> {
        self.blocked.0.store(polled.is_pending(), Ordering::Relaxed);
        polled
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
        self.note(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.note(polled)
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
