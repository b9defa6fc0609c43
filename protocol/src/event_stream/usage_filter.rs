//! Removes the usage that only the relay requested from a chat stream: the event that [`UsageFilter`] drops has no
//! choices and the usage of the whole response. Every other byte passes.
//!
//! Complete events, comments and empty lines pass at once. Only the beginning of an event is held, up to
//! [`MAX_HELD_BYTES`]; a longer event passes, whatever it contains. These bytes are a copy outside the relay's memory
//! budget: at most 16 KiB for each stream whose usage the relay requested, and only while an event is incomplete.
//!
//! The result does not depend on how the stream is cut into pieces, unless one stream ends some lines with CR and
//! others with CRLF.

use bytes::{Bytes, BytesMut};
use memchr::memchr2;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::usage::USAGE_KEY;

/// The longest event that is held until it is complete. An event with nothing but usage has a few hundred bytes.
pub const MAX_HELD_BYTES: usize = 16 << 10;

/// The filter of one stream.
#[derive(Debug, Default)]
pub struct UsageFilter {
    held: BytesMut,
    cursor: Cursor,
}

/// The position in the bytes that have not passed.
#[derive(Debug, Default)]
struct Cursor {
    /// The beginning of the last event.
    event: usize,
    /// The beginning of the last line.
    line: usize,
    /// Where the search for the end of this line continues.
    searched: usize,
    /// True if the event was too long, so that its beginning has passed.
    is_passing: bool,
    /// True if the beginning of the line has passed, too.
    is_line_begun: bool,
    /// True if CR alone has ended a line, so that no LF need follow.
    has_lone_cr: bool,
}

/// A part of a stream that passes or is dropped as a whole.
struct Part {
    end: usize,
    /// True for an event with all its bytes; false for a comment, an empty line, and the end of an event that was too
    /// long.
    is_event: bool,
}

impl UsageFilter {
    /// Adds the next bytes of the stream, and returns those that pass.
    pub fn push(&mut self, mut piece: Bytes) -> Bytes {
        if self.held.is_empty() {
            let (passed, end) = self.cursor.filter(&piece);
            self.held.extend_from_slice(&piece[end..]);
            return passed.unwrap_or_else(|| {
                piece.truncate(end);
                piece
            });
        }
        self.held.extend_from_slice(&piece);
        let (passed, end) = self.cursor.filter(&self.held);
        let whole = self.held.split_to(end);
        passed.unwrap_or_else(|| whole.freeze())
    }

    /// Ends the stream, and returns the held bytes. An event at the end of a stream may lack its empty line.
    pub fn finish(&mut self) -> Bytes {
        let rest = self.held.split().freeze();
        let is_dropped = !std::mem::take(&mut self.cursor).is_passing && has_only_usage(&rest);
        if is_dropped { Bytes::new() } else { rest }
    }
}

impl Cursor {
    /// Returns the bytes that pass, if they are not all of those up to the returned position. The rest is held.
    fn filter(&mut self, bytes: &[u8]) -> (Option<Bytes>, usize) {
        let mut kept: Option<BytesMut> = None;
        let mut passed = 0;
        loop {
            let start = self.event;
            let Some(part) = self.next_part(bytes) else { break };
            let is_short = part.end - start <= MAX_HELD_BYTES;
            if part.is_event && is_short && has_only_usage(&bytes[start..part.end]) {
                kept.get_or_insert_default().extend_from_slice(&bytes[passed..start]);
                passed = part.end;
            }
        }
        let end = self.end_of_passed(bytes);
        if let Some(kept) = &mut kept {
            kept.extend_from_slice(&bytes[passed..end]);
        }
        self.line -= end.min(self.line);
        self.searched -= end.min(self.searched);
        self.event = 0;
        (kept.map(BytesMut::freeze), end)
    }

    /// Returns the next part that is complete.
    fn next_part(&mut self, bytes: &[u8]) -> Option<Part> {
        loop {
            let Some(found) = memchr2(b'\n', b'\r', &bytes[self.searched..]) else {
                self.searched = bytes.len();
                return None;
            };
            let line_end = self.searched + found;
            self.searched = line_end;
            let end = match (bytes[line_end], bytes.get(line_end + 1)) {
                (b'\n', _) => line_end + 1,
                (_, Some(b'\n')) => line_end + 2,
                (_, Some(_)) => {
                    self.has_lone_cr = true;
                    line_end + 1
                }
                (_, None) if self.has_lone_cr => line_end + 1,
                (_, None) => return None,
            };
            let is_first = self.line == self.event && !self.is_passing;
            let is_empty = self.line == line_end && !self.is_line_begun;
            let is_comment = is_first && bytes[self.line] == b':';
            (self.line, self.searched, self.is_line_begun) = (end, end, false);
            if is_empty || is_comment {
                let is_event = !is_first && !self.is_passing;
                (self.event, self.is_passing) = (end, false);
                return Some(Part { end, is_event });
            }
        }
    }

    /// Returns where the held bytes begin: at the last event, unless it is too long.
    fn end_of_passed(&mut self, bytes: &[u8]) -> usize {
        if !self.is_passing && bytes.len() - self.event <= MAX_HELD_BYTES {
            return self.event;
        }
        self.is_passing = true;
        // A CR at the end may be half of a line end.
        let end = self.searched.max(self.line);
        self.is_line_begun |= end > self.line;
        end
    }
}

/// The members of a chunk that decide.
#[derive(Deserialize)]
struct Chunk<'a> {
    choices: Vec<IgnoredAny>,
    #[serde(borrow)]
    usage: &'a RawValue,
    error: Option<IgnoredAny>,
}

/// True if an event has a usage and no choices.
fn has_only_usage(event: &[u8]) -> bool {
    if !may_have_usage(event) {
        return false;
    }
    let mut data: Option<Vec<u8>> = None;
    for line in event.split(|byte| matches!(byte, b'\n' | b'\r')) {
        if line.starts_with(b"event") {
            return false;
        }
        let Some(value) = line.strip_prefix(b"data:") else { continue };
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match &mut data {
            None => data = Some(value.to_vec()),
            Some(data) => {
                data.push(b'\n');
                data.extend_from_slice(value);
            }
        }
    }
    let chunk = data.as_deref().and_then(|data| serde_json::from_slice::<Chunk<'_>>(data).ok());
    chunk.is_some_and(|chunk| chunk.choices.is_empty() && chunk.usage.get().starts_with('{') && chunk.error.is_none())
}

/// Decides for nearly every event: if usage is requested, vLLM and SGLang add `"usage":null` to all of them.
fn may_have_usage(event: &[u8]) -> bool {
    USAGE_KEY.find_iter(event).any(|at| {
        let after = event[at + USAGE_KEY.needle().len()..].trim_ascii_start();
        let value = after.strip_prefix(b":").unwrap_or(after).trim_ascii_start();
        !value.starts_with(b"null")
    })
}

#[cfg(test)]
mod tests;
