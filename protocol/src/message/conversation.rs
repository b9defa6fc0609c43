//! The key of a conversation on the wire.

use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The key of a conversation: a keyed hash, and equal at all relays of a set. 16 hexadecimal digits on the wire.
///
/// `Debug` does not show it: equal keys in a log would reveal which requests belong together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConversationKey(pub u64);

impl ConversationKey {
    /// The number of digits on the wire.
    pub const DIGITS: usize = 16;

    fn parse(text: &str) -> Option<Self> {
        let is_key = text.len() == Self::DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_key.then(|| u64::from_str_radix(text, 16).ok()).flatten().map(Self)
    }
}

impl fmt::Debug for ConversationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConversationKey(…)")
    }
}

impl Serialize for ConversationKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:016x}", self.0))
    }
}

impl<'de> Deserialize<'de> for ConversationKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom("a key of a conversation has 16 hexadecimal digits"))
    }
}

/// Reads an optional key; one of another form is ignored, because the request can be served without it.
pub(super) fn if_valid<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ConversationKey>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(value.as_str().and_then(ConversationKey::parse))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sixteen_hexadecimal_digits_are_a_key() {
        assert_eq!(ConversationKey::parse("00000000000000Ff"), Some(ConversationKey(255)));
        for text in
            ["", "ff", "+000000000000001", "0x00000000000001", "000000000000000g", "00000000000000001", "äääääääá"]
        {
            assert_eq!(ConversationKey::parse(text), None, "{text}");
        }
    }

    #[test]
    fn debug_output_hides_key() {
        assert_eq!(format!("{:?}", ConversationKey(255)), "ConversationKey(…)");
    }
}
