//! What the kernel does for a connection by itself.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tracing::debug;

/// From the last byte of a silent peer to the first keep-alive probe, and from each probe to the next.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);

/// Unanswered probes after which the connection is closed: a minute after the last byte.
const PROBES: u32 = 3;

/// Lets the kernel close a connection within a minute after its peer is unreachable. A peer that loses its network sends nothing.
///
/// Best effort: what a system does not know is left out.
pub fn watch_peer(socket: &SockRef<'_>) {
    let keep_alive = TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL).with_retries(PROBES);
    if let Err(error) = socket.set_tcp_keepalive(&keep_alive) {
        debug!(%error, "TCP keep-alive could not be set");
    }
    // The kernel sends no keep-alive probes while data is unacknowledged; it would retransmit that for about 15 minutes.
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_user_timeout(Some(PROBE_INTERVAL * (PROBES + 1))) {
        debug!(%error, "TCP_USER_TIMEOUT could not be set");
    }
}
