//! Types that both kinds share, and small ones of one field.

use std::borrow::Cow;

use modelrelay_protocol::units::{self, UnitError};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Number, Value};

/// A key of a Secret in the resource's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key in the Secret's data.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Human-readable text.
    Text,
    /// One JSON object per line.
    Json,
}

impl LogFormat {
    /// Returns the value that the programs' settings use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// A duration with units, such as `30s` or `1h30m`. At least 1 ms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DurationText(pub String);

/// A duration that may be `0s`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DurationOrZeroText(pub String);

/// A size in bytes: an integer, or text such as `256Mi`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SizeText(pub Size);

/// The forms of a size that the schema accepts. Kubernetes' own type ends at 2 GiB, but the API server accepts more,
/// and an object that cannot be deserialized gets no status that explains the error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Size {
    /// A number of bytes, of any length.
    Number(Number),
    /// Text with a unit, or digits alone.
    Text(String),
}

/// A Kubernetes structure that is kept as written, including fields that are newer than this program.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RawObject(pub Value);

impl DurationText {
    /// Creates a value from a constant of this crate.
    pub fn of(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Parses the duration.
    pub fn parse(&self) -> Result<std::time::Duration, UnitError> {
        units::parse_duration(&self.0)
    }
}

impl DurationOrZeroText {
    /// Parses the duration.
    pub fn parse(&self) -> Result<std::time::Duration, UnitError> {
        units::parse_duration_or_zero(&self.0)
    }
}

impl SizeText {
    /// Creates a value from a constant of this crate.
    pub fn of(text: &str) -> Self {
        Self(Size::Text(text.to_owned()))
    }

    /// Parses the number of bytes.
    pub fn parse(&self) -> Result<u64, UnitError> {
        match &self.0 {
            Size::Number(bytes) => units::parse_size(&bytes.to_string()),
            Size::Text(text) => units::parse_size(text),
        }
    }
}

impl RawObject {
    /// True if nothing was written.
    pub fn is_empty(&self) -> bool {
        match &self.0 {
            Value::Null => true,
            Value::Object(map) => map.is_empty(),
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => false,
        }
    }
}

/// Deserializes null as the default: the API server keeps null in a field that may be an integer or text.
pub fn null_is_default<'de, D: Deserializer<'de>>(
    deserializer: D,
    default: fn() -> SizeText,
) -> Result<SizeText, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(default))
}

/// Checked in addition to CEL's `duration()`, which accepts units and signs that the programs do not.
const DURATION_PATTERN: &str = "^([0-9]+(ms|s|m|h))+$";
const SIZE_PATTERN: &str = "^[1-9][0-9]{0,14}(Ki|Mi|Gi|Ti)?$";

impl JsonSchema for DurationText {
    fn schema_name() -> Cow<'static, str> {
        "DurationText".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string", "maxLength": 32, "pattern": DURATION_PATTERN,
            "x-kubernetes-validations": [{
                "rule": "duration(self) >= duration('1ms') && duration(self) <= duration('87600h')",
                "message": "must be a duration from 1ms to 87600h, such as 500ms, 30s or 1h30m",
            }],
        })
    }
}

impl JsonSchema for DurationOrZeroText {
    fn schema_name() -> Cow<'static, str> {
        "DurationOrZeroText".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string", "maxLength": 32, "pattern": DURATION_PATTERN,
            "x-kubernetes-validations": [{
                "rule": "duration(self) <= duration('87600h')",
                "message": "must be a duration from 0s to 87600h, such as 0s, 30s or 1h30m",
            }],
        })
    }
}

impl JsonSchema for SizeText {
    fn schema_name() -> Cow<'static, str> {
        "SizeText".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true, "maxLength": 18, "pattern": SIZE_PATTERN, "minimum": 1,
        })
    }
}

impl JsonSchema for RawObject {
    fn schema_name() -> Cow<'static, str> {
        "RawObject".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
    }
}

/// Number of IP versions of a Service, in a cluster that has IPv4 and IPv6. Default: the cluster's, SingleStack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IpFamilyPolicy {
    /// One address.
    SingleStack,
    /// Both in a cluster that has both, otherwise one.
    PreferDualStack,
    /// Both; a cluster without both rejects the Service.
    RequireDualStack,
}

/// Versions of IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IpFamily {
    /// IPv4.
    IPv4,
    /// IPv6.
    IPv6,
}
