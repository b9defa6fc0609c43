//! `modelrelay-worker check`: reports whether a worker would run with these settings, and what it would do.
//!
//! It opens no connection: valid settings may still meet a relay that rejects the secret. `connect` checks that.

use std::fmt::Write;

use crate::settings::{
    self, Args, BackendSettings, CredentialSource, Live, Models, SettingError, Settings, SlotSettings,
};
use crate::worker::trust;

/// The result for valid settings.
#[derive(Debug)]
pub struct CheckReport {
    /// The actions of a run, one line each.
    pub plan: String,
    /// The conditions that a run would wait for.
    pub warnings: Vec<String>,
}

/// Validates flags, variables and `worker.yaml` as a run would. Returns every mistake, at least one.
pub fn check(args: &Args) -> Result<CheckReport, Vec<SettingError>> {
    let settings = Settings::check(args)?;
    trust(settings.live.relay_ca_file.as_ref()).map_err(|error| vec![error])?;
    if let Some(target) = &settings.traces {
        target.check().map_err(|error| vec![settings::export_error(&error)])?;
    }
    if let Some(target) = &settings.metric_export {
        target.check().map_err(|error| vec![settings::export_error(&error)])?;
    }
    let credential = settings.live.credential.read();
    let warnings = credential.err().map(|error| format!("the worker would wait for this: {error}"));
    Ok(CheckReport { plan: plan(&settings), warnings: warnings.into_iter().collect() })
}

fn plan(settings: &Settings) -> String {
    let live = &settings.live;
    let mut text = format!(
        "relay: {}{}\nprovider: {}, as {}, with {}\n",
        live.relay.address(),
        if live.relay.every_address { " (every address behind the name)" } else { "" },
        live.provider,
        settings.name,
        shown(&live.credential),
    );
    // Writing into a string cannot fail.
    let _ = match &live.slots {
        None => write!(text, "{}", served(live)),
        Some(slots) => slots.iter().try_for_each(|slot| writeln!(text, "{}", swapped(slot))),
    };
    let _ = writeln!(text, "probes: http://{}", settings.probe.addr);
    text
}

/// Describes the source of the credential, never its content.
fn shown(credential: &CredentialSource) -> String {
    match credential {
        CredentialSource::Secret(_) => "a worker secret".to_owned(),
        CredentialSource::SecretFile(path) => format!("the worker secret in {}", path.display()),
        CredentialSource::TokenFile(path) => format!("the token in {}", path.display()),
    }
}

fn served(live: &Live) -> String {
    let BackendSettings { url, engine, .. } = &live.backend;
    let models = match &live.models {
        Models::Listed => "all that it lists".to_owned(),
        Models::Fixed(models) => models.join(", "),
    };
    let url = url.as_str().trim_end_matches('/');
    format!("backend: {url} ({})\nmodels: {models}\nconcurrent requests: {}\n", engine.as_str(), live.max_concurrency)
}

fn swapped(slot: &SlotSettings) -> String {
    let models: Vec<&str> = slot.config.models.iter().map(|model| &*model.id).collect();
    format!("slot {}: {}, one at a time", slot.config.id, models.join(", "))
}
