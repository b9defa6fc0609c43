//! The class of a request on the wire.

use serde::{Deserialize, Deserializer, Serialize};

/// The class of a request. A higher class goes first; the highest is the least in the order of this type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestClass {
    /// A person waits for the response.
    Interactive,
    /// The class of requests without an API key.
    #[default]
    Normal,
    /// The response may come late.
    Batch,
}

impl RequestClass {
    pub(super) fn is_normal(&self) -> bool {
        *self == Self::Normal
    }
}

/// Reads a class. An unknown one is `normal`, because the request can be served without it.
pub(super) fn or_normal<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RequestClass, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(RequestClass::deserialize(value).unwrap_or_default())
}
