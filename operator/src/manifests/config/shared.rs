//! The parts of a relay's configuration that belong to other Providers than its own, and what an applied configuration
//! contains.

use std::collections::BTreeMap;

use modelrelay_protocol::config_hash::{config_hash, secret_of_file};
use modelrelay_protocol::secret::Secret;
use serde_yaml::Value;

use super::{RELAY_YAML, provider_yaml, salt_of, secret_entries};
use crate::spec::provider::ValidatedProvider;
use crate::spec::rotation::RelaySide;

/// The maximum size of one entry, with its secrets: all of them fit into one Secret of 1 MiB.
pub const MAX_ENTRY_BYTES: usize = 24 << 10;

/// A Provider in the configuration of another one's relay.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedEntry {
    /// Its name at the relay.
    pub name: String,
    /// Its part of `relay.yaml`.
    pub yaml: Value,
    /// Its worker secrets, by key, in the order in which its part names them.
    pub secrets: Vec<(String, Secret)>,
}

impl SharedEntry {
    /// Returns the entry of a Provider with these worker secrets.
    pub fn of(provider: &ValidatedProvider, name: &str, secrets: &RelaySide) -> Self {
        // Names contain no period before their own, and keys none at all, so no two entries have the same key.
        let prefix = format!("{name}.");
        let yaml = provider_yaml(provider, name, &prefix, &secrets.previous);
        let mut yaml = serde_yaml::to_value(yaml).unwrap_or_default();
        if let Some(fields) = yaml.as_mapping_mut() {
            // At a shared address these would receive requests that name no model, or none that is known: the owner's.
            ["defaultModel", "fallbackModel"].iter().for_each(|field| _ = fields.remove(*field));
        }
        let entries = secret_entries(&secrets.current, &secrets.previous);
        Self {
            name: name.to_owned(),
            yaml,
            secrets: entries.into_iter().map(|(key, value)| (format!("{prefix}{key}"), Secret::new(value))).collect(),
        }
    }

    /// Returns its size in the configuration Secret, with the keys of its secrets.
    pub fn bytes(&self) -> usize {
        const INDENT: usize = 2;
        let secrets = self.secrets.iter().map(|(key, value)| key.len() + value.expose().len());
        let yaml = serde_yaml::to_string(&self.yaml).unwrap_or_default();
        yaml.len() + INDENT * yaml.lines().count() + secrets.sum::<usize>()
    }
}

/// A configuration that relays mount.
#[derive(Debug)]
pub struct AppliedConfig {
    /// The hash that relays report once they run it.
    pub hash: String,
    /// Its salt.
    pub salt: Option<Secret>,
    /// True if clients need an API key.
    pub requires_api_keys: bool,
    /// The Providers in it.
    pub entries: Vec<SharedEntry>,
}

impl AppliedConfig {
    /// Reads the values of a configuration Secret.
    pub fn read(data: &BTreeMap<String, String>) -> Option<Self> {
        let yaml = data.get(RELAY_YAML)?;
        let parsed: Value = serde_yaml::from_str(yaml).ok()?;
        let mut entries = Vec::new();
        for provider in parsed.get("providers")?.as_sequence()? {
            let files = provider.get("workerSecrets").and_then(Value::as_sequence).into_iter().flatten();
            let mut secrets = Vec::new();
            for file in files {
                let file = file.get("file")?.as_str()?;
                secrets.push((file.to_owned(), Secret::new(secret_of_file(data.get(file)?))));
            }
            let name = provider.get("name")?.as_str()?.to_owned();
            entries.push(SharedEntry { name, yaml: provider.clone(), secrets });
        }
        let secrets = entries.iter().flat_map(|entry| &entry.secrets);
        let hash = config_hash(yaml.as_bytes(), secrets.map(|(file, value)| (file.as_str(), value.expose())));
        let requires_api_keys = parsed.get("requireApiKeys").and_then(Value::as_bool).unwrap_or(false);
        Some(Self { hash, salt: salt_of(yaml).map(Secret::new), requires_api_keys, entries })
    }

    /// Returns the entry with this name.
    pub fn entry(&self, name: &str) -> Option<&SharedEntry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// True if relays with this configuration admit workers by exactly these secrets of the Provider with this name.
    pub fn has_secrets(&self, name: &str, secrets: &RelaySide) -> bool {
        let wanted = secret_entries(&secrets.current, &secrets.previous);
        self.entry(name).is_some_and(|entry| {
            entry.secrets.len() == wanted.len()
                && entry.secrets.iter().zip(&wanted).all(|((_, has), (_, wanted))| has.expose() == wanted)
        })
    }
}

#[cfg(test)]
mod tests;
