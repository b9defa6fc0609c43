//! The receiving half of the flow control of one body: how much the sender may send, when credit is returned to it, and
//! whether the body had the announced length.
//!
//! A window is the maximum that may be in transit or unread at once. It starts small, because a reader that stops costs
//! the memory of its window, and doubles for a reader that keeps up with a fast sender: 64 KiB allow 5 Mbit/s at a
//! round trip of 100 ms. The receiver cannot see whether the sender waits for credit or for its backend, so speed
//! decides: the window grows if the reader has read a whole window within two round trips and has nothing left to read.
//! If the round trip is not known, [`FAST`] covers every round trip up to that time. A chat's tokens (some 10 kB/s)
//! never reach this speed. Where credit returns immediately, a larger window would only cost memory for a reader that
//! stops.

use std::fmt;
use std::time::{Duration, Instant};

/// Credit is returned in portions of this size: at most one message per piece.
pub const RETURN_AFTER: u64 = 65_536;

/// A reader is fast if it reads a whole window in this time and the round trip is not known.
pub const FAST: Duration = Duration::from_secs(1);

/// The sender exceeded its credit; its stream fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// The number of bytes beyond the credit.
    pub excess: u64,
}

impl fmt::Display for Overrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes exceed the credit", self.excess)
    }
}

impl std::error::Error for Overrun {}

/// The credit of one stream's sender, and the bytes received and read.
#[derive(Clone, Debug)]
pub struct ReceiveWindow {
    window: u64,
    max: u64,
    fast: Duration,
    granted: u64,
    received: u64,
    consumed: u64,
    /// The time since which `fast_consumed` bytes have been read.
    fast_since: Option<Instant>,
    fast_consumed: u64,
}

impl ReceiveWindow {
    /// Creates a window of `window` bytes that grows to `max` at most.
    #[must_use]
    pub fn new(window: u64, max: u64) -> Self {
        let window = window.max(1);
        Self {
            window,
            max: max.max(window),
            fast: FAST,
            granted: window,
            received: 0,
            consumed: 0,
            fast_since: None,
            fast_consumed: 0,
        }
    }

    /// Sets the time from returning credit to receiving the bytes sent on it.
    #[must_use]
    pub fn with_round_trip(self, round_trip: Duration) -> Self {
        Self { fast: (2 * round_trip).min(FAST), ..self }
    }

    /// Records the arrival of a piece of `len` bytes.
    ///
    /// # Errors
    /// The sender had no credit for it. The piece is then treated as not received.
    pub fn on_piece(&mut self, len: u64) -> Result<(), Overrun> {
        let received = self.received.saturating_add(len);
        if received > self.granted {
            return Err(Overrun { excess: received - self.granted });
        }
        self.received = received;
        Ok(())
    }

    /// Records that `len` bytes have been read. Returns the credit to return to the sender, if enough has accumulated:
    /// 64 KiB, or half of a smaller window, so that a sender that has used all its credit always gets more.
    pub fn on_consumed(&mut self, len: u64, now: Instant) -> Option<u64> {
        let len = len.min(self.unread());
        self.consumed += len;
        let grew = self.grow_if_fast(len, now);
        let owed = (self.consumed.saturating_add(self.window)).saturating_sub(self.granted);
        if owed < (self.window / 2).clamp(1, RETURN_AFTER) && !grew {
            return None;
        }
        self.granted = self.granted.saturating_add(owed);
        Some(owed)
    }

    /// The number of bytes that have arrived and have not been read.
    #[must_use]
    pub fn unread(&self) -> u64 {
        self.received - self.consumed
    }

    /// The maximum that may be in transit or unread.
    #[must_use]
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Ends growth at `max` from now on; credit already granted stays granted. Called when memory runs short.
    pub fn set_max(&mut self, max: u64) {
        self.max = max.max(self.window);
    }

    /// A slow reader with a backlog never gets a larger window, however fast the sender: it has unread bytes at every
    /// check.
    fn grow_if_fast(&mut self, len: u64, now: Instant) -> bool {
        let Some(since) = self.fast_since else {
            // Bytes that were available at once were not read in a measurable time.
            self.fast_since = Some(now);
            return false;
        };
        self.fast_consumed += len;
        if now.saturating_duration_since(since) > self.fast {
            self.fast_since = Some(now);
            self.fast_consumed = 0;
            return false;
        }
        if self.fast_consumed < self.window || self.unread() > 0 || self.window >= self.max {
            return false;
        }
        self.window = self.window.saturating_mul(2).min(self.max);
        self.fast_since = Some(now);
        self.fast_consumed = 0;
        true
    }
}

/// The body's length differs from the announced length; its request fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthError {
    /// The body is longer than announced.
    TooLong {
        /// The announced length.
        expected: u64,
    },
    /// The body ended early.
    TooShort {
        /// The announced length.
        expected: u64,
        /// The received length.
        received: u64,
    },
}

impl fmt::Display for LengthError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { expected } => {
                write!(f, "body longer than the announced {expected} bytes")
            }
            Self::TooShort { expected, received } => {
                write!(f, "body ended after {received} of {expected} announced bytes")
            }
        }
    }
}

impl std::error::Error for LengthError {}

/// Compares a body with its announced length, if there was one.
#[derive(Clone, Debug)]
pub struct BodyCounter {
    expected: Option<u64>,
    received: u64,
}

impl BodyCounter {
    /// `expected` is `None` for a body of unknown length, which never fails.
    #[must_use]
    pub fn new(expected: Option<u64>) -> Self {
        Self { expected, received: 0 }
    }

    /// Records the arrival of `len` more bytes.
    ///
    /// # Errors
    /// The body exceeds the announced length.
    pub fn on_piece(&mut self, len: u64) -> Result<(), LengthError> {
        self.received = self.received.saturating_add(len);
        match self.expected {
            Some(expected) if self.received > expected => Err(LengthError::TooLong { expected }),
            Some(_) | None => Ok(()),
        }
    }

    /// Records the end of the body.
    ///
    /// # Errors
    /// The announced length was not reached, or was exceeded.
    pub fn finish(&self) -> Result<(), LengthError> {
        let received = self.received;
        match self.expected {
            Some(expected) if received < expected => Err(LengthError::TooShort { expected, received }),
            Some(expected) if received > expected => Err(LengthError::TooLong { expected }),
            Some(_) | None => Ok(()),
        }
    }

    /// True once the announced length has been reached, which ends a request body.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.expected.is_some_and(|expected| self.received >= expected)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1_024;

    #[test]
    fn credit_returns_in_portions_of_64_kib() {
        let now = Instant::now();
        let mut window = ReceiveWindow::new(256 * KIB, 256 * KIB);
        assert_eq!(window.on_piece(100 * KIB), Ok(()));
        assert_eq!(window.on_consumed(60 * KIB, now), None);
        assert_eq!(window.on_consumed(10 * KIB, now), Some(70 * KIB));
        assert_eq!(window.on_consumed(30 * KIB, now), None);
        assert_eq!(window.unread(), 0);
    }

    #[test]
    fn small_window_never_starves_sender() {
        let now = Instant::now();
        for size in [1, 2, 3, 100, 65_535, 65_536, 131_072] {
            let mut window = ReceiveWindow::new(size, size);
            let mut credit = size;
            for _ in 0..10 {
                // The sender uses all its credit; the reader reads it in two parts.
                assert_eq!(window.on_piece(credit), Ok(()));
                let half = credit / 2;
                let returned =
                    window.on_consumed(half, now).unwrap_or(0) + window.on_consumed(credit - half, now).unwrap_or(0);
                assert!(returned > 0, "a window of {size} stands still");
                credit = returned;
            }
        }
    }

    #[test]
    fn piece_beyond_credit_is_overrun() {
        let mut window = ReceiveWindow::new(100, 100);
        assert_eq!(window.on_piece(60), Ok(()));
        assert_eq!(window.on_piece(50), Err(Overrun { excess: 10 }));
        assert_eq!(window.on_piece(40), Ok(()));
        assert_eq!(window.on_piece(u64::MAX), Err(Overrun { excess: u64::MAX - 100 }));
    }

    #[test]
    fn window_of_fast_reader_grows_to_maximum() {
        let mut now = Instant::now();
        let mut window = ReceiveWindow::new(256 * KIB, 1_024 * KIB);
        let mut credit = 256 * KIB;
        for _ in 0..200 {
            now += Duration::from_millis(10);
            let piece = credit.min(64 * KIB);
            window.on_piece(piece).unwrap();
            credit -= piece;
            credit += window.on_consumed(piece, now).unwrap_or(0);
        }
        assert_eq!(window.window(), 1_024 * KIB);
        assert!(credit > 900 * KIB);
    }

    /// Returns the final window if the sender waits only for credit, for `round_trip` each time.
    fn saturated(window: ReceiveWindow, round_trip: Duration) -> u64 {
        let (mut window, mut now) = (window, Instant::now());
        let mut credit = window.window();
        for _ in 0..100 {
            now += round_trip;
            window.on_piece(credit).unwrap();
            credit = window.on_consumed(credit, now).expect("all was used");
        }
        window.window()
    }

    #[test]
    fn window_grows_only_as_round_trip_needs() {
        let window = ReceiveWindow::new(256 * KIB, 4_096 * KIB);
        let far = Duration::from_millis(50);
        assert_eq!(saturated(window.clone().with_round_trip(far), far), 4_096 * KIB);
        // 256 KiB in 5 ms is 50 MB/s: the backend limits it, not a round trip of 1 ms.
        let near = Duration::from_millis(1);
        assert_eq!(saturated(window.clone().with_round_trip(near), Duration::from_millis(5)), 256 * KIB);
        assert_eq!(saturated(window, Duration::from_millis(5)), 4_096 * KIB, "an unknown one may be long");
    }

    /// Returns the window after two reads of `read` bytes each, the second one `later`.
    fn after_two_reads(window: ReceiveWindow, later: Duration, read: u64) -> u64 {
        let (mut window, now) = (window, Instant::now());
        window.on_piece(read).unwrap();
        window.on_consumed(read, now);
        window.on_piece(read).unwrap();
        window.on_consumed(read, now + later);
        window.window()
    }

    #[test]
    fn window_grows_when_read_within_two_round_trips() {
        let window = ReceiveWindow::new(64 * KIB, 512 * KIB).with_round_trip(Duration::from_millis(10));
        assert_eq!(after_two_reads(window.clone(), Duration::from_millis(20), 64 * KIB), 128 * KIB);
        assert_eq!(after_two_reads(window.clone(), Duration::from_millis(21), 64 * KIB), 64 * KIB);
        assert_eq!(after_two_reads(window, Duration::from_millis(20), 64 * KIB - 1), 64 * KIB);
    }

    #[test]
    fn window_keeps_size_after_maximum_is_lowered() {
        let mut window = ReceiveWindow::new(64 * KIB, 512 * KIB);
        window.set_max(0);
        assert_eq!(after_two_reads(window, Duration::from_millis(1), 64 * KIB), 64 * KIB);
    }

    #[test]
    fn window_never_grows_for_slow_stream_or_backlog() {
        let mut now = Instant::now();
        let mut chat = ReceiveWindow::new(256 * KIB, 4_096 * KIB);
        for _ in 0..10_000 {
            now += Duration::from_millis(20);
            chat.on_piece(200).unwrap();
            chat.on_consumed(200, now);
        }
        assert_eq!(chat.window(), 256 * KIB);

        let mut slow = ReceiveWindow::new(256 * KIB, 4_096 * KIB);
        let mut credit = 256 * KIB;
        for _ in 0..1_000 {
            slow.on_piece(credit).unwrap();
            credit = slow.on_consumed(100 * KIB, now).unwrap_or(0);
        }
        assert_eq!(slow.window(), 256 * KIB);
    }

    #[test]
    fn body_must_match_announced_length() {
        let mut counter = BodyCounter::new(Some(5));
        assert_eq!(counter.on_piece(4), Ok(()));
        assert!(!counter.is_complete());
        assert_eq!(counter.finish(), Err(LengthError::TooShort { expected: 5, received: 4 }));
        assert_eq!(counter.on_piece(1), Ok(()));
        assert!(counter.is_complete());
        assert_eq!(counter.finish(), Ok(()));
        assert_eq!(counter.on_piece(1), Err(LengthError::TooLong { expected: 5 }));
        assert_eq!(counter.finish(), Err(LengthError::TooLong { expected: 5 }));
        assert!(BodyCounter::new(Some(0)).is_complete());

        let mut unknown = BodyCounter::new(None);
        assert_eq!(unknown.on_piece(u64::MAX), Ok(()));
        assert_eq!(unknown.on_piece(u64::MAX), Ok(()));
        assert!(!unknown.is_complete());
        assert_eq!(unknown.finish(), Ok(()));
    }

    proptest! {
        /// A sender that obeys its credit never causes an overrun, never has more than the maximum unread, and never
        /// stalls while the reader reads.
        #[test]
        fn sender_within_credit_never_stalls_or_overruns(
            window in 1_u64..300_000,
            factor in 1_u64..8,
            steps in prop::collection::vec((0_u64..200_000, 0_u64..200_000, 0_u64..400), 1..200),
        ) {
            let max = window * factor;
            let mut now = Instant::now();
            let mut receiver = ReceiveWindow::new(window, max);
            let mut credit = window;
            for (send, read, millis) in steps {
                now += Duration::from_millis(millis);
                let send = send.min(credit);
                prop_assert_eq!(receiver.on_piece(send), Ok(()));
                credit -= send;
                credit += receiver.on_consumed(read, now).unwrap_or(0);
                prop_assert!(receiver.unread() + credit <= max);
                prop_assert!(receiver.window() <= max);
            }
            prop_assert_eq!(receiver.on_piece(credit), Ok(()));
            prop_assert!(receiver.on_consumed(u64::MAX, now).is_some());
            prop_assert!(receiver.on_piece(u64::MAX).is_err());
        }
    }
}
