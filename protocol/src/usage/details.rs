//! The details of a response: its model, its id, and why it ended. They are read only for a relay that wants them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::fields::{Document, parsed, value_after_key};
use crate::limits::{MAX_FINISH_REASON_BYTES, MAX_FINISH_REASONS, MAX_ID_BYTES};
use crate::message::ResponseDetails;
use crate::names::{is_model_name, is_unprintable};

/// The number of events at the beginning of a stream in which the model is searched.
const MAX_FIRST_EVENTS: u32 = 4;

/// A longer string of JSON is not a name, whatever its escapes.
const MAX_RAW_BYTES: usize = 4096;

static FINISH_KEY: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"finish_reason\""));

/// The details read so far.
#[derive(Debug, Default)]
pub(super) struct FoundDetails {
    /// True for a response to `POST /v1/responses`, whose status states why it ended.
    is_responses: bool,
    first_events: u32,
    model: Option<String>,
    id: Option<String>,
    /// By the index of the choice.
    finish_reasons: BTreeMap<u64, String>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    index: Option<&'a RawValue>,
    #[serde(borrow)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Ending<'a> {
    #[serde(borrow)]
    stop_reason: Option<&'a RawValue>,
    #[serde(borrow)]
    reason: Option<&'a RawValue>,
}

impl FoundDetails {
    pub(super) fn new(is_responses: bool) -> Self {
        Self { is_responses, ..Self::default() }
    }

    /// True if this event must be parsed: it is one of the first, or it ends a choice. Chat events without a finish
    /// reason contain it as `null`.
    pub(super) fn wants_event(&mut self, json: &[u8]) -> bool {
        if self.model.is_none() && self.first_events < MAX_FIRST_EVENTS {
            self.first_events += 1;
            return true;
        }
        let is_text =
            |at| value_after_key(&json[at + FINISH_KEY.needle().len()..]).is_some_and(|it| it.starts_with(b"\""));
        FINISH_KEY.find_iter(json).any(is_text)
    }

    /// Reads a whole body or event, and the message or response in it.
    pub(super) fn read(&mut self, document: &Document<'_>, inner: &[Option<Document<'_>>]) {
        for level in inner.iter().flatten().chain([document]) {
            self.name(text(level.model), text(level.id));
            if let Some(choices) = level.choices {
                // An invalid choice ends the list.
                let _ = serde_json::Deserializer::from_str(choices.get()).deserialize_seq(Choices(self));
            }
            let delta = level.delta.and_then(parsed::<Ending<'_>>).and_then(|delta| delta.stop_reason);
            self.end(0, text(level.stop_reason.or(delta)));
            if self.is_responses {
                let incomplete = level.incomplete_details.and_then(parsed::<Ending<'_>>);
                let status = text(level.status).filter(|it| it != "in_progress" && it != "queued");
                self.end(0, incomplete.and_then(|it| text(it.reason)).or(status));
            }
        }
    }

    /// Keeps the first valid names.
    pub(super) fn name(&mut self, model: Option<String>, id: Option<String>) {
        if self.model.is_none() {
            self.model = model.filter(|model| is_model_name(model));
        }
        if self.id.is_none() {
            self.id = id.filter(|id| id.len() <= MAX_ID_BYTES);
        }
    }

    pub(super) fn into_details(self) -> ResponseDetails {
        let finish_reasons = self.finish_reasons.into_values().collect();
        ResponseDetails { backend: None, model: self.model, id: self.id, finish_reasons }
    }

    fn end(&mut self, choice: u64, reason: Option<String>) {
        let Some(reason) = reason.filter(|reason| reason.len() <= MAX_FINISH_REASON_BYTES) else { return };
        if self.finish_reasons.len() < MAX_FINISH_REASONS || self.finish_reasons.contains_key(&choice) {
            self.finish_reasons.insert(choice, reason);
        }
    }
}

/// Reads the list of choices without keeping it.
struct Choices<'a>(&'a mut FoundDetails);

impl<'de> Visitor<'de> for Choices<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of choices")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut position = 0;
        while let Some(choice) = list.next_element::<Choice<'de>>()? {
            let index = choice.index.and_then(parsed::<u64>).unwrap_or(position);
            self.0.end(index, text(choice.finish_reason));
            position += 1;
        }
        Ok(())
    }
}

/// Returns a short printable string.
fn text(raw: Option<&RawValue>) -> Option<String> {
    let text = parsed::<String>(raw.filter(|raw| raw.get().len() <= MAX_RAW_BYTES)?)?;
    (!text.is_empty() && !text.contains(is_unprintable)).then_some(text)
}
