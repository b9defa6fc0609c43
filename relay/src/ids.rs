//! Random names. An id on the wire cannot be guessed, so a worker cannot answer for another's request.

/// `bytes` random bytes in hexadecimal.
pub fn random_hex<const BYTES: usize>() -> String {
    let mut bytes = [0u8; BYTES];
    // Without a source of randomness nothing here can be safe; every system we run on has one.
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    let mut text = String::with_capacity(2 * BYTES);
    for byte in bytes {
        for nibble in [byte >> 4, byte & 15] {
            text.push(char::from_digit(u32::from(nibble), 16).unwrap_or('0'));
        }
    }
    text
}

/// A wire id of one sending of a request.
pub fn request_id() -> String {
    format!("r-{}", random_hex::<16>())
}

/// A worker's id at this relay.
pub fn worker_id() -> String {
    format!("w-{}", random_hex::<8>())
}

/// An admin's order to a worker.
pub fn operation_id() -> String {
    format!("op-{}", random_hex::<12>())
}

/// An id for a client's request that brought none.
pub fn client_request_id() -> String {
    format!("req_{}", random_hex::<12>())
}
