//! A byte budget for everything that clients and workers can make the relay hold: request heads and bodies, response
//! heads and bodies, and WebSocket messages that have begun.
//!
//! Bytes are reserved before they are kept. [`Reservation::hold`] ties a reservation to its bytes, so that a body in a
//! worker's outgoing queue stays reserved and is released when its last clone is dropped.

mod shares;

pub use shares::Holder;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use modelrelay_protocol::error::{ApiError, ErrorKind};

use shares::BodyShares;

/// The purpose of memory. Each purpose may use more of the budget than the one before it, so that large or waiting data
/// never displaces small or moving data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A large body, a message, or response bytes queued behind others that the client has not read: seven eighths of
    /// the budget.
    Bulk,
    /// A small request body: fifteen sixteenths of the budget.
    SmallBody,
    /// Response bytes for a client that has read everything so far: the whole budget.
    Passing,
}

/// The largest request body that is a [`Purpose::SmallBody`].
const SMALL_BODY_BYTES: u64 = 1 << 20;

impl Purpose {
    /// Returns the purpose of a request body of this size.
    pub fn of_body(bytes: u64) -> Self {
        if bytes > SMALL_BODY_BYTES { Self::Bulk } else { Self::SmallBody }
    }

    /// Returns the part of a budget of `limit` bytes that may be in use once bytes for this purpose are added.
    pub fn room_in(self, limit: u64) -> u64 {
        match self {
            Self::Bulk => limit - limit / 8,
            Self::SmallBody => limit - limit / 16,
            Self::Passing => limit,
        }
    }
}

/// The largest request body that is not charged to its client's share; thousands of them fit into the budget.
const UNSHARED_BODY_BYTES: u64 = 64 << 10;

/// The limit that leaves no room for more bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The part of the budget that bytes for this purpose may use.
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
                "requests of this API key use its full share of the relay's memory, half of MAX_BUFFERED_BYTES; try again"
            }
            Full::AddressShare => {
                "requests of this client's address use its full share of the relay's memory, half of MAX_BUFFERED_BYTES; try again"
            }
        };
        Self::new(ErrorKind::Overloaded, message)
    }
}

/// The budget and the bytes reserved from it.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    used: AtomicU64,
    unread: AtomicU64,
    shares: BodyShares,
}

impl Budget {
    /// Creates a budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        let (used, unread) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { limit: AtomicU64::new(limit), used, unread, shares: BodyShares::default() })
    }

    /// Returns an empty reservation.
    pub fn open(self: &Arc<Self>) -> Reservation {
        self.reservation(None, 0)
    }

    /// Returns an empty reservation for a request body of this client.
    pub fn open_for(self: &Arc<Self>, holder: Holder) -> Reservation {
        self.reservation(Some(holder), 0)
    }

    /// Reserves `bytes`; `None` if they do not fit.
    pub fn reserve(self: &Arc<Self>, bytes: u64, purpose: Purpose) -> Option<Reservation> {
        let mut reservation = self.open();
        reservation.grow(bytes, purpose).is_ok().then_some(reservation)
    }

    /// Returns the part of this budget that may be in use once bytes for this purpose are added.
    pub fn room(&self, purpose: Purpose) -> u64 {
        purpose.room_in(self.limit())
    }

    /// The number of reserved bytes.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The size of the budget, from the configuration.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// The number of reserved response bytes that clients have not read. It also decides how far the windows of streams
    /// grow.
    pub fn unread(&self) -> u64 {
        self.unread.load(Ordering::Relaxed)
    }

    /// True if unread response bytes fill more than a quarter of the budget, so that no window grows.
    pub fn is_tight(&self) -> bool {
        self.unread() > self.limit() / 4
    }

    /// Reserves unread response bytes; returns false if they do not fit. [`Self::give_back_unread`] releases them.
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

    /// Turns bytes from [`Self::take_unread`] into a reservation of the client's connection.
    pub(crate) fn adopt_unread(self: &Arc<Self>, bytes: u64) -> Reservation {
        self.unread.fetch_sub(bytes, Ordering::Relaxed);
        self.reservation(None, bytes)
    }

    fn reservation(self: &Arc<Self>, holder: Option<Holder>, bytes: u64) -> Reservation {
        Reservation { budget: Arc::clone(self), holder, bytes }
    }

    /// The number of bytes that one client's request bodies may use.
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

/// Bytes reserved from the budget until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    /// The client to whose share the bytes are charged.
    holder: Option<Holder>,
    bytes: u64,
}

impl Reservation {
    /// Checks that `bytes` more would fit now.
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

    /// Reserves `bytes` more, or nothing if they do not fit.
    pub fn grow(&mut self, bytes: u64, purpose: Purpose) -> Result<(), Full> {
        self.grow_within(self.budget.share(), bytes, purpose)
    }

    /// Reserves bytes for a copy of a body that is dropped once the copy is made. Both together may exceed the client's
    /// share.
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

    /// Releases `bytes`.
    pub fn shrink(&mut self, bytes: u64) {
        let own = in_share(self.bytes);
        self.bytes -= bytes;
        self.give_back_share(own - in_share(self.bytes));
        self.budget.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The number of reserved bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ties the reservation to the bytes: it is released with their last clone.
    pub fn hold(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(AccountedBytes { bytes, _reservation: self })
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

/// Returns how much of its client's share a request body of `bytes` uses.
fn in_share(bytes: u64) -> u64 {
    if bytes > UNSHARED_BODY_BYTES { bytes } else { 0 }
}

struct AccountedBytes {
    bytes: Bytes,
    _reservation: Reservation,
}

impl AsRef<[u8]> for AccountedBytes {
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
