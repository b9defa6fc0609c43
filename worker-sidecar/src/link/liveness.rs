//! When the relay is lost: by the bytes received below the WebSocket, even in the middle of a message.
//!
//! A silence beyond the limit ends the link even if bytes arrive after it. A process that was stopped in the meantime finds in
//! its socket the messages that the relay had sent before it gave up this worker, and whose requests others have served since.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use modelrelay_net::{Guard, Liveness};
use modelrelay_protocol::limits::HEARTBEATS_UNTIL_LOST;

const SILENT: &str = "the relay sent nothing for three heartbeats";

/// The times when bytes last moved.
pub(crate) type Traffic = Liveness<SilenceLimit>;

/// The silence that ends the link, in milliseconds; unlimited while the link is being established.
#[derive(Debug)]
pub(crate) struct SilenceLimit(AtomicU64);

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

impl Default for SilenceLimit {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

impl SilenceLimit {
    /// The link is established, and its relay sends something in each interval.
    pub(crate) fn expect_heartbeats(&self, interval: Duration) {
        let limit = (interval * HEARTBEATS_UNTIL_LOST).as_millis();
        self.0.store(u64::try_from(limit).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// True if nothing arrived within the limit, so that the peer is lost.
    pub(super) fn is_reached(&self, silent: Duration) -> bool {
        silent >= Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

impl Guard for SilenceLimit {
    fn admit(&self, _: usize, silent: Duration) -> io::Result<()> {
        if self.is_reached(silent) { Err(io::Error::new(io::ErrorKind::TimedOut, SILENT)) } else { Ok(()) }
    }
}

/// Checks the peer at `now`.
pub(crate) fn judge(traffic: &Traffic, now: Instant, interval: Duration) -> LivenessCheck {
    let limit = interval * HEARTBEATS_UNTIL_LOST;
    let heard = traffic.last_read();
    let silent = now.saturating_duration_since(heard);
    if silent >= limit {
        return LivenessCheck::Lost(SILENT);
    }
    let mut next = heard + if silent < interval { interval } else { silent + interval };
    next = next.min(heard + limit);
    if let Some(stuck) = traffic.waiting_since() {
        if now.saturating_duration_since(stuck) >= limit {
            return LivenessCheck::Lost("the relay read nothing for three heartbeats");
        }
        next = next.min(stuck + limit);
    }
    if silent >= interval { LivenessCheck::Ping(next) } else { LivenessCheck::Fine(next) }
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    use modelrelay_net::LivenessIo;
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};

    use super::*;

    const BEAT: Duration = Duration::from_secs(15);

    #[test]
    fn one_silent_interval_pings_and_three_end_link() {
        let start = Instant::now();
        let traffic = Traffic::new(start, SilenceLimit::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(judge(&traffic, at(1), BEAT), LivenessCheck::Fine(at(15)));
        assert_eq!(judge(&traffic, at(15), BEAT), LivenessCheck::Ping(at(30)));
        assert_eq!(judge(&traffic, at(40), BEAT), LivenessCheck::Ping(at(45)));
        assert!(matches!(judge(&traffic, at(45), BEAT), LivenessCheck::Lost(_)));
        traffic.mark_read(at(44));
        assert_eq!(judge(&traffic, at(45), BEAT), LivenessCheck::Fine(at(59)));
    }

    #[test]
    fn stalled_output_ends_link_despite_received_data() {
        let start = Instant::now();
        let traffic = Traffic::new(start, SilenceLimit::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        traffic.mark_read(at(100));
        traffic.mark_waiting(at(60));
        assert_eq!(judge(&traffic, at(100), BEAT), LivenessCheck::Fine(at(105)));
        assert!(matches!(judge(&traffic, at(105), BEAT), LivenessCheck::Lost(_)));
        traffic.mark_progress(at(101));
        assert_eq!(judge(&traffic, at(105), BEAT), LivenessCheck::Fine(at(115)));
    }

    #[tokio::test]
    async fn bytes_after_three_silent_heartbeats_are_refused() {
        let start = Instant::now().checked_sub(BEAT * 4).unwrap();
        let traffic = Traffic::new(start, SilenceLimit::default());
        let (mut peer, socket) = tokio::io::duplex(64);
        let mut counted = LivenessIo::new(socket, Arc::clone(&traffic));
        peer.write_all(b"ab").await.unwrap();
        assert_eq!(counted.read_u8().await.unwrap(), b'a', "a link that is being made");
        traffic.guard.expect_heartbeats(BEAT);
        assert_eq!(counted.read_u8().await.unwrap(), b'b');
        traffic.mark_read(start + BEAT);
        peer.write_all(b"c").await.unwrap();
        assert_eq!(counted.read_u8().await.unwrap_err().to_string(), SILENT);
    }

    /// Four heartbeats pass in the middle of each read.
    struct Stopped(Arc<Traffic>, Instant);

    impl AsyncRead for Stopped {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            buf.put_slice(b"l");
            self.0.mark_read(self.1);
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn bytes_read_over_three_heartbeats_are_refused() {
        let start = Instant::now().checked_sub(BEAT * 4).unwrap();
        let traffic = Traffic::new(start, SilenceLimit::default());
        traffic.guard.expect_heartbeats(BEAT);
        traffic.mark_read(Instant::now());
        let mut counted = LivenessIo::new(Stopped(Arc::clone(&traffic), start), traffic);
        assert_eq!(counted.read_u8().await.unwrap_err().to_string(), SILENT);
    }
}
