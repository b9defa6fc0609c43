//! `relay.yaml`: it is accepted with all its bounds kept, or rejected in one line that names the place and no secret.

#![no_main]

use std::collections::HashSet;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use modelrelay_fuzz::{ConfigFolder, assert_one_line, expected_names, names_devices, secrets_below, shows};
use modelrelay_relay::settings::cli::Args;
use modelrelay_relay::settings::config::Config;

static FOLDER: LazyLock<ConfigFolder> = LazyLock::new(ConfigFolder::new);
static ARGS: LazyLock<Args> = LazyLock::new(|| {
    let path = FOLDER.write("relay.yaml", b"");
    Args::load_from(["modelrelay-relay", "--config", path.to_str().expect("UTF-8")]).expect("valid arguments")
});

/// The top-level keys, or the names of the file as a whole.
static PLACES: LazyLock<Vec<String>> = LazyLock::new(|| {
    FOLDER.write("relay.yaml", b"unknown: 1");
    let error = Config::from_args(&ARGS).map(|config| config.hash).expect_err("an unknown key");
    let mut places = expected_names(&error.to_string());
    assert!(places.contains(&"providers".to_owned()), "the keys of the file: {places:?}");
    places.extend(["--config", "relay.yaml"].map(str::to_owned));
    places
});

fuzz_target!(|content: &[u8]| {
    if names_devices(content) {
        return;
    }
    let (args, places) = (&*ARGS, &*PLACES);
    FOLDER.write("relay.yaml", content);
    match Config::from_args(args) {
        Ok(config) => {
            check(&config);
            let again = Config::from_args(args).expect("the same file again");
            assert_eq!((again.providers, again.hash), (config.providers, config.hash));
        }
        Err(error) => {
            let message = error.to_string();
            assert_one_line(&message);
            assert!(places.iter().any(|place| message.contains(place.as_str())), "no place is named: {message}");
            if let Ok(yaml) = serde_yaml::from_slice(content) {
                for secret in secrets_below(&yaml, &["workerSecrets"]) {
                    let is_file = message.contains(".file: ");
                    assert!(is_file || !shows(&message, &secret), "a secret is shown: {message}");
                }
            }
        }
    }
});

fn check(config: &Config) {
    assert_eq!(config.hash.len(), 64);
    assert!(config.relay_count >= 1);
    let mut names = HashSet::new();
    for provider in &config.providers {
        let name = provider.name.as_str();
        assert!(names.insert(name), "{name} is there twice");
        assert!(
            !name.is_empty()
                && name.len() <= 52
                && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        );
        assert!(provider.worker_secrets.iter().all(|secret| !secret.secret.is_empty()));
        assert!((1..=4096).contains(&provider.max_models_per_worker), "{}", provider.max_models_per_worker);
        let Some(models) = &provider.models else { continue };
        let mut known = HashSet::new();
        for model in models {
            // Each name means one model, in whichever way it is requested.
            for name in std::iter::once(&model.id).chain(&model.aliases) {
                assert!(known.insert(name) && !name.is_empty() && !name.contains(char::is_control));
            }
        }
    }
}
