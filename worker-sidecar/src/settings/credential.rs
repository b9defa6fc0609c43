//! The credential that the worker sends to its relays: a secret of the provider, or the token of its Pod's
//! ServiceAccount.
//!
//! Exactly one of the two: with both, it would be unclear which of them admits the worker, and a secret that is no
//! longer needed would be left behind. The environment and the flags take precedence over `worker.yaml`, as everywhere.

use std::path::{Path, PathBuf};

use modelrelay_protocol::secret::Secret;

use super::Args;
use super::file::File;
use super::{SettingError, header_secret, read_secret};

/// The worker's credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// A secret of the provider.
    Secret(Secret),
    /// The token of a ServiceAccount.
    Token(Secret),
}

/// The source of the credential.
#[derive(Clone, Debug, PartialEq)]
pub enum CredentialSource {
    /// A secret, given directly.
    Secret(Secret),
    /// A file, read again each second and at every dial: a rotation needs no restart.
    SecretFile(PathBuf),
    /// A file that the kubelet rewrites before the token expires; read just as often.
    TokenFile(PathBuf),
}

impl Credential {
    /// Returns the human-readable name.
    pub fn noun(&self) -> &'static str {
        match self {
            Self::Secret(_) => "worker secret",
            Self::Token(_) => "worker token",
        }
    }

    /// Returns the question to check when a relay rejects it.
    pub fn question(&self) -> &'static str {
        match self {
            Self::Secret(secret) => {
                oddity(secret.expose()).unwrap_or("check that the worker secret belongs to this provider")
            }
            Self::Token(_) => "check that the provider's workerServiceAccounts list the ServiceAccount of this Pod",
        }
    }
}

impl CredentialSource {
    /// Returns the human-readable name.
    pub fn noun(&self) -> &'static str {
        match self {
            Self::Secret(_) | Self::SecretFile(_) => "worker secret",
            Self::TokenFile(_) => "worker token",
        }
    }

    /// True if it may change without the settings.
    pub fn is_file(&self) -> bool {
        match self {
            Self::Secret(_) => false,
            Self::SecretFile(_) | Self::TokenFile(_) => true,
        }
    }

    /// Detects errors that waiting does not fix. A missing or empty file is not one of them: on Kubernetes a Pod may
    /// start before the Secret that it mounts.
    pub fn check(&self) -> Result<(), SettingError> {
        let (Self::SecretFile(path) | Self::TokenFile(path)) = self else { return Ok(()) };
        let is_to_come = match std::fs::read(path) {
            Ok(content) => content.trim_ascii_end().is_empty(),
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if is_to_come { Ok(()) } else { self.read().map(|_| ()) }
    }

    /// Returns the current credential. An error states why there is none, never its content.
    pub fn read(&self) -> Result<Credential, SettingError> {
        match self {
            Self::Secret(secret) => Ok(Credential::Secret(secret.clone())),
            Self::SecretFile(path) => read_secret("WORKER_SECRET_FILE", path).map(Credential::Secret),
            Self::TokenFile(path) => read_secret("WORKER_TOKEN_FILE", path).map(Credential::Token),
        }
    }
}

/// Returns the likely reason why a secret does not match: characters that were not meant to be part of it.
fn oddity(secret: &str) -> Option<&'static str> {
    let is_quoted =
        secret.len() > 1 && ['"', '\''].iter().any(|quote| secret.starts_with(*quote) && secret.ends_with(*quote));
    if secret.trim() != secret {
        return Some(
            "the worker secret begins or ends with whitespace, which HTTP headers drop; remove it here and at the relay",
        );
    }
    is_quoted.then_some("the worker secret includes quotation marks; check that the relay's value includes them too")
}

/// The values of one source: the environment with its flags, or the file.
struct CredentialSettings<'a> {
    secret: (&'static str, Option<&'a Secret>),
    secret_file: (&'static str, Option<&'a Path>),
    token_file: (&'static str, Option<&'a Path>),
}

impl CredentialSettings<'_> {
    fn source(&self) -> Result<Option<CredentialSource>, SettingError> {
        let secret = self.secret.1.filter(|secret| !secret.expose().trim().is_empty());
        let by_secret = match (secret, self.secret_file) {
            (Some(secret), _) => {
                Some((self.secret.0, CredentialSource::Secret(header_secret(self.secret.0, secret.expose())?)))
            }
            (None, (name, Some(path))) => Some((name, CredentialSource::SecretFile(path.to_owned()))),
            (None, (_, None)) => None,
        };
        match (by_secret, self.token_file.1) {
            (Some((secret, _)), Some(path)) => Err(SettingError::new(
                self.token_file.0,
                path.display().to_string(),
                format!("{secret} is set too, but a worker uses either a token or a secret; remove one of them"),
            )),
            (Some((_, source)), None) => Ok(Some(source)),
            (None, path) => Ok(path.map(|path| CredentialSource::TokenFile(path.to_owned()))),
        }
    }
}

pub(super) fn source(args: &Args, file: &File) -> Result<CredentialSource, SettingError> {
    const MISSING: &str = "missing or empty: set the provider's secret in WORKER_SECRET or WORKER_SECRET_FILE \
        (workerSecret or workerSecretFile in worker.yaml), or a ServiceAccount token of the Pod in WORKER_TOKEN_FILE (workerTokenFile)";
    let of_args = CredentialSettings {
        secret: ("WORKER_SECRET", args.worker_secret.as_ref()),
        secret_file: ("WORKER_SECRET_FILE", args.worker_secret_file.as_deref()),
        token_file: ("WORKER_TOKEN_FILE", args.worker_token_file.as_deref()),
    };
    let of_file = CredentialSettings {
        secret: ("workerSecret", file.worker_secret.0.as_ref()),
        secret_file: ("workerSecretFile", file.worker_secret_file.as_deref()),
        token_file: ("workerTokenFile", file.worker_token_file.as_deref()),
    };
    let source = match of_args.source()? {
        Some(source) => source,
        None => of_file.source()?.ok_or_else(|| SettingError::hidden("WORKER_SECRET", MISSING))?,
    };
    source.check()?;
    Ok(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_secret_is_named_as_likely_cause() {
        let question = |secret: &str| Credential::Secret(Secret::new(secret)).question();
        assert!(question("\"secret\"").contains("quotation marks") && question("'secret'").contains("quotation marks"));
        assert!(question(" secret").contains("whitespace") && question("secret\t").contains("whitespace"));
        for usual in ["secret", "a\"b", "\"", "it's", ""] {
            assert_eq!(question(usual), "check that the worker secret belongs to this provider", "{usual}");
        }
    }
}
