//! The fields of a body that are needed, borrowed from it: no tree is built, and later messages are only skipped.

use serde::Deserialize;
use serde_json::value::RawValue;

/// The fields of a request's body.
#[derive(Deserialize)]
pub(super) struct PromptFields<'a> {
    #[serde(borrow)]
    pub(super) tools: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) functions: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) system: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) instructions: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) messages: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) input: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) prompt: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) prompt_cache_key: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) user: Option<&'a RawValue>,
    #[serde(borrow)]
    metadata: Option<&'a RawValue>,
    #[serde(borrow)]
    previous_response_id: Option<&'a RawValue>,
}

impl<'a> PromptFields<'a> {
    /// Parses a body; `None` if it is not valid.
    pub(super) fn parse(body: &'a [u8]) -> Option<Self> {
        serde_json::from_str(std::str::from_utf8(body).ok()?).ok()
    }

    /// True if the request continues a stored response.
    pub(super) fn continues_response(&self) -> bool {
        self.previous_response_id.is_some()
    }

    /// The name of the user in Anthropic's metadata, which contains Claude Code's session.
    pub(super) fn metadata_user_id(&self) -> Option<&'a RawValue> {
        serde_json::from_str::<UserMetadata<'a>>(self.metadata?.get()).ok()?.user_id
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

/// Passes each token of valid JSON to `write`, without whitespace, commas, and members named `cache_control`. Numbers and
/// literals are followed by a blank. Text that is cut off is accepted.
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
