//! A relay that serves several Providers at one address.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The Provider whose relay serves another one too.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RelayRef {
    /// Name of the Provider.
    #[schemars(length(min = 1, max = 52), regex(pattern = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// Namespace of the Provider. Default: this namespace. Another one must list this Provider in relay.sharedWith.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub namespace: Option<String>,
}

/// Providers of another namespace that may refer to a relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharedWith {
    /// Namespace of the Providers.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub namespace: String,
    /// Name of the Provider. Empty: every Provider of the namespace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 52), regex(pattern = r"^([a-z]([-a-z0-9]*[a-z0-9])?)?$"), extend("default" = ""))]
    pub provider: String,
}
