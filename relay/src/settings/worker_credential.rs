//! The credential of a connected worker.

use std::sync::Arc;

use crate::kubernetes::identity::Identity;

/// The credential that admitted a worker.
#[derive(Clone, Debug)]
pub enum Credential {
    /// A secret of the provider, identified by its SHA-256.
    Secret([u8; 32]),
    /// The token of a ServiceAccount.
    Token(Arc<Identity>),
}

impl Credential {
    /// The ServiceAccount as `NAMESPACE/NAME`, if the credential is a token.
    pub fn identity(&self) -> Option<String> {
        match self {
            Self::Secret(_) => None,
            Self::Token(identity) => Some(identity.account.to_string()),
        }
    }
}

/// The present status of a worker's credential, the best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CredentialStatus {
    /// It was removed.
    Removed,
    /// It expired, and was not revoked before.
    Over,
    /// It is still valid.
    Good,
}
