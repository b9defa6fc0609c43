//! The worker secret and the admin token as flags, variables and files give them.
//!
//! Any text is taken, letters outside ASCII too: both are compared as bytes. Control characters are refused, since no header
//! can carry them, and nobody could ever show such a secret.

use modelrelay_protocol::secret::Secret;

use super::file::read_secret;
use super::{AdminTokenSource, ConfigError};
use crate::cli::{Args, OptionalPath, SecretText};

/// The worker secret of a relay without `--config`. A file counts before the variable.
pub(super) fn worker_secret(args: &Args) -> Result<Option<Secret>, ConfigError> {
    if let Some(OptionalPath(Some(path))) = &args.worker_secret_file {
        let setting = "WORKER_SECRET_FILE (--worker-secret-file)";
        let refused = |why: &str| ConfigError::refused(setting, &path.display().to_string(), why);
        let text = read_secret(path).map_err(|why| refused(&why))?;
        if text.is_empty() {
            return Err(refused("the file is empty; it must hold the secret"));
        }
        return checked(setting, &text).map(Some);
    }
    match args.worker_secret.as_ref().map_or("", SecretText::expose) {
        "" => Ok(None),
        text => checked("WORKER_SECRET (--worker-secret)", text).map(Some),
    }
}

/// True if a worker secret is given that does not count.
pub(super) fn ignores_worker_secret(args: &Args) -> bool {
    let in_file = matches!(args.worker_secret_file, Some(OptionalPath(Some(_))));
    in_file && args.config.is_none() && args.worker_secret.as_ref().is_some_and(|secret| !secret.expose().is_empty())
}

/// A file can be changed while the relay runs, so it counts where both are given.
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

/// The secret itself is in no error.
pub(super) fn checked(place: &str, text: &str) -> Result<Secret, ConfigError> {
    if text.contains(char::is_control) {
        return Err(ConfigError::new(format!(
            "{place}: it has a control character, perhaps a line end (\\r), that no request can carry: take it out"
        )));
    }
    Ok(Secret::new(text))
}
