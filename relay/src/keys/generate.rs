//! New keys, and the parts of presented ones.

use sha2::{Digest, Sha256};

use super::KEY_PREFIX;

/// The alphabet has no `-`, which separates the parts of the key, and no characters that are easily confused: 32, so
/// that each is five random bits.
const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
/// 60 bits, so that ids do not collide.
const ID_CHARS: usize = 12;
/// 160 bits.
const SECRET_CHARS: usize = 32;
/// A longer value cannot be a key, and is not hashed.
const MAX_PRESENTED_BYTES: usize = 256;

/// A key before it is stored.
pub(super) struct FreshKey {
    pub(super) id: String,
    pub(super) whole: String,
    pub(super) sha256: [u8; 32],
}

pub(super) fn fresh() -> Result<FreshKey, getrandom::Error> {
    let mut random = [0; ID_CHARS + SECRET_CHARS];
    getrandom::fill(&mut random)?;
    let text: String = random.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect();
    let (id, secret) = text.split_at(ID_CHARS);
    let whole = format!("{KEY_PREFIX}{id}-{secret}");
    let sha256 = Sha256::digest(whole.as_bytes()).into();
    Ok(FreshKey { id: id.to_owned(), whole, sha256 })
}

/// The id in a presented key.
pub(super) fn id_of(presented: &str) -> Option<&str> {
    if presented.len() > MAX_PRESENTED_BYTES {
        return None;
    }
    let (id, _secret) = presented.strip_prefix(KEY_PREFIX)?.split_once('-')?;
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_key_has_expected_form_and_unique_id() {
        let (one, two) = (fresh().expect("random"), fresh().expect("random"));
        assert_ne!((&one.id, &one.whole), (&two.id, &two.whole));
        assert_eq!(id_of(&one.whole), Some(one.id.as_str()));
        assert_eq!((one.id.len(), one.whole.len()), (12, 3 + 12 + 1 + 32));
    }

    #[test]
    fn malformed_key_has_no_id() {
        for text in ["", "mr-", "mr-abc", "sk-abc-def", "abc-def", &format!("mr-abc-{}", "x".repeat(300))] {
            assert_eq!(id_of(text), None, "{text}");
        }
    }
}
