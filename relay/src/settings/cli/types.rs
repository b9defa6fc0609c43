//! Types of single settings.

use std::net::SocketAddr;
use std::path::PathBuf;

use modelrelay_protocol::cidr::Cidr;

use crate::kubernetes::identity::ServiceAccount;

/// A secret from a flag or a variable, before it is validated; it cannot be printed.
#[derive(Clone)]
pub struct SecretText(String);

/// A path for which an empty variable means none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionalPath(pub Option<PathBuf>);

/// A text for which an empty variable means none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionalText(pub Option<String>);

/// An address for which an empty variable means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionalAddr(pub Option<SocketAddr>);

/// The networks of trusted proxies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proxies(pub Vec<Cidr>);

/// Names of hosts or of headers, in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

/// The ServiceAccounts of workers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Accounts(pub Vec<ServiceAccount>);

impl SecretText {
    /// The secret itself.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for SecretText {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl std::fmt::Debug for SecretText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SecretText(…)")
    }
}
