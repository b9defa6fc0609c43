//! The secret key of the hash, which all relays of a set compute from the worker secrets that they share.

use hmac::{Hmac, KeyInit, Mac};
use modelrelay_protocol::secret::Secret;
use sha2::Sha256;

use crate::settings::config::ProviderConfig;

/// Separates this key from every other use of the secrets.
const LABEL: &[u8] = b"modelrelay conversation key 1";

/// The number of bytes of a pseudonym: enough that no two conversations share one.
const PSEUDONYM_BYTES: usize = 16;

/// The place where pseudonyms are shown. Pseudonyms of one place are not linked to those of another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShownIn {
    /// Exported traces.
    Traces,
    /// The request journal.
    Journal,
}

impl ShownIn {
    /// Separates these pseudonyms from every other use of the key.
    fn label(self) -> &'static [u8] {
        match self {
            Self::Traces => b"modelrelay conversation pseudonym 1",
            Self::Journal => b"modelrelay conversation pseudonym in the request journal 1",
        }
    }
}

/// A secret key of 128 bits. Without it, a client could construct a prompt that has another client's key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HashKey(u64, u64);

impl HashKey {
    /// Derives the key from the worker secrets of a provider with HMAC-SHA-256. Of several secrets, the one with the
    /// lowest derived key is used, so that their order does not matter. A rotation that changes this secret forgets all
    /// homes once. `None` without a secret.
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

    /// Returns the name of a conversation in traces or the request journal: an HMAC-SHA-256 of its key. A reader cannot
    /// compute that key, nor construct a prompt that has it.
    pub fn pseudonym(self, place: ShownIn, conversation: u64) -> String {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&self.0.to_le_bytes());
        key[8..].copy_from_slice(&self.1.to_le_bytes());
        let mac = mac(&key, &[place.label(), &conversation.to_le_bytes()]);
        mac[..PSEUDONYM_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Returns both halves.
    pub(super) fn halves(self) -> (u64, u64) {
        (self.0, self.1)
    }

    fn of_secret(secret: &Secret) -> Self {
        Self::of_bytes(&mac(secret.expose().as_bytes(), &[LABEL]))
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let half = |range: std::ops::Range<usize>| u64::from_le_bytes(bytes[range].try_into().expect("eight bytes"));
        Self(half(0..8), half(8..16))
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC accepts keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(secrets: &[&str]) -> HashKey {
        let secrets: Vec<Secret> = secrets.iter().map(|secret| Secret::new(*secret)).collect();
        HashKey::derive(&secrets).expect("a key")
    }

    #[test]
    fn relays_with_same_secrets_share_pseudonyms() {
        for place in [ShownIn::Traces, ShownIn::Journal] {
            let pseudonym = key(&["a", "b"]).pseudonym(place, 7);
            assert_eq!(pseudonym, key(&["b", "", "a"]).pseudonym(place, 7));
            assert_ne!(pseudonym, key(&["a", "b"]).pseudonym(place, 8));
            assert_ne!(pseudonym, key(&["c"]).pseudonym(place, 7));
        }
    }

    #[test]
    fn traces_and_journal_have_different_pseudonyms() {
        assert_ne!(key(&["a"]).pseudonym(ShownIn::Traces, 7), key(&["a"]).pseudonym(ShownIn::Journal, 7));
    }

    #[test]
    fn relays_without_secrets_have_different_pseudonyms() {
        let pseudonym = || HashKey::random().pseudonym(ShownIn::Journal, 7);
        assert_ne!(pseudonym(), pseudonym());
    }

    #[test]
    fn pseudonym_does_not_contain_key_of_conversation() {
        let conversation = 0x0123_4567_89ab_cdef_u64;
        let text = key(&["a"]).pseudonym(ShownIn::Traces, conversation);
        assert!(text.len() == 2 * PSEUDONYM_BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit()), "{text}");
        let shown = [conversation, conversation.swap_bytes()].map(|number| format!("{number:016x}"));
        assert!(shown.iter().all(|number| !text.contains(number)), "{text}");
    }
}
