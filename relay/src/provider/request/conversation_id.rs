//! Pseudonyms of conversations for traces.
//!
//! The key of a conversation decides where its requests are sent, and never leaves the relay. A trace shows an HMAC of it, under a
//! key that is used for nothing else: whoever reads traces cannot compute the key, nor choose a prompt that has it.

use hmac::{Hmac, KeyInit, Mac};
use modelrelay_protocol::secret::Secret;
use sha2::Sha256;

/// Separates the key of pseudonyms from every other use of the worker secrets.
const LABEL: &[u8] = b"modelrelay conversation pseudonym 1";

/// The number of bytes of a pseudonym: enough that no two conversations share one.
const BYTES: usize = 16;

/// Makes the pseudonyms, if traces show them.
#[derive(Clone)]
pub struct ConversationIds {
    /// The key for a provider without a worker secret: random per process.
    fallback: [u8; 32],
}

impl ConversationIds {
    /// Creates a maker of pseudonyms.
    pub fn new() -> Self {
        let mut fallback = [0; 32];
        getrandom::fill(&mut fallback).expect("system random number generator failed");
        Self { fallback }
    }

    /// Returns the pseudonym of a request's conversation, if it has one. Relays that share the provider's worker secrets return
    /// the same. Of several secrets, the one with the lowest derived key is used, so that their order does not matter.
    pub fn pseudonym<'a>(
        &self,
        secrets: impl IntoIterator<Item = &'a Secret>,
        conversation: Option<u64>,
    ) -> Option<String> {
        let conversation = conversation?;
        let secrets = secrets.into_iter().map(Secret::expose).filter(|secret| !secret.is_empty());
        let key = secrets.map(|secret| mac(secret.as_bytes(), LABEL)).min().unwrap_or(self.fallback);
        let pseudonym = mac(&key, &conversation.to_be_bytes());
        Some(pseudonym.iter().take(BYTES).map(|byte| format!("{byte:02x}")).collect())
    }
}

impl Default for ConversationIds {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for ConversationIds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConversationIds").finish_non_exhaustive()
    }
}

fn mac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC accepts keys of any length");
    mac.update(message);
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pseudonym(ids: &ConversationIds, secrets: &[&str], conversation: u64) -> String {
        let secrets: Vec<Secret> = secrets.iter().map(|secret| Secret::new(*secret)).collect();
        ids.pseudonym(&secrets, Some(conversation)).expect("a pseudonym")
    }

    #[test]
    fn relays_with_same_secrets_agree_on_pseudonym() {
        let (one, other) = (ConversationIds::new(), ConversationIds::new());
        let first = pseudonym(&one, &["a", "b"], 7);
        assert_eq!(first, pseudonym(&other, &["b", "", "a"], 7));
        assert_ne!(first, pseudonym(&one, &["c"], 7));
        assert_ne!(first, pseudonym(&one, &["a", "b"], 8));
    }

    #[test]
    fn pseudonym_without_secret_differs_per_process() {
        let (one, other) = (ConversationIds::new(), ConversationIds::new());
        assert_eq!(pseudonym(&one, &[], 7), pseudonym(&one, &[""], 7));
        assert_ne!(pseudonym(&one, &[], 7), pseudonym(&other, &[], 7));
    }

    #[test]
    fn pseudonym_does_not_contain_key_of_conversation() {
        let ids = ConversationIds::new();
        let key = 0x0123_4567_89ab_cdef_u64;
        let text = pseudonym(&ids, &["a"], key);
        assert!(text.len() == 2 * BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit()), "{text}");
        assert!(!text.contains(&format!("{key:x}")) && !text.contains(&key.to_string()), "{text}");
    }

    #[test]
    fn request_without_conversation_has_no_pseudonym() {
        assert_eq!(ConversationIds::new().pseudonym(&[Secret::new("a")], None), None);
    }
}
