//! Injection: the webhook that puts a worker into Pods that carry a pool's label.

/// A fresh drain token: 128 bits, in hexadecimal.
pub fn token() -> String {
    let mut bytes = [0_u8; 16];
    // Without a source of randomness the token would be no secret; every system that runs this has one.
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_long_and_differ() {
        let (one, other) = (token(), token());
        assert_eq!(one.len(), 32);
        assert!(one.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(one, other);
    }
}
