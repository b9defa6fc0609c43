//! One byte budget for every request body that the relay holds: being received, queued, or kept for a requeue.
//!
//! A reservation is made before a body is read and lives exactly as long as the bytes do: [`Reservation::hold`] ties the
//! two together, so that a body which waits in a worker's outgoing queue is still counted and nothing needs to remember
//! to give it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;

/// The budget and what is taken from it.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    unread: AtomicU64,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { limit: AtomicU64::new(limit), used: AtomicU64::new(0), unread: AtomicU64::new(0) })
    }

    /// Takes `bytes`, or nothing when they do not fit.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut reservation = Reservation { budget: Arc::clone(self), bytes: 0 };
        reservation.grow(bytes).then_some(reservation)
    }

    /// Bytes of request bodies that are held.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The setting.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Answer bytes that no client has read yet. They are bounded per stream by credit; here they only decide how
    /// large a new stream's window is.
    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Whether unread answers fill a quarter of the budget, so that no window grows.
    pub fn is_tight(&self) -> bool {
        self.unread() > self.limit() / 4
    }

    pub(crate) fn add_unread(&self, bytes: u64) {
        self.unread.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub_unread(&self, bytes: u64) {
        self.unread.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes taken from the budget until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Reservation {
    /// The budget that it is taken from.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Takes more, or nothing when it does not fit.
    pub fn grow(&mut self, bytes: u64) -> bool {
        self.grow_within(bytes, self.budget.limit())
    }

    /// Takes more of a budget of which only `limit` may be used, or nothing when it does not fit.
    pub fn grow_within(&mut self, bytes: u64, limit: u64) -> bool {
        let taken = self.budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= limit)
        });
        if taken.is_ok() {
            self.bytes += bytes;
        }
        taken.is_ok()
    }

    /// Bytes taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ties the reservation to the bytes: it ends with their last clone.
    pub fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Held { bytes, _reservation: self })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

struct Held {
    bytes: Bytes,
    _reservation: Reservation,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_taken_beyond_the_limit_and_all_comes_back() {
        let budget = Budget::new(100);
        let mut first = budget.reserve(60).unwrap();
        assert!(budget.reserve(41).is_none());
        assert!(first.grow(40) && !first.grow(1));
        drop(first);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_reservation_lives_as_long_as_the_last_slice_of_its_bytes() {
        let budget = Budget::new(100);
        let body = budget.reserve(10).unwrap().hold(Bytes::from_static(b"0123456789"));
        let slice = body.slice(3..5);
        drop(body);
        assert_eq!(budget.used(), 10);
        drop(slice);
        assert_eq!(budget.used(), 0);
    }
}
