//! Reads `relay.yaml` and the secret files it names, as one consistent set with a hash.

use std::collections::BTreeMap;
use std::path::Path;

use modelrelay_protocol::config_hash::{config_hash, secret_of_file};

use super::ConfigError;
use super::raw::RawFile;
use crate::system::file_watch::read_bounded;

/// The largest file, more than any configuration within the other bounds needs.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// The largest secret file; a secret is one line.
const MAX_SECRET_BYTES: u64 = 64 << 10;

/// `relay.yaml` and its secret files at one moment.
pub struct Sources {
    pub(super) raw: RawFile,
    /// By the name in `relay.yaml`.
    pub(super) secrets: BTreeMap<String, String>,
    hash: String,
}

impl Sources {
    /// Reads everything; an error names the place in the file, or the file itself.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        // A mounted Secret swaps a symlink: between two reads, the second file may belong to a newer version of the
        // first. A second read right after it gets the new set whole.
        Self::read_once(path).or_else(|_| Self::read_once(path))
    }

    /// SHA-256 in hex; see [`config_hash`].
    pub fn hash(&self) -> &str {
        &self.hash
    }

    fn read_once(path: &Path) -> Result<Self, ConfigError> {
        let shown = path.display();
        if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml")) {
            return Err(ConfigError::new(format!(
                "--config: {shown}: the relay reads YAML, not TOML: write a relay.yaml (see docs/reference/settings.md)"
            )));
        }
        let bytes =
            read_bounded(path, MAX_FILE_BYTES).map_err(|why| ConfigError::new(format!("--config: {shown}: {why}")))?;
        let raw: RawFile = serde_yaml::from_slice(&bytes).map_err(|error| yaml_error(&shown.to_string(), &error))?;
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let mut in_order = Vec::new();
        let mut secrets = BTreeMap::new();
        for (place, name) in secret_files(&raw) {
            if secrets.contains_key(name) {
                continue;
            }
            let text = read_secret(&folder.join(name)).map_err(|why| ConfigError::refused(&place, name, &why))?;
            in_order.push(name.to_owned());
            secrets.insert(name.to_owned(), text);
        }
        let hash = config_hash(&bytes, in_order.iter().map(|name| (name.as_str(), secrets[name].as_str())));
        Ok(Self { raw, secrets, hash })
    }
}

fn secret_files(raw: &RawFile) -> impl Iterator<Item = (String, &str)> {
    raw.providers.iter().enumerate().flat_map(|(provider, entry)| {
        let secrets = entry.worker_secrets.iter().flatten().enumerate();
        secrets.filter_map(move |(secret, entry)| {
            Some((format!("providers[{provider}].workerSecrets[{secret}].file"), entry.file.as_deref()?))
        })
    })
}

pub(super) fn read_secret(path: &Path) -> Result<String, String> {
    let bytes = read_bounded(path, MAX_SECRET_BYTES)?;
    let text = String::from_utf8(bytes).map_err(|_| "the file is not UTF-8 text".to_owned())?;
    Ok(secret_of_file(&text).to_owned())
}

/// The parser's error names the place and the expected values. It also repeats the value that it found, which must not
/// be a secret.
fn yaml_error(file: &str, error: &serde_yaml::Error) -> ConfigError {
    let message = error.to_string();
    // The path comes first, and is missing at the top of the file. The fields that are allowed elsewhere, such as
    // `workerSecrets`, are listed after it.
    let place = message.split_once(": ").map_or("", |(place, _)| place);
    if !place.contains("workerSecrets") {
        return ConfigError::new(format!("{file}: {message}"));
    }
    let at = error.location().map(|at| format!(" at line {} column {}", at.line(), at.column())).unwrap_or_default();
    ConfigError::new(format!(
        "{file}: {place}: invalid entry{at}; expected {{file: NAME}} or {{value: SECRET}}, with an optional notAfter"
    ))
}
