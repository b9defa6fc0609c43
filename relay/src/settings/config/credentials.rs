//! The worker secret and the admin token from flags, variables and files.
//!
//! Any text is accepted, including letters outside ASCII: both are compared as bytes. Control characters are rejected,
//! because no header can contain them, so that no worker could ever present such a secret.

use modelrelay_protocol::secret::Secret;

use super::file::read_secret;
use super::{AdminTokenSource, ConfigError};
use crate::settings::cli::{Args, OptionalPath, SecretText};

/// The worker secret of a relay without `--config`. A file takes precedence over the variable.
pub(super) fn worker_secret(args: &Args) -> Result<Option<Secret>, ConfigError> {
    if let Some(OptionalPath(Some(path))) = &args.worker_secret_file {
        let setting = "WORKER_SECRET_FILE (--worker-secret-file)";
        let refused = |why: &str| ConfigError::refused(setting, &path.display().to_string(), why);
        let text = read_secret(path).map_err(|why| refused(&why))?;
        if text.is_empty() {
            return Err(refused("the file is empty; it must contain the secret"));
        }
        return checked(setting, &text).map(Some);
    }
    match args.worker_secret.as_ref().map_or("", SecretText::expose) {
        "" => Ok(None),
        text => checked("WORKER_SECRET (--worker-secret)", text).map(Some),
    }
}

/// True if a given worker secret has no effect.
pub(super) fn ignores_worker_secret(args: &Args) -> bool {
    let in_file = matches!(args.worker_secret_file, Some(OptionalPath(Some(_))));
    in_file && args.config.is_none() && args.worker_secret.as_ref().is_some_and(|secret| !secret.expose().is_empty())
}

/// The source of the admin token. A file can be changed while the relay runs, so it takes precedence.
pub(super) fn admin_token(args: &Args) -> Result<AdminTokenSource, ConfigError> {
    let given = args.admin_token.as_ref().map_or("", SecretText::expose);
    match &args.admin_token_file {
        Some(OptionalPath(Some(path))) => Ok(AdminTokenSource::File(path.clone())),
        Some(OptionalPath(None)) | None if given.is_empty() => Ok(AdminTokenSource::None),
        Some(OptionalPath(None)) | None => {
            checked("MODELRELAY_ADMIN_TOKEN (--admin-token)", given).map(AdminTokenSource::Value)
        }
    }
}

/// Validates a secret. No error contains the secret itself.
pub(super) fn checked(place: &str, text: &str) -> Result<Secret, ConfigError> {
    if text.contains(char::is_control) {
        return Err(ConfigError::new(format!(
            "{place}: the secret contains a control character, such as a line end (\\r), which is not allowed in a header: remove it"
        )));
    }
    Ok(Secret::new(text))
}
