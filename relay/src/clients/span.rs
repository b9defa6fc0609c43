//! The position of a value in a body, and a body with other bytes in its place.

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use serde_json::value::RawValue;

/// Returns the position of a raw value, which borrows from the body: its address is its position.
pub fn span_of(raw: &RawValue, body: &[u8]) -> Range<usize> {
    let start = raw.get().as_ptr() as usize - body.as_ptr() as usize;
    start..start + raw.get().len()
}

/// Returns the body with these parts in place of some of its bytes. Every other byte stays.
pub fn splice(body: &[u8], place: &Range<usize>, parts: &[&str]) -> Bytes {
    let added: usize = parts.iter().map(|part| part.len()).sum();
    let mut changed = BytesMut::with_capacity(body.len() - place.len() + added);
    changed.extend_from_slice(&body[..place.start]);
    parts.iter().for_each(|part| changed.extend_from_slice(part.as_bytes()));
    changed.extend_from_slice(&body[place.end..]);
    changed.freeze()
}
