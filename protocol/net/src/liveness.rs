//! A stream that records when it last moved a byte.
//!
//! Liveness is determined by bytes received, below the WebSocket: a peer is alive in the middle of a long message
//! although no message ends. Sent bytes prove nothing, because they may be in a kernel buffer; a peer that accepts none
//! of the waiting output is lost as well.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// No output waits, so none can be stuck.
const NOTHING_WAITS: u64 = u64::MAX;

/// Decides whether received bytes are accepted.
pub trait Guard {
    /// `bytes` arrived after a silence of `silent`; an error rejects them, and ends the link.
    fn admit(&self, bytes: usize, silent: Duration) -> io::Result<()>;
}

/// The times when bytes last moved, in each direction.
#[derive(Debug)]
pub struct Liveness<G> {
    start: Instant,
    read_ms: AtomicU64,
    written_ms: AtomicU64,
    /// Checks what arrives.
    pub guard: G,
}

impl<G> Liveness<G> {
    /// Records a byte received at `start`, and no output waiting.
    pub fn new(start: Instant, guard: G) -> Arc<Self> {
        Arc::new(Self { start, read_ms: AtomicU64::new(0), written_ms: AtomicU64::new(NOTHING_WAITS), guard })
    }

    /// The time of the peer's last byte.
    pub fn last_read(&self) -> Instant {
        self.start + Duration::from_millis(self.read_ms.load(Ordering::Relaxed))
    }

    /// The time since which output has been waiting without progress; `None` while no output waits.
    pub fn waiting_since(&self) -> Option<Instant> {
        let at = self.written_ms.load(Ordering::Relaxed);
        (at != NOTHING_WAITS).then(|| self.start + Duration::from_millis(at))
    }

    /// Records that a byte was received.
    pub fn mark_read(&self, now: Instant) {
        self.read_ms.store(self.millis(now), Ordering::Relaxed);
    }

    /// Records that output begins to wait; earlier writes no longer matter.
    pub fn mark_waiting(&self, now: Instant) {
        self.written_ms.store(self.millis(now), Ordering::Relaxed);
    }

    /// Records that the kernel has accepted a part of the waiting output.
    pub fn mark_progress(&self, now: Instant) {
        let progress = |at| (at != NOTHING_WAITS).then(|| self.millis(now));
        // Fails while no output waits: then there is nothing to record.
        let _ = self.written_ms.fetch_update(Ordering::Relaxed, Ordering::Relaxed, progress);
    }

    /// Records that the kernel has accepted all output.
    pub fn mark_idle(&self) {
        self.written_ms.store(NOTHING_WAITS, Ordering::Relaxed);
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_millis()).unwrap_or(NOTHING_WAITS - 1)
    }
}

/// The stream.
#[derive(Debug)]
pub struct LivenessIo<S, G> {
    inner: S,
    liveness: Arc<Liveness<G>>,
}

impl<S, G> LivenessIo<S, G> {
    /// Wraps `inner`.
    pub fn new(inner: S, liveness: Arc<Liveness<G>>) -> Self {
        Self { inner, liveness }
    }
}

impl<S: AsyncRead + Unpin, G: Guard> AsyncRead for LivenessIo<S, G> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.inner).poll_read(cx, buf);
        let bytes = buf.filled().len() - before;
        if bytes > 0 {
            // Read the clock after the read: the process may have been stopped in the middle of it.
            let now = Instant::now();
            let silent = now.saturating_duration_since(self.liveness.last_read());
            if let Err(error) = self.liveness.guard.admit(bytes, silent) {
                buf.set_filled(before);
                return Poll::Ready(Err(error));
            }
            self.liveness.mark_read(now);
        }
        result
    }
}

impl<S: AsyncWrite + Unpin, G> AsyncWrite for LivenessIo<S, G> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        if let Poll::Ready(Ok(1..)) = result {
            self.liveness.mark_progress(Instant::now());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_counts_only_while_output_waits() {
        let start = Instant::now();
        let liveness = Liveness::new(start, ());
        let at = |seconds| start + Duration::from_secs(seconds);
        liveness.mark_progress(at(1));
        assert_eq!(liveness.waiting_since(), None);
        liveness.mark_waiting(at(2));
        assert_eq!(liveness.waiting_since(), Some(at(2)));
        liveness.mark_progress(at(3));
        assert_eq!(liveness.waiting_since(), Some(at(3)));
        liveness.mark_idle();
        assert_eq!(liveness.waiting_since(), None);
    }
}
