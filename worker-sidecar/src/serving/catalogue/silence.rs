//! Running requests of a backend that is gone and sends no more bytes.
//!
//! A server that receives SIGTERM may close its port and still finish its streams, or hold them open indefinitely. Only
//! the bytes that it sends show the difference.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::link::{LinkId, LinkRequestKey};

/// How long a running request may receive no byte once the backend refuses connections.
pub(super) const LONGEST_SILENCE: Duration = Duration::from_secs(5);

/// A running request, and the number of response pieces that have arrived.
#[derive(Clone, Debug)]
pub(super) struct ResponseProgress {
    pub(super) link: LinkId,
    pub(super) key: LinkRequestKey,
    pub(super) pieces: u64,
}

/// The running requests since the backend is gone.
#[derive(Debug, Default)]
pub(super) struct Silence {
    since: HashMap<(LinkId, u64), (u64, Instant)>,
}

impl Silence {
    /// The backend is not gone.
    pub(super) fn clear(&mut self) {
        self.since.clear();
    }

    /// Records all running requests. Returns those that have received nothing for too long.
    pub(super) fn observe(&mut self, running: Vec<ResponseProgress>, now: Instant) -> Vec<ResponseProgress> {
        let before = std::mem::take(&mut self.since);
        let mut silent = Vec::new();
        for seen in running {
            let id = (seen.link, seen.key.serial);
            let same = before.get(&id).filter(|(pieces, _)| *pieces == seen.pieces);
            let since = same.map_or(now, |(_, since)| *since);
            if now.saturating_duration_since(since) >= LONGEST_SILENCE {
                silent.push(seen);
            } else {
                self.since.insert(id, (seen.pieces, since));
            }
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(serial: u64, pieces: u64) -> ResponseProgress {
        let key = LinkRequestKey { id: "r".into(), stream: Some(1), serial };
        ResponseProgress { link: LinkId::default(), key, pieces }
    }

    fn serials(silent: &[ResponseProgress]) -> Vec<u64> {
        silent.iter().map(|seen| seen.key.serial).collect()
    }

    #[test]
    fn silent_request_is_reported_after_five_seconds() {
        let (mut silence, begin) = (Silence::default(), Instant::now());
        for seconds in 0..5 {
            let now = begin + Duration::from_secs(seconds);
            assert!(silence.observe(vec![progress(1, 0), progress(2, seconds)], now).is_empty(), "{seconds}");
        }
        let silent = silence.observe(vec![progress(1, 0), progress(2, 5)], begin + LONGEST_SILENCE);
        assert_eq!(serials(&silent), [1]);
    }

    #[test]
    fn received_byte_restarts_silence() {
        let (mut silence, begin) = (Silence::default(), Instant::now());
        silence.observe(vec![progress(1, 3)], begin);
        silence.observe(vec![progress(1, 4)], begin + Duration::from_secs(4));
        assert!(silence.observe(vec![progress(1, 4)], begin + Duration::from_secs(8)).is_empty());
        assert_eq!(serials(&silence.observe(vec![progress(1, 4)], begin + Duration::from_secs(9))), [1]);
    }

    #[test]
    fn returning_backend_restarts_silence() {
        let (mut silence, begin) = (Silence::default(), Instant::now());
        silence.observe(vec![progress(1, 3)], begin);
        silence.clear();
        assert!(silence.observe(vec![progress(1, 3)], begin + Duration::from_secs(9)).is_empty());
    }
}
