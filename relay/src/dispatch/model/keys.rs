//! Hash maps whose consecutive keys are stored next to each other.
//!
//! Request keys come from one counter, so a peer cannot choose colliding ones. Requests end mostly in the order in
//! which they arrived: if a map stores keys in numerical order, each request is found next to the previous one, which
//! is in the processor's cache. A scattering hash puts each at a place of its own, and the processor waits for memory,
//! more often the more requests wait.
//!
//! Measured with 1,000 waiting requests, the default bound of a queue: a request, from its arrival to its completion,
//! costs the core 6,300 instructions, and 9,000 with the standard library's hasher; with 100,000, 6,300 and 9,300.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::event::{RequestKey, WorkerKey};
use super::registry::Worker;
use super::request::Request;

/// Requests are boxed: a map of pointers is small when most of it is skipped, and quickly grown.
pub(crate) type Requests = HashMap<RequestKey, Box<Request>, BuildHasherDefault<KeyHasher>>;

/// Workers, whose keys come from a counter of the relay, too.
pub(crate) type Workers = HashMap<WorkerKey, Worker, BuildHasherDefault<KeyHasher>>;

/// After this many consecutive keys (as a power of two) there is a gap, so that keys that are multiples of a large
/// power of two do not collide.
const RUN_BITS: u32 = 12;

/// Odd, and more than the standard library's map checks in one step.
const GAP: u64 = 17;

/// Not for names that come from peers. The standard library's map finds the place by the low bits, and distinguishes
/// the keys in a place by the highest seven.
#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write_u64(&mut self, key: u64) {
        const HIGHEST: u64 = 0x7f << 57;
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        let place = key.wrapping_add((key >> RUN_BITS).wrapping_mul(GAP));
        self.0 = (place & !HIGHEST) | (key.wrapping_mul(GOLDEN) & HIGHEST);
    }

    fn write(&mut self, bytes: &[u8]) {
        // A key is one number; other input is hashed correctly, but slowly.
        for byte in bytes {
            self.write_u64(self.0.wrapping_mul(257).wrapping_add(u64::from(*byte)));
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::hash::BuildHasher;

    use super::*;

    fn hash(key: u64) -> u64 {
        BuildHasherDefault::<KeyHasher>::default().hash_one(RequestKey(key))
    }

    /// Returns the largest number of 100,000 keys that share one of the 16-slot groups of a map of their size.
    fn most_in_a_group(stride: u64) -> usize {
        let mut groups: BTreeMap<u64, usize> = BTreeMap::new();
        for number in 0..100_000 {
            *groups.entry((hash(number * stride) & 0x1_ffff) >> 4).or_default() += 1;
        }
        groups.into_values().max().unwrap_or_default()
    }

    #[test]
    fn consecutive_keys_hash_to_consecutive_places() {
        let adjacent = (1..100_000).filter(|key| hash(*key) & 0xffff == (hash(key - 1) + 1) & 0xffff).count();
        assert!(adjacent > 99_900, "{adjacent}");
    }

    #[test]
    fn keys_of_one_provider_spread_over_groups() {
        for stride in [1, 2, 3, 10, 16, 64, 100, 256, 1000, 1024, 4096, 8192] {
            let most = most_in_a_group(stride);
            assert!(most <= 24, "every {stride}th key: {most} in one place");
        }
    }

    #[test]
    fn text_keys_hash_differently() {
        let hash = |key: &str| BuildHasherDefault::<KeyHasher>::default().hash_one(key);
        let hashes: BTreeSet<_> = ["", "a", "b", "ab", "ba"].map(hash).into();
        assert_eq!(hashes.len(), 5);
    }

    #[test]
    fn keys_in_same_group_have_different_tags() {
        let tags: BTreeSet<_> = (0..16).map(|key| hash(key) >> 57).collect();
        assert_eq!(tags.len(), 16);
    }
}
