//! The canonical head of a prompt, hashed as it is read: tools, system, and the messages up to the first one of the
//! user.

use std::hash::Hasher;

use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::value::RawValue;
use siphasher::sip::SipHasher13;

use super::json::{Block, Message, PromptField, PromptFields, tokens};
use super::secret::HashKey;

/// The beginning of the system block that Claude Code changes with each request.
const BILLING_BLOCK: &str = "\"x-anthropic-billing-header";

/// The hash so far, and the number of bytes of the prompt in it.
pub(super) struct PromptHasher {
    hasher: SipHasher13,
    bytes: usize,
}

impl PromptHasher {
    /// An empty head.
    pub(super) fn new(key: &HashKey) -> Self {
        let (first, second) = key.halves();
        Self { hasher: SipHasher13::new_with_keys(first, second), bytes: 0 }
    }

    /// Adds a field that is not part of the prompt.
    pub(super) fn field(&mut self, name: &str, value: &[u8]) {
        self.hasher.write(name.as_bytes());
        self.hasher.write(b"\n");
        self.hasher.write(&(value.len() as u64).to_le_bytes());
        self.hasher.write(value);
    }

    /// Adds the first `limit` bytes of a prompt; returns the size of the head.
    pub(super) fn prompt(&mut self, prompt: &[u8], limit: usize) -> usize {
        // The closing quote is not part of the text: the next turn continues there.
        let text = prompt.strip_suffix(b"\"").unwrap_or(prompt);
        self.json(&text[..text.len().min(limit)]);
        self.bytes
    }

    /// Adds the head of a chat; returns its size. `None` without a message of the user.
    pub(super) fn chat(&mut self, body: &PromptFields<'_>) -> Option<usize> {
        self.part("tools", body.get(PromptField::Tools));
        self.part("functions", body.get(PromptField::Functions));
        if let Some(system) = body.get(PromptField::System) {
            self.hasher.write(b"system\n");
            self.content(system);
        }
        self.messages(body.get(PromptField::Messages)?)
    }

    /// Adds the head of a request to `/v1/responses`; returns its size. `None` without input of the user.
    pub(super) fn responses(&mut self, body: &PromptFields<'_>) -> Option<usize> {
        self.part("instructions", body.get(PromptField::Instructions));
        self.part("tools", body.get(PromptField::Tools));
        let input = body.get(PromptField::Input)?;
        if input.starts_with(b"\"") {
            self.message("\"user\"", input);
            return Some(self.bytes);
        }
        self.messages(input)
    }

    /// Returns the hash.
    pub(super) fn finish(&self) -> u64 {
        self.hasher.finish()
    }

    fn part(&mut self, name: &str, value: Option<&[u8]>) {
        if let Some(value) = value {
            self.hasher.write(name.as_bytes());
            self.hasher.write(b"\n");
            self.json(value);
        }
    }

    fn messages(&mut self, messages: &[u8]) -> Option<usize> {
        let mut is_complete = false;
        each(messages, |raw| {
            let Ok(message) = serde_json::from_str::<Message<'_>>(raw.get()) else { return false };
            let role = message.role.map_or("\"user\"", RawValue::get);
            let is_user = role == "\"user\"";
            if let Some(content) = message.content.filter(|_| is_user || is_system(role)) {
                self.message(role, content.get().as_bytes());
                is_complete = is_user;
            }
            !is_user
        });
        is_complete.then_some(self.bytes)
    }

    fn message(&mut self, role: &str, content: &[u8]) {
        self.hasher.write(b"message\n");
        self.hasher.write(role.as_bytes());
        self.content(content);
    }

    /// Adds content; a string is the same as one text block.
    fn content(&mut self, content: &[u8]) {
        if content.starts_with(b"\"") {
            self.text(content);
            return;
        }
        each(content, |raw| {
            match serde_json::from_str::<Block<'_>>(raw.get()).ok().and_then(|block| block.text()) {
                Some(text) if text.starts_with(BILLING_BLOCK) => {}
                Some(text) => self.text(text.as_bytes()),
                None => self.json(raw.get().as_bytes()),
            }
            true
        });
    }

    fn text(&mut self, json: &[u8]) {
        self.hasher.write(b"text\n");
        self.hasher.write(json);
        self.bytes += json.len();
    }

    fn json(&mut self, json: &[u8]) {
        let Self { hasher, bytes } = self;
        tokens(json, |token| {
            hasher.write(token);
            *bytes += token.len();
        });
    }
}

fn is_system(role: &str) -> bool {
    matches!(role, "\"system\"" | "\"developer\"")
}

/// Passes the elements of an array to `visit` until it returns false; the rest is not read.
fn each<'a>(array: &'a [u8], visit: impl FnMut(&'a RawValue) -> bool) {
    // An error is of no interest: an array that is left early has characters behind its end, and another value no
    // elements.
    drop(serde_json::Deserializer::from_slice(array).deserialize_seq(Elements(visit)));
}

struct Elements<F>(F);

impl<'de, F: FnMut(&'de RawValue) -> bool> Visitor<'de> for Elements<F> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<(), A::Error> {
        while let Some(element) = array.next_element::<&'de RawValue>()? {
            if !(self.0)(element) {
                break;
            }
        }
        Ok(())
    }
}
