//! The `model` field of a multipart form. A body that cannot be parsed passes unchanged.

use std::ops::ControlFlow;

use bytes::{Bytes, BytesMut};
use memchr::memmem;

use crate::multipart;

/// A part's headers are a line or two. Longer ones are not searched.
const LONGEST_HEADERS: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Renamer {
    delimiter: Vec<u8>,
    requested: usize,
    name: Bytes,
    place: Place,
    /// Bytes that cannot be decided yet: the beginning of a boundary, or of a part's headers.
    held: Bytes,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    /// Before the first boundary, which may be at the very beginning.
    Start,
    /// In a part's value, or before the first part.
    Value,
    /// After a boundary.
    Headers,
    /// In the value that is replaced.
    Name,
    /// The name is replaced, or the form has none.
    Done,
}

impl Renamer {
    pub(super) fn new(boundary: &str, requested: &str, name: &str) -> Self {
        Self {
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            requested: requested.len(),
            name: Bytes::copy_from_slice(name.as_bytes()),
            place: Place::Start,
            held: Bytes::new(),
        }
    }

    pub(super) fn length(&self, before: u64) -> u64 {
        before.saturating_add(self.name.len() as u64).saturating_sub(self.requested as u64)
    }

    pub(super) fn push(&mut self, piece: Bytes, pass: &mut impl FnMut(Bytes)) {
        let mut piece = match std::mem::take(&mut self.held) {
            held if held.is_empty() => piece,
            held => BytesMut::from_iter(held.into_iter().chain(piece)).freeze(),
        };
        while self.step(&mut piece, pass).is_continue() {}
        self.held = piece;
    }

    pub(super) fn finish(&mut self, pass: &mut impl FnMut(Bytes)) {
        pass(std::mem::take(&mut self.held));
        self.place = Place::Done;
    }

    /// Advances one place if the available bytes are sufficient; leaves the undecided bytes in `piece`.
    fn step(&mut self, piece: &mut Bytes, pass: &mut impl FnMut(Bytes)) -> ControlFlow<()> {
        match self.place {
            Place::Start => {
                let opening = &self.delimiter[2..];
                if piece.len() < opening.len() {
                    return ControlFlow::Break(());
                }
                self.place = Place::Value;
                if piece.starts_with(opening) {
                    self.place = Place::Headers;
                    pass(piece.split_to(opening.len()));
                }
            }
            Place::Value | Place::Name => {
                let is_name = matches!(self.place, Place::Name);
                let end = memmem::find(piece, &self.delimiter);
                let value = piece.split_to(end.unwrap_or(piece.len() - begun(piece, &self.delimiter)));
                if !is_name {
                    pass(value);
                }
                if end.is_none() {
                    return ControlFlow::Break(());
                }
                pass(piece.split_to(self.delimiter.len()));
                self.place = if is_name { Place::Done } else { Place::Headers };
            }
            Place::Headers => match headers(piece) {
                Headers::Unfinished if piece.len() <= LONGEST_HEADERS => return ControlFlow::Break(()),
                Headers::Unfinished | Headers::LastBoundary => self.place = Place::Done,
                Headers::Of { is_model, length } => {
                    pass(piece.split_to(length));
                    self.place = Place::Value;
                    if is_model {
                        pass(self.name.clone());
                        self.place = Place::Name;
                    }
                }
            },
            Place::Done => {
                pass(std::mem::take(piece));
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }
}

enum Headers {
    Unfinished,
    LastBoundary,
    /// Headers of this length, with the rest of the boundary's line and the empty line.
    Of {
        is_model: bool,
        length: usize,
    },
}

/// Parses the bytes after a boundary.
fn headers(piece: &[u8]) -> Headers {
    if piece.starts_with(b"--") {
        return Headers::LastBoundary;
    }
    let Some(line) = memmem::find(piece, b"\r\n") else { return Headers::Unfinished };
    let part = &piece[line + 2..];
    // A part without headers begins with the empty line itself.
    if part.starts_with(b"\r\n") {
        return Headers::Of { is_model: false, length: line + 4 };
    }
    match memmem::find(part, b"\r\n\r\n") {
        Some(end) => {
            let is_model = multipart::field_name(&part[..end]).as_deref() == Some("model");
            Headers::Of { is_model, length: line + 2 + end + 4 }
        }
        None => Headers::Unfinished,
    }
}

/// Returns the number of bytes at the end that may be the beginning of the delimiter.
fn begun(piece: &[u8], delimiter: &[u8]) -> usize {
    let most = piece.len().min(delimiter.len() - 1);
    (1..=most).rev().find(|length| piece.ends_with(&delimiter[..*length])).unwrap_or(0)
}
