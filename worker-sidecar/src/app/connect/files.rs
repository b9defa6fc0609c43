//! The files that `connect` writes: `worker.yaml`, and next to it a file with the secret that only its owner may read.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use modelrelay_platform::files;
use modelrelay_protocol::secret::Secret;

use crate::settings::Engine;

/// The location of the secret.
#[derive(Debug)]
pub(super) enum SecretPlace {
    /// Not in a file yet.
    New(Secret),
    /// In this file, which `connect` must not change.
    File(PathBuf),
}

/// All answers.
#[derive(Debug)]
pub(super) struct Answers {
    pub(super) relay: String,
    pub(super) relay_ca_file: Option<PathBuf>,
    pub(super) relay_headers_file: Option<PathBuf>,
    pub(super) provider: String,
    pub(super) secret: SecretPlace,
    pub(super) name: String,
    pub(super) backend: String,
    pub(super) engine: Engine,
    pub(super) api_key_file: Option<PathBuf>,
    pub(super) at_once: u32,
}

/// The file of the secret that belongs to a `worker.yaml`.
pub(super) fn secret_file(output: &Path) -> PathBuf {
    output.with_extension("secret")
}

/// Writes the files, the secret first: a worker that reads the new `worker.yaml` finds it.
pub(super) fn write(output: &Path, answers: &Answers) -> Result<(), String> {
    let secret = match &answers.secret {
        SecretPlace::New(secret) => {
            let file = secret_file(output);
            replace(&file, &format!("{}\n", secret.expose()), files::OWNER_ONLY)?;
            file
        }
        SecretPlace::File(file) => file.clone(),
    };
    replace(output, &yaml(answers, &absolute(&secret)?)?, 0o644)
}

/// Paths are written as absolute paths: a service starts in another folder than its owner.
fn yaml(answers: &Answers, secret: &Path) -> Result<String, String> {
    let mut text =
        "# Written by `modelrelay-worker connect`. docs/reference/settings.md lists all keys, under Worker;\n\
        # `modelrelay-worker check --config FILE` validates a change.\n"
            .to_owned();
    let mut add = |key: &str, value: &str| {
        // Writing into a string cannot fail. A JSON string is a valid YAML string, whatever its content.
        let _ = writeln!(text, "{key}: {}", serde_json::Value::from(value));
    };
    add("relay", &answers.relay);
    if let Some(file) = &answers.relay_ca_file {
        add("relayCaFile", &utf8(&absolute(file)?)?);
    }
    if let Some(file) = &answers.relay_headers_file {
        add("relayHeadersFile", &utf8(&absolute(file)?)?);
    }
    add("provider", &answers.provider);
    add("workerSecretFile", &utf8(secret)?);
    add("name", &answers.name);
    text.push_str("backend:\n");
    let mut add = |key: &str, value: &str| {
        let _ = writeln!(text, "  {key}: {}", serde_json::Value::from(value));
    };
    add("url", &answers.backend);
    add("engine", answers.engine.as_str());
    if let Some(file) = &answers.api_key_file {
        add("apiKeyFile", &utf8(&absolute(file)?)?);
    }
    let _ = writeln!(text, "maxConcurrency: {}", answers.at_once);
    Ok(text)
}

/// Writes under an unused name first, so that a partial file is never read, and the content is never readable for
/// others.
fn replace(file: &Path, text: &str, mode: u32) -> Result<(), String> {
    let failed = |error: io::Error| format!("cannot write {}: {error}; choose another --output", file.display());
    let (new, mut opened) = unused(file, mode).map_err(failed)?;
    let written = opened.write_all(text.as_bytes()).and_then(|()| opened.sync_all());
    written.and_then(|()| fs::rename(&new, file)).map_err(|error| {
        let _ = fs::remove_file(&new);
        failed(error)
    })
}

/// Creates a new file next to this one.
fn unused(file: &Path, mode: u32) -> io::Result<(PathBuf, File)> {
    let mut number = 0_u32;
    loop {
        let mut new = file.as_os_str().to_owned();
        new.push(format!(".new{number}"));
        match files::with_mode(OpenOptions::new().write(true).create_new(true), mode).open(&new) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            opened => return Ok((PathBuf::from(new), opened?)),
        }
    }
}

fn absolute(file: &Path) -> Result<PathBuf, String> {
    std::path::absolute(file).map_err(|error| format!("{}: {error}", file.display()))
}

fn utf8(file: &Path) -> Result<String, String> {
    let refused = || format!("cannot write {} into worker.yaml: the path is not valid UTF-8", file.display());
    file.to_str().map(str::to_owned).ok_or_else(refused)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::app::check::check;
    use crate::settings::Args;

    fn answers() -> Answers {
        Answers {
            relay: "https://relay.example".to_owned(),
            relay_ca_file: None,
            relay_headers_file: None,
            provider: "local".to_owned(),
            secret: SecretPlace::New(Secret::new("hunter2")),
            name: "Grace's \"box\": #1 \u{e4}".to_owned(),
            backend: "http://127.0.0.1:8000".to_owned(),
            engine: Engine::Vllm,
            api_key_file: None,
            at_once: 16,
        }
    }

    #[test]
    fn written_configuration_loads_with_any_names() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("worker.yaml");
        write(&output, &answers()).unwrap();
        let report = check(&Args { config: Some(output.clone()), ..Args::default() }).unwrap();
        assert!(report.plan.contains("Grace's \"box\": #1 \u{e4}, with the worker secret in "), "{}", report.plan);
        assert!(report.warnings.is_empty() && !fs::read_to_string(output).unwrap().contains("hunter2"));
    }

    #[test]
    fn secret_file_is_private_despite_existing_open_file() {
        let folder = tempfile::tempdir().unwrap();
        let (output, secret) = (folder.path().join("w.yaml"), folder.path().join("w.secret"));
        let theirs = [".new", ".new0"].map(|end| folder.path().join(format!("w.secret{end}")));
        for file in theirs.iter().chain([&secret]) {
            fs::write(file, "older").unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
        }
        write(&output, &answers()).unwrap();
        assert_eq!(fs::read_to_string(&secret).unwrap(), "hunter2\n");
        assert_eq!(fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(theirs.map(|file| fs::read_to_string(file).unwrap()), ["older", "older"]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4, "no other file is left");
    }
}
