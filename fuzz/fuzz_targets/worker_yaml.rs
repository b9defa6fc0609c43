//! `worker.yaml`: it is accepted with all its bounds kept, or rejected in one line that names the setting and no
//! secret.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use modelrelay_fuzz::{ConfigFolder, assert_one_line, expected_names, names_devices, secrets_below, shows};
use modelrelay_protocol::limits::{MAX_MODELS_PER_SLOT, MAX_SLOTS_PER_WORKER};
use modelrelay_worker::settings::{Args, Models, Settings};

static FOLDER: LazyLock<ConfigFolder> = LazyLock::new(ConfigFolder::new);

/// The beginnings of a rejection: a key of the file, an environment variable that a key replaces, or the file itself.
static SETTINGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let path = FOLDER.write("unknown.yaml", b"unknown: 1");
    let error = Settings::load(&Args { config: Some(path), ..Args::default() }).expect_err("an unknown key");
    let mut settings = expected_names(&error.to_string());
    assert!(settings.len() > 20, "the keys of the file: {settings:?}");
    settings.extend(["--config", "WORKER_SECRET", "WORKER_SECRET_FILE", "WORKER_TOKEN_FILE"].map(str::to_owned));
    settings
});

fuzz_target!(|content: &[u8]| {
    if names_devices(content) {
        return;
    }
    let path = FOLDER.write("worker.yaml", content);
    let args = Args { config: Some(path), ..Args::default() };
    match Settings::load(&args) {
        Ok(settings) => {
            check(&settings);
            assert_eq!(Settings::load(&args).expect("the same file again"), settings);
        }
        Err(error) => {
            let message = error.to_string();
            assert_one_line(&message);
            let setting = message.split([':', '.', '[']).next().unwrap_or_default();
            assert!(SETTINGS.iter().any(|known| known == setting), "no setting is named: {message}");
            if let Ok(yaml) = serde_yaml::from_slice(content) {
                for secret in secrets_below(&yaml, &["workerSecret", "drainToken", "headers", "relayHeaders", "env"]) {
                    assert!(!shows(&message, &secret), "a secret is shown: {message}");
                }
            }
        }
    }
});

fn check(settings: &Settings) {
    let live = &settings.live;
    let url = &live.backend.url;
    assert!(matches!(url.scheme(), "http" | "https") && url.host_str().is_some_and(|host| !host.is_empty()));
    assert!(url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none());
    for ours in ["host", "content-length", "transfer-encoding", "connection"] {
        assert!(!live.backend.headers.contains_key(ours), "{ours}");
    }
    assert!((1..=100_000).contains(&live.max_concurrency));
    if let Models::Fixed(models) = &live.models {
        assert!(!models.is_empty() && models.iter().all(|name| !name.is_empty() && name != "*"));
    }
    if let Some(slots) = &live.slots {
        assert!((1..=MAX_SLOTS_PER_WORKER).contains(&slots.len()));
        assert!(slots.iter().all(|slot| (1..=MAX_MODELS_PER_SLOT).contains(&slot.config.models.len())));
    }
}
