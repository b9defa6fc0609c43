//! The stored part of a key, and its JSON.

use std::time::SystemTime;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::KeyLimits;
use crate::dispatch::{Class, Weight};

/// A key as stored, without its secret.
///
/// Unknown fields are an error: a store that a later version wrote must not be rewritten without its content.
/// `deny_unknown_fields` and `flatten` cannot be combined, so the limits are a field of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyRecord {
    /// Finds the key.
    pub id: String,
    /// The name from the admin.
    pub name: String,
    /// The digest of the whole key.
    #[serde(with = "hex_digest")]
    pub sha256: [u8; 32],
    /// The creation time.
    #[serde(with = "time")]
    pub created_at: SystemTime,
    /// The time of last use, as of the last write.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_time")]
    pub last_used_at: Option<SystemTime>,
    /// True if it was revoked.
    #[serde(default)]
    pub revoked: bool,
    /// The time of the revocation; absent in revoked keys of earlier versions, until the relay sets it.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional_time")]
    pub revoked_at: Option<SystemTime>,
    /// The number of changes since its creation, by which the current one of two states of a key is found.
    #[serde(default, skip_serializing_if = "is_default")]
    pub revision: u64,
    /// Its weight.
    #[serde(default, skip_serializing_if = "is_default")]
    pub weight: Weight,
    /// The class of its requests.
    #[serde(default, skip_serializing_if = "is_default")]
    pub class: Class,
    /// Its limits.
    #[serde(default)]
    pub limits: KeyLimits,
}

impl KeyRecord {
    /// A key without limits that was never used.
    pub(super) fn new(id: String, name: String, sha256: [u8; 32], created_at: SystemTime) -> Self {
        Self {
            id,
            name,
            sha256,
            created_at,
            last_used_at: None,
            revoked: false,
            revoked_at: None,
            revision: 0,
            weight: Weight::default(),
            class: Class::default(),
            limits: KeyLimits::default(),
        }
    }

    /// Revokes the key; `false` if it was revoked before.
    pub(super) fn revoke(&mut self, now: SystemTime) -> bool {
        let changes = !self.revoked;
        if changes {
            self.revoked = true;
            self.revoked_at = Some(now);
        }
        changes
    }

    /// Adopts the revocation of another state of the same key: a revocation is permanent.
    pub(super) fn adopt_revocation(&mut self, other: &Self) {
        if other.revoked && !self.revoked {
            self.revoked = true;
            self.revoked_at = other.revoked_at;
        }
    }
}

/// The key with this id, if it was not revoked.
pub(super) fn active<'a>(records: &'a mut [KeyRecord], id: &str) -> Option<&'a mut KeyRecord> {
    records.iter_mut().find(|record| record.id == id && !record.revoked)
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Formats a time as RFC 3339 in UTC, with milliseconds.
pub(super) fn format_time(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

mod time {
    use super::{Deserialize, Deserializer, Serializer, SystemTime, format_time, parse};

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format_time(*time))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        parse(&String::deserialize(deserializer)?)
    }
}

pub(super) mod optional_time {
    use super::{Deserialize, Deserializer, Serialize, Serializer, SystemTime, format_time, parse};

    pub(in super::super) fn serialize<S: Serializer>(
        time: &Option<SystemTime>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        time.map(format_time).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<SystemTime>, D::Error> {
        Option::<String>::deserialize(deserializer)?.map(|text| parse(&text)).transpose()
    }
}

mod hex_digest {
    use super::{Deserialize, Deserializer, Serializer};
    use serde::de::Error as _;

    pub(super) fn serialize<S: Serializer>(digest: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
        let text: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 32], D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut digest = [0; 32];
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(D::Error::custom("expected 64 hexadecimal digits"));
        }
        for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(D::Error::custom)?;
            *byte = u8::from_str_radix(pair, 16).map_err(D::Error::custom)?;
        }
        Ok(digest)
    }
}

fn parse<E: serde::de::Error>(text: &str) -> Result<SystemTime, E> {
    humantime::parse_rfc3339(text).map_err(|_| E::custom("expected a UTC time such as \"2026-12-01T00:00:00Z\""))
}
