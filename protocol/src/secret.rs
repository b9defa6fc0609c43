//! A secret that cannot be printed and is compared in constant time.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A shared secret or token. `Debug` shows that it exists, never its value.
#[derive(Clone)]
pub struct Secret {
    text: String,
    digest: [u8; 32],
}

impl Secret {
    /// Stores the secret unchanged; the caller trims a file's last newline.
    pub fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        let digest = digest(&text);
        Self { text, digest }
    }

    /// The secret itself, for the one place that sends it.
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// True if the secret is empty. An empty secret admits no request.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// SHA-256 of the secret.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// True if `presented` equals this secret apart from characters that a copy may add around it; see [`bare`]. The
    /// result must not be reported to the peer.
    pub fn is_nearly(&self, presented: &str) -> bool {
        let own = bare(&self.text);
        let same: bool = digest(own).ct_eq(&digest(bare(presented))).into();
        same && !own.is_empty()
    }

    /// True if `presented` is this secret. Digests are compared, so the timing reveals neither content nor length.
    pub fn verify(&self, presented: &str) -> bool {
        let same: bool = self.digest.ct_eq(&digest(presented)).into();
        same && !self.is_empty()
    }
}

/// Returns a secret without the quotes, blanks and line ends around it, which shells, editors and environment files
/// add.
pub fn bare(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | '\u{feff}'))
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.digest.ct_eq(&other.digest).into()
    }
}

impl Eq for Secret {}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.is_empty() { "Secret(empty)" } else { "Secret(…)" })
    }
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_same_text_verifies() {
        let secret = Secret::new("hunter2");
        assert!(secret.verify("hunter2"));
        assert!(!secret.verify("hunter") && !secret.verify("hunter22") && !secret.verify(""));
    }

    #[test]
    fn secret_is_exposed_unchanged_and_compared_by_digest() {
        let secret = Secret::new("hunter2\n");
        assert_eq!(secret.expose(), "hunter2\n");
        assert!(secret == secret.clone() && secret != Secret::new("hunter2"));
        // FIPS 180-4's first example.
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = Secret::new("abc").digest().map(|byte| format!("{byte:02x}")).concat();
        assert_eq!(digest, known);
    }

    #[test]
    fn quoted_secret_is_nearly_same() {
        for presented in ["\"hunter2\"", "'hunter2'", " hunter2\r\n", "\u{feff}hunter2"] {
            assert!(Secret::new("hunter2").is_nearly(presented) && Secret::new(presented).is_nearly("hunter2"));
            assert!(!Secret::new("hunter2").verify(presented));
        }
        assert!(!Secret::new("hunter2").is_nearly("hunter") && !Secret::new("\"\"").is_nearly(""));
    }

    #[test]
    fn empty_secret_never_verifies() {
        assert!(!Secret::new("").verify(""));
    }

    #[test]
    fn debug_never_shows_secret() {
        assert!(!format!("{:?}", Secret::new("hunter2")).contains("hunter2"));
    }
}
