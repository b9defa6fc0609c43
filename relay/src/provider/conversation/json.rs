//! The fields of a body that are needed, borrowed from it: no tree is built, and later messages are only skipped.

use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;

/// A field of a body that is part of the prompt, or names its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the fields")]
pub enum PromptField {
    Tools,
    Functions,
    System,
    Instructions,
    Messages,
    Input,
    Prompt,
    PromptCacheKey,
    User,
    Metadata,
}

impl PromptField {
    /// The number of fields.
    const COUNT: usize = Self::Metadata as usize + 1;

    /// Returns the field with this name.
    pub fn named(name: &[u8]) -> Option<Self> {
        Some(match name {
            b"tools" => Self::Tools,
            b"functions" => Self::Functions,
            b"system" => Self::System,
            b"instructions" => Self::Instructions,
            b"messages" => Self::Messages,
            b"input" => Self::Input,
            b"prompt" => Self::Prompt,
            b"prompt_cache_key" => Self::PromptCacheKey,
            b"user" => Self::User,
            b"metadata" => Self::Metadata,
            _ => return None,
        })
    }
}

/// The positions of these fields' values in a body, found while the body is scanned for its model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptSpans([Range<usize>; PromptField::COUNT]);

impl PromptSpans {
    /// Records the position of a value; of two values of one field, the last counts, as for most backends.
    pub fn set(&mut self, field: PromptField, span: Range<usize>) {
        self.0[field as usize] = span;
    }
}

/// The fields of a body.
#[derive(Clone, Copy)]
pub(super) struct PromptFields<'a> {
    body: &'a [u8],
    spans: &'a PromptSpans,
}

impl<'a> PromptFields<'a> {
    /// The fields at these positions of the body.
    pub(super) fn new(body: &'a [u8], spans: &'a PromptSpans) -> Self {
        Self { body, spans }
    }

    /// The JSON of a field's value; `None` if the field is absent or null.
    pub(super) fn get(&self, field: PromptField) -> Option<&'a [u8]> {
        let value = self.body.get(self.spans.0[field as usize].clone())?;
        (!matches!(value, b"" | b"null")).then_some(value)
    }

    /// The name of the user in Anthropic's metadata, which contains Claude Code's session.
    pub(super) fn metadata_user_id(&self) -> Option<&'a [u8]> {
        let metadata = serde_json::from_slice::<UserMetadata<'a>>(self.get(PromptField::Metadata)?).ok()?;
        Some(metadata.user_id?.get().as_bytes())
    }
}

#[derive(Deserialize)]
struct UserMetadata<'a> {
    #[serde(borrow)]
    user_id: Option<&'a RawValue>,
}

/// A message, or an item of `input`.
#[derive(Deserialize)]
pub(super) struct Message<'a> {
    #[serde(borrow)]
    pub(super) role: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) content: Option<&'a RawValue>,
}

/// A block of content.
#[derive(Deserialize)]
pub(super) struct Block<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow)]
    text: Option<&'a RawValue>,
}

impl<'a> Block<'a> {
    /// The JSON string of a text block.
    pub(super) fn text(&self) -> Option<&'a str> {
        let is_text = self.kind.is_none_or(|kind| matches!(kind.get(), "\"text\"" | "\"input_text\""));
        self.text.filter(|_| is_text).map(RawValue::get)
    }
}

/// Passes each token of valid JSON to `write`, without whitespace, commas, and members named `cache_control`. Numbers
/// and literals are followed by a blank. Text that is cut off is accepted.
pub(super) fn tokens(json: &[u8], mut write: impl FnMut(&[u8])) {
    let mut at = 0;
    while let Some(&byte) = json.get(at) {
        let end = token_end(json, at);
        match byte {
            b',' | b' ' | b'\t' | b'\r' | b'\n' => {}
            b'"' if &json[at..end] == b"\"cache_control\"" && next_token(json, end) == Some(b':') => {
                at = member_end(json, end);
                continue;
            }
            b'"' | b'{' | b'}' | b'[' | b']' | b':' => write(&json[at..end]),
            _ => {
                write(&json[at..end]);
                write(b" ");
            }
        }
        at = end;
    }
}

/// The end of the token, or of the one blank, that begins at `at`.
fn token_end(json: &[u8], at: usize) -> usize {
    let is_end = |byte: &u8| matches!(byte, b',' | b':' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n');
    match json[at] {
        b'"' => string_end(json, at + 1),
        b'{' | b'}' | b'[' | b']' | b':' | b',' | b' ' | b'\t' | b'\r' | b'\n' => at + 1,
        _ => json[at + 1..].iter().position(is_end).map_or(json.len(), |length| at + 1 + length),
    }
}

/// The position behind the closing quote of a string whose text begins at `at`.
fn string_end(json: &[u8], mut at: usize) -> usize {
    while let Some(length) = json.get(at..).and_then(|rest| rest.iter().position(|b| matches!(b, b'"' | b'\\'))) {
        at += length;
        if json[at] == b'"' {
            return at + 1;
        }
        at += 2;
    }
    json.len()
}

/// The first byte at or behind `at` that is not a blank.
fn next_token(json: &[u8], at: usize) -> Option<u8> {
    json[at..].iter().copied().find(|byte| !byte.is_ascii_whitespace())
}

/// The end of the value of a member whose name ends at `at`.
fn member_end(json: &[u8], mut at: usize) -> usize {
    let mut depth = 0_usize;
    while let Some(&byte) = json.get(at) {
        at = token_end(json, at);
        match byte {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b':' | b' ' | b'\t' | b'\r' | b'\n' => continue,
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    at
}
