//! The number of links that the workers of one provider may have, so that connections are left for all other peers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of links per provider and per address that is always allowed, whatever `MAX_CONNECTIONS` is.
const MIN_LINKS: usize = 64;

/// The open links of one provider, by the address from which they were dialled.
#[derive(Debug, Default)]
pub struct LinkLimiter {
    taken: Mutex<OpenLinks>,
}

#[derive(Debug, Default)]
struct OpenLinks {
    total: usize,
    by_address: BTreeMap<IpAddr, usize>,
}

/// The place of a link, released on drop.
#[derive(Debug)]
pub struct LinkPermit {
    places: Arc<LinkLimiter>,
    address: IpAddr,
}

impl LinkLimiter {
    /// Returns a place for another link, unless the provider has half of `max_connections`, or the address a quarter.
    pub fn take(self: &Arc<Self>, address: IpAddr, max_connections: usize) -> Option<LinkPermit> {
        let mut taken = self.lock();
        let of_address = taken.by_address.get(&address).copied().unwrap_or(0);
        if taken.total >= (max_connections / 2).max(MIN_LINKS) || of_address >= (max_connections / 4).max(MIN_LINKS) {
            return None;
        }
        taken.total += 1;
        taken.by_address.insert(address, of_address + 1);
        Some(LinkPermit { places: Arc::clone(self), address })
    }

    fn lock(&self) -> MutexGuard<'_, OpenLinks> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LinkPermit {
    fn drop(&mut self) {
        let mut taken = self.places.lock();
        taken.total -= 1;
        if let Some(left) = taken.by_address.remove(&self.address).filter(|links| *links > 1) {
            taken.by_address.insert(self.address, left - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(places: &Arc<LinkLimiter>, last: u8, links: usize) -> Vec<LinkPermit> {
        (0..links).map_while(|_| places.take(IpAddr::from([127, 0, 0, last]), 1_000)).collect()
    }

    #[test]
    fn provider_gets_at_most_half_of_connections() {
        let places = Arc::new(LinkLimiter::default());
        let all: Vec<_> = (1..=9).map(|last| take(&places, last, 100)).collect();
        assert_eq!(all.iter().map(Vec::len).sum::<usize>(), 500);
        drop(all);
        let taken = places.lock();
        assert_eq!((taken.total, taken.by_address.len()), (0, 0));
    }

    #[test]
    fn address_gets_at_most_quarter_of_connections() {
        let places = Arc::new(LinkLimiter::default());
        let mut links = take(&places, 1, 300);
        assert_eq!(links.len(), 250);
        assert_eq!(take(&places, 2, 10).len(), 10);
        links.pop();
        assert_eq!(take(&places, 1, 10).len(), 1);
    }

    #[test]
    fn address_gets_minimum_links_despite_small_limit() {
        let places = Arc::new(LinkLimiter::default());
        let address = IpAddr::from([127, 0, 0, 1]);
        let links: Vec<_> = (0..100).map_while(|_| places.take(address, 2)).collect();
        assert_eq!(links.len(), MIN_LINKS);
    }
}
