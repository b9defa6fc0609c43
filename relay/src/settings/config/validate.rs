//! Converts raw settings to validated ones: bounds, names, duplicates. Every error names its place.

use std::collections::{BTreeMap, HashSet};
use std::time::SystemTime;

use modelrelay_protocol::limits::MAX_MODEL_CHARS;
use modelrelay_protocol::model_details::ModelDetails;
use modelrelay_protocol::names::is_model_name;
use serde_json::{Map, Value};

use super::bounds::{bounded, within};
use super::credentials;
use super::fairness::{FairnessConfig, FairnessMode};
use super::model_names::{NamePlaces, RawModelNames};
use super::placement::{CacheIsolation, MOST_HOMES, MOST_SPILL_REQUESTS, Placement, PlacementConfig};
use super::raw::{RawFairness, RawModel, RawPlacement, RawProvider, RawQueue, RawSecret};
use super::{
    CatalogueModel, ConfigError, MAX_MODELS_PER_WORKER, MAX_RELAY_COUNT, ProviderConfig, Sources, WorkerSecret, tenants,
};
use crate::dispatch::Spill;
use crate::keys::Tenant;
use crate::kubernetes::identity::ServiceAccount;

const MAX_PROVIDERS: usize = 256;
const MAX_PROVIDER_NAME: usize = 52;
/// The longest part of a provider's name after a period: a namespace.
const MAX_NAMESPACE: usize = 63;
const MAX_SECRETS: usize = 16;
const MAX_ACCOUNTS: usize = 64;
const MAX_SECRET_CHARS: usize = 4096;
/// The most models, aliases and other entries of one list.
pub(super) const MAX_MODELS: usize = 1024;
const MAX_ALIASES: usize = 64;
const MAX_QUEUE_LENGTH: usize = 1_000_000;

/// The validated part of a file.
pub(super) struct ValidatedFile {
    pub(super) require_api_keys: Option<bool>,
    pub(super) relay_count: Option<u32>,
    pub(super) expect_workers: Option<bool>,
    pub(super) unready_when_saturated: Option<bool>,
    pub(super) tenants: Vec<Tenant>,
    pub(super) providers: Vec<ProviderConfig>,
}

pub(super) fn file(sources: &Sources) -> Result<ValidatedFile, ConfigError> {
    let raw = &sources.raw;
    within("relayCount", raw.relay_count, 1, MAX_RELAY_COUNT)?;
    bounded("providers", raw.providers.len(), MAX_PROVIDERS)?;
    let mut names = HashSet::new();
    let mut providers = Vec::with_capacity(raw.providers.len());
    for (index, entry) in raw.providers.iter().enumerate() {
        let place = format!("providers[{index}]");
        providers.push(provider(&place, entry, sources)?);
        if !names.insert(entry.name.as_str()) {
            return Err(ConfigError::refused(&format!("{place}.name"), &entry.name, "provider names must be unique"));
        }
    }
    Ok(ValidatedFile {
        require_api_keys: raw.require_api_keys,
        relay_count: raw.relay_count,
        expect_workers: raw.expect_workers,
        unready_when_saturated: raw.unready_when_saturated,
        tenants: tenants::tenants(raw.tenants.as_deref())?,
        providers,
    })
}

fn provider(place: &str, raw: &RawProvider, sources: &Sources) -> Result<ProviderConfig, ConfigError> {
    provider_name(&format!("{place}.name"), &raw.name)?;
    within(&format!("{place}.maxModelsPerWorker"), raw.max_models_per_worker, 1, MAX_MODELS_PER_WORKER)?;
    let default = ProviderConfig::new(&raw.name);
    let config = ProviderConfig {
        enabled: raw.enabled.unwrap_or(true),
        worker_secrets: worker_secrets(&format!("{place}.workerSecrets"), raw.worker_secrets.as_deref(), sources)?,
        worker_accounts: worker_accounts(
            &format!("{place}.workerServiceAccounts"),
            raw.worker_service_accounts.as_deref(),
        )?,
        models: catalogue(&format!("{place}.models"), raw.models.as_deref())?,
        model_details: model_details(&format!("{place}.modelDetails"), raw.model_details.as_ref())?,
        cold_models: cold_models(&format!("{place}.coldModels"), raw.cold_models.as_deref())?,
        request_timeout: raw.request_timeout.map(|timeout| timeout.0),
        stream_idle_timeout: raw.stream_idle_timeout.map_or(default.stream_idle_timeout, |timeout| timeout.0),
        first_byte_timeout: raw.first_byte_timeout.map(|timeout| timeout.0),
        placement: placement(&format!("{place}.placement"), raw.placement.as_ref())?,
        fairness: fairness(&format!("{place}.fairness"), raw.fairness.as_ref())?,
        max_models_per_worker: raw.max_models_per_worker.unwrap_or(default.max_models_per_worker),
        require_protocol_version: raw.require_protocol_version.unwrap_or(false),
        ..default
    };
    let config = with_queue(&format!("{place}.queue"), config, raw.queue.as_ref())?;
    let names = RawModelNames {
        aliases: raw.aliases.as_ref().map_or(&[], |aliases| &aliases.0),
        default_model: raw.default_model.as_deref(),
        fallback_model: raw.fallback_model.as_deref(),
    };
    let at = |key: &str| format!("{place}.{key}");
    let places =
        NamePlaces { aliases: at("aliases"), default_model: at("defaultModel"), fallback_model: at("fallbackModel") };
    config.with_names(&places, &names)
}

fn with_queue(place: &str, config: ProviderConfig, raw: Option<&RawQueue>) -> Result<ProviderConfig, ConfigError> {
    let Some(raw) = raw else { return Ok(config) };
    within(&format!("{place}.maxLength"), raw.max_length, 0, MAX_QUEUE_LENGTH)?;
    Ok(ProviderConfig {
        max_queue_len: raw.max_length.unwrap_or(config.max_queue_len),
        max_queue_bytes: raw.max_bytes.map_or(config.max_queue_bytes, |size| size.0),
        queue_timeout: raw.timeout.map(|timeout| timeout.0),
        cold_timeout: raw.cold_timeout.map(|timeout| timeout.0),
        ..config
    })
}

fn placement(place: &str, raw: Option<&RawPlacement>) -> Result<PlacementConfig, ConfigError> {
    let default = PlacementConfig::default();
    let Some(raw) = raw else { return Ok(default) };
    within(&format!("{place}.maxHomes"), raw.max_homes, 1, MOST_HOMES)?;
    within(&format!("{place}.spillRequests"), raw.spill_requests, 0, MOST_SPILL_REQUESTS)?;
    let mode = raw.mode.as_deref().map(|text| {
        let refused = || ConfigError::refused(&format!("{place}.mode"), text, Placement::ALLOWED);
        Placement::parse(text).ok_or_else(refused)
    });
    let cache_isolation = raw.cache_isolation.as_deref().map(|text| {
        let refused = || ConfigError::refused(&format!("{place}.cacheIsolation"), text, CacheIsolation::ALLOWED);
        CacheIsolation::parse(text).ok_or_else(refused)
    });
    Ok(PlacementConfig {
        mode: mode.transpose()?.unwrap_or(default.mode),
        cache_isolation: cache_isolation.transpose()?.unwrap_or(default.cache_isolation),
        max_homes: raw.max_homes.unwrap_or(default.max_homes),
        spill: Spill {
            requests: raw.spill_requests.unwrap_or(default.spill.requests),
            bytes: raw.spill_bytes.map_or(default.spill.bytes, |size| size.0),
        },
    })
}

fn fairness(place: &str, raw: Option<&RawFairness>) -> Result<FairnessConfig, ConfigError> {
    let default = FairnessConfig::default();
    let Some(raw) = raw else { return Ok(default) };
    let mode = raw.mode.as_deref().map(|text| {
        let refused = || ConfigError::refused(&format!("{place}.mode"), text, FairnessMode::ALLOWED);
        FairnessMode::parse(text).ok_or_else(refused)
    });
    Ok(FairnessConfig {
        mode: mode.transpose()?.unwrap_or(default.mode),
        promote_after: raw.promote_after.map_or(default.promote_after, |after| after.0),
    })
}

fn worker_secrets(place: &str, raw: Option<&[RawSecret]>, sources: &Sources) -> Result<Vec<WorkerSecret>, ConfigError> {
    let raw = raw.unwrap_or_default();
    bounded(place, raw.len(), MAX_SECRETS)?;
    let mut secrets = Vec::with_capacity(raw.len());
    for (index, entry) in raw.iter().enumerate() {
        let place = format!("{place}[{index}]");
        let text = match (&entry.file, &entry.value) {
            (Some(file), None) => sources.secrets.get(file).map_or("", String::as_str),
            (None, Some(value)) => value.as_str(),
            (Some(_), Some(_)) | (None, None) => {
                return Err(ConfigError::new(format!("{place}: exactly one of file and value is required")));
            }
        };
        if text.chars().count() > MAX_SECRET_CHARS {
            return Err(ConfigError::new(format!("{place}: the secret is longer than {MAX_SECRET_CHARS} characters")));
        }
        let not_after = not_after(&format!("{place}.notAfter"), entry.not_after.as_deref())?;
        // An empty secret admits no worker, so it is left out.
        if !text.is_empty() {
            secrets.push(WorkerSecret { secret: credentials::checked(&place, text)?, not_after });
        }
    }
    Ok(secrets)
}

fn worker_accounts(place: &str, raw: Option<&[String]>) -> Result<Vec<ServiceAccount>, ConfigError> {
    let raw = raw.unwrap_or_default();
    bounded(place, raw.len(), MAX_ACCOUNTS)?;
    let account = |(index, text): (usize, &String)| {
        text.parse().map_err(|allowed: String| ConfigError::refused(&format!("{place}[{index}]"), text, &allowed))
    };
    raw.iter().enumerate().map(account).collect()
}

fn not_after(place: &str, raw: Option<&str>) -> Result<Option<SystemTime>, ConfigError> {
    let Some(text) = raw else { return Ok(None) };
    humantime::parse_rfc3339(text)
        .map(Some)
        .map_err(|_| ConfigError::refused(place, text, "a UTC time such as \"2026-12-01T00:00:00Z\""))
}

/// `None` for an absent and for an empty catalogue: both leave the provider open.
fn catalogue(place: &str, raw: Option<&[RawModel]>) -> Result<Option<Vec<CatalogueModel>>, ConfigError> {
    let raw = raw.unwrap_or_default();
    bounded(place, raw.len(), MAX_MODELS)?;
    let mut seen = HashSet::new();
    let mut models = Vec::with_capacity(raw.len());
    for (index, entry) in raw.iter().enumerate() {
        let place = format!("{place}[{index}]");
        let aliases = entry.aliases.as_deref().unwrap_or_default();
        bounded(&format!("{place}.aliases"), aliases.len(), MAX_ALIASES)?;
        unique_model(&format!("{place}.id"), &entry.id, &mut seen)?;
        for (index, alias) in aliases.iter().enumerate() {
            unique_model(&format!("{place}.aliases[{index}]"), alias, &mut seen)?;
        }
        models.push(CatalogueModel { id: entry.id.clone(), aliases: aliases.to_vec() });
    }
    Ok((!models.is_empty()).then_some(models))
}

fn model_details(
    place: &str,
    raw: Option<&BTreeMap<String, Map<String, Value>>>,
) -> Result<BTreeMap<String, ModelDetails>, ConfigError> {
    bounded(place, raw.map_or(0, BTreeMap::len), MAX_MODELS)?;
    let mut models = BTreeMap::new();
    for (model, fields) in raw.into_iter().flatten() {
        unique_model(place, model, &mut HashSet::new())?;
        let details = ModelDetails::declared(fields);
        let details = details.map_err(|why| ConfigError::new(format!("{place}.{model}: {why}")))?;
        models.insert(model.clone(), details);
    }
    Ok(models)
}

fn cold_models(place: &str, raw: Option<&[String]>) -> Result<Vec<String>, ConfigError> {
    let raw = raw.unwrap_or_default();
    bounded(place, raw.len(), MAX_MODELS)?;
    let mut seen = HashSet::new();
    for (index, model) in raw.iter().enumerate() {
        unique_model(&format!("{place}[{index}]"), model, &mut seen)?;
    }
    Ok(raw.to_vec())
}

pub(super) fn unique_model<'a>(place: &str, model: &'a str, seen: &mut HashSet<&'a str>) -> Result<(), ConfigError> {
    if !is_model_name(model) {
        let allowed =
            format!("1 to {MAX_MODEL_CHARS} characters, no control or invisible characters, no space at either end");
        return Err(ConfigError::refused(place, model, &allowed));
    }
    if !seen.insert(model) {
        return Err(ConfigError::refused(place, model, "each id and alias must be unique within a provider"));
    }
    Ok(())
}

/// Checks a provider's name: a DNS label that leaves room for suffixes, because on Kubernetes it is the name of
/// Services. A period and a namespace may follow, for relays that serve Providers of several namespaces.
fn provider_name(place: &str, name: &str) -> Result<(), ConfigError> {
    let (own, namespace) = name.split_once('.').map_or((name, None), |(own, namespace)| (own, Some(namespace)));
    let is_plain = |text: &str, most: usize| {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        (1..=most).contains(&text.len()) && text.bytes().all(inner) && !text.starts_with('-') && !text.ends_with('-')
    };
    let fine = is_plain(own, MAX_PROVIDER_NAME)
        && own.starts_with(|first: char| first.is_ascii_lowercase())
        && !own.ends_with("-workers")
        && namespace.is_none_or(|namespace| is_plain(namespace, MAX_NAMESPACE));
    if fine {
        return Ok(());
    }
    let allowed = format!(
        "at most {MAX_PROVIDER_NAME} characters of a-z, 0-9 and -, beginning with a letter, ending with a letter or digit, not ending in \
         -workers; a period and a namespace may follow"
    );
    Err(ConfigError::refused(place, name, &allowed))
}
