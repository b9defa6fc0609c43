//! Incomplete input of a peer, a worker's message or the head of a client's request: accounted, bounded, and with a
//! deadline.
//!
//! It is held in memory until its last byte arrives. Small input costs nothing beyond the socket. For larger input,
//! each byte is reserved in the relay's budget before it is stored.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use modelrelay_protocol::limits::{MAX_CONTROL_BYTES, MAX_MESSAGE_BYTES};

use crate::net::budget::{Budget, Purpose, Reservation};

/// The part of a message that is not accounted, because each worker may have it: the largest piece of a response and
/// the bytes that were read ahead.
const UNCOUNTED_BYTES: u64 = 128 << 10;

/// The part of a request's head that is not accounted, because each connection may have it.
const UNCOUNTED_HEAD_BYTES: u64 = 8 << 10;

/// How long accounted input may take, and its least rate.
const PATIENCE: Duration = Duration::from_secs(30);
const MIN_BYTES_PER_SEC: u64 = 16 << 10;

/// Why no more is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It is longer than its sender may send.
    TooLarge,
    /// The budget is used up.
    NoMemory,
    /// It arrives too slowly.
    TooSlow,
}

/// The message or head that a peer is sending.
#[derive(Debug)]
pub struct Unfinished {
    budget: Arc<Budget>,
    uncounted: u64,
    limit: AtomicU64,
    received: AtomicU64,
    /// The state of input that is larger than the unaccounted part.
    large: Mutex<Option<Large>>,
    refused: Mutex<Option<Refusal>>,
}

#[derive(Debug)]
struct Large {
    reservation: Reservation,
    since: Instant,
}

impl Unfinished {
    /// For a worker's messages. Until [`Self::allow_bodies`], they are control messages.
    pub fn message(budget: Arc<Budget>) -> Self {
        Self::new(budget, UNCOUNTED_BYTES, MAX_CONTROL_BYTES as u64 + UNCOUNTED_BYTES)
    }

    /// For the head of a request, whose size the HTTP library bounds.
    pub fn head(budget: Arc<Budget>) -> Self {
        Self::new(budget, UNCOUNTED_HEAD_BYTES, u64::MAX)
    }

    fn new(budget: Arc<Budget>, uncounted: u64, limit: u64) -> Self {
        let (limit, received) = (AtomicU64::new(limit), AtomicU64::new(0));
        Self { budget, uncounted, limit, received, large: Mutex::default(), refused: Mutex::default() }
    }

    /// Allows whole responses in a message, for a worker without streams.
    pub fn allow_bodies(&self) {
        self.limit.store(MAX_MESSAGE_BYTES as u64 + UNCOUNTED_BYTES, Ordering::Relaxed);
    }

    /// Adds bytes that arrived at `now`.
    ///
    /// # Errors
    ///
    /// If nothing more may be read; [`Self::refusal`] returns the reason.
    pub fn receive(&self, bytes: u64, now: impl FnOnce() -> Instant) -> io::Result<()> {
        let received = self.received.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if received <= self.uncounted {
            return Ok(());
        }
        self.receive_large(received, now()).map_err(|refusal| {
            *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(refusal);
            io::Error::other("reading the peer's unfinished message was stopped")
        })
    }

    fn receive_large(&self, received: u64, now: Instant) -> Result<(), Refusal> {
        if received > self.limit.load(Ordering::Relaxed) {
            return Err(Refusal::TooLarge);
        }
        let mut large = self.large();
        let large = match &mut *large {
            Some(large) => large,
            none @ None => none.insert(Large { reservation: self.budget.open(), since: now }),
        };
        if large.reservation.grow(received - large.reservation.bytes(), Purpose::Bulk).is_err() {
            return Err(Refusal::NoMemory);
        }
        let allowed = PATIENCE + Duration::from_secs(received / MIN_BYTES_PER_SEC);
        if now.saturating_duration_since(large.since) > allowed {
            return Err(Refusal::TooSlow);
        }
        Ok(())
    }

    /// True if its first bytes have arrived.
    pub fn has_begun(&self) -> bool {
        self.received.load(Ordering::Relaxed) > 0
    }

    /// Ends the message or head.
    pub fn end(&self) {
        if self.received.swap(0, Ordering::Relaxed) > self.uncounted {
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
        (Unfinished::message(Arc::clone(&budget)), budget)
    }

    /// Receives bytes in pieces, all of them now.
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
    fn small_messages_use_no_budget() {
        let (unfinished, budget) = unfinished(0);
        for _ in 0..100 {
            assert_eq!(receive(&unfinished, UNCOUNTED_BYTES), None);
            unfinished.end();
        }
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn large_message_uses_budget_until_its_end() {
        let (unfinished, budget) = unfinished(2 * MIB);
        assert_eq!(receive(&unfinished, MIB), None);
        assert_eq!(budget.used(), MIB);
        unfinished.end();
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn message_beyond_budget_is_rejected() {
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
    fn slow_message_is_rejected() {
        let (unfinished, _budget) = unfinished(100 * MIB);
        let begin = Instant::now();
        let later = |secs| begin + Duration::from_secs(secs);
        unfinished.receive(UNCOUNTED_BYTES + 1, || begin).unwrap();
        unfinished.receive(1, || later(38)).unwrap();
        assert!(unfinished.receive(1, || later(39)).is_err());
        assert_eq!(unfinished.refusal(), Some(Refusal::TooSlow));
    }
}
