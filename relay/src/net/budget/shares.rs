//! The share of the budget that each client's request bodies use.
//!
//! One client may hold half of the budget, so that its uploads leave room for other clients. A client's only body may
//! be larger, so that a request limit that fits into the budget stays usable.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Full;

/// The client to whose share a request body is charged: its API key, or its address if no key is required.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holder {
    /// The id of an API key.
    Key(Arc<str>),
    /// An address, or the network that is treated as one.
    Address(IpAddr),
}

impl Holder {
    /// The error returned if the share has no room.
    pub(super) fn full(&self) -> Full {
        match self {
            Self::Key(_) => Full::KeyShare,
            Self::Address(_) => Full::AddressShare,
        }
    }
}

/// Bytes of request bodies by client, without clients that have none.
#[derive(Debug, Default)]
pub(super) struct BodyShares(Mutex<HashMap<Holder, u64>>);

impl BodyShares {
    /// True if `bytes` more fit within `limit`, for a body that already has `own` bytes.
    pub(super) fn has_room(&self, holder: &Holder, own: u64, bytes: u64, limit: u64) -> bool {
        let held = self.lock().get(holder).copied().unwrap_or(0);
        fits(held, own, bytes, limit)
    }

    /// Reserves `bytes` if [`Self::has_room`].
    pub(super) fn take(&self, holder: &Holder, own: u64, bytes: u64, limit: u64) -> bool {
        let mut shares = self.lock();
        match shares.get_mut(holder) {
            Some(held) => {
                let taken = fits(*held, own, bytes, limit);
                *held += if taken { bytes } else { 0 };
                taken
            }
            None => {
                shares.insert(holder.clone(), bytes);
                true
            }
        }
    }

    /// Releases reserved bytes.
    pub(super) fn give_back(&self, holder: &Holder, bytes: u64) {
        if let Entry::Occupied(mut held) = self.lock().entry(holder.clone()) {
            *held.get_mut() -= bytes;
            if *held.get() == 0 {
                held.remove();
            }
        }
    }

    /// True if no client holds anything.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Holder, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// True if the body is its client's only one, or if all its bodies stay within the limit.
fn fits(held: u64, own: u64, bytes: u64, limit: u64) -> bool {
    held == own || held.saturating_add(bytes) <= limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_body_may_exceed_limit() {
        let (shares, holder) = (BodyShares::default(), Holder::Key("k".into()));
        assert!(shares.take(&holder, 0, 90, 50) && shares.take(&holder, 90, 5, 50));
        assert!(!shares.has_room(&holder, 0, 1, 50) && !shares.take(&holder, 0, 1, 50));
        shares.give_back(&holder, 95);
        assert!(shares.take(&holder, 0, 30, 50) && shares.take(&holder, 0, 20, 50));
        assert!(!shares.take(&holder, 30, 1, 50));
        shares.give_back(&holder, 50);
        assert!(shares.is_empty());
    }

    #[test]
    fn each_client_has_its_own_share() {
        let shares = BodyShares::default();
        let address = |last| Holder::Address([127, 0, 0, last].into());
        assert!(shares.take(&Holder::Key("k".into()), 0, 50, 50));
        assert!(shares.take(&address(1), 0, 50, 50) && shares.take(&address(2), 0, 50, 50));
        assert!(!shares.take(&address(2), 0, 1, 50));
    }
}
