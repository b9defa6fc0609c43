//! Variables that are still set when the answers are written: they take precedence over `worker.yaml`, even with values
//! that were just rejected.

use std::path::{Path, PathBuf};

use http::HeaderMap;

use crate::settings::{self, Args, BackendSettings, Credential, RelayUrl, Settings};

/// The settings that `connect` writes, as a run would read them.
#[derive(PartialEq)]
struct WrittenSettings {
    provider: String,
    name: String,
    relay: RelayUrl,
    relay_ca_file: Option<PathBuf>,
    relay_headers: Option<HeaderMap>,
    credential: Option<Credential>,
    backend: BackendSettings,
    max_concurrency: u32,
}

/// Returns the variables that would make a run of this file behave differently, or fail.
pub(super) fn in_the_way(file: &Path) -> Vec<String> {
    let Some(written) = written_settings(&Args { config: Some(file.to_owned()), ..Args::default() }) else {
        return Vec::new();
    };
    let differs = |variable: &String| {
        written_settings(&settings::of_variable(variable, file)).is_none_or(|with_variable| with_variable != written)
    };
    settings::flags().into_iter().map(|setting| setting.variable).filter(differs).collect()
}

fn written_settings(args: &Args) -> Option<WrittenSettings> {
    let Settings { name, live, .. } = Settings::check(args).ok()?;
    Some(WrittenSettings {
        provider: live.provider,
        name,
        relay: live.relay,
        relay_ca_file: live.relay_ca_file.and_then(|file| std::path::absolute(file).ok()),
        relay_headers: live.relay_headers.read().ok(),
        credential: live.credential.read().ok(),
        backend: live.backend,
        max_concurrency: live.max_concurrency,
    })
}
