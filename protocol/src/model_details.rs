//! Limits and capabilities of models, which backends list with a model's id and from which clients configure
//! themselves.
//!
//! The fields are a closed list, each with one form and a bound: every client of the relay reads the values that a
//! worker or a backend sends here. `id`, `object`, `created` and `owned_by` are not among them. A field of another form
//! is left out alone, so that one odd value neither hides the others nor ends a link.
//!
//! Cleaning is idempotent: what one side has cleaned, the other side reads unchanged.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::limits::{MAX_DETAILS_BYTES, MAX_DETAILS_BYTES_PER_MODEL};
use crate::names::{is_model_name, is_unprintable};

/// The largest figure: JavaScript reads no larger integer exactly.
const MAX_FIGURE: u64 = 1 << 53;

/// Entries of one list or object of flags.
const MAX_ENTRIES: usize = 64;

/// Characters of one entry's name.
const MAX_ENTRY_CHARS: usize = 64;

/// The form of a field.
#[derive(Clone, Copy)]
enum Form {
    /// A positive integer. Of several workers the smallest is shown.
    Figure,
    /// A list of names. Of several workers those that all list are shown.
    Names,
    /// A list of names, or an object of flags. A flag is shown as true if all workers state that it is.
    Features,
    /// An object of further fields.
    Group(&'static [(&'static str, Form)]),
}

/// All fields, by the server that lists them.
const FIELDS: &[(&str, Form)] = &[
    // vLLM and SGLang.
    ("max_model_len", Form::Figure),
    // llama-server.
    ("meta", Form::Group(META)),
    ("n_ctx", Form::Figure),
    ("n_ctx_train", Form::Figure),
    // LM Studio.
    ("max_context_length", Form::Figure),
    ("loaded_context_length", Form::Figure),
    // OpenRouter and servers in its style.
    ("context_length", Form::Figure),
    ("context_window", Form::Figure),
    ("max_completion_tokens", Form::Figure),
    ("max_output_length", Form::Figure),
    ("architecture", Form::Group(MODALITIES)),
    ("top_provider", Form::Group(TOP_PROVIDER)),
    ("input_modalities", Form::Names),
    ("output_modalities", Form::Names),
    ("supported_parameters", Form::Names),
    ("supported_features", Form::Names),
    // LiteLLM and Anthropic.
    ("max_tokens", Form::Figure),
    ("max_input_tokens", Form::Figure),
    ("max_output_tokens", Form::Figure),
    // llama-server, LM Studio and Ollama list names here, Mistral flags.
    ("capabilities", Form::Features),
];

const META: &[(&str, Form)] = &[
    ("n_ctx", Form::Figure),
    ("n_ctx_train", Form::Figure),
    ("n_embd", Form::Figure),
    ("n_params", Form::Figure),
    ("n_vocab", Form::Figure),
    ("size", Form::Figure),
];

const MODALITIES: &[(&str, Form)] = &[("input_modalities", Form::Names), ("output_modalities", Form::Names)];

const TOP_PROVIDER: &[(&str, Form)] = &[("context_length", Form::Figure), ("max_completion_tokens", Form::Figure)];

/// The fields that state the context length: the length in force before the length that the model was trained with.
const CONTEXT_LENGTHS: [&str; 9] = [
    "/meta/n_ctx",
    "/n_ctx",
    "/loaded_context_length",
    "/max_model_len",
    "/context_length",
    "/context_window",
    "/max_context_length",
    "/meta/n_ctx_train",
    "/n_ctx_train",
];

/// The details of one model, cleaned.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelDetails(Map<String, Value>);

impl ModelDetails {
    /// Returns the known fields of a model's entry in a backend's list; none if they are too long together.
    pub fn listed(entry: &Value) -> Self {
        let details = entry.as_object().map(Self::cleaned).unwrap_or_default();
        if details.is_within_bound() { details } else { Self::default() }
    }

    /// Returns the fields that an operator wrote. An error names the first field that is unknown or has another form.
    pub fn declared(fields: &Map<String, Value>) -> Result<Self, String> {
        let details = Self::cleaned(fields);
        if let Some(field) = first_difference(fields, &details.0) {
            return Err(format!("{field} is unknown or has a value of the wrong type"));
        }
        if !details.is_within_bound() {
            return Err(format!("the fields of one model exceed {MAX_DETAILS_BYTES_PER_MODEL} bytes"));
        }
        Ok(details)
    }

    fn cleaned(fields: &Map<String, Value>) -> Self {
        Self(clean_group(FIELDS, fields))
    }

    fn is_within_bound(&self) -> bool {
        self.bytes() <= MAX_DETAILS_BYTES_PER_MODEL
    }

    /// True if there is no field.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The fields, for the entry of a list.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    /// Reduces the details to those that also hold for another worker of the same model. A field that only one of the
    /// two states stays.
    pub fn merge(&mut self, other: &Self) {
        if self != other {
            merge_group(&mut self.0, &other.0);
        }
    }

    /// Replaces the fields that `declared` states.
    pub fn replace(&mut self, declared: &Self) {
        replace_group(&mut self.0, &declared.0);
    }

    /// The context length in tokens, if any field states it.
    pub fn context_length(&self) -> Option<u64> {
        CONTEXT_LENGTHS.iter().find_map(|path| {
            let mut parts = path.split('/').skip(1);
            let first = self.0.get(parts.next()?)?;
            parts.next().map_or(Some(first), |field| first.get(field))?.as_u64()
        })
    }

    fn bytes(&self) -> usize {
        serde_json::to_string(&self.0).map_or(usize::MAX, |text| text.len())
    }
}

/// The details of all models of a worker, by model name: no more than one message has room for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DetailsByModel(BTreeMap<String, ModelDetails>);

impl DetailsByModel {
    /// True if no model has details.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The details of a model.
    pub fn of(&self, model: &str) -> Option<&ModelDetails> {
        self.0.get(model)
    }

    /// Leaves out the models for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.0.retain(|model, _| keep(model));
    }
}

/// Leaves out entries that are empty, have no valid name, or exceed the bound.
impl FromIterator<(String, ModelDetails)> for DetailsByModel {
    fn from_iter<I: IntoIterator<Item = (String, ModelDetails)>>(all: I) -> Self {
        let usable = |(model, details): &(String, ModelDetails)| !details.is_empty() && is_model_name(model);
        let mut by_model: BTreeMap<_, _> = all.into_iter().filter(usable).collect();
        let mut room = MAX_DETAILS_BYTES;
        by_model.retain(|model, details| {
            let rest = room.checked_sub(model.len() + details.bytes());
            room = rest.unwrap_or(room);
            rest.is_some()
        });
        Self(by_model)
    }
}

/// Accepts any JSON. A peer that sends anything but details is treated as sending none.
impl<'de> Deserialize<'de> for DetailsByModel {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let Value::Object(models) = Value::deserialize(from)? else { return Ok(Self::default()) };
        Ok(models.into_iter().map(|(model, details)| (model, ModelDetails::listed(&details))).collect())
    }
}

fn clean_group(known: &[(&str, Form)], fields: &Map<String, Value>) -> Map<String, Value> {
    let cleaned = known.iter().filter_map(|(name, form)| {
        let value = clean(*form, fields.get(*name)?)?;
        Some(((*name).to_owned(), value))
    });
    cleaned.collect()
}

fn clean(form: Form, value: &Value) -> Option<Value> {
    match (form, value) {
        (Form::Figure, Value::Number(number)) => {
            number.as_u64().filter(|figure| (1..=MAX_FIGURE).contains(figure)).map(Value::from)
        }
        (Form::Names | Form::Features, Value::Array(names)) => clean_names(names),
        (Form::Features, Value::Object(flags)) => clean_flags(flags),
        (Form::Group(known), Value::Object(fields)) => {
            Some(clean_group(known, fields)).filter(|group| !group.is_empty()).map(Value::Object)
        }
        (Form::Figure | Form::Names | Form::Features | Form::Group(_), _) => None,
    }
}

fn clean_names(names: &[Value]) -> Option<Value> {
    let all_plain = names.iter().all(|name| name.as_str().is_some_and(is_entry));
    (names.len() <= MAX_ENTRIES && all_plain).then(|| Value::Array(names.to_vec()))
}

/// Backends put other values among their flags, such as the limits of a tool. Those are left out.
fn clean_flags(flags: &Map<String, Value>) -> Option<Value> {
    let flags: Map<_, _> = flags
        .iter()
        .filter(|(name, value)| value.is_boolean() && is_entry(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    (1..=MAX_ENTRIES).contains(&flags.len()).then_some(Value::Object(flags))
}

fn is_entry(name: &str) -> bool {
    (1..=MAX_ENTRY_CHARS).contains(&name.chars().count()) && !name.contains(is_unprintable)
}

fn merge_group(fields: &mut Map<String, Value>, other: &Map<String, Value>) {
    for (name, value) in other {
        let both = match fields.remove(name) {
            Some(own) => merged(own, value),
            None if value.is_boolean() => continue,
            None => value.clone(),
        };
        fields.insert(name.clone(), both);
    }
    fields.retain(|name, value| !value.is_boolean() || other.contains_key(name));
}

/// Returns the common part of both values. A list and an object of flags have nothing in common.
fn merged(own: Value, other: &Value) -> Value {
    match (own, other) {
        (Value::Number(own), Value::Number(other)) => own.as_u64().min(other.as_u64()).into(),
        (Value::Bool(own), Value::Bool(other)) => (own && *other).into(),
        (Value::Array(mut own), Value::Array(other)) => {
            own.retain(|name| other.contains(name));
            own.into()
        }
        (Value::Object(mut own), Value::Object(other)) => {
            merge_group(&mut own, other);
            own.into()
        }
        (
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) | Value::Object(_),
            _,
        ) => Value::Array(Vec::new()),
    }
}

fn replace_group(fields: &mut Map<String, Value>, declared: &Map<String, Value>) {
    for (name, value) in declared {
        match (fields.get_mut(name), value) {
            (Some(Value::Object(own)), Value::Object(declared)) => replace_group(own, declared),
            _ => {
                fields.insert(name.clone(), value.clone());
            }
        }
    }
}

/// The first field of `written` that `kept` lacks or has with another value.
fn first_difference(written: &Map<String, Value>, kept: &Map<String, Value>) -> Option<String> {
    written.iter().find_map(|(name, value)| match (value, kept.get(name)) {
        (value, Some(same)) if value == same => None,
        (Value::Object(written), Some(Value::Object(kept))) => {
            first_difference(written, kept).map(|inner| format!("{name}.{inner}"))
        }
        (_, Some(_) | None) => Some(name.escape_debug().to_string()),
    })
}

#[cfg(test)]
mod tests;
