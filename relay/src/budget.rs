//! One byte budget for everything that clients and workers can make the relay hold: request heads and bodies, response heads and
//! bodies, and WebSocket messages that have begun.
//!
//! A reservation is made before bytes are kept and lives exactly as long as they do: [`Reservation::hold`] ties the
//! two together, so that a body which waits in a worker's outgoing queue is still counted and nothing needs to remember
//! to give it back.

mod shares;

pub use shares::Holder;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use modelrelay_protocol::error::{ApiError, ErrorKind};

use shares::BodyShares;

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

/// A request body of at most this size takes nothing of its client's share: thousands of them fit.
const UNSHARED_BODY_BYTES: u64 = 64 << 10;

/// The bound that leaves no room for more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// What bytes for this purpose may use of the budget.
    Budget,
    /// The share of the client's API key.
    KeyShare,
    /// The share of the client's address.
    AddressShare,
}

impl From<Full> for ApiError {
    fn from(full: Full) -> Self {
        let message = match full {
            Full::Budget => "the relay's memory is full (MAX_BUFFERED_BYTES); try again",
            Full::KeyShare => {
                "requests of this API key hold its share of the relay's memory, half of MAX_BUFFERED_BYTES; try again"
            }
            Full::AddressShare => {
                "requests of this client's address hold its share of the relay's memory, half of MAX_BUFFERED_BYTES; try again"
            }
        };
        Self::new(ErrorKind::Overloaded, message)
    }
}

/// The budget and what is taken from it.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    unread: AtomicU64,
    shares: BodyShares,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        let (used, unread) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { limit: AtomicU64::new(limit), used, unread, shares: BodyShares::default() })
    }

    /// A reservation of nothing yet.
    pub fn open(self: &Arc<Self>) -> Reservation {
        self.reservation(None, 0)
    }

    /// A reservation of nothing yet, for a request body of this client.
    pub fn open_for(self: &Arc<Self>, holder: Holder) -> Reservation {
        self.reservation(Some(holder), 0)
    }

    /// Takes `bytes`, or nothing when they do not fit.
    pub fn reserve(self: &Arc<Self>, bytes: u64, purpose: Purpose) -> Option<Reservation> {
        let mut reservation = self.open();
        reservation.grow(bytes, purpose).is_ok().then_some(reservation)
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
        self.reservation(None, bytes)
    }

    fn reservation(self: &Arc<Self>, holder: Option<Holder>, bytes: u64) -> Reservation {
        Reservation { budget: Arc::clone(self), holder, bytes }
    }

    /// What one client's request bodies may use.
    fn share(&self) -> u64 {
        self.limit() / 2
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
    /// The client whose share they take.
    holder: Option<Holder>,
    bytes: u64,
}

impl Reservation {
    /// Checks that so many more bytes would fit now.
    pub fn check(&self, bytes: u64, purpose: Purpose) -> Result<(), Full> {
        let (own, total) = (in_share(self.bytes), in_share(self.bytes + bytes));
        if let Some(holder) = &self.holder
            && !self.budget.shares.has_room(holder, own, total - own, self.budget.share())
        {
            return Err(holder.full());
        }
        let fits = self.budget.used().saturating_add(bytes) <= self.budget.room(purpose);
        if fits { Ok(()) } else { Err(Full::Budget) }
    }

    /// Takes more, or nothing when it does not fit.
    pub fn grow(&mut self, bytes: u64, purpose: Purpose) -> Result<(), Full> {
        self.grow_within(self.budget.share(), bytes, purpose)
    }

    /// Takes bytes for a copy of a body that is dropped once the copy is made. The two together may exceed the client's share.
    pub fn grow_for_copy(&mut self, bytes: u64, purpose: Purpose) -> Result<(), Full> {
        self.grow_within(u64::MAX, bytes, purpose)
    }

    fn grow_within(&mut self, share: u64, bytes: u64, purpose: Purpose) -> Result<(), Full> {
        let (own, total) = (in_share(self.bytes), in_share(self.bytes + bytes));
        if let Some(holder) = self.holder.as_ref().filter(|_| total > 0)
            && !self.budget.shares.take(holder, own, total - own, share)
        {
            return Err(holder.full());
        }
        if !self.budget.take(bytes, self.budget.room(purpose)) {
            self.give_back_share(total - own);
            return Err(Full::Budget);
        }
        self.bytes += bytes;
        Ok(())
    }

    /// Gives bytes back.
    pub fn shrink(&mut self, bytes: u64) {
        let own = in_share(self.bytes);
        self.bytes -= bytes;
        self.give_back_share(own - in_share(self.bytes));
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ties the reservation to the bytes: it ends with their last clone.
    pub fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Held { bytes, _reservation: self })
    }

    fn give_back_share(&self, bytes: u64) {
        if let Some(holder) = self.holder.as_ref().filter(|_| bytes > 0) {
            self.budget.shares.give_back(holder, bytes);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

/// What a request body of so many bytes takes of its client's share.
fn in_share(bytes: u64) -> u64 {
    if bytes > UNSHARED_BODY_BYTES { bytes } else { 0 }
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
    fn reservations_stay_within_limit_and_are_returned() {
        let budget = Budget::new(100);
        let mut first = budget.reserve(60, Purpose::Passing).unwrap();
        assert!(budget.reserve(41, Purpose::Passing).is_none());
        assert_eq!(first.grow(40, Purpose::Passing), Ok(()));
        assert_eq!(first.grow(1, Purpose::Passing), Err(Full::Budget));
        drop(first);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn bulk_reservations_leave_room_for_passing_bytes() {
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
    fn client_holds_at_most_half_of_budget() {
        const KIB: u64 = 1 << 10;
        let budget = Budget::new(1024 * KIB);
        let key = || budget.open_for(Holder::Key("k".into()));
        let (mut first, mut second, mut small) = (key(), key(), key());
        assert_eq!(first.grow(64 * KIB, Purpose::SmallBody), Ok(()));
        assert_eq!(first.grow(236 * KIB, Purpose::SmallBody), Ok(()));
        assert_eq!(second.check(213 * KIB, Purpose::Bulk), Err(Full::KeyShare));
        assert_eq!(second.grow(213 * KIB, Purpose::Bulk), Err(Full::KeyShare));
        assert_eq!(second.grow(212 * KIB, Purpose::Bulk), Ok(()));
        assert_eq!(small.grow(64 * KIB, Purpose::SmallBody), Ok(()));
        assert_eq!(small.grow(1, Purpose::SmallBody), Err(Full::KeyShare));
        let mut other = budget.open_for(Holder::Address([127, 0, 0, 1].into()));
        assert_eq!(other.grow(321 * KIB, Purpose::Bulk), Err(Full::Budget));
        assert_eq!(other.grow(320 * KIB, Purpose::Bulk), Ok(()));
        second.shrink(200 * KIB);
        assert_eq!(small.grow(64 * KIB, Purpose::Passing), Ok(()));
        drop((first, second, small, other));
        assert_eq!((budget.used(), budget.shares.is_empty()), (0, true));
    }

    #[test]
    fn copy_of_body_may_exceed_share() {
        let budget = Budget::new(1 << 20);
        let key = || budget.open_for(Holder::Key("k".into()));
        let (mut body, mut copy) = (key(), key());
        assert_eq!(body.grow(400 << 10, Purpose::SmallBody), Ok(()));
        assert_eq!(copy.grow(400 << 10, Purpose::SmallBody), Err(Full::KeyShare));
        assert_eq!(copy.grow_for_copy(400 << 10, Purpose::SmallBody), Ok(()));
        drop(body);
        assert_eq!(key().grow(200 << 10, Purpose::SmallBody), Err(Full::KeyShare));
    }

    #[test]
    fn reservation_lives_until_last_slice_is_dropped() {
        let budget = Budget::new(100);
        let body = budget.reserve(10, Purpose::Bulk).unwrap().hold(Bytes::from_static(b"0123456789"));
        let slice = body.slice(3..5);
        drop(body);
        assert_eq!(budget.used(), 10);
        drop(slice);
        assert_eq!(budget.used(), 0);
    }
}
