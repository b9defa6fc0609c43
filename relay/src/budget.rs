//! One byte budget for everything that clients and workers can make the relay hold: request heads and bodies, response heads and
//! bodies, and WebSocket messages that have begun.
//!
//! A reservation is made before bytes are kept and lives exactly as long as they do: [`Reservation::hold`] ties the
//! two together, so that a body which waits in a worker's outgoing queue is still counted and nothing needs to remember
//! to give it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use modelrelay_protocol::error::{ApiError, ErrorKind};

/// The purpose of memory. Each may use more of the budget than the one before it, so that large or waiting data never takes the
/// room of small or moving data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A large body, a message, or response bytes behind others that the client has not read: seven eighths.
    Bulk,
    /// A small request body: fifteen sixteenths.
    SmallBody,
    /// Response bytes for a client that has read everything so far: all.
    Passing,
}

/// A larger request body is [`Purpose::Bulk`].
const SMALL_BODY_BYTES: u64 = 1 << 20;

impl Purpose {
    /// What the memory of a request body of this size is for.
    pub fn of_body(bytes: u64) -> Self {
        if bytes > SMALL_BODY_BYTES { Self::Bulk } else { Self::SmallBody }
    }

    /// How much of a budget of `limit` bytes may be used together with bytes for this purpose.
    pub fn room_in(self, limit: u64) -> u64 {
        match self {
            Self::Bulk => limit - limit / 8,
            Self::SmallBody => limit - limit / 16,
            Self::Passing => limit,
        }
    }
}

/// Returns the error of a request or response for which the budget has no room.
pub fn full() -> ApiError {
    ApiError::new(ErrorKind::Overloaded, "the relay's memory is full (MAX_BUFFERED_BYTES); try again")
}

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

    /// A reservation of nothing yet.
    pub fn open(self: &Arc<Self>) -> Reservation {
        Reservation { budget: Arc::clone(self), bytes: 0 }
    }

    /// Takes `bytes`, or nothing when they do not fit.
    pub fn reserve(self: &Arc<Self>, bytes: u64, purpose: Purpose) -> Option<Reservation> {
        let mut reservation = self.open();
        reservation.grow(bytes, purpose).then_some(reservation)
    }

    /// How much of the budget may be used together with bytes for this purpose.
    pub fn room(&self, purpose: Purpose) -> u64 {
        purpose.room_in(self.limit())
    }

    /// Bytes that are held.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The setting.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Response bytes among them that clients have not read. They also decide how far the windows of streams grow.
    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// Whether unread answers fill a quarter of the budget, so that no window grows.
    pub fn is_tight(&self) -> bool {
        self.unread() > self.limit() / 4
    }

    /// Takes unread response bytes, or nothing when they do not fit; [`Self::give_back_unread`] returns them.
    pub(crate) fn take_unread(&self, bytes: u64, purpose: Purpose) -> bool {
        let taken = self.take(bytes, self.room(purpose));
        if taken {
            self.unread.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    pub(crate) fn give_back_unread(&self, bytes: u64) {
        self.unread.fetch_sub(bytes, Ordering::Relaxed);
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Makes a reservation of bytes that were taken with [`Self::take_unread`]: they are the client's connection's now.
    pub(crate) fn adopt_unread(self: &Arc<Self>, bytes: u64) -> Reservation {
        self.unread.fetch_sub(bytes, Ordering::Relaxed);
        Reservation { budget: Arc::clone(self), bytes }
    }

    fn take(&self, bytes: u64, limit: u64) -> bool {
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= limit)
        });
        taken.is_ok()
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
    pub fn grow(&mut self, bytes: u64, purpose: Purpose) -> bool {
        let taken = self.budget.take(bytes, self.budget.room(purpose));
        if taken {
            self.bytes += bytes;
        }
        taken
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
        let mut first = budget.reserve(60, Purpose::Passing).unwrap();
        assert!(budget.reserve(41, Purpose::Passing).is_none());
        assert!(first.grow(40, Purpose::Passing) && !first.grow(1, Purpose::Passing));
        drop(first);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn what_is_large_leaves_room_for_what_moves() {
        let budget = Budget::new(1_600);
        let bulk = budget.reserve(1_400, Purpose::Bulk).unwrap();
        assert!(budget.reserve(1, Purpose::Bulk).is_none());
        let small = budget.reserve(100, Purpose::SmallBody).unwrap();
        assert!(budget.reserve(1, Purpose::SmallBody).is_none());
        assert!(budget.take_unread(100, Purpose::Passing) && !budget.take_unread(1, Purpose::Passing));
        drop((bulk, small));
        let adopted = budget.adopt_unread(60);
        budget.give_back_unread(40);
        assert_eq!((budget.used(), budget.unread()), (60, 0));
        drop(adopted);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_reservation_lives_as_long_as_the_last_slice_of_its_bytes() {
        let budget = Budget::new(100);
        let body = budget.reserve(10, Purpose::Bulk).unwrap().hold(Bytes::from_static(b"0123456789"));
        let slice = body.slice(3..5);
        drop(body);
        assert_eq!(budget.used(), 10);
        drop(slice);
        assert_eq!(budget.used(), 0);
    }
}
