//! The liveness of a worker's socket, which rejects the bytes of a message that is too large or too slow.

use std::io;
use std::time::{Duration, Instant};

use modelrelay_net::Guard;

use crate::net::unfinished::Unfinished;

/// The times when bytes last moved. Its guard is the message that the peer is sending.
pub type Liveness = modelrelay_net::Liveness<Unfinished>;

/// The stream that records them.
pub type LivenessIo<S> = modelrelay_net::LivenessIo<S, Unfinished>;

impl Guard for Unfinished {
    fn admit(&self, bytes: usize, _: Duration) -> io::Result<()> {
        self.receive(bytes as u64, Instant::now)
    }
}
