//! The places of usage and ids in the three dialects, and their field names.

use memchr::{memchr2, memmem};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Usage;
use super::details::FoundDetails;
use crate::limits::MAX_ID_BYTES;
use crate::message::TokenCounts;

/// The number of candidates checked in the end of a long text, which bounds the work that a hostile one can cause.
const MAX_CANDIDATES: usize = 16;

/// The values read so far.
#[derive(Debug, Default)]
pub(super) struct Found {
    input: Option<u64>,
    cache_written: Option<u64>,
    cache_read: Option<u64>,
    output: Option<u64>,
    total: Option<u64>,
    cached: Option<u64>,
    id: Option<String>,
    /// `None` if the relay does not want them.
    details: Option<Box<FoundDetails>>,
}

/// A body or an event. Values stay raw, so that a value of an unexpected type spoils only itself.
#[derive(Deserialize)]
pub(super) struct Document<'a> {
    #[serde(borrow)]
    object: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) model: Option<&'a RawValue>,
    /// OpenAI's chat and completions.
    #[serde(borrow)]
    pub(super) choices: Option<&'a RawValue>,
    /// Anthropic's messages.
    #[serde(borrow)]
    pub(super) stop_reason: Option<&'a RawValue>,
    /// Anthropic's `message_delta`.
    #[serde(borrow)]
    pub(super) delta: Option<&'a RawValue>,
    /// Responses.
    #[serde(borrow)]
    pub(super) status: Option<&'a RawValue>,
    /// Responses.
    #[serde(borrow)]
    pub(super) incomplete_details: Option<&'a RawValue>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    /// Responses events.
    #[serde(borrow)]
    response: Option<&'a RawValue>,
    /// Anthropic's `message_start`.
    #[serde(borrow)]
    message: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    total_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Details<'a> {
    #[serde(borrow)]
    cached_tokens: Option<&'a RawValue>,
}

impl Found {
    /// Reads the details too.
    pub(super) fn with_details(mut self, is_responses: bool) -> Self {
        self.details = Some(Box::new(FoundDetails::new(is_responses)));
        self
    }

    pub(super) fn wants_details(&self) -> bool {
        self.details.is_some()
    }

    /// True if the details require this event.
    pub(super) fn wants_event(&mut self, json: &[u8]) -> bool {
        self.details.as_mut().is_some_and(|details| details.wants_event(json))
    }

    pub(super) fn has_id(&self) -> bool {
        self.id.is_some()
    }

    /// Reads a whole body or event. Invalid JSON is searched as if it were too long.
    pub(super) fn read_document(&mut self, json: &[u8], with_id: bool) {
        let Ok(document) = serde_json::from_slice::<Document<'_>>(json) else {
            self.read_edges(json, json, with_id);
            return;
        };
        let nested = [document.message, document.response].map(|raw| parsed::<Document<'_>>(raw?));
        let nested_usages = nested.iter().flatten().filter_map(|inner| inner.usage);
        for usage in nested_usages.chain(document.usage) {
            if let Some(fields) = parsed(usage) {
                self.merge(&fields);
            }
        }
        if let Some(details) = &mut self.details {
            details.read(&document, &nested);
        }
        if with_id && self.id.is_none() {
            let [_, response] = nested;
            let is_response =
                document.object.is_none_or(|object| text(object).is_some_and(|object| object == "response"));
            let own = document.id.filter(|_| is_response);
            self.id = response.and_then(|inner| inner.id).or(own).and_then(text).and_then(|id| valid_id(&id));
        }
    }

    /// Reads the kept edges of a text that is too long to keep.
    pub(super) fn read_edges(&mut self, head: &[u8], tail: &[u8], with_id: bool) {
        let key = b"\"usage\"";
        for at in memmem::rfind_iter(tail, key).take(MAX_CANDIDATES) {
            let Some(object) = object_at_key(tail, at, key.len()) else {
                continue;
            };
            let mut reader = serde_json::Deserializer::from_slice(object);
            if Fields::deserialize(&mut reader).is_ok_and(|fields| self.merge(&fields)) {
                break;
            }
        }
        let id = || top_level_string(head, b"id").and_then(|id| valid_id(std::str::from_utf8(id).ok()?));
        if with_id && self.id.is_none() {
            self.id = id();
        }
        if let Some(details) = &mut self.details {
            let model = top_level_string(head, b"model").and_then(|model| String::from_utf8(model.to_vec()).ok());
            details.name(model.filter(|model| !model.contains('\\')), id());
        }
    }

    pub(super) fn into_usage(self) -> Usage {
        let (token_counts, details) = (self.token_counts(), self.details);
        Usage { token_counts, response_id: self.id, details: details.map(|it| Box::new(it.into_details())) }
    }

    /// Merges the reported values; returns true if any was present.
    fn merge(&mut self, fields: &Fields<'_>) -> bool {
        let details = fields.prompt_tokens_details.or(fields.input_tokens_details);
        let cached = details.and_then(parsed::<Details<'_>>).and_then(|details| details.cached_tokens);
        let news = [
            (&mut self.input, fields.prompt_tokens.or(fields.input_tokens)),
            (&mut self.output, fields.completion_tokens.or(fields.output_tokens)),
            (&mut self.total, fields.total_tokens),
            (&mut self.cached, cached),
            (&mut self.cache_written, fields.cache_creation_input_tokens),
            (&mut self.cache_read, fields.cache_read_input_tokens),
        ];
        let mut any = false;
        for (slot, raw) in news {
            if let Some(number) = raw.and_then(parsed::<u64>) {
                *slot = Some(number);
                any = true;
            }
        }
        any
    }

    fn token_counts(&self) -> Option<TokenCounts> {
        let sum = |a: Option<u64>, b: Option<u64>| a.unwrap_or(0).saturating_add(b.unwrap_or(0));
        let input = self.input.map(|input| input.saturating_add(sum(self.cache_written, self.cache_read)));
        let (prompt_tokens, completion_tokens) = match (input, self.output, self.total) {
            (None, None, None) => return None,
            (Some(input), Some(output), _) => (input, output),
            (Some(input), None, total) => (input, total.map_or(0, |total| total.saturating_sub(input))),
            (None, Some(output), total) => (total.map_or(0, |total| total.saturating_sub(output)), output),
            // A reranker only reads.
            (None, None, Some(total)) => (total, 0),
        };
        Some(TokenCounts {
            prompt_tokens,
            completion_tokens,
            total_tokens: self.total.unwrap_or_else(|| prompt_tokens.saturating_add(completion_tokens)),
            cached_tokens: self.cached.or(self.cache_read),
        })
    }
}

/// Returns the text that starts with the object at the key at `at`, or `None` if its value is not an object.
pub(super) fn object_at_key(json: &[u8], at: usize, key_len: usize) -> Option<&[u8]> {
    let value = value_after_key(json.get(at + key_len..)?)?;
    value.starts_with(b"{").then_some(value)
}

pub(super) fn value_after_key(rest: &[u8]) -> Option<&[u8]> {
    Some(rest.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start())
}

/// Returns the plain string of a top-level key in the beginning of a JSON object.
fn top_level_string<'a>(json: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let mut depth = 0_usize;
    let mut rest = json;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                let (string, after) = split_string(rest)?;
                rest = after;
                if depth == 1
                    && string == key
                    && let Some(value) = value_after_key(rest)
                {
                    return split_string(value.strip_prefix(b"\"")?).map(|(value, _)| value);
                }
            }
            _ => {}
        }
    }
    None
}

/// Splits after the closing quote of a string whose opening quote has been consumed.
fn split_string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at = 0;
    loop {
        at += memchr2(b'"', b'\\', bytes.get(at..)?)?;
        if bytes[at] == b'"' {
            return Some((&bytes[..at], &bytes[at + 1..]));
        }
        at += 2;
    }
}

pub(super) fn parsed<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> Option<T> {
    serde_json::from_str(raw.get()).ok()
}

fn text(raw: &RawValue) -> Option<String> {
    parsed(raw)
}

/// Accepts ids that fit the wire; a backslash means an escape that was not read.
fn valid_id(id: &str) -> Option<String> {
    (!id.is_empty() && id.len() <= MAX_ID_BYTES && !id.contains('\\')).then(|| id.to_owned())
}
