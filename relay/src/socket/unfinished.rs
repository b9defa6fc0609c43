//! What a worker has begun to send and not ended: counted from its first byte, bounded, and in time.
//!
//! A message is held in memory until its last byte comes. Small ones cost nothing more than the socket; of larger ones each byte
//! is taken from the budget of the relay before it is kept.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use modelrelay_protocol::limits::{MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES};

use crate::budget::{Budget, Reservation};

/// So much of a message is not counted, for each worker may have it: the largest piece of a response and what was read ahead.
const UNCOUNTED_BYTES: u64 = 128 << 10;

/// How long a message may take beyond this, and at which rate it has to come.
const PATIENCE: Duration = Duration::from_secs(30);
const MIN_BYTES_PER_SEC: u64 = 16 << 10;

/// Why no more of a message is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is longer than its sender may send.
    TooLarge,
    /// The budget is used up.
    NoMemory,
    /// It comes too slowly.
    TooSlow,
}

/// The message that a worker is sending.
#[derive(Debug)]
pub struct Unfinished {
    budget: Arc<Budget>,
    limit: AtomicU64,
    received: AtomicU64,
    /// Of a message that is larger than [`UNCOUNTED_BYTES`].
    large: Mutex<Option<Large>>,
    refused: Mutex<Option<Refusal>>,
}

#[derive(Debug)]
struct Large {
    reservation: Reservation,
    since: Instant,
}

impl Unfinished {
    /// Nothing was sent. Until [`Self::allow_bodies`], a message is a control message.
    pub fn new(budget: Arc<Budget>) -> Self {
        let limit = AtomicU64::new(MAX_CONTROL_BYTES as u64 + UNCOUNTED_BYTES);
        Self { budget, limit, received: AtomicU64::new(0), large: Mutex::default(), refused: Mutex::default() }
    }

    /// The worker has no streams: a message may hold a whole response.
    pub fn allow_bodies(&self) {
        self.limit.store(MAX_MESSAGE_BYTES as u64 + UNCOUNTED_BYTES, Ordering::Relaxed);
    }

    /// Takes bytes that came at `now`.
    ///
    /// # Errors
    ///
    /// Nothing more may be read; [`Self::refusal`] says why.
    pub fn receive(&self, bytes: u64, now: impl FnOnce() -> Instant) -> io::Result<()> {
        let received = self.received.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if received <= UNCOUNTED_BYTES {
            return Ok(());
        }
        self.receive_large(received, now()).map_err(|refusal| {
            *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(refusal);
            io::Error::other("the rest of a message is refused")
        })
    }

    fn receive_large(&self, received: u64, now: Instant) -> Result<(), Refusal> {
        if received > self.limit.load(Ordering::Relaxed) {
            return Err(Refusal::TooLarge);
        }
        let mut large = self.large();
        let large = match &mut *large {
            Some(large) => large,
            none @ None => {
                let reservation = self.budget.reserve(0).ok_or(Refusal::NoMemory)?;
                none.insert(Large { reservation, since: now })
            }
        };
        // The rest is for the bodies of small requests.
        let limit = self.budget.limit() / 8 * 7;
        if !large.reservation.grow_within(received - large.reservation.bytes(), limit) {
            return Err(Refusal::NoMemory);
        }
        let allowed = PATIENCE + Duration::from_secs(received / MIN_BYTES_PER_SEC);
        if now.saturating_duration_since(large.since) > allowed {
            return Err(Refusal::TooSlow);
        }
        Ok(())
    }

    /// A message has come to its end.
    pub fn end(&self) {
        if self.received.swap(0, Ordering::Relaxed) > UNCOUNTED_BYTES {
            *self.large() = None;
        }
    }

    /// Why nothing more is read.
    pub fn refusal(&self) -> Option<Refusal> {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn large(&self) -> MutexGuard<'_, Option<Large>> {
        self.large.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn unfinished(budget: u64) -> (Unfinished, Arc<Budget>) {
        let budget = Budget::new(budget);
        (Unfinished::new(Arc::clone(&budget)), budget)
    }

    /// Receives so much in pieces, all of them now.
    fn receive(unfinished: &Unfinished, bytes: u64) -> Option<Refusal> {
        let now = Instant::now();
        let pieces = std::iter::repeat_n(UNCOUNTED_BYTES / 2, usize::try_from(bytes / (UNCOUNTED_BYTES / 2)).unwrap());
        for piece in pieces {
            if unfinished.receive(piece, || now).is_err() {
                return unfinished.refusal();
            }
        }
        None
    }

    #[test]
    fn small_messages_take_nothing_of_the_budget() {
        let (unfinished, budget) = unfinished(0);
        for _ in 0..100 {
            assert_eq!(receive(&unfinished, UNCOUNTED_BYTES), None);
            unfinished.end();
        }
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn large_message_is_in_the_budget_until_its_end() {
        let (unfinished, budget) = unfinished(2 * MIB);
        assert_eq!(receive(&unfinished, MIB), None);
        assert_eq!(budget.used(), MIB);
        unfinished.end();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn message_that_does_not_fit_is_refused() {
        let (unfinished, budget) = unfinished(MIB);
        assert_eq!(receive(&unfinished, MIB), Some(Refusal::NoMemory));
        assert!(budget.used() > MIB / 2 && budget.used() <= MIB / 8 * 7, "{}", budget.used());
    }

    #[test]
    fn only_peers_without_streams_send_bodies() {
        let (unfinished, _budget) = unfinished(100 * MIB);
        assert_eq!(receive(&unfinished, 2 * MIB), Some(Refusal::TooLarge));
        let (unfinished, _budget) = self::unfinished(100 * MIB);
        unfinished.allow_bodies();
        assert_eq!(receive(&unfinished, 64 * MIB), None);
        assert_eq!(receive(&unfinished, MIB), Some(Refusal::TooLarge));
    }

    #[test]
    fn message_that_comes_too_slowly_is_refused() {
        let (unfinished, _budget) = unfinished(100 * MIB);
        let begin = Instant::now();
        let later = |secs| begin + Duration::from_secs(secs);
        unfinished.receive(UNCOUNTED_BYTES + 1, || begin).unwrap();
        unfinished.receive(1, || later(38)).unwrap();
        assert!(unfinished.receive(1, || later(39)).is_err());
        assert_eq!(unfinished.refusal(), Some(Refusal::TooSlow));
    }
}
