//! The secret key of the hash, which all relays of a set compute from the worker secrets that they share.

use hmac::{Hmac, KeyInit, Mac};
use modelrelay_protocol::secret::Secret;
use sha2::Sha256;

use crate::settings::config::ProviderConfig;

/// Separates this key from every other use of the secrets.
const LABEL: &[u8] = b"modelrelay conversation key 1";

/// A secret key of 128 bits. Without it, a client could construct a prompt that has another client's key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HashKey(u64, u64);

impl HashKey {
    /// Derives the key from the worker secrets of a provider with HMAC-SHA-256. Of several secrets, the one with the lowest
    /// derived key is used, so that their order does not matter. A rotation that changes this secret forgets all homes once.
    /// `None` without a secret.
    pub fn derive<'a>(secrets: impl IntoIterator<Item = &'a Secret>) -> Option<Self> {
        secrets.into_iter().filter(|secret| !secret.expose().is_empty()).map(Self::of_secret).min()
    }

    /// Derives the key of a provider; `None` if its workers only have service accounts.
    pub fn of_provider(config: &ProviderConfig) -> Option<Self> {
        Self::derive(config.worker_secrets.iter().map(|secret| &secret.secret))
    }

    /// Returns a random key: relays without a common secret do not know each other's conversations.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("system random number generator failed");
        Self::of_bytes(&bytes)
    }

    /// Returns both halves.
    pub(super) fn halves(self) -> (u64, u64) {
        (self.0, self.1)
    }

    fn of_secret(secret: &Secret) -> Self {
        let mac = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes());
        let mut mac = mac.expect("HMAC accepts keys of any length");
        mac.update(LABEL);
        Self::of_bytes(&mac.finalize().into_bytes())
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let half = |range: std::ops::Range<usize>| u64::from_le_bytes(bytes[range].try_into().expect("eight bytes"));
        Self(half(0..8), half(8..16))
    }
}
