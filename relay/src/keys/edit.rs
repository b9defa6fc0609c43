//! Requests of admins: the fields of a new key, and changes to an existing one.
//!
//! Both have the same fields with the same rules. A new key is changed before it is stored.

use std::collections::HashSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::SystemTime;

use modelrelay_protocol::names::is_unprintable;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{KeyRecord, KeyStoreError, generate};
use crate::dispatch::{Class, ShareError, Weight};

/// The most characters of a name.
pub(crate) const MAX_NAME_CHARS: usize = 128;
/// The most providers or models that a key is restricted to.
pub(crate) const MAX_SCOPE: usize = 256;
/// The most characters of each.
pub(crate) const MAX_SCOPE_CHARS: usize = 256;
/// The highest limit of tokens: more than the largest fleet generates in a day.
pub(crate) const MAX_TOKENS: u64 = 1_000_000_000_000;
/// The most characters of a value in the audit log.
const MAX_SHOWN_CHARS: usize = 256;
const ALLOWED: &str = "name, providers, models, expires_at, max_in_flight, max_queue_percent, tokens_per_minute, \
    tokens_per_day, weight, class";

/// The fields of a request's JSON object, in its order; [`KeyEdits`] and [`NewKey`] validate them. Its text lists them
/// for the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyFields(Vec<(String, Value)>);

/// Validated changes to a key; fields that are not named stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEdits(Vec<KeyEdit>);

/// A validated key to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewKey(KeyEdits);

/// The value of one field; `None` removes the limit, or restores the default.
#[derive(Debug, Clone, PartialEq, Eq)]
enum KeyEdit {
    Name(String),
    Providers(Option<Vec<String>>),
    Models(Option<Vec<String>>),
    ExpiresAt(Option<SystemTime>),
    MaxInFlight(Option<u32>),
    MaxQueuePercent(Option<u8>),
    TokensPerMinute(Option<u64>),
    TokensPerDay(Option<u64>),
    Weight(Option<Weight>),
    Class(Option<Class>),
}

/// A key before it is stored, with its secret.
pub(super) struct FreshRecord {
    pub(super) record: KeyRecord,
    pub(super) whole: String,
}

impl TryFrom<KeyFields> for KeyEdits {
    type Error = KeyStoreError;

    fn try_from(fields: KeyFields) -> Result<Self, KeyStoreError> {
        fields.0.iter().map(|(field, value)| KeyEdit::parse(field, value)).collect::<Result<_, _>>().map(Self)
    }
}

impl KeyEdits {
    /// Changes the record; false if it was so before.
    pub(super) fn apply(&self, record: &mut KeyRecord) -> bool {
        let mut changed = record.clone();
        self.0.iter().for_each(|edit| edit.apply(&mut changed));
        if changed == *record {
            return false;
        }
        *record = KeyRecord { revision: record.revision + 1, ..changed };
        true
    }
}

impl TryFrom<KeyFields> for NewKey {
    type Error = KeyStoreError;

    /// A key needs a name; every other field has a default.
    fn try_from(fields: KeyFields) -> Result<Self, KeyStoreError> {
        let edits = KeyEdits::try_from(fields)?;
        if edits.0.iter().any(|edit| matches!(edit, KeyEdit::Name(_))) {
            return Ok(Self(edits));
        }
        Err(KeyStoreError::Invalid(format!("name: missing; it must have 1 to {MAX_NAME_CHARS} characters")))
    }
}

impl NewKey {
    /// Generates the key.
    pub(super) fn into_fresh(self) -> Result<FreshRecord, KeyStoreError> {
        let fresh = generate::fresh()
            .map_err(|error| KeyStoreError::Unavailable(format!("system random number generator failed: {error}")))?;
        let mut record = KeyRecord::new(fresh.id, String::new(), fresh.sha256, SystemTime::now());
        self.0.0.iter().for_each(|edit| edit.apply(&mut record));
        Ok(FreshRecord { record, whole: fresh.whole })
    }
}

impl KeyEdit {
    fn parse(field: &str, value: &Value) -> Result<Self, KeyStoreError> {
        let edit = match field {
            "name" => name(value).map(Self::Name),
            "providers" => unless_null(value, names).map(Self::Providers),
            "models" => unless_null(value, names).map(Self::Models),
            "expires_at" => unless_null(value, time).map(Self::ExpiresAt),
            "max_in_flight" => unless_null(value, |value| whole(value, 1..=u32::MAX)).map(Self::MaxInFlight),
            "max_queue_percent" => unless_null(value, |value| whole(value, 1..=100)).map(Self::MaxQueuePercent),
            "tokens_per_minute" => unless_null(value, tokens).map(Self::TokensPerMinute),
            "tokens_per_day" => unless_null(value, tokens).map(Self::TokensPerDay),
            "weight" => unless_null(value, weight).map(Self::Weight),
            "class" => unless_null(value, class).map(Self::Class),
            _ => {
                let field: String = field.chars().take(MAX_NAME_CHARS).collect();
                return Err(KeyStoreError::Invalid(format!("unknown field {field:?}; allowed fields: {ALLOWED}")));
            }
        };
        edit.map_err(|requirement| KeyStoreError::Invalid(format!("{field}: must {requirement}")))
    }

    fn apply(&self, record: &mut KeyRecord) {
        match self.clone() {
            Self::Name(name) => record.name = name,
            Self::Providers(providers) => record.limits.providers = providers,
            Self::Models(models) => record.limits.models = models,
            Self::ExpiresAt(expires_at) => record.limits.expires_at = expires_at,
            Self::MaxInFlight(most) => record.limits.max_in_flight = most,
            Self::MaxQueuePercent(most) => record.limits.max_queue_percent = most,
            Self::TokensPerMinute(most) => record.limits.tokens_per_minute = most,
            Self::TokensPerDay(most) => record.limits.tokens_per_day = most,
            Self::Weight(weight) => record.weight = weight.unwrap_or_default(),
            Self::Class(class) => record.class = class.unwrap_or_default(),
        }
    }
}

/// The end of the sentence "must …".
type Requirement = String;

fn unless_null<T>(
    value: &Value,
    parse: impl FnOnce(&Value) -> Result<T, Requirement>,
) -> Result<Option<T>, Requirement> {
    if value.is_null() { Ok(None) } else { parse(value).map(Some) }
}

fn name(value: &Value) -> Result<String, Requirement> {
    let name = value.as_str().map(str::trim).filter(|name| is_printable(name, MAX_NAME_CHARS));
    let allowed = || format!("have 1 to {MAX_NAME_CHARS} characters, no control characters");
    name.map(str::to_owned).ok_or_else(allowed)
}

/// True if a text has from one to `most` characters, all of them visible.
pub(crate) fn is_printable(text: &str, most: usize) -> bool {
    (1..=most).contains(&text.chars().count()) && !text.contains(is_unprintable)
}

/// An empty list would make a key without any access, which cannot be intended.
fn names(value: &Value) -> Result<Vec<String>, Requirement> {
    let names = Vec::<String>::deserialize(value).ok();
    let are_allowed = |names: &Vec<String>| {
        (1..=MAX_SCOPE).contains(&names.len()) && names.iter().all(|name| is_printable(name, MAX_SCOPE_CHARS))
    };
    names.filter(are_allowed).ok_or_else(|| {
        format!(
            "be a list of 1 to {MAX_SCOPE} names of at most {MAX_SCOPE_CHARS} characters; null or no field allows all"
        )
    })
}

fn time(value: &Value) -> Result<SystemTime, Requirement> {
    let time = value.as_str().and_then(|text| humantime::parse_rfc3339(text).ok());
    time.ok_or_else(|| "be a UTC time such as \"2026-12-01T00:00:00Z\"; null or no field means no expiry".to_owned())
}

fn whole<T: TryFrom<u64> + PartialOrd + fmt::Display>(
    value: &Value,
    range: RangeInclusive<T>,
) -> Result<T, Requirement> {
    let number = value.as_u64().and_then(|number| T::try_from(number).ok()).filter(|number| range.contains(number));
    let allowed =
        || format!("be a whole number from {} to {}; null or no field means no limit", range.start(), range.end());
    number.ok_or_else(allowed)
}

fn tokens(value: &Value) -> Result<u64, Requirement> {
    whole(value, 1..=MAX_TOKENS)
}

fn weight(value: &Value) -> Result<Weight, Requirement> {
    let number = value.as_f64().ok_or(ShareError::Weight);
    number.and_then(Weight::try_from).map_err(|error| format!("{error}; null or no field means 1"))
}

fn class(value: &Value) -> Result<Class, Requirement> {
    let text = value.as_str().ok_or(ShareError::Class);
    text.and_then(str::parse).map_err(|error| format!("{error}; null or no field means normal"))
}

impl<'de> Deserialize<'de> for KeyFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsInOrder)
    }
}

struct FieldsInOrder;

impl<'de> Visitor<'de> for FieldsInOrder {
    type Value = KeyFields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    /// A field that appears twice is an error, because it is not clear which value is meant.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<KeyFields, A::Error> {
        let (mut fields, mut known) = (Vec::new(), HashSet::new());
        while let Some((field, value)) = map.next_entry::<String, Value>()? {
            if !known.insert(field.clone()) {
                return Err(A::Error::custom(format!("duplicate field {field:?}")));
            }
            fields.push((field, value));
        }
        Ok(KeyFields(fields))
    }
}

impl fmt::Display for KeyFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (field, value)) in self.0.iter().enumerate() {
            let value = value.to_string();
            let shown: String = value.chars().take(MAX_SHOWN_CHARS).collect();
            let (gap, cut) = (if index == 0 { "" } else { " " }, if shown.len() < value.len() { "…" } else { "" });
            write!(f, "{gap}{field}={shown}{cut}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
