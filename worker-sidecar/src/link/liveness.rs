//! Detects a lost peer by the bytes received below the WebSocket, even in the middle of a message.
//!
//! Sent bytes prove nothing, because they may be in a kernel buffer. Only a lack of progress does: a peer that accepts
//! none of the queued output for that long is lost as well.
//!
//! A silence beyond the limit ends the link even if bytes arrive after it. A process that was stopped in the meantime
//! finds in its socket the messages that the relay had sent before it gave up this worker, and whose requests others
//! have served since.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use modelrelay_protocol::limits::HEARTBEATS_UNTIL_LOST;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const SILENT: &str = "the relay sent nothing for three heartbeats";

/// The time at which bytes last moved, in milliseconds since `start`.
#[derive(Debug)]
pub(crate) struct Traffic {
    start: Instant,
    received: AtomicU64,
    progressed: AtomicU64,
    /// The time since which output is queued, plus one; 0 while none is.
    output_since: AtomicU64,
    /// The silence that ends the link; unlimited while the link is being established.
    limit: AtomicU64,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LivenessCheck {
    /// Check again at this time.
    Fine(Instant),
    /// Silent for an interval: send a ping, and check again at this time.
    Ping(Instant),
    /// The peer is lost.
    Lost(&'static str),
}

impl Traffic {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            start: Instant::now(),
            received: AtomicU64::new(0),
            progressed: AtomicU64::new(0),
            output_since: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
        })
    }

    /// The link is established, and its relay sends something in each interval.
    pub(crate) fn expect_heartbeats(&self, interval: Duration) {
        let limit = (interval * HEARTBEATS_UNTIL_LOST).as_millis();
        self.limit.store(u64::try_from(limit).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// The writer has output.
    pub(super) fn begin_output(&self) {
        self.output_since.store(self.millis(Instant::now()) + 1, Ordering::Relaxed);
    }

    /// The writer has no output.
    pub(super) fn end_output(&self) {
        self.output_since.store(0, Ordering::Relaxed);
    }

    /// Checks the peer at `now`.
    pub(crate) fn judge(&self, now: Instant, interval: Duration) -> LivenessCheck {
        let limit = interval * HEARTBEATS_UNTIL_LOST;
        let heard = self.instant(self.received.load(Ordering::Relaxed));
        let silent = now.saturating_duration_since(heard);
        if silent >= limit {
            return LivenessCheck::Lost(SILENT);
        }
        let mut next = heard + if silent < interval { interval } else { silent + interval };
        next = next.min(heard + limit);
        if let Some(since) = self.output_since.load(Ordering::Relaxed).checked_sub(1) {
            let stuck = self.instant(since.max(self.progressed.load(Ordering::Relaxed)));
            if now.saturating_duration_since(stuck) >= limit {
                return LivenessCheck::Lost("the relay read nothing for three heartbeats");
            }
            next = next.min(stuck + limit);
        }
        if silent >= interval { LivenessCheck::Ping(next) } else { LivenessCheck::Fine(next) }
    }

    /// True if nothing arrived within the limit, so that the peer is lost.
    pub(super) fn is_silent(&self, now: Instant) -> bool {
        let silent = self.millis(now).saturating_sub(self.received.load(Ordering::Relaxed));
        silent >= self.limit.load(Ordering::Relaxed)
    }

    fn millis(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX - 1)
    }

    fn instant(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }
}

/// A socket that records its traffic.
#[derive(Debug)]
pub(crate) struct Counted<S> {
    inner: S,
    traffic: Arc<Traffic>,
}

impl<S> Counted<S> {
    pub(crate) fn new(inner: S, traffic: Arc<Traffic>) -> Self {
        Self { inner, traffic }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        if buf.filled().len() > before {
            // Read the clock after the read: the process may have been stopped in the middle of it.
            let now = Instant::now();
            if self.traffic.is_silent(now) {
                buf.set_filled(before);
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, SILENT)));
            }
            self.traffic.received.store(self.traffic.millis(now), Ordering::Relaxed);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = Pin::new(&mut self.inner).poll_write(cx, buf);
        if let Poll::Ready(Ok(1..)) = wrote {
            let now = self.traffic.millis(Instant::now());
            self.traffic.progressed.store(now, Ordering::Relaxed);
        }
        wrote
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const BEAT: Duration = Duration::from_secs(15);

    #[test]
    fn one_silent_interval_pings_and_three_end_link() {
        let traffic = Traffic::new();
        let at = |seconds| traffic.start + Duration::from_secs(seconds);
        assert_eq!(traffic.judge(at(1), BEAT), LivenessCheck::Fine(at(15)));
        assert_eq!(traffic.judge(at(15), BEAT), LivenessCheck::Ping(at(30)));
        assert_eq!(traffic.judge(at(40), BEAT), LivenessCheck::Ping(at(45)));
        assert!(matches!(traffic.judge(at(45), BEAT), LivenessCheck::Lost(_)));
        traffic.received.store(44_000, Ordering::Relaxed);
        assert_eq!(traffic.judge(at(45), BEAT), LivenessCheck::Fine(at(59)));
    }

    #[test]
    fn stalled_output_ends_link_despite_received_data() {
        let traffic = Traffic::new();
        let at = |seconds| traffic.start + Duration::from_secs(seconds);
        traffic.received.store(100_000, Ordering::Relaxed);
        traffic.output_since.store(60_001, Ordering::Relaxed);
        assert_eq!(traffic.judge(at(100), BEAT), LivenessCheck::Fine(at(105)));
        assert!(matches!(traffic.judge(at(105), BEAT), LivenessCheck::Lost(_)));
        traffic.progressed.store(101_000, Ordering::Relaxed);
        assert_eq!(traffic.judge(at(105), BEAT), LivenessCheck::Fine(at(115)));
    }
    #[tokio::test]
    async fn bytes_after_three_silent_heartbeats_are_refused() {
        let mut traffic = Traffic::new();
        Arc::get_mut(&mut traffic).unwrap().start -= BEAT * 4;
        let (mut peer, socket) = tokio::io::duplex(64);
        let mut counted = Counted::new(socket, Arc::clone(&traffic));
        peer.write_all(b"ab").await.unwrap();
        assert_eq!(counted.read_u8().await.unwrap(), b'a', "a link that is being made");
        traffic.expect_heartbeats(BEAT);
        assert_eq!(counted.read_u8().await.unwrap(), b'b');
        traffic.received.store(15_000, Ordering::Relaxed);
        peer.write_all(b"c").await.unwrap();
        assert_eq!(counted.read_u8().await.unwrap_err().to_string(), SILENT);
    }

    /// Four heartbeats pass in the middle of each read.
    struct Stopped(Arc<Traffic>);

    impl AsyncRead for Stopped {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            buf.put_slice(b"l");
            self.0.received.store(0, Ordering::Relaxed);
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn bytes_read_over_three_heartbeats_are_refused() {
        let mut traffic = Traffic::new();
        Arc::get_mut(&mut traffic).unwrap().start -= BEAT * 4;
        traffic.expect_heartbeats(BEAT);
        traffic.received.store(traffic.millis(Instant::now()), Ordering::Relaxed);
        let mut counted = Counted::new(Stopped(Arc::clone(&traffic)), traffic);
        assert_eq!(counted.read_u8().await.unwrap_err().to_string(), SILENT);
    }
}
