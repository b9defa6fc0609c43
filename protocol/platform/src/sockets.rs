//! Socket options that make the kernel watch a connection.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tracing::debug;

/// The time from the last byte of a silent peer to the first keep-alive probe, and between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);

/// The number of unanswered probes after which the connection is closed: a minute after the last byte.
const PROBES: u32 = 3;

/// Makes the kernel close a connection within a minute after its peer becomes unreachable. A peer that loses its
/// network sends nothing.
///
/// Best effort: options that a system does not support are skipped.
pub fn watch_peer(socket: &SockRef<'_>) {
    let keep_alive = TcpKeepalive::new().with_time(PROBE_INTERVAL).with_interval(PROBE_INTERVAL).with_retries(PROBES);
    if let Err(error) = socket.set_tcp_keepalive(&keep_alive) {
        debug!(%error, "cannot set TCP keep-alive");
    }
    // The kernel sends no keep-alive probes while data is unacknowledged; it would retransmit that for about 15 minutes.
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_user_timeout(Some(PROBE_INTERVAL * (PROBES + 1))) {
        debug!(%error, "cannot set TCP_USER_TIMEOUT");
    }
}
