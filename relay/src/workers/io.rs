//! A TCP stream that records when it last moved a byte.
//!
//! Liveness is determined by bytes received, below the WebSocket: a peer is alive in the middle of a long message
//! although no message ends, and sent bytes prove nothing while they sit in a kernel buffer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::net::budget::Budget;
use crate::net::unfinished::Unfinished;

/// No output waits, so none can be stuck.
const NOTHING_WAITS: u64 = u64::MAX;

/// The times when bytes last moved, in each direction.
#[derive(Debug)]
pub struct Liveness {
    epoch: Instant,
    read_ms: AtomicU64,
    written_ms: AtomicU64,
    /// The message that the peer is sending.
    pub unfinished: Unfinished,
}

impl Liveness {
    /// Creates a pulse with a byte received just now and no output waiting.
    pub fn new(budget: Arc<Budget>) -> Arc<Self> {
        let (read_ms, written_ms) = (AtomicU64::new(0), AtomicU64::new(NOTHING_WAITS));
        Arc::new(Self { epoch: Instant::now(), read_ms, written_ms, unfinished: Unfinished::message(budget) })
    }

    /// The time of the peer's last byte.
    pub fn last_read(&self) -> Instant {
        self.epoch + Duration::from_millis(self.read_ms.load(Ordering::Relaxed))
    }

    /// The time since which output has been waiting without progress; `None` while no output waits.
    pub fn waiting_since(&self) -> Option<Instant> {
        let at = self.written_ms.load(Ordering::Relaxed);
        (at != NOTHING_WAITS).then(|| self.epoch + Duration::from_millis(at))
    }

    /// Records that output begins to wait now; earlier writes no longer matter.
    pub fn mark_waiting(&self) {
        self.written_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Records that the kernel has accepted all output.
    pub fn mark_idle(&self) {
        self.written_ms.store(NOTHING_WAITS, Ordering::Relaxed);
    }

    fn mark_progress(&self) {
        if self.written_ms.load(Ordering::Relaxed) != NOTHING_WAITS {
            self.mark_waiting();
        }
    }

    fn mark_read(&self) {
        self.read_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The stream.
#[derive(Debug)]
pub struct LivenessIo<S> {
    inner: S,
    liveness: Arc<Liveness>,
}

impl<S> LivenessIo<S> {
    /// Wraps `inner`.
    pub fn new(inner: S, liveness: Arc<Liveness>) -> Self {
        Self { inner, liveness }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LivenessIo<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        if read > 0 {
            self.liveness.mark_read();
            self.liveness.unfinished.receive(read as u64, Instant::now)?;
        }
        result
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for LivenessIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        if matches!(result, Poll::Ready(Ok(n)) if n > 0) {
            self.liveness.mark_progress();
        }
        result
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
