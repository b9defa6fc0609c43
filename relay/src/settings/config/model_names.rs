//! Model names of clients that no worker has: aliases, with or without a catalogue, and the models of requests that
//! name none or an unknown one.

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use super::bounds::bounded;
use super::provider::CatalogueModel;
use super::validate::{MAX_MODELS, unique_model};
use super::{ConfigError, ProviderConfig};

/// The further names of one provider's models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelNames {
    /// Maps a name that clients may use to its model, which is not an alias itself. A name that a worker serves means
    /// that worker's model.
    pub aliases: BTreeMap<String, String>,
    /// The model of requests that name none.
    pub default_model: Option<String>,
    /// The model of requests for an unknown name.
    pub fallback_model: Option<String>,
}

/// Aliases as written, in order: a map would silently keep the last of two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RawAliases(pub Vec<(String, String)>);

/// The three settings as written.
pub(super) struct RawModelNames<'a> {
    pub(super) aliases: &'a [(String, String)],
    pub(super) default_model: Option<&'a str>,
    pub(super) fallback_model: Option<&'a str>,
}

/// The names of the three settings at their place.
pub(super) struct NamePlaces {
    pub(super) aliases: String,
    pub(super) default_model: String,
    pub(super) fallback_model: String,
}

impl ProviderConfig {
    /// Adds the further names, once the catalogue is known: with a catalogue, all of them must mean its models.
    pub(super) fn with_names(self, places: &NamePlaces, raw: &RawModelNames<'_>) -> Result<Self, ConfigError> {
        let known = self.models.as_deref().map(catalogue_names);
        let aliases = aliases(&places.aliases, raw.aliases, known.as_ref())?;
        let model = |place: &str, name: Option<&str>| match name {
            Some(name) if aliases.contains_key(name) => Ok(Some(name.to_owned())),
            Some(name) => meant(place, name, known.as_ref()).map(Some),
            None => Ok(None),
        };
        let default_model = model(&places.default_model, raw.default_model)?;
        let fallback_model = model(&places.fallback_model, raw.fallback_model)?;
        Ok(Self { names: ModelNames { aliases, default_model, fallback_model }, ..self })
    }
}

fn catalogue_names(models: &[CatalogueModel]) -> HashSet<&str> {
    models.iter().flat_map(|model| model.aliases.iter().chain([&model.id])).map(String::as_str).collect()
}

fn aliases(
    place: &str,
    raw: &[(String, String)],
    known: Option<&HashSet<&str>>,
) -> Result<BTreeMap<String, String>, ConfigError> {
    bounded(place, raw.len(), MAX_MODELS)?;
    let mut seen = known.cloned().unwrap_or_default();
    for (alias, _) in raw {
        unique_model(place, alias, &mut seen)?;
    }
    let mut aliases = BTreeMap::new();
    for (alias, model) in raw {
        let place = format!("{place}.{alias}");
        if raw.iter().any(|(other, _)| other == model) {
            return Err(ConfigError::refused(&place, model, "an alias must refer to a model, not to another alias"));
        }
        aliases.insert(alias.clone(), meant(&place, model, known)?);
    }
    Ok(aliases)
}

/// Checks that requests for a model can be served. Without a catalogue, workers may serve any model.
fn meant(place: &str, name: &str, known: Option<&HashSet<&str>>) -> Result<String, ConfigError> {
    unique_model(place, name, &mut HashSet::new())?;
    match known {
        Some(known) if !known.contains(name) => {
            Err(ConfigError::refused(place, name, "the model is not in the provider's catalogue (models)"))
        }
        Some(_) | None => Ok(name.to_owned()),
    }
}

impl<'de> Deserialize<'de> for RawAliases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(AliasesVisitor)
    }
}

struct AliasesVisitor;

impl<'de> Visitor<'de> for AliasesVisitor {
    type Value = RawAliases;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from each alias to its model")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawAliases, A::Error> {
        let mut aliases = Vec::new();
        while let Some(pair) = map.next_entry()? {
            aliases.push(pair);
        }
        Ok(RawAliases(aliases))
    }
}
