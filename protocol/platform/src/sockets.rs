//! What the kernel does for a connection by itself.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tracing::debug;

/// From the last byte of a silent peer to the first question whether it is there, and from each question to the next.
const ASK_AFTER: Duration = Duration::from_secs(15);

/// Unanswered questions after which the peer is gone: a minute after its last byte.
const QUESTIONS: u32 = 3;

/// Has the kernel end a connection within a minute of its peer's disappearance. A peer that loses its network says nothing.
///
/// Best effort: what a system does not know is left out.
pub fn watch_peer(socket: &SockRef<'_>) {
    let keep_alive = TcpKeepalive::new().with_time(ASK_AFTER).with_interval(ASK_AFTER).with_retries(QUESTIONS);
    if let Err(error) = socket.set_tcp_keepalive(&keep_alive) {
        debug!(%error, "TCP keep-alive could not be set");
    }
    // Questions are not asked while bytes wait for their acknowledgement; those are sent again for a quarter of an hour else.
    #[cfg(target_os = "linux")]
    if let Err(error) = socket.set_tcp_user_timeout(Some(ASK_AFTER * (QUESTIONS + 1))) {
        debug!(%error, "TCP_USER_TIMEOUT could not be set");
    }
}
