//! Random ids. An id on the wire cannot be guessed, so a worker cannot respond to another worker's request.

use std::cell::RefCell;

use modelrelay_protocol::limits::MAX_ID_BYTES;

/// The number of random bytes per system call: each request has two ids, and a call for each would be measurable.
const POOL_BYTES: usize = 1024;

/// Bytes of the operating system; the unused ones are at the end.
struct Pool {
    bytes: [u8; POOL_BYTES],
    used: usize,
}

impl Pool {
    const EMPTY: Self = Self { bytes: [0; POOL_BYTES], used: POOL_BYTES };

    fn take<const BYTES: usize>(&mut self) -> [u8; BYTES] {
        const { assert!(BYTES <= POOL_BYTES) };
        if POOL_BYTES - self.used < BYTES {
            // Without a source of randomness nothing here can be safe; every supported system has one.
            getrandom::fill(&mut self.bytes).expect("system random number generator failed");
            self.used = 0;
        }
        let mut taken = [0; BYTES];
        let left = &mut self.bytes[self.used..self.used + BYTES];
        taken.copy_from_slice(left);
        left.fill(0);
        self.used += BYTES;
        taken
    }
}

/// `BYTES` random bytes in hexadecimal.
pub fn random_hex<const BYTES: usize>() -> String {
    thread_local!(static POOL: RefCell<Pool> = const { RefCell::new(Pool::EMPTY) });
    let bytes: [u8; BYTES] = POOL.with_borrow_mut(Pool::take);
    let mut text = String::with_capacity(2 * BYTES);
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    text
}

/// The wire id of one attempt of a request. It ends with the client's request id, so that a worker's log contains that
/// too; a long one is truncated to fit.
pub fn wire_id(client_request_id: &str) -> String {
    const RANDOM_BYTES: usize = 16;
    const ROOM: usize = MAX_ID_BYTES - "r--".len() - 2 * RANDOM_BYTES;
    // Shorter ones are used whole.
    let client = client_request_id.get(..ROOM).unwrap_or(client_request_id);
    format!("r-{}-{client}", random_hex::<RANDOM_BYTES>())
}

/// A worker's id at this relay.
pub fn worker_id() -> String {
    format!("w-{}", random_hex::<8>())
}

/// The id of an admin's order to a worker.
pub fn operation_id() -> String {
    format!("op-{}", random_hex::<12>())
}

/// An id for a client's request that has none.
pub fn client_request_id() -> String {
    format!("req_{}", random_hex::<12>())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_stay_unique_across_pool_refills() {
        let ids: HashSet<String> = (0..10 * POOL_BYTES / 16).map(|_| random_hex::<16>()).collect();
        assert_eq!(ids.len(), 10 * POOL_BYTES / 16);
        assert!(ids.iter().all(|id| id.len() == 32 && id.bytes().all(|c| c.is_ascii_hexdigit())));
    }

    #[test]
    fn wire_id_is_never_too_long() {
        let (short, long) = (wire_id("req_1"), wire_id(&"x".repeat(128)));
        assert!(short.len() == 35 + 5 && short.ends_with("-req_1"), "{short}");
        assert!(long.len() == MAX_ID_BYTES && long.ends_with("xxx"), "{long}");
    }

    #[test]
    fn issued_bytes_are_erased_from_pool() {
        let mut pool = Pool::EMPTY;
        let taken = pool.take::<16>();
        assert!(taken != [0; 16] && !pool.bytes.windows(16).any(|window| window == taken));
    }
}
